"""Propagation rules: how each kind of unit propagates relevance between its entries and its exits.

A rule is a function of the walk, the step and the flows, see :class:`whyformer.tape.walking.Rule`. A composite maps
kinds of units to rules. Rules propagate (see docs/how-it-works.md)

* backward, a *multiplier* m with R = x ⊙ m (:mod:`~whyformer.rules.multipliers`); the empty composite is the gradient;
* backward, the *relevance* R itself (:mod:`~whyformer.rules.propagation`), through linear layers by
  :mod:`~whyformer.rules.linear` and :mod:`~whyformer.rules.opaque`; or
* forward, the *shares* of tokens in each value (:mod:`~whyformer.rules.shares`, :mod:`~whyformer.rules.vectors`).

:func:`register` adds a rule for a custom operation, a kind of operations or a :class:`Rule`.

Sources: Chefer et al. 2021 (TA), Ali et al. 2022, Achtibat et al. 2024.
"""

from whyformer.rules.core import Call, Rule
from whyformer.rules.registered import register

__all__ = ["Call", "Rule", "register"]
