"""``whyformer methods``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from whyformer.apps.cli.completion import complete_method
from whyformer.apps.cli.options import AsJson, Debug, Quiet
from whyformer.apps.cli.telling import console, errors_as_sentences
from whyformer.explanation.versions import record


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to describe in full.", autocompletion=complete_method)
    ] = None,
    quiet: Quiet = False, as_json: AsJson = False, debug: Debug = False,
) -> None:  # fmt: skip
    """List the methods, or describe one with its settings and their defaults."""
    with errors_as_sentences(debug):
        import whyformer
        from whyformer.methods import find
        from whyformer.show.listing import catalogue, describe, facts

        known = whyformer.methods() if name is None else [find(name)]
        if as_json:
            typer.echo(json.dumps(record("methods", methods=[facts(m) for m in known]), indent=1))
        elif not quiet:
            console().print(catalogue(known) if name is None else describe(known[0]))
