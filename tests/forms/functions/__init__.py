"""Kinds of functions and their implementations; the first one of a function is the reference of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..base import Parts, Way, build, inputs
from ..form import Form, Inputs
from . import attentions, custom, linears, projections, streams
from .activations import ACTIVATIONS, CLASSES
from .masks import MASKED, TORCH_MASKED, padded_inputs, padded_model
from .norms import NORMS
from .softmax import CAUSAL, SOFTMAX

# models of the forms: name -> options
BASES: dict[str, dict[str, Any]] = {
    "pre-norm, vectors": {},
    "pre-norm, vectors, inline": {"inline": True},
    "pre-norm, ids": {"inputs": "ids"},
    "pre-norm, pixels": {"inputs": "pixels"},
    "post-norm, vectors": {"post": True},
    "post-norm, vectors, inline": {"post": True, "inline": True},
    "post-norm, ids": {"inputs": "ids", "post": True},
    "post-norm, pixels": {"inputs": "pixels", "post": True},
    "post-norm, pixels, inline": {"inputs": "pixels", "post": True, "inline": True},
}
INLINE, IDS, PIXELS = "pre-norm, vectors, inline", "post-norm, ids", "post-norm, pixels"
PLAIN = "pre-norm, vectors"
MakeOptions = Callable[[Way], Mapping[str, Any]]


def _model(options: Mapping[str, Any], make_options: MakeOptions, way: Way) -> nn.Module:
    return build(Parts(**options, **make_options(way)))


def _inputs(options: Mapping[str, Any]) -> Inputs:
    return inputs(options.get("inputs", "vectors"))


def _forms(
    kind: str,
    function: str,
    ways: Mapping[str, Way],
    make_options: MakeOptions,
    bases: tuple[str, ...],
    regrouped: Mapping[str, Way] | None = None,
    undefined: tuple[str, ...] = (),
    **extra: Any,
) -> Iterator[Form]:
    """One form per implementation in the first base, and for every second one in further bases; ``extra`` are further options of the model."""
    for base in bases:
        options = {**BASES[base], **extra}
        for name, way in list({**ways, **(regrouped or {})}.items())[:: 1 if base == bases[0] else 2]:
            regroups = name in (regrouped or {})
            model = partial(_model, options, make_options, way)
            yield Form(kind, function, name, base, model, partial(_inputs, options), regroups, undefined=undefined)


def _as(part: str) -> MakeOptions:
    return lambda way: {part: way}


def softmaxes() -> Iterator[Form]:
    yield from _forms("softmax", "softmax", {**SOFTMAX, **custom.SOFTMAX}, _as("softmax"), (INLINE, IDS))
    yield from _forms("causal softmax", "causal softmax", CAUSAL, _as("softmax"), (INLINE, PIXELS), read=lambda x: x[:, -1])
    for name in (*MASKED, *TORCH_MASKED):
        made = partial(padded_model, name)
        yield Form("padding mask", "padding mask", name, "pre-norm, ids", made, padded_inputs)
        yield Form("padding mask", "padding mask", f"{name}, one by one", "pre-norm, ids", made, padded_inputs, single=True)


def norms() -> Iterator[Form]:
    narrow = {"LayerNorm, no affine": INLINE, "LayerNorm, no bias": IDS, "LayerNorm, eps 1e-3": "post-norm, vectors", "RMSNorm, eps 1e-3": INLINE}
    for function, ways in NORMS.items():
        kind = "LayerNorm" if function.startswith("LayerNorm") else "RMSNorm" if function.startswith("RMSNorm") else "other norms"
        bases = (narrow[function],) if function in narrow else (INLINE, IDS)
        yield from _forms(kind, function, {**ways, **custom.NORMS.get(function, {})}, _as("norm"), bases)


def activations() -> Iterator[Form]:
    for function, ways in ACTIVATIONS.items():
        yield from _forms("activations", function, {**ways, **custom.ACTIVATIONS.get(function, {})}, _as("act"), (INLINE, IDS))
    for function in dict.fromkeys(function for _, function, _ in CLASSES):
        first = next(iter(ACTIVATIONS[function].items()))
        named = [(label, way) for label, own, way in CLASSES if own == function]
        for label, way in [("Own", first[0]), *named]:
            ways = {f"{label}: {way}": ACTIVATIONS[function][way]}
            yield from _forms("names of classes", function, ways, _as("act"), (PLAIN,), labels=label)


def linear_maps() -> Iterator[Form]:
    make_options = _as("linear")
    ways = {**linears.LINEAR, **custom.LINEAR}
    yield from _forms("linear", "linear", ways, make_options, (PLAIN, INLINE), linears.LINEAR_REGROUPED)
    yield from _forms("linear modules", "linear", linears.MODULES, _as("layer"), (PLAIN, IDS), linears.MODULES_REGROUPED)


def attention_products() -> Iterator[Form]:
    make_options = _as("product")
    yield from _forms("attention", "softmax(q k) v", attentions.PRODUCTS, make_options, (INLINE, IDS))
    functions = {
        "position bias": attentions.BIASED,
        "soft capping": attentions.SOFT_CAPPED,
        "talking heads": attentions.TALKING,
        "shared keys": attentions.SHARED,
        "cosine": attentions.COSINE,
        "norm of queries and keys": attentions.QUERY_NORM,
        "rotation": {name: attentions.rotated(turn) for name, turn in attentions.ROTATIONS.items()},
    }
    for function, ways in functions.items():
        yield from _forms("further attention", function, ways, make_options, (PLAIN, IDS))
    # this method's rule for sums depends on the total of each sum
    others = {name: attentions.rotated(turn) for name, turn in attentions.ROTATIONS_BY_OTHER_SUMS.items()}
    yield from _forms("further attention", "rotation", others, make_options, (PLAIN, IDS), undefined=("transformer_attribution",))


def attention_projections() -> Iterator[Form]:
    def fused(way: Way) -> Mapping[str, Any]:
        return {"attention": lambda name: projections.Fused(name, way)}

    def projected(way: Way) -> Mapping[str, Any]:
        return {"attention": lambda name: projections.Projected(name, way)}

    def merged(way: Way) -> Mapping[str, Any]:
        return {"attention": lambda name: projections.Mixed(name, way)}

    bases = ("pre-norm, ids", PIXELS)
    options_by_name = {
        "three linears": {},
        **{name: fused(way) for name, way in projections.FUSED.items()},
        **{name: projected(way) for name, way in projections.PROJECTIONS.items()},
    }
    yield from _forms("qkv", "qkv", {name: partial(dict, options) for name, options in options_by_name.items()}, lambda way: way(), bases)
    yield from _forms("heads and W_O", "heads and W_O", projections.MERGES, merged, bases, projections.MERGES_REGROUPED)
    whole = {"written": partial(dict), **{name: partial(dict, attention=way) for name, way in projections.WHOLE.items()}}
    yield from _forms("whole attention", "whole attention", whole, lambda way: way(), bases)


def gates() -> Iterator[Form]:
    def gated_feed(way: Way) -> Mapping[str, Any]:
        return {"feed": lambda name: streams.Gated(name, way)}

    for function, act in streams.ACTS.items():
        ways = {name: partial(_with_act, way, act) for name, way in streams.GATES.items()}
        yield from _forms("gates", function, {**ways, **streams.GATES_OF[function]}, gated_feed, (PLAIN, IDS))


def _with_act(way: Way, act: Way, x: Any, gate: Any, up: Any) -> Any:
    return way(x, gate, up, act)


def ends_of_blocks() -> Iterator[Form]:
    yield from _forms("residual", "x + f(x)", streams.RESIDUAL, _as("add"), (INLINE, IDS))
    yield from _forms("residual", "a x + f(x)", streams.SCALED, _as("add"), ("post-norm, vectors", "pre-norm, ids"))


def embeddings() -> Iterator[Form]:
    position, lookup = streams.POSITIONS["added"], streams.LOOKUPS["F.embedding"]
    patch, front = next(iter(streams.PATCHED.values())), next(iter(streams.FRONT.values()))
    words, pictures = ("pre-norm, ids", IDS), ("pre-norm, pixels", PIXELS)
    yield from _forms("lookup", "words", streams.LOOKUPS, lambda way: {"embed": lambda: streams.LookedUp(way, position)}, words)
    yield from _forms("lookup", "positions", streams.POSITIONS, lambda way: {"embed": lambda: streams.LookedUp(lookup, way)}, words)
    yield from _forms("patches", "patches", streams.PATCHED, lambda way: {"embed": lambda: streams.Patched(way, front)}, pictures)
    yield from _forms("patches", "class token", streams.FRONT, lambda way: {"embed": lambda: streams.Patched(patch, way)}, pictures)


def readouts() -> Iterator[Form]:
    for function, ways in streams.READOUTS.items():
        # at the start of a path all tokens are equal, and ties of the maximum are resolved arbitrarily
        undefined = ("beyond_intuition",) if function == "maximum" else ()
        yield from _forms("readout", function, ways, _as("read"), ("pre-norm, pixels", IDS), undefined=undefined)
    yield from _forms("output", "output", streams.ENDS, _as("end"), (PLAIN, PIXELS))


def placements() -> Iterator[Form]:
    """Functions in modules, and functions called in the forward of the block."""
    for base in (PLAIN, "post-norm, pixels"):
        ways = {"modules": {}, "inline": {"inline": True}}
        for name, options in ways.items():
            full = {**BASES[base], **options}
            yield Form("placement", "placement", name, base, partial(_model, full, lambda way: {}, Way), partial(_inputs, full))


PARTS: tuple[Callable[[], Iterator[Form]], ...] = (
    softmaxes, norms, activations, linear_maps, attention_products, attention_projections, gates, ends_of_blocks, embeddings, readouts, placements,
)


def forms() -> list[Form]:
    return [form for part in PARTS for form in part()]
