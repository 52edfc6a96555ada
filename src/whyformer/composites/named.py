"""Composites of multipliers by name: some factors are held constant, halved, or replaced by secants."""

from __future__ import annotations

from functools import partial
from typing import Literal

from whyformer.composites.gradient import GRADIENT
from whyformer.rules import multiplier
from whyformer.rules.core import NATIVE, Composite, Rule
from whyformer.rules.relevance.attention import attention_gradient

CompositeName = Literal["plain", "ah", "ln", "ah_ln", "libra", "attnlrp", "cp_lrp", "gim"]
"""Names of :data:`COMPOSITES`: what a method's setting ``composite`` may be."""

_PLAIN = dict.fromkeys(
    (
        "view",
        "selection",
        "linear",
        "matrix product",
        "gate",
        "activation",
        "power",
        "normalisation",
        "statistic",
        "softmax",
        "log_softmax",
        "attention",
    ),
    NATIVE,
)
# where something is sampled, and what a system of equations is divided by, are constants
_PLAIN |= {"grid_sample": Rule("sampling", hold=(1,)), "linalg_solve_triangular": Rule("quotient", hold=(0,))}
_HELD = Rule("constant", hold=(0,))
_NORM = Rule("normalisation", gradient=multiplier.detached_norm)
_SECANT = Rule("secant", gradient=multiplier.secant, keep_output=True)
_HALVED = Rule("product, halved", share=0.5)
# A·V halved, then QKᵀ: a quarter for q and for k, half for v
_QUARTERS = Rule("attention, halved", share=0.5, shares=(0.5, 0.5))

TABLES: dict[str, dict[str, Rule | None]] = {
    # the attention probabilities are constants: what flows, flows through the values
    "AH": {"attention": Rule("attention", hold=(0, 1)), "softmax": _HELD, "logsumexp": _HELD},
    # so is what a norm divides by, also where it is written out
    "LN": {"layer_norm": _NORM, "rms_norm": _NORM, "statistic": _HELD},
    # of ReLU it is the gradient
    "secant": {"activation": _SECANT, "relu": NATIVE, "leaky_relu": NATIVE, "prelu": NATIVE, "abs": NATIVE},
    # of a product of two branches each gets half, so that x ⊙ m keeps its sum
    "halves": {"gate": _HALVED, "product": _HALVED},
    # the branch that went through an activation is a constant
    "gate": {"activated gate": Rule("gate", hold=(0,)), "gate": _HALVED, "product": _HALVED},
    "quarters": {"attention": _QUARTERS},
    # softmax's derivative as at temperature 2
    "warm": {
        "attention": Rule(
            "attention at temperature 2", gradient=partial(attention_gradient, temperature=2.0), share=0.5,
            shares=(0.5, 0.5),
        ),
        "softmax": Rule(
            "softmax at temperature 2", gradient=partial(multiplier.softmax, temperature=2.0), keep_output=True
        ),
    },
}  # fmt: skip


def conservative(*tables: str, name: str = "") -> Composite:
    """Gradient × input under some of :data:`TABLES`: LRP(AH), LRP(LN), LRP(AH+LN) of Ali et al. and what came of them.

    Args:
        tables: their names; what is in none of them keeps its ordinary adjoint.
    """
    rules: dict[str, Rule | None] = {**_PLAIN}
    for table in tables:
        rules.update(TABLES[table])
    return Composite(name or f"LRP({'+'.join(tables)})", "multiplier", rules)


COMPOSITES: dict[CompositeName, Composite] = {
    "plain": GRADIENT,
    # Ali et al., ICML 2022
    "ah": conservative("AH"),
    "ln": conservative("LN"),
    "ah_ln": conservative("AH", "LN"),
    # Mehri et al., CVPR 2025
    "libra": conservative("AH", "LN", "secant", "halves", name="LibraGrad"),
    # Achtibat et al., ICML 2024, in the form that carries multipliers (Arras et al. 2025); CP-LRP is its baseline
    "attnlrp": conservative("LN", "secant", "halves", "quarters", name="AttnLRP"),
    "cp_lrp": conservative("AH", "LN", "secant", "gate", name="CP-LRP"),
    "gim": conservative("LN", "halves", "warm", name="GIM"),
}
