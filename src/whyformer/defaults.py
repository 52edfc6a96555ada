"""What every entrance takes where nothing is named: the library, the command line, the page, jobs and the server."""

from collections.abc import Mapping

DEFAULT_METHOD = "auto"
"""Chooses among the published methods by what measured best for the kind of input, and names its choice."""
RECOMMENDED = (DEFAULT_METHOD, "libragrad", "attnlrp", "gae")
"""What to try first; docs/which-method.md says on what measurements this stands."""
FOUNDING_METHOD = "transformer_attribution"
"""Stands first in every list of published methods."""
COMPARED = (DEFAULT_METHOD, "attnlrp", FOUNDING_METHOD, "gae")
"""What is compared where no methods are named, as far as they apply to the model."""


def grouped(families: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of methods under headings: those to try first, then those of each family.

    Args:
        families: name -> family, in the order in which a family lists its methods.
    """
    groups = {"try first": [name for name in RECOMMENDED if name in families]}
    for name, family in families.items():
        if name not in RECOMMENDED:
            groups.setdefault(family, []).append(name)
    return groups
