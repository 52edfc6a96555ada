"""Rules: what a unit hands back of what flows to it.

A rule is a function of a walk over a tape, a step of it and the flows, see :class:`whyformer.tape.walking.Rule`. A
composite is a table of rules by kind of unit. What flows is (docs/how-it-works.md)

* a *multiplier* m, R = x ⊙ m (:mod:`~whyformer.rules.multipliers`): the gradient is the multiplier of the empty table;
* the *relevance* R itself (:mod:`~whyformer.rules.propagation`); or
* forward, the *shares* of tokens in each value (:mod:`~whyformer.rules.shares`, :mod:`~whyformer.rules.vectors`).

Users give operations of their own a rule by :func:`register`.

Sources: Chefer et al. 2021 (TA), Ali et al. 2022, Achtibat et al. 2024.
"""

from whyformer.rules.registered import register

__all__ = ["register"]
