"""Benchmark ``evidence``: localization of the sentence that a language model's answer comes from.

The prompts contain planted facts (:mod:`whyformer.datasets.planted`). A prompt is used if the model's most likely next
token is the answer (agreement: if it prefers the correct verb; twin facts: if only the queried fact changes the
answer). Alternatively, the prompts are stories that the model generates up to a pronoun, which refers to one of two
names (:func:`~whyformer.datasets.planted.openings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from whyformer import explaining
from whyformer.benchmarks.batches import Encoded, TextBatch
from whyformer.benchmarks.configurations import Configuration
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.report import Report, Results, Values, mean, method_table
from whyformer.benchmarks.study import Benchmark, Exclusion, Measured, Study, seconds
from whyformer.datasets.planted import Opening, Planted, openings, planted, pronoun
from whyformer.errors import FOREIGN_ERRORS, InputError
from whyformer.evaluation.deletion import reranked
from whyformer.evaluation.statistics import Interval, bootstrap_of
from whyformer.methods.task import Scores
from whyformer.models.kinds import last_row_only
from whyformer.targets import Contrast, LogProbability, token_ids

Array = NDArray[np.float64]
_SHARES = (0.2, 0.5)
_MOST = 6  # candidates for each requested prompt
_AT_ONCE = 16
_LONGEST_STORY = 40  # tokens generated after an opening


def own_data(options: dict[str, Any]) -> tuple[str, Sequence[Any]]:
    """Return candidate prompts, or openings of stories, from which :func:`prepare` selects."""
    count = int(options["prompts"])
    if count < 1:
        raise InputError("prompts must be at least 1")
    if options.get("source") == "stories":
        return "stories", list(islice(openings(int(options["draw"])), _MOST * count))
    return "planted", list(islice(planted(int(options["draw"])), _MOST * count))


def prepare(study: Study) -> None:
    """Select prompts that the model answers correctly, or generate stories."""
    if not getattr(study.processor, "is_fast", False):
        raise InputError("evidence needs a language model with a fast tokenizer")
    count, correct, tried = int(study.options["prompts"]), list[Planted](), 0
    count = min(count, int(study.options["count"] or count))
    if study.options["source"] == "stories":
        _write_stories(study, count)
        return
    rendered = [prompt for p in study.samples if (prompt := _rendered(p, study.processor)) is not None]
    for start in range(0, len(rendered), _AT_ONCE):
        if len(correct) >= count:
            break
        batch = rendered[start : start + _AT_ONCE]
        correct += _correct(study, batch)
        tried += len(batch)
    study.samples = correct[:count]
    if not correct:
        raise InputError("the model answers none of the prompts correctly, so there is no evidence to locate")
    study.remarks.append(f"{len(study.samples)} prompts that the model answers correctly, of {tried} candidates")
    study.limit()


def _write_stories(study: Study, most: int) -> None:
    """Sample 16 continuations of each opening, and collect pronouns of different texts."""
    tokenizer, device, pronouns, count = study.processor, study.forwards.place["device"], dict[str, Planted](), 0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(study.options["draw"]))
        for opening in study.samples:
            if len(pronouns) >= most:
                break
            ids = torch.from_numpy(_ids(tokenizer, opening.text))[None].to(device)
            stories = study.model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=_LONGEST_STORY, num_return_sequences=_AT_ONCE, pad_token_id=study.forwards.pad,
            )  # fmt: skip
            count += len(stories)
            for number, row in enumerate(stories.tolist()):
                pronouns |= _pronouns(opening, row, number, tokenizer)
    study.samples = list(pronouns.values())[:most]
    if not study.samples:
        raise InputError("the stories that the model generates contain no unambiguous pronoun")
    study.remarks.append(f"{len(study.samples)} pronouns, of {count} stories that the model generated")
    study.limit()


def _pronouns(opening: Opening, row: list[int], number: int, tokenizer: Any) -> dict[str, Planted]:
    """Return text before the pronoun -> prompt; empty if retokenizing the text changes the tokens."""
    prompt = pronoun(opening, tokenizer.decode(row, skip_special_tokens=True), number)
    if prompt is None:
        return {}
    ids = [*_ids(tokenizer, prompt.text).tolist(), _token(tokenizer, prompt.answer)]
    return {prompt.text: prompt} if ids == row[: len(ids)] else {}


def _rendered(prompt: Planted, tokenizer: Any) -> Planted | None:
    """Apply the chat template to a conversation, and shift its character offsets; None if there is no template."""
    if prompt.message is None:
        return prompt
    if not getattr(tokenizer, "chat_template", None):
        return None
    message, reply = prompt.text[: prompt.message], prompt.text[prompt.message :]
    rendered = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
    )
    shift = rendered.index(message)
    places = {n: (a + shift, b + shift) for n in ("fact", "clue", "document") for a, b in [getattr(prompt, n)]}
    return replace(prompt, text=rendered + reply, **places)  # type: ignore[arg-type]


def _correct(study: Study, prompts: list[Planted]) -> list[Planted]:
    """Return the prompts that the model answers correctly."""
    tokenizer = study.processor
    texts = [p.text for p in prompts]
    texts += [text for p in prompts for text in p.changed or ()]
    rows = study.forwards.ids([_ids(tokenizer, text) for text in texts])
    changed, correct = iter(rows[len(prompts) :].argmax(-1)), []
    for prompt, row in zip(prompts, rows, strict=False):
        answer = _token(tokenizer, prompt.answer)
        if prompt.rival is not None:
            is_correct = row[answer] > row[_token(tokenizer, prompt.rival)]
        else:
            is_correct = int(row.argmax()) == answer
        if prompt.changed is not None:
            without_fact, without_twin = next(changed), next(changed)
            is_correct = is_correct and without_fact != answer and without_twin == answer
        if is_correct:
            correct.append(prompt)
    return correct


def _ids(tokenizer: Any, text: str) -> NDArray[np.int64]:
    return np.array(tokenizer(text)["input_ids"])


def _token(tokenizer: Any, text: str) -> int:
    """Return the first token of an answer."""
    return token_ids(tokenizer, text)[0]


# -- figures ---------------------------------------------------------------------------------------------------------
def measure(batch: TextBatch, configurations: Sequence[Configuration]) -> Iterator[Measured]:
    study, tokenizer = batch.study, batch.study.processor
    every = max(1, len(study.samples) // max(1, int(study.options["removal"])))
    removed = {s.id for s in study.samples[::every]}
    for i, prompt in enumerate(batch.samples):
        ids = torch.from_numpy(batch.encoded[i].ids)[None].to(study.forwards.place["device"])
        target: Any = LogProbability(_token(tokenizer, prompt.answer), among=study.options["among"] or None)
        if prompt.rival is not None:
            target = Contrast(target.index, _token(tokenizer, prompt.rival))
        plain = cache(lambda ids=ids, target=target: _seconds_of_plain(study.model, ids, target))
        for c in configurations:
            figures: Values = {"kind": prompt.kind}
            if c.kind == "method":
                try:
                    start = seconds(study.model)
                    e = explaining.explain(study.model, {"input_ids": ids}, c.method, target, **c.settings)
                    if prompt.id in removed:
                        figures["cost"] = (seconds(study.model) - start) / plain()
                except FOREIGN_ERRORS as error:
                    yield prompt.id, c, Exclusion("failed", f"{type(error).__name__}: {error}")
                    continue
                scores = e.scores[0].double().numpy()
                sums = e.diagnostics.get("conservation", {})
                figures["error"] = sums["error"][0] / max(abs(sums["start"][0]), 1e-12) if "sum" in sums else None
            else:
                scores = batch.random_map(i)
            figures |= _places(prompt, batch.encoded[i].spans, scores)
            if prompt.twin is not None:
                figures |= _twin(batch, i, scores, target)
            if prompt.id in removed:
                figures |= _removal(batch, i, scores)
            yield prompt.id, c, figures


def _within(spans: Sequence[tuple[int, int]], place: tuple[int, int]) -> NDArray[np.bool_]:
    """Return ``[N]``, True at tokens with characters inside a range."""
    return np.array([b > place[0] and a < place[1] and b > a for a, b in spans])


def _places(prompt: Planted, spans: Sequence[tuple[int, int]], scores: Array) -> Values:
    """Return figures of the places of the highest score and of the positive scores."""
    positive = np.maximum(scores, 0)
    fact, document = (positive[_within(spans, place)].sum() for place in (prompt.fact, prompt.document))
    figures = {"hit": float(_within(spans, prompt.clue)[scores.argmax()])}
    if prompt.rival is None and prompt.changed is None and positive.sum() > 0:
        figures["share"] = float(fact / positive.sum())
        figures["inside"] = float(fact / document) if document > 0 else 0.0
    return figures


def _twin(batch: TextBatch, index: int, scores: Array, target: Any) -> Values:
    """Return whether the queried fact's word scores higher than its twin's, also after ``token_deletion``."""
    prompt: Planted = batch.samples[index]
    spans, ids = batch.encoded[index].spans, torch.from_numpy(batch.encoded[index].ids)[None]
    assert prompt.twin is not None
    queried, other = _within(spans, prompt.clue), _within(spans, prompt.twin)
    ready = explaining.prepared(batch.study.model, {"input_ids": ids}, batch.study.processor)
    device = batch.study.forwards.place["device"]
    original = Scores(torch.from_numpy(scores)[None], torch.from_numpy(batch.logits[index])[None].float().to(device))
    permuted = reranked(ready.task(target, "token_deletion"), original, 3)[0][0].cpu().numpy()
    return {name: float(s[queried].max() > s[other].max()) for name, s in (("order", scores), ("reranked", permuted))}


def _log_probability(logits: Array, token: int) -> Array:
    return torch.from_numpy(logits).log_softmax(-1)[..., token].numpy()


def _removal(batch: TextBatch, index: int, scores: Array) -> Values:
    """Return the retained fraction of the answer's probability without the words of the lowest and highest scores.

    With a rival, the probability is that among the answer and the rival. The last word is never removed.
    """
    prompt: Planted = batch.samples[index]
    words, tokenizer = _words(prompt.text, batch.encoded[index]), batch.study.processor
    removable = sorted(set(words.tolist()) - {-1, int(words[-1])})
    order = np.array(removable)[np.argsort([scores[words == w].sum() for w in removable], kind="stable")]
    counts = [max(1, round(share * len(order))) for share in _SHARES]
    masks = [np.isin(words, order[:n]) for n in counts] + [np.isin(words, order[-n:]) for n in counts]
    logits = batch.run((index, mask, "delete") for mask in masks)
    answer = _token(tokenizer, prompt.answer)
    pair = [answer, _token(tokenizer, prompt.rival)] if prompt.rival is not None else None

    def probability(rows: Array) -> Array:
        return np.exp(_log_probability(rows, answer) if pair is None else _log_probability(rows[..., pair], 0))

    retained = np.minimum(probability(logits) / probability(batch.logits[index]), 1)
    least, most = retained[: len(counts)].mean(), retained[len(counts) :].mean()
    return {"least": float(least), "most": float(most), "gap": float(least - most)}


def _words(text: str, encoded: Encoded) -> NDArray[np.int64]:
    """Return the index of the word of each token ``[N]``, -1 for special tokens.

    If the tokenizer treats the whole text as one word, words are separated by spaces.
    """
    words = np.array([-1 if word is None else word for word in encoded.words])
    if len({*words.tolist()} - {-1}) < 2:
        words = np.array([len(text[:b].split()) - 1 if b > a else -1 for a, b in encoded.spans])
    return words


def _seconds_of_plain(model: nn.Module, ids: torch.Tensor, target: Any) -> float:
    """Return the seconds of a forward and a backward pass to the embeddings, with the logits of the last row only."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    start = seconds(model)
    with torch.enable_grad():
        embedded = table(ids).detach().requires_grad_()
        value = target(model(inputs_embeds=embedded, use_cache=False, **last_row_only(model)).logits[:, -1])
        torch.autograd.grad(value.sum(), embedded)
    return seconds(model) - start


# -- tables ----------------------------------------------------------------------------------------------------------
def _median(name: str) -> Callable[[Sequence[Values]], Interval | None]:
    def over(values: Sequence[Values]) -> Interval | None:
        figures = [v[name] for v in values if v.get(name) is not None]
        return bootstrap_of(np.median, figures) if figures else None

    return over


def _of(name: str) -> Callable[[Sequence[Values]], Interval | None]:
    return mean(lambda v: v.get(name))


def summarize(study: Study, results: Results) -> Report:
    columns = {
        # over prompts in which a single fact holds the answer
        "hit at 1": mean(lambda v: None if v["kind"] in ("twins", "agreement") else v["hit"]),
        "share on the fact": _of("share"), "share within the document": _of("inside"),
        "twins in order": _of("order"), "twins, token_deletion": _of("reranked"),
        "kept without least": _of("least"), "kept without most": _of("most"), "removal gap": _of("gap"),
        "error of the sum (median)": _median("error"), "forward + backward (median)": _median("cost"),
    }  # fmt: skip
    table = method_table(
        "evidence", "Where the answer came from", "Method", study.configurations, results, columns, digits=2, down=True
    )
    kinds = list(dict.fromkeys(s.kind for s in study.samples))
    counts = {kind: sum(s.kind == kind for s in study.samples) for kind in kinds}

    def of_kind(kind: str) -> Callable[[Sequence[Values]], Interval | None]:
        return mean(lambda v: v["hit"] if v["kind"] == kind else None)

    by_kind = method_table(
        "kinds", "Hit at 1 by kind of prompt", "Method", study.configurations, results,
        {f"{kind} ({counts[kind]})": of_kind(kind) for kind in kinds}, digits=2, down=True,
    )  # fmt: skip
    return Report((table, by_kind), (), conventions("evidence"))


BENCHMARK = Benchmark(
    "evidence", "a language model's planted facts (or the pronouns it writes): where its answer came from", "text",
    "attnlrp of 4/5=attnlrp:share=0.8,attnlrp of the input=attnlrp,gim,cp_lrp,"
    "libra=input_x_gradient:composite='libra',input_x_gradient,rollout,gae,transformer_attribution", {},
    {"prompts": 300, "draw": 0, "removal": 60, "source": "planted", "among": 0, "count": None, "files": None,
     "longest": None},
    prepare, measure, summarize, own_data=own_data, choices={"source": ("planted", "stories")},
)  # fmt: skip
