"""``compare``: explain one input by several methods for several targets, and list the methods that do not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from whyformer.defaults import COMPARED
from whyformer.errors import InputError, WhyformerError, check_type, without_frames
from whyformer.explaining import prepared
from whyformer.explanation.display import Displayable
from whyformer.explanation.result import Explanation
from whyformer.inputs.normalize import refuse_file_names
from whyformer.methods import Method, find
from whyformer.methods import list_methods as all_methods
from whyformer.methods.sharing import sharing
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.progress import Track
from whyformer.targets import Resolver, Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

MethodSpec = str | tuple[str, Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Refusal:
    """A method that raised an error instead of returning an explanation. It is not run for further targets."""

    method: str
    settings: dict[str, Any]
    error: WhyformerError


@dataclass(frozen=True, eq=False)
class Comparison(Displayable):
    """The result of :func:`compare`: explanations, ordered by method and then by target, and refusals."""

    explanations: list[Explanation]
    refusals: list[Refusal]

    def figure(self, **look: Any) -> Figure:
        """Draw all explanations as one figure, a row per method and a column per target
        (see :func:`whyformer.show.figure`)."""
        from whyformer.show import figure

        return figure(self.explanations, **look)

    def to_html(self, title: str = "whyformer", **look: Any) -> str:
        """Return a complete HTML document (see :func:`whyformer.show.page`)."""
        from whyformer.show import page

        return page(self.explanations, title, **look)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        from whyformer.show import render

        refused = [Text(f"refused: {r.method}: {r.error}", style="yellow") for r in self.refusals]
        return Group(*([render(self.explanations)] if self.explanations else []), *refused)

    def _repr_html_(self) -> str:
        from whyformer.show import fragment

        return "".join(map(fragment, self.explanations))

    def __repr__(self) -> str:
        width = max(len(e.method) for e in self.explanations)
        lines = [f"Comparison of {len(self.explanations)} explanations, {len(self.refusals)} refused"]
        for e in self.explanations:
            target = "any class" if e.diagnostics.get("class_specific") is False else ", ".join(e.target_names or ())
            lines.append(f"  {e.method:{width}}  {target:20}  largest |score| {float(e.scores.abs().max()):.4g}")
        return "\n".join([*lines, *(f"  refused: {r.method}: {r.error}" for r in self.refusals)])


@shows_options
def compare(
    model: Any,
    inputs: Any,
    methods: MethodSpec | Sequence[MethodSpec] | None = None,
    targets: Sequence[Target] | None = None,
    processor: Any = None,
    *,
    likeliest: int = 1,
    progress: bool | Track = False,
    **options: Unpack[Keywords],
) -> Comparison:
    """Explain one input or batch by several methods for several targets.

    The model is opened and the inputs are prepared once. A method whose scores do not depend on the class runs once. A
    method that does not apply to the model, or fails on it, is listed under ``refusals``, and the others run.

    Args:
        model, inputs, processor, progress, **options: as for :func:`explain`.
        methods: a list of names, (name, settings) or ``{"method": name, setting: value}``, or one of them; default: all
            methods for this kind of input.
        targets: a list of targets, each as for :func:`explain`, or one as text; a list among them holds one class per
            sample.
        likeliest: if ``targets`` is None, explain this many classes with the highest logits of each sample.

    Raises:
        WhyformerError: the model, the inputs, a target or a setting is wrong, or every method failed (then the first
            error).
    """
    for name, value in (("methods", methods), ("targets", targets)):
        check_type(name, value, Iterable | None, "a list")
    selected = None if methods is None else [read_method(m) for m in method_list(methods)]
    ready = prepared(model, inputs, processor, **options)
    refuse_file_names(inputs, ready.processor)
    named = [targets] if isinstance(targets, str) else targets
    goals = ready.likeliest(likeliest) if named is None else list(named)
    if selected is None:
        selected = [(m, {}) for m in all_methods() if m.modality in ("both", ready.inputs.modality)]
    if not selected or not goals:
        raise InputError(f"there are no {'methods' if not selected else 'targets'} to compare")
    results = list(explain_each(ready, selected, goals, progress=progress))
    refusals = [r for r in results if isinstance(r, Refusal)]
    explanations = [r for r in results if isinstance(r, Explanation)]
    if not explanations:
        raise refusals[0].error
    return Comparison(explanations, refusals)


def method_list(methods: Any) -> list[Any]:
    """Return a list of methods, from a list or a single one: a name, a pair (name, settings) or a mapping."""
    is_pair = isinstance(methods, tuple) and len(methods) == 2 and isinstance(methods[1], Mapping)
    single = isinstance(methods, str | Mapping) or (is_pair and isinstance(methods[0], str))
    return [methods] if single else list(methods)


def read_method(spec: MethodSpec, kinds: str = "a method is a name") -> tuple[Method, dict[str, Any]]:
    """Parse and check a name, (name, settings) or ``{"method": name, setting: value}``.

    Args:
        spec: the method and its settings.
        kinds: the beginning of the error message that lists the accepted forms.

    Returns:
        (method, settings without defaults).
    """
    if isinstance(spec, str):
        spec = (spec, {})
    elif isinstance(spec, Mapping):
        rest = dict(spec)
        spec = (rest.pop("method", None), rest)
    if not (isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], str)):
        raise InputError(f'{kinds}, (name, settings) or {{"method": name, ...}}, not {spec!r}')
    method, settings = find(spec[0]), dict(spec[1])
    method.complete(settings)
    return method, settings


def read_methods(names: Sequence[str] | None, settings: Mapping[str, Any]) -> list[tuple[Method, dict[str, Any]]]:
    """Return methods by name, each with those of the settings that it has, after validating them.

    Args:
        names: by default those of :data:`whyformer.defaults.COMPARED`.

    Raises:
        InputError: there is no method, none of them has one of the settings, or a value is out of range.
    """
    selected = [find(name) for name in dict.fromkeys(COMPARED if names is None else names)]
    if not selected:
        raise InputError("no method was named; whyformer.list_methods lists them")
    for name, value in settings.items():
        if not any(name in m.settings for m in selected):
            selected[0].complete({name: value})
    return [read_method((m.name, {k: v for k, v in settings.items() if k in m.settings})) for m in selected]


def explain_each(
    ready: Prepared, methods: Sequence[tuple[Method, dict[str, Any]]], targets: Sequence[Target], *,
    progress: bool | Track = False, once: Callable[[Any, Callable[[], Explanation]], Explanation] | None = None,
) -> Iterator[Explanation | Refusal]:  # fmt: skip
    """Yield the explanation of each method for each target, or one refusal per method that fails.

    Methods share the recorded forward pass. With one target, results are yielded as soon as they are computed; with
    several, after all of them, because they are computed target by target and yielded by method.

    Args:
        methods: with settings, as returned by :func:`read_method`.
        once: function (key, function that computes an explanation) -> explanation, to cache or wrap the computation;
            the key is (name, complete settings, target). For a method that does not depend on the class it may return
            the explanation of any class.
    """
    resolvers = [(target, ready.resolver(target)) for target in targets]  # validates all targets first
    completed = [(method.name, method.complete(settings)) for method, settings in methods]
    by_method: list[list[Explanation | Refusal]] = [[] for _ in completed]
    for target, resolver in resolvers:
        with sharing([method for method, _ in methods]) as shared:
            for (name, settings), results in zip(completed, by_method, strict=True):
                if results and isinstance(results[-1], Refusal):
                    continue
                compute = partial(shared.run, partial(ready.explain, name, target, progress=progress, **settings))
                if once is not None:
                    compute = partial(once, (name, settings, target), compute)
                earlier = [(e, r) for e, (_, r) in zip(results, resolvers, strict=False) if isinstance(e, Explanation)]
                try:
                    results.append(_explanation(compute, ready, resolver, earlier))
                except WhyformerError as error:
                    results.append(Refusal(name, settings, without_frames(error)))
                if len(resolvers) == 1:
                    yield results[-1]
    if len(resolvers) > 1:
        for results in by_method:
            yield from results


def _explanation(
    compute: Callable[[], Explanation],
    ready: Prepared,
    resolver: Resolver,
    earlier: Sequence[tuple[Explanation, Resolver]],
) -> Explanation:
    """Compute an explanation, or reuse the scores of an earlier target if they do not depend on the class."""
    same = (e for e, r in earlier if e.diagnostics.get("class_specific") is False and r.reading == resolver.reading)
    reused = next(same, None)
    if reused is None:
        return compute()
    logits = reused.logits
    if reused.classes is not None:  # only some logits are stored, perhaps not this target's
        logits = ready.task(resolver, reused.method).forward()
    return ready.finishing(resolver, logits).of_target(reused)
