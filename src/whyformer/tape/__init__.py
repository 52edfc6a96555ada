"""One recorded forward pass of a model, and what is derived from it.

The modules in the order in which to read them:

1. Record. ``recording`` runs a model and stores its calls (``calls``) and values (``values``) as a tape. ``memory``
   computes the content of views after in-place writes, ``state`` sets the global settings of torch, and ``modules``
   observes which module makes a call. ``decomposition`` records a fused call as several calls; ``custom_ops`` (with
   ``norms``) records an operation of a user as one call.
2. Interpret. ``program`` groups the calls into units: ``tables`` lists kinds of calls, ``units`` determines the kind
   of single calls, ``regions`` searches for units of several calls, which ``trials`` runs on random rows.
3. Walk. ``walking`` propagates flows backward through the units by rules or by ``adjoints``, propagates data forward,
   and repeats calls with some values replaced.
4. Label. ``sources`` determines which elements of the inputs form a row (a token, patch or pixel), and ``labelling``
   (with ``rearranging``) the row to which each element of each value belongs (``rows``).
5. Structure. ``attentions`` (with ``map_search``) finds the attentions, ``streams`` the blocks (with ``members`` and
   ``mixing``), ``shared_rows`` the rows that several streams share, ``places`` (with ``feeding``) the rows that
   represent the elements of an input.

``ends`` finds a sigmoid or softmax after the logits, ``checks`` finds values that torch did not compute, and ``caches``
keeps the results of analyses of passes that are alike.
"""
