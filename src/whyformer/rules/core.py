"""What a rule and a table of rules are, and how a rule is run: one recorded graph, two backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Grads = Sequence[Tensor | None]


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0 or so small that the quotient overflows.

    Nothing is added to the denominator: a constant there shifts float64 results by up to 2e-3 in deep models.
    """
    dead = denominator.abs() <= torch.finfo(denominator.dtype).tiny
    return numerator / denominator.masked_fill(dead, float("inf"))


def unbroadcast(value: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the axes along which an operand of ``shape`` was broadcast."""
    extra = value.dim() - len(shape)
    if extra:
        value = value.sum(tuple(range(extra)))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and value.shape[i] != 1)
    return value.sum(stretched, keepdim=True) if stretched else value


@dataclass
class Pass:
    """What a backward pass over one recorded graph carries, and its books.

    Attributes:
        relevance: False: ordinary gradients; True: relevance.
        keep: another backward pass will follow.
        batch: number of samples B; sums that a rule takes over "the tensor" are taken per sample.
        rows: number of texts that go through the blocks, where a sample is several (multiple choice); 0: B.
        sequence_first: True where the model lays out tokens as ``[N, B, D]``.
        ledger: operation -> [relevance that arrived, relevance that left], each ``[B]``, for the conservation figure.
        device: of the model's first input; the blocks of one model may lie on several devices.
    """

    relevance: bool = False
    keep: bool = False
    batch: int = 1
    rows: int = 0
    sequence_first: bool = False
    ledger: dict[str, list[Tensor]] = field(default_factory=dict)
    device: torch.device | None = None

    def take(self, given: Tensor | None) -> None:
        """Read the number of samples and of texts, and the device, off the first of the model's inputs."""
        self.device = None if given is None else given.device
        self.batch = int(given.shape[0]) if given is not None and given.dim() else 1
        several = given is not None and given.dim() == 3 and not given.is_floating_point()
        self.rows = given.shape[:2].numel() if several and given is not None else 0

    def home(self, tensor: Tensor) -> Tensor:
        """The tensor on the device of the inputs, where what was seen of all blocks meets."""
        return tensor if self.device is None else tensor.to(self.device)

    def per_sample(self, value: Tensor) -> Tensor:
        """Sum of each sample, ``[B]``; the mean sum where rows do not lie sample by sample (tokens of an expert)."""
        axis = self._batch_axis(value)
        if value.dim() and value.shape[axis] % self.batch:
            return (value.sum() / self.batch).expand(self.batch)
        if axis:
            value = value.transpose(0, axis)
        return value.reshape(self.batch, -1).sum(-1)

    def spread(self, factor: Tensor, like: Tensor) -> Tensor:
        """A ``[B]`` factor, shaped to multiply ``like``."""
        axis = self._batch_axis(like)
        if like.shape[axis] % self.batch:
            return factor.mean()
        if like.shape[axis] != self.batch:  # windows of one sample lie next to each other
            factor = factor.repeat_interleave(like.shape[axis] // self.batch)
        return factor.reshape([-1 if i == axis else 1 for i in range(like.dim())])

    def batch_first(self, value: Tensor) -> Tensor:
        """``[B, N, D]`` of a model's hidden states, also where it lays them out as ``[N, B, D]``."""
        return value.transpose(0, 1) if value.dim() == 3 and self._batch_axis(value) else value

    def _batch_axis(self, value: Tensor) -> int:
        if value.dim() < 2 or value.shape[1] not in (self.batch, self.rows):
            return 0
        tokens_first = self.sequence_first and (value.dim() == 3 or value.shape[0] not in (self.batch, self.rows))
        return 1 if tokens_first or value.shape[0] % self.batch else 0

    def record(self, name: str, arrived: Tensor, left: Sequence[Tensor | None]) -> None:
        """Book one operation's relevance; differences are what it lost, made or gave to constants."""
        zero = torch.zeros(self.batch, dtype=torch.float64, device=arrived.device)
        books = self.ledger.setdefault(name, [zero, zero])
        books[0] = books[0] + self.per_sample(arrived.detach()).double().to(books[0].device)
        for part in left:
            if part is not None and part.dim():
                books[1] = books[1] + self.per_sample(part).double().to(books[1].device)


@dataclass
class Call:
    """One recorded operation: its tensor operands, its output, and which operands carry relevance.

    Attributes:
        needs: which operands this pass goes on to; constant: which carry nothing in any pass.
    """

    operands: tuple[Tensor, ...]
    output: Tensor | None
    needs: tuple[bool, ...]
    compute: Callable[..., Tensor]
    run: Pass
    info: dict[str, Any]
    constant: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Rule:
    """How one operation passes on what flows back.

    Attributes:
        relevance: (call, R of the output) -> R of each operand (None for those that carry none).
        gradient: the same while gradients or multipliers flow. In a composite of multipliers it is the rule; in one of
            relevance it is the ordinary gradient, where that is cheaper than running the operation again.
        hold: operands that are held constant: nothing flows back to them.
        share: of what flows back, so much is passed on, before anything else (multipliers).
        shares: of what flows back to the first operands, so much arrives there.
        keep_output: whether the rule reads the output.
        books: enter the relevance in the ledger (off for operations that only pass it on).
        backward: whether anything will flow back; if not, no operand is kept.
    """

    name: str
    relevance: Callable[[Call, Tensor], Grads] | None = None
    gradient: Callable[[Call, Tensor], Grads] | None = None
    hold: tuple[int, ...] = ()
    share: float = 1.0
    shares: tuple[float, ...] = ()
    keep_output: bool = False
    books: bool = True
    backward: bool = True

    def held(self, operands: Sequence[Any]) -> list[Any]:
        """The operands, those that are held constant detached, and those that get a share so that they do."""
        held = [o.detach() if i in self.hold else o for i, o in enumerate(operands)]
        for i, share in enumerate(self.shares):
            if held[i].requires_grad:
                held[i] = shared(held[i].view_as(held[i]), share)
        return held

    def shared(self, output: Tensor) -> Tensor:
        """The output, of which ``share`` flows back."""
        return output if self.share == 1 or not output.requires_grad else shared(output, self.share)


def shared(value: Tensor, share: float) -> Tensor:
    """The same tensor; what flows back to it is multiplied by ``share``."""
    value.register_hook(lambda flow: flow * share)
    return value


NATIVE = Rule("its ordinary adjoint")


@dataclass(frozen=True)
class Composite:
    """A table of rules for one carrier.

    Attributes:
        name: what error messages call it.
        carrier: "multiplier" (R = x ⊙ m; gradient × input where every rule is the ordinary adjoint) or "relevance".
        rules: operation, or kind of operation -> rule. Where a call is told apart by its operands (a product of two
            branches, a layer that reads the root ...) its row is the role of :mod:`whyformer.engine.readings`.
        audit: refuse operations in no row. Off only for the plain gradient, where autograd is the rule.
    """

    name: str
    carrier: str
    rules: Mapping[str, Rule | None] = field(default_factory=dict)
    audit: bool = True

    def rule(self, role: str, kind: str) -> Rule | None:
        """The row of the role, else of the kind; None for an operation to refuse."""
        if not self.audit:
            return NATIVE
        return self.rules.get(role) or self.rules.get(kind)


class Ruled(torch.autograd.Function):
    """Run an operation unchanged and send back its gradient or its relevance, as the :class:`Pass` says."""

    @staticmethod
    def forward(
        ctx: Any, rule: Rule, run: Pass, compute: Callable[..., Tensor], info: dict[str, Any], *operands: Tensor
    ) -> Tensor:
        with torch._C.DisableTorchFunction():  # the interception has seen the operation as a whole
            output = compute(*operands)
            if output._is_view():
                # what a Function returns may be changed in place only if it is no view; this alias still counts changes
                output = output.detach()
            if any(output.untyped_storage().data_ptr() == o.untyped_storage().data_ptr() for o in operands):
                output = output.clone()
            ctx.rule, ctx.run, ctx.compute, ctx.info = rule, run, compute if rule.backward else None, info
            # beside the saved tensors, for which autograd would refuse a change in place
            ctx.read = [(o.detach(), _changes(o)) for o in operands] if rule.backward else []
            for base in (o if o._base is None else o._base for o in operands if o.requires_grad):
                base.__dict__.setdefault(_READERS, []).append(weakref.ref(ctx))
            ctx.output, ctx.version = (output.detach(), output._version) if rule.keep_output else (None, 0)
        return output

    @staticmethod
    def backward(ctx: Any, *flows: Tensor) -> Any:
        (flow,) = flows
        rule: Rule = ctx.rule
        if any(_changes(value) != changes for value, changes in ctx.read):
            raise RuntimeError(f"an operand of '{rule.name}' has been modified by an inplace operation")
        operands, output = tuple(value for value, _ in ctx.read), ctx.output
        if not ctx.run.keep:
            ctx.read = ctx.output = None
        if output is not None and output._version != ctx.version:  # changed in place since
            output = ctx.compute(*operands)
        carries = ctx.needs_input_grad[4:]
        call = Call(operands, output, carries, ctx.compute, ctx.run, ctx.info, tuple(not c for c in carries))
        if ctx.run.relevance:
            if rule.relevance is None:
                raise TypeError(f"the rule '{rule.name}' carries multipliers, not relevance")
            parts = rule.relevance(call, flow)
            if rule.books:
                ctx.run.record(rule.name, flow, parts)
        else:
            parts = (rule.gradient or recomputed_gradient)(call, flow)
        return (None, None, None, None, *(p if need else None for p, need in zip(parts, call.needs, strict=True)))


_READERS = "_whyformer_readers"


def _changes(value: Tensor) -> int:
    """How often it was written to; what was made in inference mode does not count that."""
    return 0 if value.is_inference() else value._version


def before_change(value: Tensor) -> None:
    """A tensor is about to be written to: the rules that have read it, or a view of it, keep what they read."""
    base = value if value._base is None else value._base
    for reference in base.__dict__.pop(_READERS, ()):
        reader = reference()
        for i, (operand, _) in enumerate((reader and reader.read) or ()):
            if operand.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
                copy = operand.clone()
                reader.read[i] = (copy, copy._version)


def recomputed_gradient(call: Call, flow: Tensor) -> Grads:
    """The ordinary gradient, by running the operation once more under autograd."""
    with torch.enable_grad():
        leaves = [o.detach().requires_grad_(n) for o, n in zip(call.operands, call.needs, strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(call.compute(*leaves), wanted, flow))
    return [next(found) if need else None for need in call.needs]
