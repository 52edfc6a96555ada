"""``whyformer app``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from whyformer.apps.cli.options import AsJson, Debug, Quiet
from whyformer.apps.cli.telling import errors_as_sentences
from whyformer.explanation.versions import record


def serve_page(
    model_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-dir", metavar="DIR",
            help="A folder that save_pretrained wrote, or one with such folders in it, to offer; repeat for several.",
        ),
    ] = None,
    hub: Annotated[
        bool | None,
        typer.Option("--hub/--no-hub", help="Take hub ids. Default: only while the page is for this machine alone."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 7860.")] = None,
    share: Annotated[bool, typer.Option("--share", help="Also open a public address (through gradio).")] = False,
    password: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", envvar="WHYFORMER_PASSWORD",
            help="Asked of visitors, with the user name whyformer. Needed for --share and for other hosts.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:  # fmt: skip
    """Serve the web page, on this machine alone unless asked otherwise."""
    with errors_as_sentences(debug):
        from whyformer.apps.web import Catalogue, serve
        from whyformer.apps.web.server import check_door

        public = check_door(host, share, password)
        catalogue = Catalogue(model_dir or (), hub=not public if hub is None else hub)

        def started(address: str) -> None:
            if as_json:
                typer.echo(json.dumps(record("app", url=address)))
            elif not quiet:
                typer.echo(f"whyformer is at {address} (Ctrl+C ends it)")

        serve(catalogue, host=host, port=port, share=share, password=password, browser=browser, started=started)
