"""``whyformer explain`` and ``whyformer compare``; one input and one model for them and the commands that draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whyformer.apps import INPUTS, model_for
from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import Working, one_line, remark, tell, working
from whyformer.defaults import DEFAULT_METHOD
from whyformer.errors import InputError, MethodNotApplicable

if TYPE_CHECKING:
    from whyformer.comparing import Refusal
    from whyformer.evaluation.trust import Trust
    from whyformer.explanation.result import Explanation
    from whyformer.inputs.argument import Argument
    from whyformer.methods import Method
    from whyformer.models import Loaded


@dataclass(kw_only=True)
class MapsOptions(opt.InputOptions, opt.Drawing):
    target: list[str] | None = None
    top: int = 5
    setting: list[str] | None = None
    format: str | None = None
    check: bool = False

    def validate(self, method: str | None) -> None:
        """Check the options that depend on no input, before one is read."""
        self.look()
        opt.chosen_formats(self.format or "")
        if method is not None:
            opt.chosen_methods(method, self.setting, "")


@dataclass(kw_only=True)
class Explain(MapsOptions):
    more: list[str] | None = None
    method: str | None = None
    purpose: str | None = None
    contrast: str | None = None
    image: list[Path] | None = None
    pair: str | None = None


@dataclass(kw_only=True)
class Compare(MapsOptions):
    method: str | None = None


def explain(asked: Explain) -> None:
    """Explain a prediction: prints the top classes and the map of each class asked for, and writes it to files.

    A picture becomes a PNG, a text an HTML page, unless --format says otherwise; several classes stand side by side.
    Several inputs, or a folder of pictures and .txt files, are explained one after the other. Answers of
    language models have a command of their own, generate.
    """
    from whyformer.apps.cli.several import each_of, inputs_of

    if asked.contrast is not None:
        targets: list[Any] = asked.target or [None]
        asked = replace(asked, target=[opt.rather(one, asked.contrast) for one in targets])
    asked = _chosen(asked)
    asked.validate(asked.method)
    found = inputs_of(asked.source, asked.more or [])
    if found is None:
        _run("explain", asked, asked.method)
    else:
        each_of(found, asked, lambda one, given, loaded: _explained("explain", one, asked.method, given, loaded))


def compare(asked: Compare) -> None:
    """Show several methods side by side: rows are methods, columns classes; a sentence gets one line a method.

    Without --target a picture is explained for its two likeliest classes, a text for the predicted one.
    """
    asked.validate(asked.method)
    _run("compare", asked, asked.method)


def _chosen(asked: Explain) -> Explain:
    """With the method: the default, where none was named, for the purpose that was."""
    if asked.purpose is None:
        return replace(asked, method=asked.method or DEFAULT_METHOD)
    names = [name.strip() for name in (asked.method or DEFAULT_METHOD).split(",")]
    if DEFAULT_METHOD not in names:
        raise InputError(
            f"--purpose says what auto is to take, and the method is {asked.method}: leave one of them out"
        )
    return replace(asked, method=",".join(names), setting=[*(asked.setting or []), f"purpose={asked.purpose}"])


def _run(command: str, asked: MapsOptions, method: str | None) -> None:
    from whyformer.inputs.argument import read_argument

    _explained(command, asked, method, read_argument(asked.source), {})


def _explained(
    command: str, asked: MapsOptions, method: str | None, given: Argument, loaded: dict[str, Loaded]
) -> None:
    """One input, from the methods that are asked for to the files."""
    look = asked.look()
    seeing = given.kind in ("image", "sound") or getattr(asked, "image", None)
    default = "png,html" if command == "compare" else "png" if seeing else "html"
    formats = opt.chosen_formats(default if asked.format is None else asked.format)
    chosen = opt.chosen_methods(method, asked.setting, given.kind)
    with working(asked) as bars:
        work = Work(asked, given, bars, loaded)
        likeliest = 2 if command == "compare" and given.kind == "image" else 1
        results, refusals = work.explain(chosen, asked.target or work.ready.likeliest(likeliest))
        for refusal in refusals:
            # a method that was asked for by name has to apply
            if method is not None or not isinstance(refusal.error, MethodNotApplicable) or not results:
                raise refusal.error
        checks = [work.check(e) for e in results] if asked.check else []
    for refusal in refusals:
        remark(asked, f"left out: {one_line(refusal.error)}")
    # everything is made in memory before files are written, and they before anything is printed
    from whyformer.show import files, terminal

    results = [found.noted_in(e) for e, found in zip(results, checks, strict=True)] if checks else results
    facts = files.record_of(command, results, work.loaded.name, given.title)
    if checks:
        facts["checks"] = [found.to_dict() for found in checks]
    contents = files.contents(results, given.name, given.title, facts, formats, **look)
    tell(asked, facts, terminal.render(results, asked.top), files.write_all(asked.out, contents))


class Work:
    """One input and one model, used as often as is asked."""

    def __init__(
        self, asked: opt.InputOptions, given: Argument, bars: Working, loaded: dict[str, Loaded] | None = None
    ) -> None:
        self.bars = bars
        images = getattr(asked, "image", None)
        kind = "both" if images and given.kind == "text" else given.kind
        name = model_for(kind, asked.model)
        known = {} if loaded is None else loaded
        with bars.step(f"loading {name}"):
            from whyformer.explainer import Explainer
            from whyformer.models import load

            if name not in known:
                known[name] = load(name, device=asked.options.device, dtype=asked.options.dtype)
            self.loaded: Loaded = known[name]
        if self.loaded.modality != kind:
            reads = self.loaded.reads + (" (--image)" if self.loaded.modality == "both" else "")
            raise InputError(f"{self.loaded.name} reads {reads}, and this is {INPUTS[kind]}: choose another --model")
        content: Any = {"text": given.content, "images": images} if kind == "both" else given.content
        if (pair := getattr(asked, "pair", None)) is not None:
            if kind != "text":
                raise InputError(f"--pair is the second of two texts, and this is {INPUTS[kind]}")
            content = {"text": given.content, "text_pair": pair}
        self.explainer = Explainer(self.loaded, **asked.options.named)
        self.ready = self.explainer.prepare(content)
        self.checked: list[Trust] = []

    def explain(
        self, methods: list[tuple[Method, dict[str, Any]]], targets: Sequence[Any]
    ) -> tuple[list[Explanation], list[Refusal]]:
        """Each method for each target, and why some do not apply."""
        from whyformer.comparing import Refusal, each

        def once(key: Any, make: Callable[[], Explanation]) -> Explanation:
            with self.bars.step(key[0] if key[2] is None else f"{key[0]}, class {key[2]}"):
                return make()

        found = list(each(self.ready, methods, targets, progress=self.bars.track, once=once))
        refusals = [one for one in found if isinstance(one, Refusal)]
        return [one for one in found if not isinstance(one, Refusal)], refusals

    def check(self, e: Explanation) -> Trust:
        """How far an explanation of this input may be believed."""
        import whyformer

        known, model = self.checked, self.loaded.model
        with self.bars.step(f"checking {e.method}"):
            known.append(whyformer.trust(e, model, self.ready.inputs, self.loaded.processor, known=known))
        return known[-1]
