"""Benchmark ``evidence``: does a language model's map point at the sentence from which it took its answer?

Prompts with planted facts (:mod:`whyformer.datasets.planted`), kept where the model's likeliest next token is the
answer (for agreement, where it prefers the right verb; of twin facts, where only the asked one changes the answer). Or
pronouns in stories that the model writes itself (:mod:`whyformer.datasets.stories`), which mean one of two names.
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
from whyformer.benchmarks.study import Benchmark, Measured, Study, Unusable, seconds
from whyformer.datasets.planted import Planted, planted
from whyformer.datasets.stories import Opening, openings, pronoun
from whyformer.errors import FOREIGN_ERRORS, InputError
from whyformer.evaluation.deletion import reranked
from whyformer.evaluation.statistics import Interval
from whyformer.methods.task import Scores
from whyformer.models.kinds import last_row_alone
from whyformer.targets import Contrast, LogProbability, token_ids

Array = NDArray[np.float64]
_SHARES = (0.2, 0.5)
_MOST = 6  # prompts drawn for each that is kept, at most
_AT_ONCE = 16
_LONGEST_STORY = 40  # tokens written behind an opening


def own_data(options: dict[str, Any]) -> tuple[str, Sequence[Any]]:
    """More prompts than are asked for, of which :func:`prepare` keeps those that the model answers rightly; or openings
    of stories."""
    count = int(options["prompts"])
    if count < 1:
        raise InputError("prompts must be at least 1")
    if options.get("source") == "stories":
        return "stories", list(islice(openings(int(options["draw"])), _MOST * count))
    return "planted", list(islice(planted(int(options["draw"])), _MOST * count))


def prepare(study: Study) -> None:
    """Keep the prompts that the model answers rightly, as many as are asked for; or let it write stories."""
    if not getattr(study.processor, "is_fast", False):
        raise InputError("evidence needs a language model with a fast tokenizer")
    wanted, kept, seen = int(study.options["prompts"]), list[Planted](), 0
    wanted = min(wanted, int(study.options["count"] or wanted))
    if study.options["source"] == "stories":
        _written(study, wanted)
        return
    drawn = [made for p in study.samples if (made := _rendered(p, study.processor)) is not None]
    for start in range(0, len(drawn), _AT_ONCE):
        if len(kept) >= wanted:
            break
        some = drawn[start : start + _AT_ONCE]
        kept += _right(study, some)
        seen += len(some)
    study.samples = kept[:wanted]
    if not kept:
        raise InputError("the model answers none of the prompts rightly, so there is no evidence to find")
    study.remarks.append(f"{len(study.samples)} prompts that the model answers rightly, of {seen} drawn")
    study.limit()


def _written(study: Study, wanted: int) -> None:
    """Pronouns of different texts, from stories that the model goes on with at random, 16 of each opening."""
    tokenizer, device, kept, count = study.processor, study.forwards.place["device"], dict[str, Planted](), 0
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(study.options["draw"]))
        for opening in study.samples:
            if len(kept) >= wanted:
                break
            begun = torch.from_numpy(_ids(tokenizer, opening.text))[None].to(device)
            stories = study.model.generate(  # type: ignore[operator]
                begun, attention_mask=torch.ones_like(begun), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=_LONGEST_STORY, num_return_sequences=_AT_ONCE, pad_token_id=study.forwards.pad,
            )  # fmt: skip
            count += len(stories)
            for number, row in enumerate(stories.tolist()):
                kept |= _meant(opening, row, number, tokenizer)
    study.samples = list(kept.values())[:wanted]
    if not study.samples:
        raise InputError("the stories that the model writes hold no pronoun of which it is clear whom it means")
    study.remarks.append(f"{len(study.samples)} pronouns, of {count} stories that the model wrote")
    study.limit()


def _meant(opening: Opening, row: list[int], number: int, tokenizer: Any) -> dict[str, Planted]:
    """The text before a story's pronoun -> what it means; none where the text and the pronoun are other tokens."""
    made = pronoun(opening, tokenizer.decode(row, skip_special_tokens=True), number)
    if made is None:
        return {}
    ids = [*_ids(tokenizer, made.text).tolist(), _token(tokenizer, made.answer)]
    return {made.text: made} if ids == row[: len(ids)] else {}


def _rendered(prompt: Planted, tokenizer: Any) -> Planted | None:
    """A conversation as the tokenizer writes it, with the places moved; None where it has no template."""
    if prompt.message is None:
        return prompt
    if not getattr(tokenizer, "chat_template", None):
        return None
    message, reply = prompt.text[: prompt.message], prompt.text[prompt.message :]
    written = str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
    )
    moved = written.index(message)
    places = {n: (a + moved, b + moved) for n in ("fact", "clue", "document") for a, b in [getattr(prompt, n)]}
    return replace(prompt, text=written + reply, **places)  # type: ignore[arg-type]


def _right(study: Study, prompts: list[Planted]) -> list[Planted]:
    """Those of some prompts that the model answers rightly."""
    tokenizer = study.processor
    texts = [p.text for p in prompts]
    texts += [text for p in prompts for text in p.changed or ()]
    rows = study.forwards.ids([_ids(tokenizer, text) for text in texts])
    changed, best = iter(rows[len(prompts) :].argmax(-1)), []
    for prompt, row in zip(prompts, rows, strict=False):
        answer = _token(tokenizer, prompt.answer)
        if prompt.rival is not None:
            good = row[answer] > row[_token(tokenizer, prompt.rival)]
        else:
            good = int(row.argmax()) == answer
        if prompt.changed is not None:
            asked, other = next(changed), next(changed)
            good = good and asked != answer and other == answer
        if good:
            best.append(prompt)
    return best


def _ids(tokenizer: Any, text: str) -> NDArray[np.int64]:
    return np.array(tokenizer(text)["input_ids"])


def _token(tokenizer: Any, text: str) -> int:
    """The first token of an answer."""
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
                    yield prompt.id, c, Unusable("failed", f"{type(error).__name__}: {error}")
                    continue
                scores = e.scores[0].double().numpy()
                found = e.diagnostics.get("conservation", {})
                figures["error"] = found["error"][0] / max(abs(found["start"][0]), 1e-12) if "sum" in found else None
            else:
                scores = batch.drawn(i)
            figures |= _places(prompt, batch.encoded[i].spans, scores)
            if prompt.twin is not None:
                figures |= _twin(batch, i, scores, target)
            if prompt.id in removed:
                figures |= _removal(batch, i, scores)
            yield prompt.id, c, figures


def _within(spans: Sequence[tuple[int, int]], place: tuple[int, int]) -> NDArray[np.bool_]:
    """``[N]`` which tokens have characters inside of a place."""
    return np.array([b > place[0] and a < place[1] and b > a for a, b in spans])


def _places(prompt: Planted, spans: Sequence[tuple[int, int]], scores: Array) -> Values:
    """Where the highest score and the positive scores are."""
    positive = np.maximum(scores, 0)
    fact, document = (positive[_within(spans, place)].sum() for place in (prompt.fact, prompt.document))
    figures = {"hit": float(_within(spans, prompt.clue)[scores.argmax()])}
    if prompt.rival is None and prompt.changed is None and positive.sum() > 0:
        figures["share"] = float(fact / positive.sum())
        figures["inside"] = float(fact / document) if document > 0 else 0.0
    return figures


def _twin(batch: TextBatch, index: int, scores: Array, target: Any) -> Values:
    """Whether the asked fact's word scores higher than the other's; and so after ``token_deletion``."""
    prompt: Planted = batch.samples[index]
    spans, ids = batch.encoded[index].spans, torch.from_numpy(batch.encoded[index].ids)[None]
    assert prompt.twin is not None
    asked, other = _within(spans, prompt.clue), _within(spans, prompt.twin)
    ready = explaining.open_model(batch.study.model, batch.study.processor).prepare({"input_ids": ids})
    device = batch.study.forwards.place["device"]
    made = Scores(torch.from_numpy(scores)[None], torch.from_numpy(batch.logits[index])[None].float().to(device))
    again = reranked(ready.task(target, "token_deletion"), made, 3)[0][0].cpu().numpy()
    return {name: float(s[asked].max() > s[other].max()) for name, s in (("order", scores), ("reranked", again))}


def _log_probability(logits: Array, token: int) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted[..., token] - np.log(np.exp(shifted).sum(-1)))


def _removal(batch: TextBatch, index: int, scores: Array) -> Values:
    """Kept share of the answer's probability (of its odds against the rival) where the words with the lowest scores are
    deleted, and where those with the highest are; the last word stays."""
    prompt: Planted = batch.samples[index]
    words, tokenizer = _words(prompt.text, batch.encoded[index]), batch.study.processor
    listed = sorted(set(words.tolist()) - {-1, int(words[-1])})
    order = np.array(listed)[np.argsort([scores[words == w].sum() for w in listed], kind="stable")]
    counts = [max(1, round(share * len(order))) for share in _SHARES]
    masks = [np.isin(words, order[:n]) for n in counts] + [np.isin(words, order[-n:]) for n in counts]
    logits = batch.run((index, mask, "delete") for mask in masks)
    answer = _token(tokenizer, prompt.answer)
    pair = [answer, _token(tokenizer, prompt.rival)] if prompt.rival is not None else None

    def probability(rows: Array) -> Array:
        return np.exp(_log_probability(rows, answer) if pair is None else _log_probability(rows[..., pair], 0))

    kept = np.minimum(probability(logits) / probability(batch.logits[index]), 1)
    least, most = kept[: len(counts)].mean(), kept[len(counts) :].mean()
    return {"least": float(least), "most": float(most), "gap": float(least - most)}


def _words(text: str, encoded: Encoded) -> NDArray[np.int64]:
    """``[N]`` which word each token is of, -1 at special ones; the tokenizer's words, or what stands between spaces
    where it takes the whole text for one."""
    words = np.array([-1 if word is None else word for word in encoded.words])
    if len({*words.tolist()} - {-1}) < 2:
        words = np.array([len(text[:b].split()) - 1 if b > a else -1 for a, b in encoded.spans])
    return words


def _seconds_of_plain(model: nn.Module, ids: torch.Tensor, target: Any) -> float:
    """For a plain forward and backward pass to the embeddings with the last row's logits alone."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    start = seconds(model)
    with torch.enable_grad():
        embedded = table(ids).detach().requires_grad_()
        value = target(model(inputs_embeds=embedded, use_cache=False, **last_row_alone(model)).logits[:, -1])
        torch.autograd.grad(value.sum(), embedded)
    return seconds(model) - start


# -- tables ----------------------------------------------------------------------------------------------------------
def _median(name: str) -> Callable[[Sequence[Values]], Interval | None]:
    def over(values: Sequence[Values]) -> Interval | None:
        found = [v[name] for v in values if v.get(name) is not None]
        if not found:
            return None
        low, high = np.quantile(found, [0.025, 0.975]).tolist()
        return Interval(float(np.median(found)), low, high, len(found))

    return over


def _of(name: str) -> Callable[[Sequence[Values]], Interval | None]:
    return mean(lambda v: v.get(name))


def _of_facts(name: str) -> Callable[[Sequence[Values]], Interval | None]:
    """Of the prompts with one fact that holds the answer."""
    return mean(lambda v: None if v["kind"] in ("twins", "agreement") else v.get(name))


def summarize(study: Study, results: Results) -> Report:
    columns = {
        "hit at 1": _of_facts("hit"), "share on the fact": _of("share"), "share within the document": _of("inside"),
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
