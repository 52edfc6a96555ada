"""Rules: an operation with the same forward value and a changed backward.

A rule knows no model and no interception. Two kinds exist, one for each carrier (docs/how-it-works.md):

* *multiplier* rules (:mod:`~whyformer.rules.multiplier`) are plain functions of tensors. What flows back is the
  multiplier m of R = x ⊙ m, so that an empty table is gradient × input.
* *relevance* rules (:class:`~whyformer.rules.core.Rule`) are run by :class:`~whyformer.rules.core.Ruled`. One recorded
  graph serves two backward passes: while ``Pass.relevance`` is False it sends back the ordinary gradient, while it is
  True the relevance R itself.

Sources: Chefer et al. 2021 (TA), Ali et al. 2022, Achtibat et al. 2024.
"""
