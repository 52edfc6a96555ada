"""What is known of a model, read off a plain pass once for each kind of input."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.models import walking
from whyformer.models.structure import as_written, block_groups
from whyformer.program.blocks import ModuleCall, ProgramBlock
from whyformer.program.calls import here, inside, users_hooks_aside
from whyformer.program.facts import Facts, facts_of, with_samples
from whyformer.program.operations import tensors_in
from whyformer.program.record import Program, Recorder

Block = nn.Module | ProgramBlock
Feed = tuple[tuple[Any, ...], dict[str, Any]]
_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, dict[Any, Facts]]] = weakref.WeakKeyDictionary()


def facts(
    model: nn.Module, feed: Feed, roots: frozenset[Any] = frozenset(), *, again: bool = False,
    within: AbstractContextManager[None] | None = None, any_roots: bool = False,
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
        any_roots: those for other roots serve as well.
    """
    named: dict[Any, Any] = {**dict(enumerate(feed[0])), **feed[1]}
    written = tuple((id(p), 0 if p.is_inference() else p._version) for p in walking.parameters(model))
    state, known = _KNOWN.get(model, (None, {}))
    if state != written:
        known = {}
        _KNOWN[model] = written, known
    kinds = tuple((n, v.dtype, v.dim()) if isinstance(v, Tensor) else (n, type(v)) for n, v in named.items())
    key = (roots, model.training, within is not None, kinds)
    if any_roots:
        key = next((other for other in known if other[1:] == key[1:]), key)
    samples = next((v.shape[0] for v in named.values() if isinstance(v, Tensor) and v.dim()), 1)
    if again or key not in known or (known[key].undecided and samples > 1):
        known[key] = _read(model, feed, roots, within, samples)
    return known[key]


def _read(
    model: nn.Module, feed: Feed, roots: frozenset[Any], within: AbstractContextManager[None] | None, samples: int
) -> Facts:
    program, modules = _written(model, feed, roots, within)
    found = facts_of(program, modules, samples)
    if found.undecided and samples > 1:
        rolled, _ = _written(model, _rolled(feed, samples), roots, within)
        found = with_samples(found, program, rolled, samples)
    return found


def _rolled(feed: Feed, samples: int) -> Feed:
    """The last sample first."""

    def roll(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or value.shape[0] % samples:
            return value
        return value.detach().roll(value.shape[0] // samples, 0)

    return tuple(map(roll, feed[0])), {k: roll(v) for k, v in feed[1].items()}


def _written(
    model: nn.Module, feed: Feed, roots: frozenset[Any], within: AbstractContextManager[None] | None
) -> tuple[Program, list[ModuleCall]]:
    """A plain pass, written down, and the calls of modules in containers."""
    known: dict[int, Any] = {}
    args, kwargs = (_own(v, known) for v in feed)
    recorder = Recorder(model)
    named: Mapping[Any, Any] = {**dict(enumerate(args)), **kwargs}
    for place, value in named.items():
        for tensor in tensors_in((value,)):
            carries = tensor.is_floating_point() and (place in roots if roots else tensor.dim() > 1)
            recorder.begin(place, tensor, carries=carries)
    modules: list[ModuleCall] = []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        inside(recorder),
        users_hooks_aside(recorder),
        within or nullcontext(),
        _listed(recorder, modules),
        as_written(model, walking.modules(model)),
        recorder,
    ):
        output = model(*args, **kwargs)
    return recorder.finish(output.values() if isinstance(output, Mapping) else (output,)), modules


@contextmanager
def _listed(recorder: Recorder, calls: list[ModuleCall]) -> Iterator[None]:
    """Note the calls of modules in containers."""
    begun: list[tuple[int, int]] = []
    handles = []
    for name, modules in block_groups(recorder.model).items():

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if here.run is recorder:
                begun.append((len(recorder.program.calls), recorder.carrying((args, kwargs))))

        def after(
            own: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name, last: nn.Module = modules[-1]
        ) -> None:
            if here.run is recorder and begun:
                (first, entry), now = begun.pop(), len(recorder.program.calls) - 1
                calls.append(ModuleCall(name, own is last, first, now, entry, recorder.carrying((output,))))

        for module in dict.fromkeys(modules):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def groups_of(model: nn.Module, feed: Feed) -> dict[str, list[Block]]:
    """Name -> blocks: the modules of each container of blocks (:func:`~whyformer.models.structure.block_groups`), the
    main one first; where those are not what the program shows to be its blocks, the parts of the program."""
    known = facts(model, feed, any_roots=True)
    if known.listed:
        return {name: list(modules) for name, modules in block_groups(model).items()}
    return {"": [ProgramBlock(i) for i in range(len(known.blocks))]}


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
