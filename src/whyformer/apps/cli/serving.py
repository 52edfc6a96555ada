"""``whyformer serve``, explanations over HTTP, and the web page, ``whyformer app``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.printing import Printer
from whyformer.apps.server.limits import Limits
from whyformer.explanation.versions import record
from whyformer.options import Options

_Key = Annotated[list[str] | None, Option(
    metavar="KEY", envvar="WHYFORMER_API_KEY",
    help="Asked of clients, as Authorization: Bearer KEY; repeat for several."
)]
_ModelFolders = Annotated[list[Path] | None, Option(
    metavar="DIR",
    help="A folder that save_pretrained wrote, or one with such folders in it, to offer; repeat for several."
)]
_Password = Annotated[str | None, Option(
    metavar="WORD", envvar="WHYFORMER_PASSWORD",
    help="Asked of visitors, with the user name whyformer. Needed for --share and for other hosts."
)]


@opt.command()
def serve(
    model: opt.ModelArgument,
    *,
    host: Annotated[str, Option(
        metavar="ADDRESS", help="Where to listen; other machines are let in only with a key."
    )] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Where to listen.")] = 8000,
    api_key: _Key = None,
    batch: Annotated[int, Option(min=1, help="The most requests that are explained at once.")] = Limits.batch,
    wait: Annotated[float, Option(
        min=0.001, metavar="MILLISECONDS", help="How long the first of them waits for others."
    )] = 1000 * Limits.wait,
    queue: Annotated[int, Option(min=1, help="Requests that may wait; further ones are refused (429).")] = Limits.queue,
    seconds: Annotated[float, Option(
        min=0.1, help="From a request to its answer, or it is refused (504)."
    )] = Limits.seconds,
    grace: Annotated[float, Option(
        min=0.1, metavar="SECONDS", help="How long accepted requests may take to finish when the server ends."
    )] = Limits.grace,
    options: Options,
    printer: Printer,
) -> None:
    """Answer requests for explanations of one model, on this machine alone unless asked otherwise."""
    from whyformer.apps.server import serve as answer

    def started(url: str) -> None:
        text = f"whyformer answers at {url}, described in {url}/openapi.json (Ctrl+C ends it)"
        printer.result(record("serve", url=url), text)

    limits = Limits(batch=batch, wait=wait / 1000, queue=queue, seconds=seconds, grace=grace)
    keys = tuple(api_key or ())
    answer(model, host=host, port=port, keys=keys, limits=limits, options=options, started=started)


@opt.command()
def serve_page(
    *,
    model_dir: _ModelFolders = None,
    hub: Annotated[bool | None, Option(
        "--hub/--no-hub", help="Take hub ids. Default: only while the page is for this machine alone."
    )] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int | None, Option(min=1, max=65535, help="Default: the first free one from 7860.")] = None,
    share: Annotated[bool, Option("--share", help="Also open a public address (through gradio).")] = False,
    password: _Password = None,
    browser: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    printer: Printer,
) -> None:
    """Serve the web page, on this machine alone unless asked otherwise."""
    from whyformer.apps.web import Catalogue, serve
    from whyformer.apps.web.server import check_exposure

    def started(url: str) -> None:
        printer.result(record("app", url=url), f"whyformer is at {url} (Ctrl+C ends it)")

    public = check_exposure(host, share, password)
    catalogue = Catalogue(model_dir or (), hub=not public if hub is None else hub)
    serve(catalogue, host=host, port=port, share=share, password=password, browser=browser, started=started)
