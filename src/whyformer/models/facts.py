"""What is known of a model, read off a plain pass once for each kind of input."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.models import walking
from whyformer.program.calls import inside, users_hooks_aside
from whyformer.program.facts import Facts, facts_of
from whyformer.program.operations import tensors_in
from whyformer.program.record import Recorder

Feed = tuple[tuple[Any, ...], dict[str, Any]]
_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, Facts]]] = weakref.WeakKeyDictionary()


def facts(
    model: nn.Module, feed: Feed, roots: frozenset[Any] = frozenset(), *, again: bool = False,
    within: AbstractContextManager[None] | None = None,
) -> Facts:  # fmt: skip
    """The facts of the model's program for inputs of this kind.

    Costs one plain pass, written down, for each model and kind of inputs: their names, types and numbers of axes. They
    are read anew when a parameter was written to.

    Args:
        feed: (args, kwargs) of the model's forward.
        roots: positions or names of the inputs that are explained; where there are none, of all that are no whole
            numbers.
        again: read them off this very input: the model took another way.
        within: the pass runs in it; its kind is part of what they are known for.
    """
    named: dict[Any, Any] = {**dict(enumerate(feed[0])), **feed[1]}
    written = tuple((id(p), 0 if p.is_inference() else p._version) for p in walking.parameters(model))
    state, known = _KNOWN.get(model, (None, {}))
    if state != written:
        known = {}
        _KNOWN[model] = written, known
    kinds = tuple((n, v.dtype, v.dim()) if isinstance(v, Tensor) else (n, type(v)) for n, v in named.items())
    key = (roots, model.training, within is not None, kinds)
    if again or key not in known:
        known[key] = _read(model, feed, roots, within)
    return known[key]


def _read(model: nn.Module, feed: Feed, roots: frozenset[Any], within: AbstractContextManager[None] | None) -> Facts:
    known: dict[int, Any] = {}
    args, kwargs = (_own(v, known) for v in feed)
    recorder = Recorder(model)
    named: Mapping[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for place, value in named.items():
        for tensor in tensors_in((value,)):
            carries = tensor.is_floating_point() and (place in roots if roots else tensor.dim() > 1)
            recorder.begin(place, tensor, carries=carries)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        inside(recorder),
        users_hooks_aside(recorder),
        within or nullcontext(),
        recorder,
    ):
        output = model(*args, **kwargs)
    return facts_of(recorder.finish(output.values() if isinstance(output, Mapping) else (output,)))


def _own(value: Any, known: dict[int, Any]) -> Any:
    """The same values, with tensors that a pass may write to and caches that it may fill of their own; what is one
    object stays one."""
    if id(value) in known:
        return known[id(value)]
    made = value
    if isinstance(value, Tensor):
        made = value.detach().clone()
    elif type(value) in (list, tuple):
        made = type(value)(_own(v, known) for v in value)
    elif type(value) is dict:
        made = {k: _own(v, known) for k, v in value.items()}
    elif type(value).__name__.endswith("Cache"):
        made = copy.deepcopy(value)
    known[id(value)] = made
    return made
