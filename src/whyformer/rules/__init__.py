"""Rules: an operation with the same forward value and a changed backward.

A rule knows no model and no interception. It is a function of a :class:`~whyformer.rules.core.Call` and of what flows
back, put into a table as a :class:`~whyformer.rules.core.Rule` and run by :class:`~whyformer.rules.core.Ruled`. What
flows is (docs/how-it-works.md)

* a *multiplier* m, R = x ⊙ m (:mod:`~whyformer.rules.multiplier`): the rule stands in for the ordinary gradient; or
* the *relevance* R itself (:mod:`~whyformer.rules.relevance`): one recorded graph serves two backward passes, while
  ``Pass.relevance`` is False with the ordinary gradient, while it is True with relevance.

Users give operations of their own a rule by :func:`register`.

Sources: Chefer et al. 2021 (TA), Ali et al. 2022, Achtibat et al. 2024.
"""

from whyformer.rules.registered import register

__all__ = ["register"]
