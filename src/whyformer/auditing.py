"""``audit``: what is read off a model, which rule each of its operations gets, and which methods apply to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from whyformer.composites.chefer import deep_taylor, layerwise
from whyformer.composites.named import conservative
from whyformer.engine.probes import Tally
from whyformer.errors import InputError, WhyformerError
from whyformer.explaining import Ready, begin
from whyformer.methods import METHODS, Method, list_methods
from whyformer.methods.conservation import Balance
from whyformer.methods.task import Task
from whyformer.models import load
from whyformer.progress import Track, tracking
from whyformer.rules.core import Composite
from whyformer.targets import Target

COMPOSITES: dict[str, Composite] = {
    "transformer_attribution": deep_taylor(),
    "lrp": layerwise(),
    "lrp_ah": conservative("AH"),
    "lrp_ln": conservative("LN"),
    "lrp_ah_ln": conservative("AH", "LN"),
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
        block: the first block call that its rows enter before any attention.
    """

    name: str
    input: str
    level: str | None
    size: list[int] | None
    block: int | None


@dataclass(frozen=True)
class AttentionMap:
    """One attention: whose rows look at whose, how many attentions deep, in which call of a block."""

    queries: list[str]
    keys: list[str]
    depth: int
    block: int | None
    shape: list[int]


@dataclass(frozen=True)
class AuditedOperation:
    """An operation that carries relevance.

    Attributes:
        name, role: as it is called, and the row it goes by; count: how often it ran.
        rules: method -> its rule; None where it has none.
    """

    name: str
    role: str
    count: int
    rules: dict[str, str | None]


@dataclass(frozen=True)
class Audit:
    """The outcome of :func:`audit`.

    Attributes:
        streams, attentions, operations: what was seen.
        blocks: method -> block call -> Σ relevance at its input as a share of what started, over the batch.
        lost: method -> rule -> Σ of the relevance that arrived less Σ of what left, in that share.
        sums: method -> Σ scores as a share of what started, for methods without an account of blocks.
        methods: name -> None where it applies, else why it does not.
    """

    model: str
    streams: list[Stream]
    attentions: list[AttentionMap]
    operations: list[AuditedOperation]
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


def audit(
    model: nn.Module | str,
    inputs: Any = None,
    processor: Any = None,
    *,
    target: Target = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    progress: bool | Track = False,
) -> Audit:
    """What whyformer sees of a model, before anything is explained.

    Each composite is run once forward and back, each method once with its quickest settings; perturbation methods are
    not run, as they need forward passes alone.

    Args:
        model, processor, target, device, dtype, progress: as for :func:`whyformer.explain`.
        inputs: as there; by default, for a model given by name, a picture of noise or a short sentence.

    Raises:
        WhyformerError: the model or the inputs cannot be used, or the output needs a target.
    """
    if inputs is None:
        if not isinstance(model, str):
            raise InputError("audit needs inputs for a model that is not given by name: pass what its forward takes")
        loaded = load(model, device=device, dtype=dtype)
        model, processor, device, dtype = loaded.model, processor or loaded.processor, None, None
        noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        shown = Image.fromarray(noise)
        inputs = {"text": SENTENCE, "image": shown, "both": {"text": SENTENCE, "images": shown}}[loaded.modality]
    ready = begin(model, inputs, processor, device=device, dtype=dtype)
    task = ready.task(target, "audit")
    found = Audit(ready.name, [], [], [], {}, {}, {}, {})
    with task.at_work():
        for a in task.structure.attentions:
            seen = AttentionMap(sorted(a.queries), sorted(a.keys), a.depth, a.block, list(a.shape))
            found.attentions.append(seen)
        _run_composites(task, found)
    found.streams.extend(_streams(ready, task, target))
    for method in tracking(progress)(list_methods(), "methods", len(METHODS)):
        found.methods[method.name] = _why_not(ready, method, target)
    return found


def _run_composites(task: Task, found: Audit) -> None:
    """Each composite once: which operations carry, by which rule, and what becomes of the relevance."""
    rules: dict[tuple[str, str], dict[str, str | None]] = defaultdict(dict)
    counts: dict[tuple[str, str], int] = {}
    for name, composite in COMPOSITES.items():
        tally = Tally()
        recording = task.begin(composite, tally)
        for key, (rule, count) in tally.found.items():
            rules[key][name] = rule
            counts[key] = max(count, counts.get(key, 0))
        seed, relevance = task.seed(recording.logits), composite.carrier == "relevance"
        start = float(task.value(recording.logits.detach()).sum())
        try:
            flows = recording.backward(seed, relevance=relevance)
        except WhyformerError:
            continue  # the methods' own refusals say why
        if relevance:
            figure: Any = Balance.of_recording(recording).diagnostics()["conservation"]
            start = sum(figure["start"]) or 1.0
            found.blocks[name] = {int(block): sum(own) / start for block, own in figure["blocks"].items()}
            found.lost[name] = {rule: sum(own) / start for rule, own in figure["given_up_by_operation"].items()}
        else:
            roots = zip(recording.roots, flows, strict=True)
            found.sums[name] = sum(float((root.detach() * flow).sum()) for root, flow in roots) / (start or 1.0)
    found.operations.extend(AuditedOperation(*key, counts[key], rules[key]) for key in sorted(rules))


def _streams(ready: Ready, task: Task, target: Target) -> list[Stream]:
    sizes: dict[str, tuple[str, list[int]]] = {}
    for method in ("raw_attention", "input_x_gradient"):
        try:
            e = ready.explain(method, target)
        except WhyformerError:
            continue
        for name in e.inputs:
            part = e.part(name)
            sizes.setdefault(name, (part.level, list(part.grid or part.scores.shape[1:])))
    lookups, entries = task.structure.lookups, task.structure.entries
    return [
        Stream(name, lookups[name].input if name in lookups else name, level, size, entries.get(name, (None,))[0])
        for name in task.sources
        for level, size in [sizes.get(name, (None, None))]
    ]


def _why_not(ready: Ready, method: Method, target: Target) -> str | None:
    if method.modality != "both" and method.modality != ready.inputs.modality:
        return f"it explains {'pictures' if method.modality == 'image' else 'text'}"
    if method.family == "perturbation":
        return None
    settings: Mapping[str, Any] = {name: _QUICK[name] for name in method.settings if name in _QUICK}
    if "limit" in method.settings:
        settings = {**settings, "limit": 1}  # told to stop where the work would begin
    try:
        ready.explain(method.name, target, **settings)
    except WhyformerError as error:
        said = " ".join(str(error).split())
        return None if "limit=1" in said else said.removeprefix(f"{method.name} ").partition(" Methods that apply:")[0]
    return None
