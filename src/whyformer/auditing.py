"""``audit``: report the structure of a model, the rules of its operations, and the methods that apply to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError, WhyformerError
from whyformer.explaining import prepared
from whyformer.explanation.result import Explanation
from whyformer.methods import METHODS, Method, list_methods
from whyformer.methods.layout import Layout
from whyformer.methods.passes import ForwardPass
from whyformer.methods.sharing import SharedPasses, sharing
from whyformer.methods.task import Task
from whyformer.models import load
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.progress import Track, tracking
from whyformer.rules.multipliers import COMPOSITES
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.rules.registered import with_custom_rules
from whyformer.tape.program import Program, read_program
from whyformer.tape.walking import Composite, plan
from whyformer.targets import Target

RULES: dict[str, Composite] = {
    "transformer_attribution": deep_taylor(),
    "lrp": layerwise(),
    "lrp_ah": COMPOSITES["ah"],
    "lrp_ln": COMPOSITES["ln"],
    "lrp_ah_ln": COMPOSITES["ah_ln"],
}
SENTENCE = "A short and harmless sentence."
# settings that make methods fast without affecting whether they apply; a limit stops them before the main computation
_QUICK: dict[str, Any] = {"samples": 1, "steps": 1, "block": -1, "limit": 1}


@dataclass(frozen=True)
class Stream:
    """The rows of one input.

    Attributes:
        name: name of the stream.
        input: the input whose elements the rows represent. It differs from ``name`` if the model computes the ids of
            the stream from this input.
        level, size: kind and number of its scores, such as "patch" and [14, 14]; None if it cannot be scored.
        blocks: number of blocks that its rows pass through.
    """

    name: str
    input: str
    level: str | None
    size: list[int] | None
    blocks: int


@dataclass(frozen=True)
class AttentionMap:
    """One attention.

    Attributes:
        queries, keys: names of the inputs of its query and key rows; empty for learned queries.
        depth: the largest number of attentions on a path to its output, including itself.
        block: index of its block among those of its stream; None if it lies in none.
        shape: numbers of samples, queries and keys.
    """

    queries: list[str]
    keys: list[str]
    depth: int
    block: int | None
    shape: list[int]


@dataclass(frozen=True)
class AuditedUnit:
    """A unit of the program: one or several calls to which one rule applies.

    Attributes:
        number: number of the value that it computes.
        kind: its kind, which selects the rule ("layer", "norm", "product").
        name: name of its call; the kind if it consists of several calls.
        shape: shape of the value.
        entries: numbers of its inputs that carry relevance.
        module: path of the module that made the call.
        block: index of its block, in the order of execution; -1 if it lies in none.
        unknown: methods that have no rule for it.
    """

    number: int
    kind: str
    name: str
    shape: list[int]
    entries: list[int]
    module: str
    block: int
    unknown: list[str]


@dataclass(frozen=True)
class AuditedOperation:
    """Units with the same name, kind and rules.

    Attributes:
        name, kind: as in :class:`AuditedUnit`.
        count: number of these units.
        rules: maps a method to its rule; None if it has none. Methods whose relevance does not arrive are left out.
    """

    name: str
    kind: str
    count: int
    rules: dict[str, str | None]


@dataclass(frozen=True)
class Audit:
    """The result of :func:`audit`. Sums of relevance are over the batch, relative to the relevance of the target.

    Attributes:
        model: name of the model.
        streams, attentions, operations, program: the structure of the model.
        blocks: for each method, maps a block to the sum of the relevance at its input.
        lost: for each method, maps a kind of unit to the relevance that arrives at its units less that which leaves.
        sums: for each method, the sum of the relevance at the inputs.
        methods: maps a method to None if it applies, else to the reason why it does not.
    """

    model: str
    streams: list[Stream]
    attentions: list[AttentionMap]
    operations: list[AuditedOperation]
    program: list[AuditedUnit]
    blocks: dict[str, dict[int, float]]
    lost: dict[str, dict[str, float]]
    sums: dict[str, float]
    methods: dict[str, str | None]

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as a dictionary of plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        from whyformer.show import auditing

        return auditing.plain(self)


@shows_options
def audit(
    model: Any,
    inputs: Any = None,
    processor: Any = None,
    *,
    target: Target = None,
    progress: bool | Track = False,
    **options: Unpack[Keywords],
) -> Audit:
    """Report the structure of a model, the rules of its operations, and which methods apply.

    The model is recorded once, and relevance is propagated with the rules of five methods. Then each method runs once
    with its fastest settings, except perturbation methods, which need only the output.

    Args:
        model, processor, target, progress, **options: as for :func:`whyformer.explain`.
        inputs: as for :func:`whyformer.explain`; for a model that is loaded by name, the default is a picture of noise,
            a short sentence, or both.

    Returns:
        An :class:`Audit`.

    Raises:
        WhyformerError: the model or the inputs cannot be used, or the output needs a target.
    """
    if inputs is None:
        if not isinstance(model, str):
            raise InputError("audit needs inputs for a module: pass the inputs of its forward")
        model = load(model, device=options.get("device"), dtype=options.get("dtype"))
        noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        inputs = {"text": SENTENCE, "image": image, "both": {"text": SENTENCE, "images": image}}[model.modality]
    ready = prepared(model, inputs, processor, **options)
    with sharing(list_methods()) as shared:
        task = replace(ready.task(target, "audit"), shared=shared)

        def audited(task: Task) -> Any:
            layout = task.forward_pass().layout(task.scored_inputs, task.read_logits)
            return layout, _operations(task, layout), _figures(task)

        layout, (operations, program), (blocks, lost, sums) = ready.work(task, audited)
        methods = tracking(progress)(list_methods(), "methods", len(METHODS))
        results = {method.name: _result(ready, method, target, shared) for method in methods}
    explanations = [results[name] for name in ("raw_attention", "input_x_gradient")]
    streams = _streams(task, layout, [e for e in explanations if isinstance(e, Explanation)])
    reasons = {name: result if isinstance(result, str) else None for name, result in results.items()}
    return Audit(ready.name, streams, _attentions(layout), operations, program, blocks, lost, sums, reasons)


def _attentions(layout: Layout) -> list[AttentionMap]:
    blocks = {a.map: i for s in layout.streams for i, block in enumerate(s.blocks) for a in block.attentions}
    attentions = []
    for a in layout.attentions:
        if a.queries is not None and a.keys is not None:
            names = [] if a.is_learned else _names(layout, a.queries), _names(layout, a.keys)
            shape = [*a.queries.shape, a.keys.shape[1]]
            attentions.append(AttentionMap(*names, a.depth, blocks.get(a.map), shape))
    return attentions


def _names(layout: Layout, numbers: Tensor) -> list[str]:
    """Return the names of the inputs from which some rows are computed."""
    families = (layout.rows.families[f] for f in layout.rows.family[numbers].unique().tolist())
    return sorted({family.source.rstrip("'") for family in families if family.source})


def _operations(task: Task, layout: Layout) -> tuple[list[AuditedOperation], list[AuditedUnit]]:
    """Return the units between inputs and target, grouped by name, kind and rules, and individually."""
    recording = task.forward_pass()
    roots = task.rooted_pass(COMPOSITES["plain"]).roots.every
    logits = recording.logits(task.read_logits)
    program = read_program(recording.tape, roots, recording.starts(task.read_logits, torch.ones_like(logits)))
    rules = {name: _rules(program, recording, with_custom_rules(composite)) for name, composite in RULES.items()}
    blocks = sorted((block.entry, block.exit) for stream in layout.streams for block in stream.blocks)
    counts, units = Counter[tuple[str, str, tuple[tuple[str, str | None], ...]]](), []
    for i, unit in enumerate(program.units):
        unit_rules = {name: titles[i] for name, titles in rules.items() if titles[i] != ""}
        counts[unit.name, unit.kind, tuple(unit_rules.items())] += 1
        unknown = [name for name, title in unit_rules.items() if title is None]
        block = sum(entry < unit.exit for entry, _ in blocks) - 1
        block = block if block >= 0 and unit.exit <= blocks[block][1] else -1
        shape, module = list(recording.tape.shapes[unit.exit]), recording.modules.get(unit.calls[-1], "")
        units.append(
            AuditedUnit(unit.exit, unit.kind, unit.name, shape, list(unit.entries), module, block, unknown)
        )
    groups = sorted(counts.items(), key=lambda pair: pair[0][:2])
    return [AuditedOperation(name, kind, n, dict(titles)) for (name, kind, titles), n in groups], units


def _rules(program: Program, recording: ForwardPass, composite: Composite) -> list[str | None]:
    """Return the name of the rule of each unit; None if it has none, "" if no relevance arrives."""
    steps = plan(program, recording.tape, composite, frozenset(program.roots))
    titles, arrives = list[str | None](), set(program.outputs)
    for step in reversed(steps):
        is_constant = any(step.carry) and not any(step.live)
        reached = any(r in arrives for r in step.unit.exits)
        titles.append(step.rule.title if is_constant or reached else "")
        if reached:
            arrives.update(e for e, live in zip(step.unit.entries, step.live, strict=True) if live)
    return titles[::-1]


def _figures(task: Task) -> tuple[dict[str, dict[int, float]], dict[str, dict[str, float]], dict[str, float]]:
    """Return ``blocks``, ``lost`` and ``sums`` of an :class:`Audit`."""
    blocks, lost, sums = dict[str, dict[int, float]](), dict[str, dict[str, float]](), dict[str, float]()
    for name, composite in RULES.items():
        try:
            rooted = task.rooted_pass(composite)
            flows, moved = rooted.back(task.seed(rooted.logits))
        except WhyformerError:
            continue  # Audit.methods has the reason
        relevance = composite.propagates == "relevance"
        start = float(task.value(rooted.logits).sum()) or 1.0
        if moved is not None:
            figure = moved.diagnostics()["conservation"]
            start = sum(figure["start"]) or 1.0
            blocks[name] = {int(block): sum(samples) / start for block, samples in figure["blocks"].items()}
            lost[name] = {kind: sum(samples) / start for kind, samples in figure["given_up_by_operation"].items()}
        parts = (flow if relevance else rooted.root_values[source] * flow for source, flow in flows.items())
        sums[name] = sum(float(part.sum()) for part in parts) / start
    return blocks, lost, sums


def _streams(task: Task, layout: Layout, explanations: list[Explanation]) -> list[Stream]:
    """Return the rows of each input, with the kind and number of scores that one of the explanations has for it."""
    sizes: dict[str, tuple[str, list[int]]] = {}
    for e in explanations:
        for name in e.inputs:
            part = e.part(name)
            sizes.setdefault(name, (part.level, list(part.grid or part.scores.shape[1:])))
    streams = []
    for name in task.sources:
        source = task.derived.get(name, name)  # rows of ids that are looked up a second time have a name with a prime
        blocks = sum(len(stream.blocks) for stream in layout.streams if source in stream.names)
        level, size = sizes.get(name, (None, None))
        streams.append(Stream(name, source.rstrip("'"), level, size, blocks))
    return streams


def _result(ready: Prepared, method: Method, target: Target, shared: SharedPasses) -> Explanation | str | None:
    """Return the explanation of a method, or the reason why it does not apply; None if it applies and is not run."""
    if method.modality != "both" and method.modality != ready.inputs.modality:
        return f"it explains {'pictures' if method.modality == 'image' else 'text'}"
    if method.family == "perturbation":
        return None
    settings = {name: _QUICK[name] for name in method.settings if name in _QUICK}
    try:
        return shared.run(partial(ready.explain, method.name, target, **settings))
    except WhyformerError as error:
        reason = " ".join(str(error).split())
        if "limit=1" in reason:
            return None
        return reason.removeprefix(f"{method.name} ").partition(" Methods that apply:")[0]
