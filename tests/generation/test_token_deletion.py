"""``token_deletion``: the top tokens are deleted one by one, and ranked by the decrease of the target."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image

import whyformer
import zoo
from whyformer import targets
from whyformer.errors import InputError
from whyformer.evaluation import token_deletion
from whyformer.evaluation.deletion import reranked
from whyformer.explaining import prepared
from whyformer.methods.task import Scores

PROMPT = [2, 9, 5, 17, 30, 9, 4]
ANSWER = [9, 11]


@cache
def llama() -> Any:
    return zoo.llama_lm()[0].double()


def log_probability(model: Any, ids: list[int], token: int) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])


def decrease_by_hand(ids: list[int], token: int, j: int) -> float:
    return log_probability(llama(), ids, token) - log_probability(llama(), ids[:j] + ids[j + 1 :], token)


@pytest.mark.parametrize("method", ["attnlrp", "rollout", "occlusion"])
def test_top_tokens_are_ranked_by_measured_decrease(method: str) -> None:
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    inputs, target = {"input_ids": torch.tensor([PROMPT]), "attention_mask": mask}, targets.LogProbability(11)
    plain = whyformer.explain(llama(), inputs, method, target)
    e = token_deletion(llama(), inputs, plain, 3)
    (figures,) = e.diagnostics["token_deletion"]
    assert len(figures["tokens"]) == 3
    assert len(PROMPT) - 1 not in figures["tokens"], "behind the last token the model reads"
    by_hand = [decrease_by_hand(PROMPT, 11, j) for j in figures["tokens"]]
    assert figures["lost"] == pytest.approx(by_hand, abs=1e-10)
    assert by_hand == sorted(by_hand, reverse=True)
    best = e.scores[0, figures["tokens"]].tolist()
    assert best == sorted(best, reverse=True)
    others = [j for j in range(len(PROMPT)) if j not in figures["tokens"]]
    assert torch.equal(e.scores[0, others], plain.scores[0, others])
    assert sorted(e.scores[0].tolist()) == pytest.approx(sorted(plain.scores[0].tolist()), abs=1e-12)


def test_occurrences_of_the_target_token_are_always_candidates() -> None:
    # token 9 is at positions 1 and 5, and is the first target
    scores = torch.tensor([[0.0, 0.1, 0.8, 0.7, 0.6, 0.9, 2.0]], dtype=torch.float64)
    ready = prepared(llama(), torch.tensor([PROMPT]))
    for token, positions in ((9, [1, 5]), (11, [2, 5])):
        task = ready.task(targets.LogProbability(token))
        assert sorted(reranked(task, Scores(scores, task.forward()), 2)[1][0]["tokens"]) == positions


def test_occurrences_of_the_target_token_are_replaced_by_the_next_likeliest() -> None:
    scores = torch.tensor([[0.0, 0.1, 0.8, 0.7, 0.6, 0.9, 2.0]], dtype=torch.float64)
    task = prepared(llama(), torch.tensor([PROMPT])).task(targets.LogProbability(9))
    logits = task.forward()
    ranked, (figures,) = reranked(task, Scores(scores, logits), 3)
    other = next(t for t in logits[0].argsort(descending=True).tolist() if t != 9)
    assert dict(zip(figures["tokens"], figures["instead"], strict=True)) == {1: other, 5: other, 2: None}
    clean = log_probability(llama(), PROMPT, 9)
    expected = {j: clean - log_probability(llama(), [*PROMPT[:j], other, *PROMPT[j + 1 :]], 9) for j in (1, 5)}
    expected[2] = decrease_by_hand(PROMPT, 9, 2)
    assert dict(zip(figures["tokens"], figures["lost"], strict=True)) == pytest.approx(expected, abs=1e-10)
    assert figures["tokens"] == sorted(expected, key=lambda j: -expected[j])
    assert [ranked[0, j] for j in figures["tokens"]] == sorted(scores[0, [1, 2, 5]].tolist(), reverse=True)


def test_padded_texts_equal_single_texts() -> None:
    target = targets.LogProbability(11)
    ids = torch.tensor([PROMPT, [0, 0, *PROMPT[:5]]])
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(7) >= torch.tensor([[0], [2]])).long()}
    both, alone = (
        token_deletion(llama(), x, whyformer.explain(llama(), x, "attnlrp", target), 2) for x in (inputs, torch.tensor([PROMPT[:5]]))
    )
    assert torch.allclose(both.scores[1, 2:], alone.scores[0], atol=1e-10)  # rotary angles are float32
    lost = [e.diagnostics["token_deletion"][i]["lost"] for e, i in ((both, 1), (alone, 0))]
    assert lost[0] == pytest.approx(lost[1], abs=1e-5)


def test_target_can_be_overridden() -> None:
    inputs = torch.tensor([PROMPT])
    plain = whyformer.explain(llama(), inputs, "attnlrp", targets.LogProbability(11))
    (figures,) = token_deletion(llama(), inputs, plain, 2, target=targets.LogProbability(12)).diagnostics["token_deletion"]
    assert figures["lost"] == pytest.approx([decrease_by_hand(PROMPT, 12, j) for j in figures["tokens"]], abs=1e-10)


def test_loaded_explanation_is_accepted(tmp_path: Any) -> None:
    inputs = torch.tensor([PROMPT])
    e = whyformer.explain(llama(), inputs, "attnlrp", targets.LogProbability(11))
    e.save(tmp_path / "e.safetensors")
    result = token_deletion(llama(), inputs, whyformer.Explanation.load(tmp_path / "e.safetensors"), 2)
    assert torch.equal(result.scores, token_deletion(llama(), inputs, e, 2).scores)


def test_decrease_of_classifier_equals_occlusion() -> None:
    text = "A charming film, though it drags."
    e = token_deletion("bundled:sst2", text, whyformer.explain("bundled:sst2", text, "rollout"))
    (figures,) = e.diagnostics["token_deletion"]
    occluded = whyformer.explain("bundled:sst2", text, "occlusion")
    assert figures["lost"] == pytest.approx(occluded.scores[0, figures["tokens"]].tolist(), abs=1e-5)
    assert figures["baseline"] == occluded.diagnostics["baseline"]


@pytest.mark.parametrize("count", [-1, 0, True, 2.5, 1000])
def test_invalid_count_raises(count: Any) -> None:
    e = whyformer.explain(llama(), torch.tensor([PROMPT]), "attnlrp")
    with pytest.raises(InputError, match="count"):
        token_deletion(llama(), torch.tensor([PROMPT]), e, count)


def test_image_raises() -> None:
    picture = Image.new("L", (28, 28))
    with pytest.raises(InputError, match="picture"):
        token_deletion("bundled:digits", picture, whyformer.explain("bundled:digits", picture, "rollout"))


def test_scores_of_another_text_raise() -> None:
    e = whyformer.explain(llama(), torch.tensor([PROMPT[:5]]), "attnlrp", targets.LogProbability(11))
    with pytest.raises(InputError, match="score"):
        token_deletion(llama(), torch.tensor([PROMPT]), e)


@pytest.mark.parametrize("target", [None, "logit", "probability", "contrast"])
def test_default_of_generation_is_attnlrp_with_share(target: Any) -> None:
    """For every target; attnlrp without settings is the published form."""
    g: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, target=target)
    summed: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, "attnlrp", target=target, share=0.8)
    explicit: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, "attnlrp", target=target)
    published: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, "attnlrp", target=target, share=0)
    assert torch.equal(g.matrix, summed.matrix)
    assert torch.equal(explicit.matrix, published.matrix)
    assert not torch.allclose(summed.matrix, published.matrix)
    assert {e.diagnostics["auto"]["name"] for e in g} == {"attnlrp (share=0.8)"}


@pytest.mark.parametrize("of", ["log_probability", "logit", "probability"])
def test_default_of_explain_for_a_token_equals_generation(of: Any) -> None:
    ids, target = torch.tensor([PROMPT]), targets.Token(-1, ANSWER[0], of=of)
    e = whyformer.explain(llama(), ids, target=target)
    assert e.diagnostics["auto"]["name"] == "attnlrp (share=0.8)"
    assert torch.equal(e.scores, whyformer.explain(llama(), ids, "attnlrp", target, share=0.8).scores)
    g: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER)
    if of == "log_probability":
        assert torch.allclose(g[0].scores, e.scores, atol=1e-12)
        span = whyformer.explain(llama(), torch.tensor([[*PROMPT, *ANSWER]]), target=targets.Span(7, 8))
        assert torch.allclose(whyformer.explain_span(g, 0, 1, llama()).scores[0], span.scores[0], atol=1e-12)
        assert torch.allclose(g.matrix[:2].sum(0)[: span.scores.shape[1]], span.scores[0], atol=1e-12)


def test_attnlrp_with_share_equals_sum_of_multipliers_over_blocks() -> None:
    """Also with padding."""
    ids, target = torch.tensor([PROMPT]), targets.LogProbability(11)
    summed = whyformer.explain(llama(), ids, "attnlrp", target, share=1)
    plain = whyformer.explain(llama(), ids, "libragrad", target, composite="attnlrp", share=1)
    assert torch.allclose(summed.scores, plain.scores, atol=1e-12)
    padded = {"input_ids": torch.tensor([PROMPT, [0, 0, *PROMPT[:5]]]), "attention_mask": torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])}
    both = whyformer.explain(llama(), padded, "attnlrp", target, share=0.8)
    alone = whyformer.explain(llama(), torch.tensor([PROMPT[:5]]), "attnlrp", target, share=0.8)
    assert torch.allclose(both.scores[1, 2:], alone.scores[0], atol=1e-6)


def test_default_for_models_without_blocks_and_classifiers() -> None:
    class WithoutBlocks(torch.nn.Module):
        """A language model without repeated blocks."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.embed, self.norm, self.head = inner.model.embed_tokens, inner.model.norm, inner.lm_head
            self.config = inner.config

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(input_ids).cumsum(1)))

    g: Any = whyformer.explain_generation(WithoutBlocks(llama()).eval(), PROMPT, ANSWER)
    choice = g[0].diagnostics["auto"]
    assert (choice["name"], list(choice["passed_over"])) == ("attnlrp", ["attnlrp (share=0.8)"])
    assert g.matrix[0].abs().max() > 0
    e = whyformer.explain("bundled:sst2", "A charming film.", target=targets.LogProbability(1))
    assert e.diagnostics["auto"]["name"] == "libragrad"
