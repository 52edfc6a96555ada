"""What whyformer offers: ``whyformer methods``, the schema of its JSON, and the web page (``whyformer app``)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.completion import known
from whyformer.apps.cli.telling import tell, working
from whyformer.errors import InputError
from whyformer.explanation.versions import record
from whyformer.options import DEFAULTS, Options


@dataclass(kw_only=True)
class Methods(opt.Common):
    name: str | None = None


def methods(asked: Methods) -> None:
    """List the methods, or describe one with its settings and their defaults."""
    from whyformer.show.terminal import catalogue, describe

    # as it was kept for completion: to list methods, nothing that computes is imported
    kept = known()["methods"]
    if asked.name is not None and asked.name not in kept:
        from whyformer.methods import find

        find(asked.name)  # says which there are
    chosen = [kept[name] for name in sorted(kept) if asked.name in (None, name)]
    facts = [one["facts"] for one in chosen]
    listed = [(one["facts"], one["signed"]) for one in chosen]
    said = catalogue(listed) if asked.name is None else describe(facts[0], signed=chosen[0]["signed"])
    tell(asked, record("methods", methods=facts), said)


@dataclass(kw_only=True)
class Audited(opt.Common):
    model: str
    source: str | None = None
    target: str | None = None
    options: Options = DEFAULTS


def audit(asked: Audited) -> None:
    """Show what is read off a model: its inputs and attentions, the rule of each operation, the methods that apply."""
    with working(asked) as bars:
        import whyformer
        from whyformer.inputs.argument import read_argument
        from whyformer.show import auditing

        given = None if asked.source is None else read_argument(asked.source).content
        options = {"target": asked.target, **asked.options.named}
        found = whyformer.audit(asked.model, given, **options, progress=bars.track)
    tell(asked, record("audit", **found.to_dict()), auditing.render(found))


@dataclass(kw_only=True)
class Schema:
    command: str | None = None
    debug: bool = False


def schema(asked: Schema) -> None:
    """Print the JSON Schema of what --json prints, of one command or of all."""
    from whyformer.apps.cli.output import COMMANDS
    from whyformer.apps.cli.schema import make_schema

    if asked.command is not None and asked.command not in COMMANDS:
        raise InputError(f"no command '{asked.command}' prints JSON; these do: {', '.join(COMMANDS)}")
    typer.echo(json.dumps(make_schema(asked.command), indent=1))


@dataclass(kw_only=True)
class Page(opt.Common):
    model_dir: list[Path] | None = None
    hub: bool | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    share: bool = False
    password: str | None = None
    browser: bool = False


def serve_page(asked: Page) -> None:
    """Serve the web page, on this machine alone unless asked otherwise."""
    from whyformer.apps.web import Catalogue, serve
    from whyformer.apps.web.server import check_door

    public = check_door(asked.host, asked.share, asked.password)
    catalogue = Catalogue(asked.model_dir or (), hub=not public if asked.hub is None else asked.hub)
    serve(
        catalogue, host=asked.host, port=asked.port, share=asked.share, password=asked.password, browser=asked.browser,
        started=lambda address: tell(
            asked, record("app", url=address), f"whyformer is at {address} (Ctrl+C ends it)"
        ),
    )  # fmt: skip
