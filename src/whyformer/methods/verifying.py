"""``verify``: the best tokens are taken out one by one; what the target loses decides which stands first."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.inputs import Inputs
from whyformer.inputs.removal import Removal, logits_without, removal, values_of
from whyformer.methods.task import Scores, Task
from whyformer.models.kinds import LANGUAGE
from whyformer.models.output import Output, decodes

_FEED = {"input_ids", "attention_mask", "use_cache", "logits_to_keep"}
_AT_ONCE = 16
_AGREES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def check(count: Any) -> int:
    """``verify`` as it may be given.

    Raises:
        InputError: it is no whole number from 0 to 256.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 256:
        raise InputError(
            f"verify is how many of the best tokens are taken out, a whole number from 0 to 256: {count!r}"
        )
    return count


@dataclass
class Prefix:
    """Keys and values of a text, so that a pass over a changed copy begins at the token that was changed.

    Attributes:
        ids: ``[1, N]`` the text; what was kept of it serves every text that begins with it.
    """

    model: nn.Module
    ids: Tensor
    _kept: list[Any] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, inputs: Inputs) -> Prefix | None:
        """For one text of a language model that keeps keys and values of every token; else None."""
        if not _causal(model, inputs):
            return None
        made = Prefix(model, inputs.tensor)
        if model not in _AGREES:
            _AGREES[model] = made._agrees()
        return made if _AGREES[model] else None

    def serves(self, ids: Tensor) -> bool:
        """Whether a text begins this one."""
        count = ids.shape[1]
        return ids.shape[0] == 1 and count <= self.ids.shape[1] and torch.equal(ids, self.ids[:, :count].to(ids.device))

    def logits(self, ids: Tensor, first: int) -> Tensor:
        """``[1, V]`` of the token behind ``ids [1, n]``, which differ from the text nowhere before ``first``."""
        if not self._kept:
            self._kept.append(self._run(self.ids, None).past_key_values)
        return Output(self.model, self._run(ids[:, first:], self._up_to(first))).logits[:, -1]  # type: ignore[index]

    def _run(self, ids: Tensor, cache: Any) -> Any:
        more = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        with torch.no_grad():
            return self.model(input_ids=ids, past_key_values=cache, use_cache=True, **more)

    def _up_to(self, count: int) -> Any:
        """What was kept of the first tokens, as a cache of its own: the model adds to it."""
        whole = self._kept[0]
        made = type(whole)()
        for i, layer in enumerate(whole.layers if count else ()):
            made.update(layer.keys[..., :count, :], layer.values[..., :count, :], i)
        return made

    def _agrees(self) -> bool:
        """Whether a pass that goes on from kept keys and values says what one over the whole text says."""
        ids = self.ids[:, : min(self.ids.shape[1], 32)]
        made = Prefix(self.model, ids)
        try:
            whole, cache = (found := self._run(ids, None)).logits[:, -1], found.past_key_values
            length = ids.shape[1]
            if not all(getattr(layer.keys, "shape", [0, 0])[-2] == length for layer in cache.layers):
                return False
            if any(getattr(layer, "is_sliding", False) or layer.values.dim() != 4 for layer in cache.layers):
                return False
            made._kept.append(cache)
            parts = torch.cat([made.logits(ids, length // 2), made.logits(ids, length - 1)])
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError):
            return False
        bound = 20 * torch.finfo(whole.dtype).eps ** 0.75 * float(whole.abs().max())
        return bool((parts - whole).abs().max() <= bound)


def _causal(model: nn.Module, inputs: Inputs) -> bool:
    """Whether this is one text of a language model, with nothing beside it."""
    mask = inputs.kwargs.get("attention_mask")
    return (
        inputs.batch == 1
        and len(inputs.args) == (inputs.scored == 0)
        and not inputs.others
        and inputs.scored in (0, "input_ids")
        and set(inputs.kwargs) <= _FEED
        and (mask is None or bool(mask.bool().all()))
        and LANGUAGE.get(model, False)
        and "past_key_values" in inspect.signature(model.forward).parameters
    )


def verified(task: Task, scores: Scores, count: int, prefix: Prefix | None = None) -> Scores:
    """The ``count`` best tokens of each sample, put in the order of what the target loses without each.

    Where one of them is the very token that a language model says next, a word may have been copied from any of its
    places: behind the best token come these, and then the other best ones. Each such place is made to say something
    else, the likeliest other token (symmetric token replacement, Zhang & Nanda, ICLR 2024): without the word "Sam lives
    in. Iris lives in Rome." tells of one place only, and deletion hardly matters.

    d_j = f(x) − f(x without token j), which of a language model is deleted (or replaced, see above), else replaced as
    ``occlusion`` does; the scores of these tokens are handed out among them so that the highest goes to the largest d.
    All other scores, and the sum of all, stay. ``diagnostics["verified"]``: for each sample the tokens by number in
    their new order, what the target loses without each, the token that stood ``"instead"`` of a place of the one that
    is said (None for the others), the baseline, and whether the passes began at the changed token (``"partial"``: keys
    and values of what stands before it are kept) or were whole.

    Args:
        prefix: keys and values of a text that begins with this one, where they are there.

    Raises:
        InputError: the scores are not of single tokens, or no token can be taken out.
    """
    if task.inputs.modality != "text":
        kind = "a picture" if task.inputs.modality == "image" else "no text"
        raise InputError(f"verify takes tokens out one at a time, and this input is {kind}: leave it out")
    speaks = LANGUAGE.get(task.model, False) and not task.counted and task.inputs.tensor.dim() == 2
    try:
        # what stands for nothing in a tokenizer often ends a text, behind which the model forgets what was before
        removed = removal(replace(task, method="verify"), "delete" if speaks else None)
    except InputError as error:
        raise InputError(
            "verify: no token is known to stand for one that is taken out: give processor= (the model's tokenizer), or "
            "an attention_mask beside the ids, by which it can be deleted"
        ) from error
    values, features = scores.values, removed.features
    if values.shape != features.shape:
        raise InputError(f"verify needs a score for each token, and these are {list(values.shape)}: leave it out")
    said = task.value_index(scores.logits).tolist() if speaks else []
    best = [_best(task, b, row, features[b], count, said) for b, row in enumerate(values.cpu())]
    jobs = [(b, [j]) for b, own in enumerate(best) for j in own]
    if not jobs:
        return scores
    prefix = (prefix or Prefix.of(task.model, task.inputs)) if speaks else None
    prefix = prefix if prefix is not None and prefix.serves(task.inputs.tensor) else None
    ways, instead = _ways(task, removed, jobs, said, scores.logits)
    target = task.resolve(scores.logits)
    clean, lost = target(scores.logits), dict[tuple[int, int], float]()
    for way, some in ways:
        owners = [b for b, _ in some]
        gone = clean[owners] - values_of(target, _rows(task, way, some, prefix), owners, scores.logits)
        lost |= {(b, j): value for (b, (j,)), value in zip(some, gone.tolist(), strict=True)}
    made, told = values.clone(), []
    for b, own in enumerate(best):
        order = sorted(own, key=lambda j, b=b: -lost[b, j])  # type: ignore[misc]
        made[b, order] = values[b, own].sort(descending=True).values
        told.append(
            {"tokens": order, "lost": [lost[b, j] for j in order], "instead": [instead.get((b, j)) for j in order],
             "baseline": removed.baseline, "passes": "whole" if prefix is None else "partial"}
        )  # fmt: skip
    return replace(scores, values=made, diagnostics={**scores.diagnostics, "verified": told})


_Jobs = list[tuple[int, list[int]]]


def _ways(
    task: Task, removed: Removal, jobs: _Jobs, said: list[int], logits: Tensor
) -> tuple[list[tuple[Removal, _Jobs]], dict[tuple[int, int], int]]:
    """Which tokens are taken out how; and (sample, token) -> what stands there instead, of places of what is said."""
    ids = task.inputs.tensor
    copied = [job for job in jobs if said and int(ids[job[0], job[1][0]]) == said[job[0]]]
    rest = [job for job in jobs if job not in copied]
    if not copied:
        return [(removed, rest)], {}
    own = torch.tensor(said, device=logits.device)[:, None]
    other = logits.scatter(1, own, -math.inf).argmax(1)
    swapped = replace(removed, baseline="fill_id", filler=other.to(ids)[:, None].expand_as(ids))
    ways = [(swapped, copied), *([(removed, rest)] if rest else [])]
    return ways, {(b, j): int(other[b]) for b, (j,) in copied}


def _rows(task: Task, way: Removal, jobs: _Jobs, prefix: Prefix | None) -> Tensor:
    """``[len(jobs), C]`` logits of the text with each job's token taken out that way."""
    if prefix is None:
        return logits_without(replace(task, method="verify"), way, jobs, _AT_ONCE, "verify")
    return torch.cat([prefix.logits(way.without([job]).tensor, job[1][0]) for job in jobs])


def _best(task: Task, sample: int, row: Tensor, able: Tensor, count: int, said: list[int]) -> list[int]:
    """The tokens of a sample that are taken out; the one behind which a language model reads is none of them.

    Args:
        said: of a language model, the token of each sample that the target is about.
    """
    order = [j for j in row.argsort(descending=True, stable=True).tolist() if able[j]]
    if said:
        last = int(able.nonzero().max()) if order and not decodes(task.model) else -1
        order = [j for j in order if j != last]
        places = [j for j in order if int(task.inputs.tensor[sample, j]) == said[sample]]
        if set(places) & set(order[:count]):
            order = list(dict.fromkeys([*order[:1], *places, *order]))
    return order[:count]
