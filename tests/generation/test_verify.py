"""``verify``: the best tokens are taken out one by one, and stand in the order of what the target loses."""

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
from whyformer.methods import verifying

PROMPT = [2, 9, 5, 17, 30, 9, 4]
ANSWER = [9, 11]


@cache
def llama() -> Any:
    return zoo.llama_lm()[0].double()


def log_probability(model: Any, ids: list[int], token: int) -> float:
    with torch.no_grad():
        return float(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token])


def lost_by_hand(ids: list[int], token: int, j: int) -> float:
    return log_probability(llama(), ids, token) - log_probability(llama(), ids[:j] + ids[j + 1 :], token)


@pytest.mark.parametrize("method", ["attnlrp", "rollout", "occlusion"])
def test_what_is_lost_is_measured_and_decides(method: str) -> None:
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    given, target = {"input_ids": torch.tensor([PROMPT]), "attention_mask": mask}, targets.LogProbability(11)
    plain = whyformer.explain(llama(), given, method, target)
    e = whyformer.explain(llama(), given, method, target, verify=3)
    (told,) = e.diagnostics["verified"]
    assert told["passes"] == "partial"
    assert len(told["tokens"]) == 3
    assert len(PROMPT) - 1 not in told["tokens"], "behind the last token the model reads"
    by_hand = [lost_by_hand(PROMPT, 11, j) for j in told["tokens"]]
    assert told["lost"] == pytest.approx(by_hand, abs=1e-10)
    assert by_hand == sorted(by_hand, reverse=True)
    best = e.scores[0, told["tokens"]].tolist()
    assert best == sorted(best, reverse=True)
    others = [j for j in range(len(PROMPT)) if j not in told["tokens"]]
    assert torch.equal(e.scores[0, others], plain.scores[0, others])
    assert sorted(e.scores[0].tolist()) == pytest.approx(sorted(plain.scores[0].tolist()), abs=1e-12)


def test_other_places_of_the_token_that_is_said_come_first() -> None:
    # token 9 stands at 1 and 5, and is what is explained
    scores = torch.tensor([[0.0, 0.1, 0.8, 0.7, 0.6, 0.9, 2.0]], dtype=torch.float64)
    ready = whyformer.explaining.begin(llama(), torch.tensor([PROMPT]))
    task = ready.task(targets.LogProbability(9), "verify")
    made = verifying.verified(task, whyformer.methods.task.Scores(scores, task.forward()), 2)
    assert sorted(made.diagnostics["verified"][0]["tokens"]) == [1, 5]
    task = ready.task(targets.LogProbability(11), "verify")
    made = verifying.verified(task, whyformer.methods.task.Scores(scores, task.forward()), 2)
    assert sorted(made.diagnostics["verified"][0]["tokens"]) == [2, 5]


@pytest.mark.parametrize("kept", [True, False])
def test_a_place_of_what_is_said_says_something_else_instead(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "_AGREES", {llama(): kept})
    scores = torch.tensor([[0.0, 0.1, 0.8, 0.7, 0.6, 0.9, 2.0]], dtype=torch.float64)
    task = whyformer.explaining.begin(llama(), torch.tensor([PROMPT])).task(targets.LogProbability(9), "verify")
    logits = task.forward()
    made = verifying.verified(task, whyformer.methods.task.Scores(scores, logits), 3)
    (told,) = made.diagnostics["verified"]
    assert told["passes"] == ("partial" if kept else "whole")
    other = next(t for t in logits[0].argsort(descending=True).tolist() if t != 9)
    assert dict(zip(told["tokens"], told["instead"], strict=True)) == {1: other, 5: other, 2: None}
    clean = log_probability(llama(), PROMPT, 9)
    wanted = {j: clean - log_probability(llama(), [*PROMPT[:j], other, *PROMPT[j + 1 :]], 9) for j in (1, 5)}
    wanted[2] = lost_by_hand(PROMPT, 9, 2)
    assert dict(zip(told["tokens"], told["lost"], strict=True)) == pytest.approx(wanted, abs=1e-10)
    assert told["tokens"] == sorted(wanted, key=lambda j: -wanted[j])
    assert [made.values[0, j] for j in told["tokens"]] == sorted(scores[0, [1, 2, 5]].tolist(), reverse=True)


@pytest.mark.parametrize("method", ["attnlrp", "occlusion"])
def test_each_step_of_an_answer_is_verified_as_by_itself(method: str) -> None:
    g: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, method, verify=2)
    for t, token in enumerate(ANSWER):
        ids = [*PROMPT, *ANSWER[:t]]
        e = whyformer.explain(llama(), torch.tensor([ids]), method, targets.LogProbability(token), verify=2)
        assert torch.allclose(g[t].scores, e.scores, atol=1e-12)
        assert g[t].diagnostics["verified"][0]["tokens"] == e.diagnostics["verified"][0]["tokens"]


def test_a_batch_is_verified_as_each_by_itself() -> None:
    ids = torch.tensor([PROMPT, [0, 0, *PROMPT[:5]]])
    given = {"input_ids": ids, "attention_mask": (torch.arange(7) >= torch.tensor([[0], [2]])).long()}
    both = whyformer.explain(llama(), given, "attnlrp", targets.LogProbability(11), verify=2)
    alone = whyformer.explain(llama(), torch.tensor([PROMPT[:5]]), "attnlrp", targets.LogProbability(11), verify=2)
    assert both.diagnostics["verified"][1]["passes"] == "whole"
    assert torch.allclose(both.scores[1, 2:], alone.scores[0], atol=1e-10)  # rotary angles are float32
    assert both.diagnostics["verified"][1]["lost"] == pytest.approx(alone.diagnostics["verified"][0]["lost"], abs=1e-5)


def test_where_nothing_is_kept_the_passes_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given, target = torch.tensor([PROMPT]), targets.LogProbability(11)
    partial = whyformer.explain(llama(), given, "attnlrp", target, verify=3)
    monkeypatch.setattr(verifying, "_AGREES", {llama(): False})
    whole = whyformer.explain(llama(), given, "attnlrp", target, verify=3)
    assert [e.diagnostics["verified"][0]["passes"] for e in (partial, whole)] == ["partial", "whole"]
    assert torch.equal(partial.scores, whole.scores)


def test_a_window_of_keys_cannot_go_on() -> None:
    import transformers

    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MistralConfig(**shape, num_key_value_heads=2, sliding_window=3)
    model = zoo.randomise(transformers.MistralForCausalLM(config).eval()).double()
    e = whyformer.explain(model, torch.tensor([PROMPT]), "input_x_gradient", targets.LogProbability(11), verify=2)
    (told,) = e.diagnostics["verified"]
    assert told["passes"] == "whole"
    with torch.no_grad():
        rows = [model(torch.tensor([PROMPT[:j] + PROMPT[j + 1 :]])).logits[0, -1].log_softmax(-1)[11] for j in told["tokens"]]
        clean = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[11]
    assert told["lost"] == pytest.approx([float(clean - r) for r in rows], abs=1e-10)


def test_a_classifier_of_texts_too() -> None:
    text = "A charming film, though it drags."
    e = whyformer.explain("bundled:sst2", text, "rollout", verify=3)
    (told,) = e.diagnostics["verified"]
    occluded = whyformer.explain("bundled:sst2", text, "occlusion")
    assert told["lost"] == pytest.approx(occluded.scores[0, told["tokens"]].tolist(), abs=1e-5)
    assert told["baseline"] == occluded.diagnostics["baseline"]


@pytest.mark.parametrize("given", [-1, True, 2.5, 1000])
def test_a_number_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match="verify is how many of the best tokens"):
        whyformer.explain(llama(), torch.tensor([PROMPT]), "attnlrp", verify=given)
    with pytest.raises(InputError, match="verify is how many of the best tokens"):
        whyformer.explain_generation(llama(), PROMPT, ANSWER, verify=given)


def test_a_picture_has_no_tokens_to_take_out() -> None:
    with pytest.raises(InputError, match="this input is a picture: leave it out"):
        whyformer.explain("bundled:digits", Image.new("L", (28, 28)), "rollout", verify=2)


@pytest.mark.parametrize("target", [None, "logit", "probability", "contrast"])
def test_the_default_sums_over_most_of_the_blocks_whatever_the_target(target: Any) -> None:
    """And a name is a formula: attnlrp by itself is the published form, of every target."""
    g: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, target=target)
    summed: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, "attnlrp", target=target, share=0.8)
    named: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, "attnlrp", target=target)
    published: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER, "attnlrp", target=target, share=0)
    assert torch.equal(g.matrix, summed.matrix)
    assert torch.equal(named.matrix, published.matrix)
    assert not torch.allclose(summed.matrix, published.matrix)
    assert {e.diagnostics["auto"]["name"] for e in g} == {"attnlrp (share=0.8)"}


@pytest.mark.parametrize("of", ["log_probability", "logit", "probability"])
def test_explain_takes_the_same_of_one_token(of: Any) -> None:
    ids, target = torch.tensor([PROMPT]), targets.Token(-1, ANSWER[0], of=of)
    e = whyformer.explain(llama(), ids, target=target)
    assert e.diagnostics["auto"]["name"] == "attnlrp (share=0.8)"
    assert torch.equal(e.scores, whyformer.explain(llama(), ids, "attnlrp", target, share=0.8).scores)
    g: Any = whyformer.explain_generation(llama(), PROMPT, ANSWER)
    if of == "log_probability":
        assert torch.allclose(g[0].scores, e.scores, atol=1e-12)
        span = whyformer.explain(llama(), torch.tensor([[*PROMPT, *ANSWER]]), target=targets.Span(7, 8))
        assert torch.allclose(g.span(0, 1).scores[0], span.scores[0], atol=1e-12)
        assert torch.allclose(g.matrix[:2].sum(0)[: span.scores.shape[1]], span.scores[0], atol=1e-12)


def test_the_sum_over_blocks_is_that_of_x_times_m_at_each() -> None:
    """No row is treated in another way, padded or not."""
    ids, target = torch.tensor([PROMPT]), targets.LogProbability(11)
    summed = whyformer.explain(llama(), ids, "attnlrp", target, share=1)
    plain = whyformer.explain(llama(), ids, "libragrad", target, composite="attnlrp", share=1)
    assert torch.allclose(summed.scores, plain.scores, atol=1e-12)
    padded = {"input_ids": torch.tensor([PROMPT, [0, 0, *PROMPT[:5]]]), "attention_mask": torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])}
    both = whyformer.explain(llama(), padded, "attnlrp", target, share=0.8)
    alone = whyformer.explain(llama(), torch.tensor([PROMPT[:5]]), "attnlrp", target, share=0.8)
    assert torch.allclose(both.scores[1, 2:], alone.scores[0], atol=1e-6)


def test_a_classifier_and_a_model_without_blocks_have_other_choices() -> None:
    class Apart(torch.nn.Module):
        """Nothing of it is repeated."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.embed, self.norm, self.head = inner.model.embed_tokens, inner.model.norm, inner.lm_head
            self.config = inner.config

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embed(input_ids).cumsum(1)))

    g: Any = whyformer.explain_generation(Apart(llama()).eval(), PROMPT, ANSWER)
    said = g[0].diagnostics["auto"]
    assert (said["name"], list(said["passed_over"])) == ("attnlrp", ["attnlrp (share=0.8)"])
    assert g.matrix[0].abs().max() > 0
    e = whyformer.explain("bundled:sst2", "A charming film.", target=targets.LogProbability(1))
    assert e.diagnostics["auto"]["name"] == "libragrad"
