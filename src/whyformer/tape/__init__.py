"""One recorded forward pass of a model, and what is derived from it.

The modules in the order in which to read them:

1. Record. ``recording`` runs a model and stores its calls (``calls``) and values (``values``) as a tape. ``memory``
   keeps track of views, ``state`` of global settings of torch, ``modules`` of module names. ``decomposition`` records
   fused calls as several calls, ``custom_ops`` (with ``norms``) operations of users as one call.
2. Interpret. ``program`` groups the calls into units: ``tables`` lists kinds of calls, ``units`` determines the kind
   of single calls, ``regions`` searches for units of several calls, which ``trials`` runs on random rows.
3. Walk. ``walking`` propagates flows backward through the units by rules or by ``adjoints``, propagates data forward,
   and repeats calls with some values replaced.
4. Label. ``sources`` turns the inputs of a model into rows (tokens, patches, pixels), and ``labelling`` finds the row
   of each element of each value (``rows``).
5. Structure. ``structure`` finds the attentions, ``streams`` the blocks (with ``members`` and ``mixing``), ``sharing``
   the rows that several streams share, ``places`` (with ``feeding``) the rows that represent the elements of an
   input.

``ends`` finds the function at the end of a model, ``checks`` values that torch did not compute.
"""
