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
    help="Key that clients must send, as Authorization: Bearer KEY; can be repeated."
)]
_ModelFolders = Annotated[list[Path] | None, Option(
    metavar="DIR",
    help="A model to offer: a folder that save_pretrained wrote, or a folder of these; can be repeated."
)]
_Password = Annotated[str | None, Option(
    metavar="WORD", envvar="WHYFORMER_PASSWORD",
    help="Password of visitors; the user name is whyformer. Required for --share and for other hosts."
)]


@opt.command()
def serve(
    model: opt.ModelArgument,
    *,
    host: Annotated[str, Option(
        metavar="ADDRESS", help="Address to listen on; access from other machines needs a key."
    )] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    api_key: _Key = None,
    batch: Annotated[int, Option(min=1, help="Maximum number of requests in a batch.")] = Limits.batch,
    wait: Annotated[float, Option(
        min=0.001, metavar="MILLISECONDS", help="Time that the first request of a batch waits for others."
    )] = 1000 * Limits.wait,
    queue: Annotated[int, Option(
        min=1, help="Maximum number of waiting requests; others are refused (429)."
    )] = Limits.queue,
    seconds: Annotated[float, Option(
        min=0.1, help="Maximum time from a request to its response (else 504)."
    )] = Limits.seconds,
    grace: Annotated[float, Option(
        min=0.1, metavar="SECONDS", help="Time for accepted requests to finish when the server stops."
    )] = Limits.grace,
    options: Options,
    printer: Printer,
) -> None:
    """Serve explanations of one model over HTTP, by default for this machine only."""
    from whyformer.apps.server import serve as answer

    def started(url: str) -> None:
        text = f"whyformer serves {url}, described in {url}/openapi.json (stop it with Ctrl+C)"
        printer.result(record("serve", url=url), text)

    limits = Limits(batch=batch, wait=wait / 1000, queue=queue, seconds=seconds, grace=grace)
    keys = tuple(api_key or ())
    answer(model, host=host, port=port, keys=keys, limits=limits, options=options, started=started)


@opt.command()
def serve_page(
    *,
    model_dir: _ModelFolders = None,
    hub: Annotated[bool | None, Option(
        "--hub/--no-hub", help="Accept hub ids. Default: only if the page is for this machine only."
    )] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int | None, Option(
        min=1, max=65535, help="Port to listen on. Default: the first free one from 7860."
    )] = None,
    share: Annotated[bool, Option("--share", help="Also open a public address (through gradio).")] = False,
    password: _Password = None,
    browser: Annotated[bool, Option("--open", help="Open the page in the browser.")] = False,
    printer: Printer,
) -> None:
    """Serve the web page, by default for this machine only."""
    from whyformer.apps.web import Catalogue, serve
    from whyformer.apps.web.server import check_exposure

    def started(url: str) -> None:
        printer.result(record("app", url=url), f"whyformer serves {url} (stop it with Ctrl+C)")

    public = check_exposure(host, share, password)
    catalogue = Catalogue(model_dir or (), hub=not public if hub is None else hub)
    serve(catalogue, host=host, port=port, share=share, password=password, browser=browser, started=started)
