"""``audit``: what is read off a model, which rule each of its operations gets, and which methods apply to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from whyformer.errors import InputError, WhyformerError
from whyformer.explaining import open_model
from whyformer.methods import METHODS, Method, list_methods
from whyformer.methods.passes import ForwardPass, Layout
from whyformer.methods.task import Task
from whyformer.methods.together import Together, sharing
from whyformer.models import load
from whyformer.options import Keywords, shows_options
from whyformer.prepared import Prepared
from whyformer.progress import Track, tracking
from whyformer.rules.multipliers import COMPOSITES
from whyformer.rules.propagation import deep_taylor, layerwise
from whyformer.rules.registered import with_own_rules
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
# settings that make a method quick and do not decide whether it applies
_QUICK: dict[str, Any] = {"samples": 1, "steps": 1, "block": -1}


@dataclass(frozen=True)
class Stream:
    """The rows of one input.

    Attributes:
        input: the input whose elements they are; another than ``name`` where the model made these ids of it.
        level, size: what its scores are of, and how many ("patch", [14, 14]); None where that cannot be had.
        blocks: how many blocks its rows run through.
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
        queries, keys: the inputs whose rows look, and are looked at; of learned queries none.
        depth: the largest number of attentions on a path to its output.
        block: the block that it lies in, counted among those of its queries; None if it lies in none.
        shape: samples, queries, keys.
    """

    queries: list[str]
    keys: list[str]
    depth: int
    block: int | None
    shape: list[int]


@dataclass(frozen=True)
class AuditedUnit:
    """A line of the program: calls of torch with one meaning.

    Attributes:
        number: of the value that it makes.
        kind: what it is to a rule ("layer", "norm", "product").
        name: of its call, or its kind if it consists of several.
        shape: of the value.
        entries: numbers of the values that carry relevance into it.
        module: path of the module that made the call.
        block: the block that it lies in, counted in the order of execution; -1 if it lies in none.
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
    """Units of one name and kind that get the same rules.

    Attributes:
        name, kind: as of :class:`AuditedUnit`; count: how many there are.
        rules: method -> its rule; None where it has none. Methods whose relevance does not arrive there are left out.
    """

    name: str
    kind: str
    count: int
    rules: dict[str, str | None]


@dataclass(frozen=True)
class Audit:
    """The outcome of :func:`audit`.

    Attributes:
        streams, attentions, operations, program: what was seen.
        blocks: method -> block -> Σ relevance at its input as a share of what started, over the batch.
        lost: method -> kind of unit -> Σ of the relevance that arrived less Σ of what left, in that share.
        sums: method -> Σ relevance at the inputs, in that share.
        methods: name -> None where it applies, else why it does not.
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
        """Plain values, ready for JSON."""
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
    """What whyformer sees of a model, before anything is explained.

    The model is recorded once and walked back by the rules of five methods. Then each method runs once with its
    quickest settings, but for perturbation methods, which need nothing but the output.

    Args:
        model, processor, target, progress, **options: as for :func:`whyformer.explain`.
        inputs: as there; by default, for a model given by name, a picture of noise or a short sentence.

    Raises:
        WhyformerError: the model or the inputs cannot be used, or the output needs a target.
    """
    if inputs is None:
        if not isinstance(model, str):
            raise InputError("audit needs inputs for a model that is not given by name: pass what its forward takes")
        model = load(model, device=options.get("device"), dtype=options.get("dtype"))
        noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        shown = Image.fromarray(noise)
        inputs = {"text": SENTENCE, "image": shown, "both": {"text": SENTENCE, "images": shown}}[model.modality]
    ready = open_model(model, processor, **options).prepare(inputs)
    with sharing(list_methods()) as together:
        task = replace(ready.task(target, "audit"), together=together)
        with ready.explaining_errors(task), task.at_work():
            layout = task.passed().layout(task.given, task.read)
            attentions, figures = _attentions(layout), _figures(task)
            operations, program = _operations(task, layout)
        streams = _streams(ready, task, layout, target)
        methods = tracking(progress)(list_methods(), "methods", len(METHODS))
        reasons = {method.name: _why_not(ready, method, target, together) for method in methods}
    return Audit(ready.name, streams, attentions, operations, program, *figures, reasons)


def _attentions(layout: Layout) -> list[AttentionMap]:
    blocks = {a.map: i for s in layout.streams for i, block in enumerate(s.blocks) for a in block.attentions}
    found = []
    for a in layout.attentions:
        if a.queries is not None and a.keys is not None:
            names = [] if a.is_learned else _names(layout, a.queries), _names(layout, a.keys)
            shape = [*a.queries.shape, a.keys.shape[1]]
            found.append(AttentionMap(*names, a.depth, blocks.get(a.map), shape))
    return found


def _names(layout: Layout, numbers: Tensor) -> list[str]:
    """The inputs that some rows are made of."""
    families = (layout.rows.families[f] for f in layout.rows.family[numbers].unique().tolist())
    return sorted({family.source.rstrip("'") for family in families if family.source})


def _operations(task: Task, layout: Layout) -> tuple[list[AuditedOperation], list[AuditedUnit]]:
    """The units between inputs and target, alike ones together and one by one, with their rules."""
    whole = task.passed()
    roots = task.recorded(COMPOSITES["plain"]).roots.every
    logits = whole.logits(task.read)
    program = read_program(whole.tape, roots, whole.starts(task.read, torch.ones_like(logits)))
    rules = {name: _rules(program, whole, with_own_rules(composite)) for name, composite in RULES.items()}
    blocks = sorted((block.entry, block.exit) for stream in layout.streams for block in stream.blocks)
    counts, units = Counter[tuple[str, str, tuple[tuple[str, str | None], ...]]](), []
    for i, unit in enumerate(program.units):
        own = {name: titles[i] for name, titles in rules.items() if titles[i] != ""}
        counts[unit.name, unit.kind, tuple(own.items())] += 1
        unknown = [name for name, title in own.items() if title is None]
        block = sum(entry < unit.exit for entry, _ in blocks) - 1
        block = block if block >= 0 and unit.exit <= blocks[block][1] else -1
        shape, module = list(whole.tape.shapes[unit.exit]), whole.modules.get(unit.calls[-1], "")
        units.append(
            AuditedUnit(unit.exit, unit.kind, unit.name, shape, list(unit.entries), module, block, unknown)
        )
    groups = sorted(counts.items(), key=lambda pair: pair[0][:2])
    return [AuditedOperation(name, kind, n, dict(own)) for (name, kind, own), n in groups], units


def _rules(program: Program, whole: ForwardPass, composite: Composite) -> list[str | None]:
    """The rule of each unit, None where there is none; "" where no relevance arrives."""
    steps = plan(program, whole.tape, composite, frozenset(program.roots))
    found, arrives = list[str | None](), set(program.outputs)
    for step in reversed(steps):
        held = any(step.carry) and not any(step.live)
        reached = any(r in arrives for r in step.unit.exits)
        found.append(step.rule.title if held or reached else "")
        if reached:
            arrives.update(e for e, live in zip(step.unit.entries, step.live, strict=True) if live)
    return found[::-1]


def _figures(task: Task) -> tuple[dict[str, dict[int, float]], dict[str, dict[str, float]], dict[str, float]]:
    """What becomes of the relevance under each composite: ``blocks``, ``lost`` and ``sums`` of an :class:`Audit`."""
    blocks, lost, sums = dict[str, dict[int, float]](), dict[str, dict[str, float]](), dict[str, float]()
    for name, composite in RULES.items():
        try:
            rooted = task.recorded(composite)
            flows = rooted.back(task.seed(rooted.logits))
        except WhyformerError:
            continue  # the methods' own refusals say why
        relevance = composite.carrier == "relevance"
        start = float(task.value(rooted.logits).sum()) or 1.0
        if relevance:
            figure = rooted.balance.diagnostics()["conservation"]
            start = sum(figure["start"]) or 1.0
            blocks[name] = {int(block): sum(own) / start for block, own in figure["blocks"].items()}
            lost[name] = {kind: sum(own) / start for kind, own in figure["given_up_by_operation"].items()}
        parts = (flow if relevance else rooted.begun[source] * flow for source, flow in flows.items())
        sums[name] = sum(float(part.sum()) for part in parts) / start
    return blocks, lost, sums


def _streams(ready: Prepared, task: Task, layout: Layout, target: Target) -> list[Stream]:
    sizes: dict[str, tuple[str, list[int]]] = {}
    for method in ("raw_attention", "input_x_gradient"):
        try:
            e = ready.explain(method, target)
        except WhyformerError:
            continue
        for name in e.inputs:
            part = e.part(name)
            sizes.setdefault(name, (part.level, list(part.grid or part.scores.shape[1:])))
    found = []
    for name in task.sources:
        source = task.made.get(name, name)  # rows of the same ids that are looked up again have a prime
        blocks = sum(len(stream.blocks) for stream in layout.streams if source in stream.names)
        level, size = sizes.get(name, (None, None))
        found.append(Stream(name, source.rstrip("'"), level, size, blocks))
    return found


def _why_not(ready: Prepared, method: Method, target: Target, together: Together) -> str | None:
    if method.modality != "both" and method.modality != ready.inputs.modality:
        return f"it explains {'pictures' if method.modality == 'image' else 'text'}"
    if method.family == "perturbation":
        return None
    settings: Mapping[str, Any] = {name: _QUICK[name] for name in method.settings if name in _QUICK}
    if "limit" in method.settings:
        settings = {**settings, "limit": 1}  # told to stop where the work would begin
    try:
        together.around(partial(ready.explain, method.name, target, **settings))
    except WhyformerError as error:
        said = " ".join(str(error).split())
        return None if "limit=1" in said else said.removeprefix(f"{method.name} ").partition(" Methods that apply:")[0]
    return None
