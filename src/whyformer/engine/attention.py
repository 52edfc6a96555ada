"""Attention in the interception: found, counted, opened for observers, and followed to its output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from whyformer.engine.adjoints import attention_of_rows
from whyformer.engine.operations import operation
from whyformer.engine.probes import AttentionCall, Edit, Features, Flows, Maps, Projections
from whyformer.engine.readings import bind, is_map
from whyformer.program.operations import operation_name, plain_name
from whyformer.rules.core import Call, Composite, Pass, Rule, Ruled
from whyformer.rules.relevance.attention import attention_gradient, causal_mask


class AttentionCapture:
    """The part of the interception that knows attention; see :class:`whyformer.engine.mode.Interception`."""

    composite: Composite
    run: Pass
    maps: Maps | None
    flows: Flows | None
    edit: Edit | None
    features: Features | None
    projections: Projections | None
    anchor: Tensor | None
    aside: int
    attentions: int
    block: int | None
    last: bool
    grouped: bool
    attention_blocks: list[int | None]
    norm_before: int | None
    entered: torch.Size
    block_input: Tensor | None

    def add_root(self, tensor: Tensor) -> Tensor:
        raise TypeError("only a whole interception has roots")

    def _rule_of_attention(self) -> Rule | None:
        """How an attention is opened, or None where it may stay as it is."""
        own = self.composite.rule("scaled_dot_product_attention", "attention")
        if self.composite.carrier == "relevance" or (own is not None and own.gradient is not None):
            return own
        return _PLAIN_ATTENTION if self.flows is not None else None

    def _observer(self, index: int) -> Callable[[Tensor, Tensor], None]:
        def observe(weights: Tensor, flow: Tensor) -> None:
            if self.flows is not None and index >= 0:
                self.flows.seen(index, *(self.run.home(self._four(t)) for t in (weights, flow)))

        return observe

    def _four(self, maps: Tensor) -> Tensor:
        """``[B·H, Q, K]`` as ``[B, H, Q, K]``, and heads in groups as heads."""
        if maps.dim() > 4:
            return maps.flatten(1, -3)
        if maps.dim() == 3:
            batch = self.run.batch if maps.shape[0] % self.run.batch == 0 else 1
            return maps.reshape(batch, -1, *maps.shape[1:])
        return maps

    def _fused_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        a = bind(
            "query key value attn_mask dropout_p is_causal scale enable_gqa", args, kwargs,
            attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False,
        )  # fmt: skip
        q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
        index = self._count_attention()
        scale = q.shape[-1] ** -0.5 if a["scale"] is None else float(a["scale"])
        options = {"is_causal": a["is_causal"], "scale": a["scale"], "enable_gqa": a["enable_gqa"]}
        carries = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        begin = self._begins(index, carries)
        carries = carries or begin
        rule = self._rule_of_attention() if carries else None
        own = self.composite.rule("scaled_dot_product_attention", "attention")
        if carries and own is not None:
            q, k, v = own.held((q, k, v))
        if rule is None:
            if self.maps is None and (self.edit is None or index < 0):
                output: Any = NotImplemented
                if self.last and carries:
                    output = attention_of_rows(func, self.run, q, k, v, mask, scale, options)
                if output is NotImplemented:
                    output = func(q, k, v, attn_mask=mask, **options)
            else:
                full = causal_mask(q, k) if a["is_causal"] else mask
                key, value = _match_heads(q, k, v)
                call = AttentionCall(index, self.block if index >= 0 else None, q, key, value, full, scale)
                if self.maps is not None:
                    self.maps.seen(call.at(self.run.home))
                if self.edit is not None and index >= 0:
                    return self.edit.change(call.map(), value, call.map() @ value)
                # where the watcher asked for the map, the product with the values is all that is left to do
                output = func(q, k, v, attn_mask=mask, **options) if call.weights is None else call.weights @ value
            return output if own is None else own.shared(output)
        info = {
            "mask": causal_mask(q, k) if a["is_causal"] else mask,
            "scale": scale,
            "observe": self._observer(index),
            "by_heads": self.flows is not None and self.flows.by_heads,
        }
        key, value = _match_heads(q, k, v)
        options["enable_gqa"] = False

        def compute(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
            return func(q, k, v, attn_mask=mask, **options)

        if self.maps is not None:
            block = self.block if index >= 0 else None
            full = causal_mask(q, k) if a["is_causal"] else mask
            self.maps.seen(AttentionCall(index, block, q, key, value, full, scale).at(self.run.home))
        operands = (q, key, value, *self._anchors(begin))
        output = Ruled.apply(rule, self.run, compute, info, *operands)
        return output if own is None else own.shared(output)

    def _written_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A·V of an attention whose map the model computed itself; A is observed on its way."""
        weights, v = args[:2]
        index = self._count_attention()
        carries = torch.is_grad_enabled() and (weights.requires_grad or v.requires_grad)
        begin = self._begins(index, carries)
        softmax, own = self.composite.rule("softmax", "softmax"), self.composite.rule("product", "matrix product")
        # a product of two branches, also where the graph begins here, but not where the map is held constant
        branches = (begin and not (softmax and softmax.hold)) or (weights.requires_grad and v.requires_grad)
        carries = carries or begin
        if carries and (self.flows is not None or self.composite.carrier == "relevance"):
            # a map that is held constant is observed too
            held = self.flows is not None and index >= self.flows.first and not weights.requires_grad
            operands = (weights, *self._anchors(begin or held))
            info = {"observe": self._observer(index)}
            weights = Ruled.apply(_OBSERVE, self.run, lambda w, *_: w, info, *operands)
        if not carries:
            with torch.no_grad():
                output = func(weights, v, *args[2:], **kwargs)
        elif self.composite.carrier == "relevance":
            output = Ruled.apply(self.composite.rules["product"], self.run, func, {}, weights, v)
        else:
            output = func(weights, v, *args[2:], **kwargs)
            if own is not None and branches:
                output = own.shared(output)
        if self.maps is not None:
            block = self.block if index >= 0 else None
            call = AttentionCall(index, block, None, None, self._four(v), weights=self._four(weights))
            self.maps.seen(call.at(self.run.home))
        return output if self.edit is None or index < 0 else self.edit.change(weights, v, output)

    def _begins(self, index: int, carries: bool) -> bool:
        """Whether the graph begins at this attention's map: the first asked for, and any later one that nothing reaches
        yet (a decoder's own attention)."""
        return torch.is_grad_enabled() and self.flows is not None and index >= self.flows.first and not carries

    def _anchors(self, begin: bool) -> list[Tensor]:
        """The leaf that hangs on an attention's map where the graph begins there."""
        return [self.anchor] if begin and self.anchor is not None else []

    def _count_attention(self) -> int:
        """Position among the attentions of the blocks; −1 for one outside them (a pooling head, another tower, a user's
        hook)."""
        if self.aside or (self.grouped and self.block is None):
            return -1
        index, self.attentions = self.attentions, self.attentions + 1
        self.attention_blocks.append(self.block)
        if self._wanted() and self.norm_before != self.block and self.block_input is not None:
            self.add_root(self.block_input)  # post-norm block: nothing is normalised before its attention
            self.block_input = None
        return index

    def _wanted(self) -> bool:
        return self.features is not None and self.block in self.features.blocks

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Mark attention maps and the features of blocks."""
        kind = operation(name).kind
        if name == "softmax" and isinstance(result, Tensor) and result.dim() in (3, 4):
            axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            if axis in (-1, result.dim() - 1):
                result._whyformer_map = True  # type: ignore[attr-defined]
        elif kind == "view" and args and is_map(args[0]) and isinstance(result, Tensor) and result.dim() in (3, 4):
            # without its last column, that is a sink which takes the rest (GPT-OSS)
            if name != "__getitem__" or result.shape in (args[0].shape, (*args[0].shape[:-1], args[0].shape[-1] - 1)):
                result._whyformer_map = True  # type: ignore[attr-defined]
        elif self.aside:
            return result
        elif kind == "normalisation":
            self._note_norm(result)
        if self.projections is not None and not self.aside:
            self.projections.follow(name, args, kwargs, result, self._post_norm)
        return result

    def _note_norm(self, result: Tensor) -> None:
        """A normalisation before the attention of a block: what it gives are the block's features."""
        if self.aside or self.block is None or self.block in self.attention_blocks or self.norm_before == self.block:
            return
        if self.entered[-1:] != result.shape[-1:] or self.entered.numel() != result.numel():  # of queries, of a window
            return
        if not self._wanted():
            self.norm_before = self.block
        elif result.requires_grad:  # else it is of no account here: what it makes is a choice (of keys, of experts)
            self.norm_before = self.block
            self.add_root(result)

    def _post_norm(self, index: int) -> bool:
        """Whether a normalisation here can be the one after that attention: no next block's first."""
        return self.block == self.attention_blocks[index] and self.block != self.norm_before


def samples_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int) -> Tensor:
    """An attention of ``[H·B, N, d]`` or ``[H, B, N, d]``, as one of ``[B, H, N, d]``."""
    flat = args[0].dim() == 3

    def turned(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 3 or (flat and value.shape[0] % samples):
            return value
        lead = value.unflatten(0, (-1, samples)) if flat else value[None] if value.dim() == 3 else value
        return lead.transpose(0, 1)

    function = torch.matmul if plain_name(operation_name(func)) == "bmm" else func
    made = function(*map(turned, args), **{k: turned(v) for k, v in kwargs.items()}).transpose(0, 1)
    return made.flatten(0, 1) if flat else made


def _observed(call: Call, flow: Tensor) -> Sequence[Tensor | None]:
    call.info["observe"](call.operands[0], flow)
    return [flow, *(torch.zeros_like(a) for a in call.operands[1:])]


_PLAIN_ATTENTION = Rule("attention", gradient=attention_gradient)
_OBSERVE = Rule("attention map", _observed, _observed, books=False)


def _match_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for grouped queries."""
    if query.dim() < 4 or query.shape[-3] == key.shape[-3]:
        return key, value
    repeats = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
