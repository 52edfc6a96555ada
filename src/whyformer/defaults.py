"""Default methods of the library, the command line, the web page, jobs and the server."""

DEFAULT_METHOD = "auto"
"""Runs the published method that measured best for the kind of input, and names it in the result."""
RECOMMENDED = (DEFAULT_METHOD, "libragrad", "attnlrp", "gae")
"""Methods to try first; docs/which-method.md lists the measurements behind this choice."""
FOUNDING_METHOD = "transformer_attribution"
"""The first method in every list of published methods."""
COMPARED = (DEFAULT_METHOD, "attnlrp", FOUNDING_METHOD, "gae")
"""Methods compared by default, as far as they apply to the model."""
