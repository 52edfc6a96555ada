"""``compare``: methods × targets of one input, with the refusals of those that do not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from whyformer.defaults import COMPARED
from whyformer.errors import InputError, WhyformerError, without_frames
from whyformer.explaining import open_model
from whyformer.explanation.candidates import Candidates, likeliest
from whyformer.explanation.displayed import Displayed
from whyformer.explanation.result import Explanation
from whyformer.methods import Method, find
from whyformer.methods import list_methods as all_methods
from whyformer.methods.together import sharing
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.progress import Track
from whyformer.targets import Resolver, Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Asked = str | tuple[str, Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Refusal:
    """Why a method gave no explanation: the error it raised. The method is not asked for further targets."""

    method: str
    settings: dict[str, Any]
    error: WhyformerError


@dataclass(frozen=True, eq=False)
class Comparison(Displayed):
    """The outcome of :func:`compare`: explanations method by method and, for each, target by target; and refusals."""

    explanations: list[Explanation]
    refusals: list[Refusal]

    def figure(self, **look: Any) -> Figure:
        """All maps as one table, a row a method and a column a target: :func:`whyformer.show.figure`."""
        from whyformer.show import figure

        return figure(self.explanations, **look)

    def to_html(self, title: str = "whyformer", **look: Any) -> str:
        """A whole HTML document: :func:`whyformer.show.page`."""
        from whyformer.show import page

        return page(self.explanations, title, **look)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from whyformer.show import render

        refused = [Text(f"refused: {one.method}: {one.error}", style="yellow") for one in self.refusals]
        return Group(*([render(self.explanations)] if self.explanations else []), *refused)

    def _repr_html_(self) -> str:
        from whyformer.show import fragment

        return "".join(map(fragment, self.explanations))

    def __repr__(self) -> str:
        wide = max(len(e.method) for e in self.explanations)
        lines = [f"Comparison of {len(self.explanations)} explanations, {len(self.refusals)} refused"]
        for e in self.explanations:
            target = "any class" if e.diagnostics.get("class_specific") is False else ", ".join(e.target_names or ())
            lines.append(f"  {e.method:{wide}}  {target:20}  largest |score| {float(e.scores.abs().max()):.4g}")
        return "\n".join([*lines, *(f"  refused: {one.method}: {one.error}" for one in self.refusals)])


@shows_options
def compare(
    model: Any,
    inputs: Any,
    methods: Sequence[Asked] | None = None,
    targets: Sequence[Target] | None = None,
    processor: Any = None,
    *,
    likeliest: int = 1,
    progress: bool | Track = False,
    **options: Unpack[Keywords],
) -> Comparison:
    """Explain one input, or batch, by several methods for several targets.

    Model and inputs are opened and prepared once; a method whose scores are the same for every class runs once. A
    method that has no meaning on this model, or fails on it, is among the refusals, and the others go on.

    Args:
        model, inputs, processor, progress, **options: as for :func:`explain`.
        methods: names, (name, settings) or ``{"method": name, setting: value}``; all that take such an input by
            default.
        targets: each as for :func:`explain`, so that a list in it holds one class a sample.
        likeliest: without ``targets``, so many of each sample's classes with the highest logits.

    Raises:
        WhyformerError: the model, the inputs, a target or a setting is wrong, or there is no explanation at all (then
            the first refusal).
    """
    asked = None if methods is None else [read_method(m) for m in methods]
    ready = open_model(model, processor, **options).prepare(inputs)
    listed = ready.likeliest(likeliest) if targets is None else list(targets)
    if asked is None:
        asked = [(m, {}) for m in all_methods() if m.modality in ("both", ready.inputs.modality)]
    if not asked or not listed:
        raise InputError(f"there are no {'methods' if not asked else 'targets'} to compare")
    found = list(each(ready, asked, listed, progress=progress))
    refusals = [one for one in found if isinstance(one, Refusal)]
    explanations = [one for one in found if isinstance(one, Explanation)]
    if not explanations:
        raise refusals[0].error
    return Comparison(explanations, refusals)


def read_method(asked: Asked, kinds: str = "a method is a name") -> tuple[Method, dict[str, Any]]:
    """(method, settings as given, checked) of a name, (name, settings) or ``{"method": name, setting: value}``.

    ``kinds`` is how the error begins that says what may be given.
    """
    if isinstance(asked, str):
        asked = (asked, {})
    elif isinstance(asked, Mapping):
        given = dict(asked)
        asked = (given.pop("method", None), given)
    if not (isinstance(asked, tuple) and len(asked) == 2 and isinstance(asked[0], str)):
        raise InputError(f'{kinds}, (name, settings) or {{"method": name, ...}}, not {asked!r}')
    method, settings = find(asked[0]), dict(asked[1])
    method.complete(settings)
    return method, settings


def read_methods(
    names: Sequence[str] | None, settings: Mapping[str, Any], kind: str = "both"
) -> list[tuple[Method, dict[str, Any]]]:
    """Methods by name, each with those of the settings that it has, checked.

    Args:
        names: by default those of :data:`whyformer.defaults.COMPARED` that explain inputs of this kind.

    Raises:
        InputError: there is no method, none of them has one of the settings, or a value is out of range.
    """
    chosen = [find(name) for name in dict.fromkeys(COMPARED if names is None else names)]
    if names is None:
        chosen = [m for m in chosen if m.modality in ("both", kind)]
    if not chosen:
        raise InputError("no method was named; whyformer.list_methods lists them")
    for name, value in settings.items():
        if not any(name in m.settings for m in chosen):
            chosen[0].complete({name: value})
    return [read_method((m.name, {k: v for k, v in settings.items() if k in m.settings})) for m in chosen]


def each(
    ready: Prepared, methods: Sequence[tuple[Method, dict[str, Any]]], targets: Sequence[Target], *,
    progress: bool | Track = False, once: Callable[[Any, Callable[[], Explanation]], Explanation] | None = None,
) -> Iterator[Explanation | Refusal]:  # fmt: skip
    """Each method for each target, or once why there is none, as soon as it is there (see :func:`compare`).

    Methods of one target share its forward pass and its gradients, so of several targets all are made before the first
    method's are there.

    Args:
        methods: with settings, as :func:`read_method` gives them.
        once: (key, function that makes an explanation) -> explanation, to remember them or to stand around the work;
            the key is (name, complete settings, target). Of a method that is the same for all classes it may return
            that of any class.
    """
    resolvers = [(target, ready.resolver(target)) for target in targets]  # all are checked before any work
    asked = [(method.name, method.complete(given)) for method, given in methods]
    found: list[list[Explanation | Refusal]] = [[] for _ in asked]
    for target, resolver in resolvers:
        with sharing([method for method, _ in methods]) as together:
            for (name, settings), made in zip(asked, found, strict=True):
                if made and isinstance(made[-1], Refusal):
                    continue
                make = partial(ready.explain, name, target, progress=progress, **settings)
                make = partial(together.around, make)
                if once is not None:
                    make = partial(once, (name, settings, target), make)
                earlier = [(e, r) for e, (_, r) in zip(made, resolvers, strict=False) if isinstance(e, Explanation)]
                try:
                    made.append(_one(make, ready, resolver, earlier))
                except WhyformerError as error:
                    made.append(Refusal(name, settings, without_frames(error)))
                if len(resolvers) == 1:
                    yield made[-1]
    if len(resolvers) > 1:
        for made in found:
            yield from made


def _one(
    make: Callable[[], Explanation],
    ready: Prepared,
    resolver: Resolver,
    earlier: Sequence[tuple[Explanation, Resolver]],
) -> Explanation:
    """An explanation; of a method that is the same for all classes an earlier one's scores."""
    same = (e for e, r in earlier if e.diagnostics.get("class_specific") is False and r.reading == resolver.reading)
    known = next(same, None)
    if known is None:
        return make()
    written, kept = resolver.written(), Candidates(known.logits)
    logits = known.logits
    if known.classes is not None:  # this target's may not be among those that were kept
        logits = ready.task(resolver, known.method).forward()
        kept = likeliest(logits, resolver.named(logits))
    index, names = resolver.describe(logits)
    facts = known.diagnostics if written is None else {**known.diagnostics, "target": written}
    labels = resolver.names(logits)
    return replace(known, target=index, target_names=names, labels=labels, diagnostics=facts, **vars(kept))
