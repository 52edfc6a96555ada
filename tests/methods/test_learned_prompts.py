"""Models that put learned vectors before a text: their rows are not padding, and belong to no token."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import whyformer
from test_output_targets import MODELS
from whyformer.errors import InputError
from whyformer.targets import LogProbability, Span
from zoo import build, randomise

METHODS = {
    "input_x_gradient": {}, "gradcam": {}, "attcat": {}, "legrad": {}, "gradcam_attention": {}, "grad_sam": {}, "alti": {}, "value_zeroing": {}, "gae": {},
    "rollout": {}, "decompx": {}, "beyond_intuition": {"variant": "head", "steps": 2}, "occlusion": {"baseline": 1},
}  # fmt: skip


class LearnedPrompt(nn.Module):
    """A model with learned vectors before the embeddings of the text."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model, self.table = model, model.get_input_embeddings()
        prompt = torch.randn(count, self.table.embedding_dim, generator=torch.Generator().manual_seed(1))
        self.prompt = nn.Parameter(prompt.double())

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        vectors = torch.cat([self.prompt.expand(len(input_ids), -1, -1), self.table(input_ids)], 1)
        mask = torch.cat([mask.new_ones(len(mask), len(self.prompt)), mask], 1)
        return self.model(inputs_embeds=vectors, attention_mask=mask).logits


def batch() -> dict[str, Tensor]:
    ids = torch.randint(4, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(("name", "method"), [*(("llama_lm", method) for method in METHODS), ("bert", "gradcam"), ("bert", "alti")])
def test_padded_batch_equals_its_samples(name: str, method: str) -> None:
    model, inputs = LearnedPrompt(build(name)[0], 3).eval(), batch()
    e = whyformer.explain(model, inputs, method, 1, **METHODS[method])
    alone = whyformer.explain(model, inputs["input_ids"][1:, :5], method, 1, **METHODS[method])
    torch.testing.assert_close(e.scores[1, :5], alone.scores[0], rtol=1e-7, atol=1e-10)
    assert not e.scores[1, 5:].any() and alone.scores.abs().amax() > 0


@pytest.mark.parametrize("count", [1, 4])
def test_next_token_after_a_learned_prompt(count: int) -> None:
    """That the rows are those of a language model is measured, also if the model has no `generate`."""
    model, ids = LearnedPrompt(build("llama_lm")[0], count).eval(), batch()["input_ids"][:1]
    vectors = model.table(ids).detach().requires_grad_()
    logits = model.model(inputs_embeds=torch.cat([model.prompt[None], vectors], 1)).logits[0, -1]
    (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[9], vectors)
    e = whyformer.explain(model, ids, "input_x_gradient", LogProbability(9))
    torch.testing.assert_close(e.scores, (vectors * gradient).sum(-1).detach())


def test_answer_after_a_learned_prompt() -> None:
    model = LearnedPrompt(build("llama_lm")[0], 3).eval()
    g = whyformer.explain_generation(model, [5, 6, 7], continuation=[9, 11], method="input_x_gradient")
    e = whyformer.explain(model, torch.tensor([[5, 6, 7, 9]]), "input_x_gradient", LogProbability(11))
    torch.testing.assert_close(g.matrix[1, :4], e.scores[0])


def test_rows_that_depend_on_later_tokens_are_no_language_model() -> None:
    model = LearnedPrompt(MODELS["words"]()[0], 2).eval()
    with pytest.raises(InputError, match="Token"):
        whyformer.explain(model, batch(), "input_x_gradient", 1)


def test_span_is_not_suggested_where_it_is_refused() -> None:
    model = LearnedPrompt(build("llama_lm")[0], 3).eval()
    with pytest.raises(InputError) as caught:
        whyformer.explain(model, batch()["input_ids"], "input_x_gradient", Span(2, 3))
    assert "targets.Token" in str(caught.value) and "targets.Span" not in str(caught.value)


@pytest.mark.parametrize("method", ["legrad", "attcat"])
def test_padded_text_beside_a_picture_is_no_query(method: str) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 20}
    config = transformers.ViltConfig(vocab_size=50, image_size=32, patch_size=16, num_labels=3, **sizes)
    model = randomise(transformers.ViltForQuestionAnswering(config)).double().eval()
    picture = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()
    inputs = {**batch(), "pixel_values": picture, "pixel_mask": torch.ones(2, 32, 32, dtype=torch.long)}
    one = {name: value[1:, :5] if name in batch() else value[1:] for name, value in inputs.items()}
    e, alone = (whyformer.explain(model, fed, method, 1) for fed in (inputs, one))
    torch.testing.assert_close(e.part("pixel_values").scores[1], alone.part("pixel_values").scores[0])
    torch.testing.assert_close(e.part("input_ids").scores[1, :5], alone.part("input_ids").scores[0])
