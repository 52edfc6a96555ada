"""The steps of one answer: their inputs and targets, and the passes that explain them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError, WhyformerError
from whyformer.explaining import OpenedModel
from whyformer.explanation.generation import Generation
from whyformer.explanation.pictured import Pictured
from whyformer.explanation.result import Explanation
from whyformer.explanation.units import joined
from whyformer.generation.prompts import Written
from whyformer.inputs import Inputs, prepare
from whyformer.inputs.pieces import pieces
from whyformer.inputs.prompts import with_pictures
from whyformer.methods import find
from whyformer.methods.finishing import note_claims
from whyformer.methods.replay import NotShared, Replay
from whyformer.methods.task import Scores
from whyformer.models.kinds import LANGUAGE, is_language_model
from whyformer.models.output import Output
from whyformer.models.readout import plain_logits
from whyformer.prepared import Prepared
from whyformer.progress import Track
from whyformer.targets import Contrast, Logit, LogProbability, Probability, Resolver, Span, Target

_NAMED: dict[str, tuple[str, Callable[[int], Any] | None]] = {
    "log_probability": ("log-probability", LogProbability), "logit": ("logit", Logit),
    "probability": ("probability", Probability),
    "among_likeliest": ("log-probability among the 10 likeliest tokens", partial(LogProbability, among=10)),
    "contrast": ("logit minus that of the best other token", None),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Steps:
    """The tokens of one answer, each explained by those before it.

    Attributes:
        opened: the model with its tokenizer and options.
        written: prompt and answer.
    """

    opened: OpenedModel
    written: Written

    @property
    def model(self) -> nn.Module:
        """The language model."""
        return self.opened.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, None where there is none."""
        return self.opened.processor

    def __len__(self) -> int:
        return len(self.written.answer)

    # -- what is fed -------------------------------------------------------------------------------------------------
    @cached_property
    def ids(self) -> list[int]:
        """All tokens: an encoder's, the prompt or what the decoder begins with, the answer."""
        return [*self.written.prompt, *self.written.begin, *self.written.answer]

    @property
    def source(self) -> int:
        """How many of them an encoder reads."""
        return len(self.written.prompt) if self.written.begin else 0

    @property
    def start(self) -> int:
        """The number of the first token of the answer."""
        return len(self.ids) - len(self)

    @cached_property
    def pieces(self) -> list[str]:
        """The text of each token."""
        own = self.ids[: self.source]
        return pieces(self.tokenizer, own) + pieces(self.tokenizer, self.ids[self.source :])

    def inputs(self, count: int, *, rows: bool = False) -> Inputs:
        """The inputs with the first ``count`` tokens of the answer.

        Args:
            rows: let the model compute its logits for the last ``count + 1`` tokens alone, where it can.
        """
        end, kwargs = self.start + count, dict[str, Any]()
        kwargs["input_ids"] = self._row(0, self.source or end)
        if self.source:
            kwargs["decoder_input_ids"] = self._row(self.source, end)
        takes = inspect.signature(self.model.forward).parameters
        if "use_cache" in takes:
            kwargs["use_cache"] = False
        if rows and "logits_to_keep" in takes:
            kwargs["logits_to_keep"] = count + 1
        kwargs |= self.written.beside.fed(end) if self.written.beside.fixed else {}
        made = prepare(self.model, kwargs, self.tokenizer)
        sides = {n: made.side(n) for n in ("input_ids", *(n for n in (made.name, *made.others) if n != "input_ids"))}
        for name, one in sides.items():
            if one.modality == "text":
                sides[name] = self._worded(one, *((self.source, end) if "decoder" in name else (0, self.source or end)))
            elif self.written.beside.pictures:
                sides[name] = replace(one, **self._shown[name])
        main, *others = sides
        return replace(sides[main], others={n: replace(sides[n], args=(), kwargs={}) for n in others})

    @cached_property
    def _shown(self) -> dict[str, dict[str, Any]]:
        """What is known of the pictures, by the name of the input, measured once."""
        beside = self.written.beside
        whole = {"input_ids": self._row(0, self.start), **beside.fed(self.start)}
        made = with_pictures(prepare(self.model, whole, self.tokenizer), [beside.pictures], beside.processor)
        sides = {n: made.side(n) for n in (made.name, *made.others)}
        return {n: {"features": one.features, "mosaic": one.mosaic} for n, one in sides.items()}

    def _row(self, first: int, last: int) -> Tensor:
        return torch.tensor([self.ids[first:last]])

    def _worded(self, inputs: Inputs, first: int, last: int) -> Inputs:
        """With the text of its tokens."""
        text, offsets = joined(self.pieces[first:last])
        tokens = inputs.features.tokens or [[str(i) for i in self.ids[first:last]]]
        return replace(inputs, features=replace(inputs.features, tokens=tokens, offsets=[offsets], texts=[text]))

    def ready(self, inputs: Inputs, *tokens: int) -> Prepared:
        """The model with these inputs, as ``explain`` has it; the logits of ``tokens`` are kept in any case."""
        return Prepared(self.opened, inputs, None, None, also=tokens)

    def read(self, step: int) -> Callable[[Output], Tensor]:
        """What is read off the output for a step of the one pass over all: the row ``[1, V]`` before its token."""

        def row(output: Output) -> Tensor:
            assert output.logits is not None
            return output.logits[:, step - len(self)]

        return row

    def refuse(self) -> None:
        """Raise where this is no language model."""

        def check(output: Output) -> Tensor:
            if output.logits is None or output.logits.dim() != 3 or not is_language_model(output):
                raise InputError(
                    f"{type(self.model).__name__} is no language model: its output is not logits of the next token; "
                    "explain() takes other models"
                )
            return output.logits[:, -1]

        if not LANGUAGE.get(self.model, False):  # else it is known
            inputs = self.inputs(0)
            plain_logits(self.model, *inputs.feed, check)

    # -- what is explained -------------------------------------------------------------------------------------------
    @cached_property
    def others(self) -> list[int]:
        """The likeliest token of each step but the one of the answer."""
        inputs = self.inputs(len(self) - 1, rows=True)
        rows = torch.cat([plain_logits(self.model, *inputs.feed, self.read(t)) for t in range(len(self))])
        answer = torch.tensor(self.written.answer, device=rows.device)
        found: list[int] = rows.scatter(1, answer[:, None], float("-inf")).argmax(1).tolist()
        return found

    def resolver(self, target: Target, step: int) -> Resolver:
        """What is explained of a step."""
        token = self.written.answer[step]
        wanted: Any = "log_probability" if target is None else target
        if isinstance(wanted, str) and wanted in _NAMED:
            kind = _NAMED[wanted][1]
            wanted = Contrast(token, self.others[step]) if kind is None else kind(token)
        made = Resolver(wanted, None, None, 1, self.tokenizer)
        if made.reading is not None and not callable(made.target):
            raise InputError(
                "each step is about the token that comes next: the target is log_probability, among_likeliest, logit, "
                "probability, contrast, or one over a row of logits, such as targets.Contrast(' is', ' are'), "
                f"not {target!r}"
            )
        return made

    def explain(
        self, method: str, target: Target, progress: bool | Track, settings: dict[str, Any]
    ) -> Generation:
        """As :func:`whyformer.generation.explain_generation`."""
        chosen, full = find(method), find(method).complete(settings)
        if chosen.modality == "image":
            raise InputError(f"{method} explains pictures, and this is text")
        self.resolver(target, 0)  # refuse a wrong target before any work
        self.refuse()
        found = None if chosen.family == "perturbation" else self._together(method, target, progress, full)
        if found is None:
            found = [self._alone(t, method, target, progress, settings) for t in range(len(self))]
        explained, values = [e for e, _ in found], torch.cat([value for _, value in found])
        return self._result(explained, values, method, full, target)

    def _alone(
        self, step: int, method: str, target: Target, progress: bool | Track, settings: dict[str, Any]
    ) -> tuple[Explanation, Tensor]:
        """A step by itself, as ``explain`` does it for the tokens before it, and the value of its target."""
        resolver = self.resolver(target, step)
        ready = self.ready(self.inputs(step), self.written.answer[step])
        made = ready.explain(method, resolver.target, progress=progress, **settings)
        return made, _value(resolver, ready.logits())

    def _together(
        self, method: str, target: Target, progress: bool | Track, full: dict[str, Any]
    ) -> list[tuple[Explanation, Tensor]] | None:
        """All steps from one forward pass, each with the value of its target; None where the method needs a pass for
        each."""
        whole, function = self.ready(self.inputs(len(self) - 1, rows=True)), find(method).function
        replay = Replay(whole.inputs)
        task = whole.task(self.resolver(target, 0), method, progress)
        made: list[tuple[Explanation, Tensor]] = []
        try:
            with task.at_work():
                for t in task.progress(range(len(self)), method, len(self)):
                    resolver = self.resolver(target, t)
                    shared = replace(task, read_logits=self.read(t), resolve=resolver.callable, replay=replay)
                    scores = function(shared, **full)
                    if not replay.used:
                        return None
                    inputs = self.inputs(t)
                    scores, own = self._cut(scores, inputs), self.ready(inputs, self.written.answer[t])
                    made.append((own.finish(scores, resolver, method, full), _value(resolver, scores.logits)))
                    note_claims(made[-1][0], find(method), full)
        except NotShared:
            return None
        except Exception as error:
            explained = None if isinstance(error, WhyformerError) else whole.as_own_error(error, task)
            if explained is None:
                raise
            raise explained from error
        finally:
            replay.release()
        return made

    def _cut(self, scores: Scores, inputs: Inputs) -> Scores:
        """Scores of the tokens of a shorter text: those behind it are 0."""
        name = (scores.inputs or inputs).name
        side = inputs.side(name)
        if side.modality != "text":
            return replace(scores, inputs=side)
        parts = {n: self._cut(part, inputs) for n, part in scores.parts.items()}
        return replace(scores, values=scores.values[:, : side.tensor.shape[1]], inputs=side, parts=parts)

    def span(self, first: int, last: int, method: str, settings: dict[str, Any]) -> Explanation:
        """Steps ``first`` to ``last`` together: Σ log p of their tokens."""
        begin = self.start - self.source
        return self.ready(self.inputs(last + 1)).explain(method, Span(begin + first, begin + last), **settings)

    # -- what comes of it --------------------------------------------------------------------------------------------
    def _result(
        self,
        found: list[Explanation],
        values: Tensor,
        method: str,
        full: dict[str, Any],
        target: Target,
    ) -> Generation:
        matrix = torch.zeros(len(self), len(self.ids), dtype=found[0].scores.dtype)
        for t, e in enumerate(found):
            row = torch.cat([e.scores, *(part.scores for name, part in e.parts.items() if "decoder" in name)], 1)[0]
            matrix[t, : len(row)] = row
        pictures = [name for name in found[0].parts if "decoder" not in name]
        decoded = next((name for name in found[0].parts if name not in pictures), "")
        rows = {n: [getattr(e, n) for e in found] for n in ("logits", "classes", "normalizer")}
        kept: dict[str, Any] = {n: torch.cat(own) for n, own in rows.items() if own[0] is not None}
        labels: dict[int, str] = {}
        for e in found:
            labels |= e.labels or {}
        named = _NAMED.get(target if isinstance(target, str) else "log_probability" if target is None else "")
        tokens = self.tokenizer.convert_ids_to_tokens(self.ids) if self.tokenizer is not None else self.pieces
        return Generation(
            matrix=matrix, tokens=[str(t) for t in tokens], pieces=self.pieces, ids=self.ids, start=self.start,
            source=self.source, method=method, settings=full, model=self.opened.name, labels=labels or None,
            explained=named[0] if named else str(target), value=values, **kept,
            target=torch.cat([e.target for e in found]), target_names=[(e.target_names or ["?"])[0] for e in found],
            turns=self.written.turns, special=self.written.special, input=found[0].input or "input_ids", part=decoded,
            seen={name: Pictured.of([e.parts[name] for e in found]) for name in pictures},
            diagnostics=[e.diagnostics for e in found], notes=self.written.notes,
        )  # fmt: skip


def _value(resolver: Resolver, logits: Tensor) -> Tensor:
    """``[1]`` the value of the target, on the CPU."""
    return resolver.callable(logits)(logits).detach().cpu()
