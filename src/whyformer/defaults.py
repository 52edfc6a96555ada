"""Default methods of the library, the command line, the web page, jobs and the server."""

from collections.abc import Mapping

DEFAULT_METHOD = "auto"
"""Runs the method that measured best for the kind of input, and names it in the result. Its settings may differ from
those that were published (``share=0.8`` of AttnLRP, for language models)."""
RECOMMENDED = (DEFAULT_METHOD, "libragrad", "attnlrp", "gae")
"""Methods to try first; docs/which-method.md lists the measurements behind this choice."""
FOUNDING_METHOD = "transformer_attribution"
"""The first method in every list of published methods."""
COMPARED = (DEFAULT_METHOD, "attnlrp", FOUNDING_METHOD, "gae")
"""Methods compared by default, as far as they apply to the model."""


def grouped(families: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names of methods by group: those to try first, then one group for each family.

    Args:
        families: name -> family, in the order in which a family lists its methods.
    """
    groups = {"try first": [name for name in RECOMMENDED if name in families]}
    for name, family in families.items():
        if name not in RECOMMENDED:
            groups.setdefault(family, []).append(name)
    return groups
