"""The steps of one answer: their inputs and targets, and the passes that explain them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn

from whyformer.errors import InputError
from whyformer.explaining import OpenedModel
from whyformer.explanation.counts import amount
from whyformer.explanation.generation import Generation
from whyformer.explanation.picture_scores import PictureScores
from whyformer.explanation.result import Explanation
from whyformer.explanation.units import joined
from whyformer.generation.prompts import Completion
from whyformer.inputs import Inputs, prepare
from whyformer.inputs.prompts import with_pictures
from whyformer.inputs.texts import pieces
from whyformer.methods import find
from whyformer.methods.finishing import note_claims
from whyformer.methods.padding import differ
from whyformer.methods.sharing import NotShared, SharedPasses
from whyformer.methods.task import Scores, Task
from whyformer.models.ends import forward
from whyformer.models.kinds import is_known_language_model, is_language_model
from whyformer.models.output import Output, parameters
from whyformer.models.readout import plain_logits, without_excluded
from whyformer.prepared import Prepared
from whyformer.progress import Track
from whyformer.targets import Contrast, Logit, LogProbability, Probability, Resolver, Span, Target

_NAMED: dict[str, tuple[str, Callable[[int], Any] | None]] = {
    "log_probability": ("log-probability", LogProbability), "logit": ("logit", Logit),
    "probability": ("probability", Probability),
    "among_likeliest": ("log-probability among the 10 likeliest tokens", partial(LogProbability, among=10)),
    "contrast": ("logit minus that of the best other token", None),
}  # fmt: skip


def refuse_without_ids(model: nn.Module) -> None:
    """Raise if the model takes no ``input_ids``."""
    takes = parameters(model)
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if "input_ids" in takes or (open_ended and getattr(model, "main_input_name", "input_ids") == "input_ids"):
        return
    raise InputError(
        f"the forward of {type(model).__name__} takes {', '.join(takes)}: wrap it in a module whose forward takes "
        "input_ids [B, N] and returns logits [B, N, V], or explain a single token with explain()"
    )


@dataclass(frozen=True, eq=False)
class Steps:
    """The tokens of an answer, each explained by the tokens before it.

    Attributes:
        opened: the model with its processor and options.
        completion: prompt and answer.
    """

    opened: OpenedModel
    completion: Completion

    @property
    def model(self) -> nn.Module:
        """The language model."""
        return self.opened.model

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None without one."""
        return self.opened.tokenizer

    def __len__(self) -> int:
        return len(self.completion.answer)

    # -- inputs ------------------------------------------------------------------------------------------------------
    @cached_property
    def ids(self) -> list[int]:
        """Ids of all tokens: the prompt, the decoder's start tokens (if there is an encoder), and the answer."""
        return [*self.completion.prompt, *self.completion.begin, *self.completion.answer]

    @property
    def source(self) -> int:
        """Number of tokens that the encoder reads; 0 without one."""
        return len(self.completion.prompt) if self.completion.begin else 0

    @property
    def start(self) -> int:
        """Index of the first token of the answer."""
        return len(self.ids) - len(self)

    @cached_property
    def pieces(self) -> list[str]:
        """Text of each token."""
        encoder, decoder = self.ids[: self.source], self.ids[self.source :]
        return pieces(self.tokenizer, encoder) + pieces(self.tokenizer, decoder)

    def inputs(self, count: int, *, rows: bool = False) -> Inputs:
        """Return the inputs with the first ``count`` tokens of the answer.

        Args:
            count: number of tokens of the answer.
            rows: compute logits of the last ``count + 1`` tokens only, if the model supports it.
        """
        end, kwargs = self.start + count, dict[str, Any]()
        kwargs["input_ids"] = self._row(0, self.source or end)
        if self.source:
            kwargs["decoder_input_ids"] = self._row(self.source, end)
        takes = parameters(self.model)
        if "use_cache" in takes:
            kwargs["use_cache"] = False
        if rows and "logits_to_keep" in takes:
            kwargs["logits_to_keep"] = count + 1
        extra = self.completion.extra
        kwargs |= extra.arguments(end) if extra.fixed else {}
        prepared = prepare(self.model, kwargs, self.tokenizer).with_main("input_ids")
        sides = prepared.sides
        for name, side in sides.items():
            if side.modality == "text":
                span = (self.source, end) if "decoder" in name else (0, self.source or end)
                sides[name] = self._with_text(side, *span)
            elif extra.pictures:
                sides[name] = replace(side, **self._picture_facts[name])
        return prepared.with_sides(sides)

    @cached_property
    def _picture_facts(self) -> dict[str, dict[str, Any]]:
        """Features and mosaic of the pictures, by the name of the input; measured once."""
        extra = self.completion.extra
        kwargs = {"input_ids": self._row(0, self.start), **extra.arguments(self.start)}
        inputs = with_pictures(prepare(self.model, kwargs, self.tokenizer), [extra.pictures], extra.processor)
        return {n: {"features": side.features, "mosaic": side.mosaic} for n, side in inputs.sides.items()}

    def _row(self, first: int, last: int) -> Tensor:
        return torch.tensor([self.ids[first:last]])

    def _with_text(self, inputs: Inputs, first: int, last: int) -> Inputs:
        """Add the text of the tokens to the features of the inputs."""
        text, offsets = joined(self.pieces[first:last])
        tokens = inputs.features.tokens or [[str(i) for i in self.ids[first:last]]]
        return replace(inputs, features=replace(inputs.features, tokens=tokens, offsets=[offsets], texts=[text]))

    def ready(self, inputs: Inputs, *tokens: int) -> Prepared:
        """Return the model prepared for these inputs; results include the logits of ``tokens``."""
        return Prepared(self.opened, inputs, None, None, also=tokens)

    def read(self, step: int, count: int) -> Callable[[Output], Tensor]:
        """Return the function that reads the logits ``[1, V]`` of a step from the output of a pass over the first
        ``count`` tokens of the answer."""

        def row(output: Output) -> Tensor:
            assert output.logits is not None
            return output.logits[:, step - count - 1]

        return row

    def depends_on_later(self, step: int, row: Tensor) -> bool:
        """Return whether the logits of a step, read from a longer pass, are not those of the tokens before it alone.

        They are not if rotary frequencies depend on the number of tokens (longrope, dynamic). Costs a plain forward
        pass.
        """
        return differ(plain_logits(self.model, *self.inputs(step, rows=True).feed), row.detach())

    def refuse(self) -> None:
        """Raise if the model is not a language model."""
        if is_known_language_model(self.model):
            return
        output = forward(self.model, *self.inputs(0).feed)
        if output.logits is None or output.logits.dim() != 3 or not is_language_model(output):
            raise InputError(
                f"{type(self.model).__name__} is not a language model: its output is not logits of the next token; "
                "use explain for it"
            )

    # -- explanations ------------------------------------------------------------------------------------------------
    @cached_property
    def others(self) -> list[int]:
        """The likeliest token of each step other than the token of the answer."""
        rows = torch.cat([plain_logits(self.model, *self.inputs(t).feed) for t in range(len(self))])
        answer = torch.tensor(self.completion.answer, device=rows.device)
        return rows.scatter(1, answer[:, None], float("-inf")).argmax(1).tolist()

    def resolver(self, target: Target, step: int) -> Resolver:
        """Return the resolved target of a step."""
        token = self.completion.answer[step]
        quantity: Any = "log_probability" if target is None else target
        if isinstance(quantity, str) and quantity in _NAMED:
            kind = _NAMED[quantity][1]
            quantity = Contrast(token, self.others[step]) if kind is None else kind(token)
        resolver = Resolver(quantity, None, None, 1, self.tokenizer)
        if resolver.reading is not None and not callable(resolver.target):
            raise InputError(
                "each step explains the next token: the target is log_probability, among_likeliest, logit, "
                "probability, contrast, or a target over a row of logits, such as targets.Contrast(' is', ' are'), "
                f"not {target!r}"
            )
        return resolver

    def explain(
        self, method: str, target: Target, progress: bool | Track, settings: dict[str, Any]
    ) -> Generation:
        """Explain all steps; see :func:`whyformer.generation.explain_generation`."""
        registered = find(method)
        full = registered.complete(settings)
        if registered.modality == "image":
            raise InputError(f"{method} explains pictures, and this is text")
        self.resolver(target, 0)  # validate the target before any pass
        self.refuse()
        steps = None if registered.family == "perturbation" else self._shared_pass(method, target, progress, full)
        if steps is None:
            steps = [self._single_step(t, method, target, progress, settings) for t in range(len(self))]
        explanations, values = [e for e, _ in steps], torch.cat([value for _, value in steps])
        return self._result(explanations, values, method, full, target)

    def _single_step(
        self, step: int, method: str, target: Target, progress: bool | Track, settings: dict[str, Any]
    ) -> tuple[Explanation, Tensor]:
        """Return the explanation of a step from a separate pass, and the value of its target."""
        resolver = self.resolver(target, step)
        ready = self.ready(self.inputs(step), self.completion.answer[step])
        explanation = ready.explain(method, resolver.target, progress=progress, **settings)
        return explanation, _value(resolver, ready.logits())

    def _shared_pass(
        self, method: str, target: Target, progress: bool | Track, full: dict[str, Any]
    ) -> list[tuple[Explanation, Tensor]] | None:
        """Return the explanation of each step from one forward pass, and the value of its target.

        None if the method or the model needs a separate pass for each step.
        """
        prepared_text, function = self.ready(self.inputs(len(self) - 1, rows=True)), find(method).function
        passes = SharedPasses(inputs_of_targets=prepared_text.inputs)
        task = prepared_text.task(self.resolver(target, 0), method, progress)

        def explained(task: Task) -> list[tuple[Explanation, Tensor]]:
            steps: list[tuple[Explanation, Tensor]] = []
            for t in task.progress(range(len(self)), method, len(self)):
                resolver = self.resolver(target, t)
                read = self.read(t, len(self) - 1)
                scores = function(replace(task, read_logits=read, resolve=resolver.callable, shared=passes), **full)
                if not passes.uses or scores.parts.keys() - prepared_text.inputs.others.keys():
                    raise NotShared
                if t == 0 < len(self) - 1 and self.depends_on_later(t, scores.logits):
                    raise NotShared
                inputs = self.inputs(t)
                scores, ready = self._cut(scores, inputs), self.ready(inputs, self.completion.answer[t])
                explanation = ready.finishing(resolver, scores.logits)(scores, method, full)
                note_claims(explanation, find(method), full)
                steps.append((explanation, _value(resolver, scores.logits)))
            return steps

        try:
            return prepared_text.work(task, explained)
        except NotShared:
            return None
        finally:
            passes.release()

    def _cut(self, scores: Scores, inputs: Inputs) -> Scores:
        """Return the scores of the tokens of a shorter text; those of all later tokens are 0."""
        name = (scores.inputs or inputs).name
        side = inputs.sides[name]
        if side.modality != "text":
            return replace(scores, inputs=side)
        parts = {n: self._cut(part, inputs) for n, part in scores.parts.items()}
        return replace(scores, values=scores.values[:, : side.tensor.shape[1]], inputs=side, parts=parts)

    def span(self, first: int, last: int, method: str, settings: dict[str, Any]) -> Explanation:
        """Explain Σ log p of the tokens of steps ``first`` to ``last``."""
        begin, inputs = self.start - self.source, self.inputs(last + 1)
        if self.depends_on_later(first, plain_logits(self.model, *inputs.feed, self.read(first, last + 1))):
            raise InputError(
                f"the logits of {type(self.model).__name__} for a token depend on the number of tokens after it, so "
                f"one pass does not explain several steps: sum their rows, g.matrix[{first}:{last + 1}].sum(0)"
            )
        return self.ready(inputs).explain(method, Span(begin + first, begin + last), **settings)

    # -- result -----------------------------------------------------------------------------------------------------
    def _result(
        self,
        explanations: list[Explanation],
        values: Tensor,
        method: str,
        full: dict[str, Any],
        target: Target,
    ) -> Generation:
        matrix = torch.zeros(len(self), len(self.ids), dtype=explanations[0].scores.dtype)
        for t, e in enumerate(explanations):
            row = torch.cat([*_scores_of_texts(e).values()], 1)[0]
            matrix[t, : len(row)] = row
        texts = [*_scores_of_texts(explanations[0])]
        pictures = [name for name in explanations[0].parts if name not in texts]
        rows = {n: [getattr(e, n) for e in explanations] for n in ("logits", "classes", "normalizer")}
        outputs: dict[str, Any] = {n: torch.cat(values) for n, values in rows.items() if values[0] is not None}
        labels: dict[int, str] = {}
        for e in explanations:
            labels |= e.labels or {}
        named = _NAMED.get(target if isinstance(target, str) else "log_probability" if target is None else "")
        title = "custom target" if isfunction(target) else str(target)
        tokens = self.tokenizer.convert_ids_to_tokens(self.ids) if self.tokenizer is not None else self.pieces
        return Generation(
            matrix=matrix, tokens=[str(t) for t in tokens], pieces=self.pieces, ids=self.ids, start=self.start,
            source=self.source, method=method, settings=full, model=self.opened.name, labels=labels or None,
            explained=named[0] if named else title, value=values, **outputs,
            target=torch.cat([e.target for e in explanations]),
            target_names=[(e.target_names or ["?"])[0] for e in explanations],
            turns=self.completion.turns, special=self.completion.special, part="".join(texts[1:]),
            input=explanations[0].input or "input_ids",
            picture_maps={name: PictureScores.of([e.parts[name] for e in explanations]) for name in pictures},
            diagnostics=[e.diagnostics for e in explanations], notes=[*self.completion.notes, *self._notes(outputs)],
        )  # fmt: skip

    def _notes(self, outputs: dict[str, Tensor]) -> list[str]:
        """Return a sentence on generated tokens that are not the likeliest, by more than rounding."""
        logits, answer = outputs["logits"], torch.tensor(self.completion.answer)[:, None]
        index = (outputs["classes"] == answer).long().argmax(1, keepdim=True) if "classes" in outputs else answer
        rounding = 8 * torch.finfo(logits.dtype).eps * without_excluded(logits).abs().amax(1)
        changed = int((logits.amax(1) - logits.gather(1, index)[:, 0] > rounding).sum())
        if not self.completion.generated or not changed:
            return []
        counted = f"{changed} of {amount(len(self), 'generated token')} {'is' if changed == 1 else 'are'}"
        return [
            f"{counted} not the likeliest by the model's logits, which are explained: its generate() changes them "
            "(settings of generation_config such as repetition_penalty)"
        ]


def _scores_of_texts(e: Explanation) -> dict[str, Tensor]:
    """Return the scores ``[1, N]`` of the tokens of each text. A token that the model looks up in several tables, each
    of which has its own scores (``input_ids#2``), has their sum."""
    scores = {e.input or "input_ids": e.scores}
    for name, part in e.parts.items():
        text, _, lookup = name.partition("#")
        if lookup or "decoder" in text:
            scores[text] = part.scores + scores[text] if lookup else part.scores
    return scores


def _value(resolver: Resolver, logits: Tensor) -> Tensor:
    """Return the value ``[1]`` of the target, on the CPU."""
    return resolver.callable(logits)(logits).detach().cpu()
