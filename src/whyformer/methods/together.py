"""One recorded forward pass, and one backward pass of gradients, for several methods of the same input and target.

Each method works as it does alone; what it records is a view of the pass that all share, where that gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from whyformer.composites.chefer import can_be_looked_up, looked_up
from whyformer.composites.gradient import GRADIENT
from whyformer.engine.hooks import batch_first
from whyformer.engine.isolation import changes, parameters
from whyformer.engine.precision import HALF
from whyformer.engine.probes import AttentionCall, Flows, Maps, Probe, asked
from whyformer.engine.run import Recording, Starts, record
from whyformer.inputs import Inputs
from whyformer.methods.passes import ForwardPass
from whyformer.methods.sources import Sources
from whyformer.rules.core import Composite

if TYPE_CHECKING:
    from whyformer.methods.registry import Method

T = TypeVar("T")

LIMIT = 2**30
"""Bytes of ∂f/∂A that are kept for the methods to come; of longer inputs each method makes its own passes."""

_OWN = {"blocks", "read", "samples", "cut", "root", "roots"}


@contextmanager
def sharing(methods: Sequence[Method]) -> Iterator[Together]:
    """What these methods share, freed at the end; one alone shares nothing."""
    together = Together(any(method.relevance for method in methods), off=len(methods) < 2)
    try:
        yield together
    finally:
        together.release()


class TooLarge(Exception):  # noqa: N818 - a signal, never told
    """The maps of this input are too large to be kept."""


@dataclass
class Together:
    """What several methods share.

    Attributes:
        relevance: whether one of them propagates relevance: then the graph serves both carriers.
        off: whether nothing is shared (any more).
        views: how many were given; failed: what went wrong in methods that had one.
    """

    relevance: bool
    off: bool = False
    views: int = 0
    failed: list[Exception] = field(default_factory=list)
    _made: dict[str, _Shared] = field(default_factory=dict)
    _passed: tuple[Inputs, Mapping[str, Any], ForwardPass] | None = None

    def around(self, make: Callable[..., T]) -> T:
        """What ``make(together=...)`` makes with what is shared; what fails so is tried alone, and it is told then what
        is wrong."""
        if self.off:
            return make(together=None)
        before = self.views
        try:
            return make(together=self)
        except Exception as error:
            if self.views == before and not self.off:
                raise
            self.failed.append(error)
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                self.off = True
                self.release()
        return make(together=None)

    def passed(self, task: Sources, make: Callable[[], ForwardPass]) -> ForwardPass:
        """What ``make`` records, once for all methods of the same inputs, unless the model was changed meanwhile."""
        if self.off:
            return make()
        if self._passed is None or self._passed[0] is not task.inputs or changes(task.model, self._passed[1]):
            self._passed = None
            self._passed = task.inputs, parameters(task.model), make()
        self.views += 1
        return self._passed[2]

    def record(
        self, task: Sources, composite: Composite, probes: tuple[Probe, ...], options: Mapping[str, Any]
    ) -> Recording | None:
        """A view of the shared pass for what :func:`whyformer.engine.run.record` is asked, None where that is no pass
        to share: inputs that were changed, several streams, half precision, other probes or composites."""
        if self.off or not _serves(task, composite, probes, options):
            return None
        carrier = "relevance" if self.relevance or composite.carrier == "relevance" else "multiplier"
        shared = self._made.get(carrier)
        if shared is None or shared.inputs is not task.inputs or changes(task.model, shared.before):
            self.release()
            try:
                shared = self._made[carrier] = _Shared.of(task, carrier, options)
            except Exception:
                self.off = True
                raise
        view = shared.view(composite, probes, options)
        self.views += view is not None
        return view

    def release(self) -> None:
        """Free the graphs."""
        for shared in self._made.values():
            shared.whole.release()
        self._made.clear()
        self._passed = None


def _serves(task: Sources, composite: Composite, probes: tuple[Probe, ...], options: Mapping[str, Any]) -> bool:
    """Whether one graph may give what is asked."""
    kinds, root = [type(probe) for probe in probes], options.get("root")
    if root == "output":
        fits = composite is GRADIENT and kinds == [Maps]
    else:
        known = composite is GRADIENT or can_be_looked_up(composite)
        fits = root is None and known and (kinds == [Flows] or (not kinds and "roots" in options))
    return (
        fits
        and options.keys() <= _OWN
        and task.structure.plain
        and task.inputs.choices is None
        and not torch._C._is_any_autocast_enabled()
        and not any(parameter.dtype in HALF for parameter in task.model.parameters())
    )


@dataclass
class _Shared:
    """A pass whose graph begins at the inputs, observed at all attentions.

    Attributes:
        before: the model's parameters as they were.
        calls: its attentions, with how often what makes their maps had been written to.
        seen: who observes the present backward pass.
        seed: of the gradients that are known: ``flows`` into the maps, ``roots`` into the inputs, ``readouts``.
    """

    inputs: Any
    before: Mapping[str, Any]
    whole: Recording = field(init=False)
    calls: list[tuple[AttentionCall, list[int]]] = field(default_factory=list)
    seen: Callable[[int, Tensor, Tensor], None] | None = None
    seed: Tensor | None = None
    flows: dict[int, Tensor] = field(default_factory=dict)
    roots: list[Tensor] = field(default_factory=list)
    readouts: dict[Any, Tensor] = field(default_factory=dict)
    started: Any = None
    size: int = 0

    @classmethod
    def of(cls, task: Sources, carrier: str, options: Mapping[str, Any]) -> _Shared:
        """Record it."""
        made = cls(task.inputs, parameters(task.model))
        composite = looked_up() if carrier == "relevance" else GRADIENT
        flows = Flows(lambda *seen: made.seen and made.seen(*seen), stops=True)
        probes = Maps(made._attended), flows
        kept = {name: options[name] for name in ("blocks", "read", "samples") if name in options}
        made.whole = record(task.model, task.fed(task.inputs), composite, *probes, roots=task.roots(), **kept)
        made.whole.kept = True
        return made

    def _attended(self, call: AttentionCall) -> None:
        batch, queries, keys = call.shape
        self.size += batch * call.value.shape[-3] * queries * keys * call.value.element_size()
        if self.size > LIMIT:
            raise TooLarge
        parts = {name: getattr(call, name) for name in ("query", "key", "value", "mask", "weights")}
        parts = {name: None if part is None else part.detach() for name, part in parts.items()}
        self.calls.append((replace(call, **parts), _written(parts.values())))

    def view(self, composite: Composite, probes: tuple[Probe, ...], options: Mapping[str, Any]) -> Recording | None:
        """What one method gets; None where it asks for the last block's output and there is none in the graph."""
        end = next(iter(self.whole.outputs), None)
        if options.get("root") == "output":
            if len(self.whole.outputs) != 1:
                return None
            watching = asked(probes, Maps)
            if watching is not None:
                for call in self.maps():
                    watching.seen(call)
        flows = asked(probes, Flows)
        made = View(
            self.whole.mode, shared=self, composite=composite, watching=flows, rooted="roots" in options,
            above=options.get("root") == "output", end=end,
        )  # fmt: skip
        made.logits, made.begun, made.blocks = self.whole.logits, self.whole.begun, self.whole.blocks
        return made

    def maps(self) -> list[AttentionCall]:
        """The attentions as they were seen; each makes its map anew, so that none is kept."""
        found = []
        for call, writes in self.calls:
            one = replace(call)
            if _written([one.query, one.key, one.value, one.mask, one.weights]) != writes:
                raise RuntimeError("what an attention has read was modified by an inplace operation")
            found.append(one)
        return found

    def gradients(self, view: View, seed: Tensor) -> list[Tensor]:
        """A pass of gradients, or what is known of the one before; those that begin in the upper half of the model go
        no further."""
        flows, whole = view.watching, self.whole
        first = 0 if flows is None else flows.first
        if self.seed is None or not torch.equal(self.seed, seed):
            if not view.rooted and 2 * first >= whole.attentions and first in whole.mode.anchors:
                self.seen = None if flows is None else _from(first, flows.seen)
                whole.backward(seed, ends=[whole.mode.anchors[first]])
                view.readouts, view.started = dict(whole.readouts), whole.started
                return [torch.zeros_like(root) for root in whole.roots]
            self.flows.clear()
            self.seen = lambda index, _, flow: self.flows.update({index: flow})
            self.roots = whole.backward(seed)
            self.seed, self.readouts, self.started = seed, dict(whole.readouts), whole.started
        for call in reversed(self.maps()) if flows is not None else ():
            if flows is not None and call.index >= first and call.index in self.flows:
                flows.seen(call.index, call.map(), self.flows[call.index])
        view.readouts, view.started = dict(self.readouts), self.started
        return self.roots

    def relevances(self, view: View, seed: Tensor) -> list[Tensor]:
        """A pass of relevance under the view's composite, down to the inputs or to the first map that it watches."""
        flows, whole = view.watching, self.whole
        first = 0 if flows is None else flows.first
        whole.run.table, self.seen = view.composite, None if flows is None else _from(first, flows.seen)
        whole.block_sums.clear()
        ends = None if view.rooted or first not in whole.mode.anchors else [whole.mode.anchors[first]]
        found = whole.backward(seed, relevance=True, ends=ends)
        view.block_sums, view.started = dict(whole.block_sums), whole.started
        return found


@dataclass
class View(Recording):
    """One method's view of a shared pass; see :class:`whyformer.engine.run.Recording`.

    Attributes:
        watching: what the method observes on the way back.
        rooted: whether it wants what arrives at the inputs.
        above: whether the graph begins at the last block's output.
    """

    _: KW_ONLY
    shared: _Shared
    composite: Composite
    watching: Flows | None
    rooted: bool
    above: bool
    end: Any

    def backward(
        self, seed: Tensor, *, relevance: bool = False, keep: bool = False, at: Starts | None = None,
        ends: list[Tensor] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """As of a recording of the method's own."""
        self.run.relevance = relevance
        if self.above:
            whole, self.shared.seen = self.shared.whole, None
            (flow,) = whole.backward(seed, ends=[whole.outputs[self.end]])
            return [batch_first(flow, whole.run)]
        return self.shared.relevances(self, seed) if relevance else self.shared.gradients(self, seed)

    def sweep(self, seed: Tensor) -> bool:
        """Gradients, then relevance."""
        self.backward(seed)
        self.backward(seed, relevance=True)
        return True

    def release(self) -> None:
        """The pass is not its own."""


def _from(first: int, seen: Callable[[int, Tensor, Tensor], None]) -> Callable[[int, Tensor, Tensor], None]:
    def later(index: int, weights: Tensor, flow: Tensor) -> None:
        if index >= first:
            seen(index, weights, flow)

    return later


def _written(parts: Any) -> list[int]:
    """How often each tensor was written to; what was made in inference mode does not count that."""
    return [0 if part is None or part.is_inference() else part._version for part in parts]
