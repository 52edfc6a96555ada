"""How tokens lie in tensors is measured: tokens before samples, frames of a sound, rows of a model's own."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
from zoo import randomise

Built = tuple[nn.Module, dict[str, Tensor]]


def xlnet(kind: str = "ForSequenceClassification") -> Built:
    config = hf.XLNetConfig(vocab_size=50, d_model=24, n_layer=2, n_head=3, d_inner=32, num_labels=4, pad_token_id=5)
    ids = torch.randint(6, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    return randomise(getattr(hf, f"XLNet{kind}")(config)).double(), {"input_ids": ids}


@pytest.mark.parametrize("length", [7, 2])  # as many tokens as samples too
def test_tokens_before_samples(length: int) -> None:
    """XLNet computes on ``[N, B, D]``."""
    model, inputs = xlnet()
    if length == 2:
        whyformer.explain(model, inputs, "saliency", [1, 3])  # which it was seen from
        inputs = {"input_ids": inputs["input_ids"][:, :2]}
    vectors = model.transformer.word_embedding(inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=vectors).logits
    (gradient,) = torch.autograd.grad(logits[0, 1] + logits[1, 3], vectors)
    e = whyformer.explain(model, inputs, "input_x_gradient", [1, 3])
    assert torch.allclose(e.scores, (vectors * gradient).sum(-1), atol=1e-10)


METHODS = ["transformer_attribution", "lrp", "gae", "rollout", "norm_attention", "value_zeroing", "gradcam", "gradcam_attention"]


@pytest.mark.parametrize("method", METHODS)
def test_tokens_before_samples_in_a_batch_and_alone(method: str) -> None:
    model, inputs = xlnet()
    whole = whyformer.explain(model, inputs, method, [1, 3])
    for i, target in enumerate([1, 3]):
        alone = whyformer.explain(model, {"input_ids": inputs["input_ids"][i : i + 1]}, method, target)
        assert torch.allclose(whole.scores[i], alone.scores[0], rtol=1e-6, atol=1e-9 * float(alone.scores.abs().max()))


def test_raw_attention_of_tokens_before_samples() -> None:
    model, inputs = xlnet()
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions[-1]
    e = whyformer.explain(model, inputs, "raw_attention")
    assert torch.allclose(e.scores, maps.mean(1)[:, -1], atol=1e-8)  # the last token is read


def wav2vec2() -> Built:
    config = hf.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=[32, 32, 32], conv_kernel=[5, 3, 3],
        conv_stride=[4, 2, 2], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=4, classifier_proj_size=16,
        attn_implementation="eager",
    )  # fmt: skip
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(0)).double()
    return randomise(hf.Wav2Vec2ForSequenceClassification(config)).double(), {"input_values": sound}


def test_frames_of_a_sound() -> None:
    """A frame's score is spread over its moments; frame i sees the moments 16 i to 16 i + 28."""
    model, inputs = wav2vec2()
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions[-1]
    frames = maps.mean(1).mean(1)  # all frames are pooled
    e = whyformer.explain(model, inputs, "raw_attention")
    count = frames.shape[-1]
    assert e.scores.shape == (2, 400)
    assert torch.allclose(e.scores.sum(1), frames.sum(1))
    owner = ((torch.arange(400) + 0.5) * count / 400).long()
    assert torch.allclose(torch.zeros_like(frames).index_add(1, owner, e.scores), frames)
    middles = 16 * torch.arange(count) + 14
    assert bool(((owner[middles] - torch.arange(count)).abs() <= 1).all())


class Frames(nn.Module):
    """Frames that stand in the order of the sound, or in reverse."""

    def __init__(self, reverse: bool) -> None:
        super().__init__()
        self.reverse = reverse
        self.stem, self.head = nn.Conv1d(1, 24, 8, 8), nn.Linear(24, 4)
        layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True, norm_first=True, dropout=0.0)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, input_values: Tensor) -> Tensor:
        x = self.stem(input_values[:, None]).mT
        return self.head(self.blocks(x.flip(1) if self.reverse else x).mean(1))


@pytest.mark.parametrize("method", ["rollout", "gae", "raw_attention", "transformer_attribution"])
def test_scores_of_frames_in_another_order_stand_at_their_moments(method: str) -> None:
    """Blocks without positions do not care in which order frames stand."""
    sound = torch.randn(2, 160, generator=torch.Generator().manual_seed(0)).double()
    models = [randomise(Frames(reverse)).double() for reverse in (False, True)]
    plain, other = (whyformer.explain(model, {"input_values": sound}, method, [1, 3]).scores for model in models)
    assert plain.std() > 0
    assert torch.allclose(plain, other, rtol=1e-9, atol=1e-12)


def test_prompts_that_a_model_puts_before_its_tokens() -> None:
    """CPM-Ant looks up 4 rows of its own before those of the words."""
    config = hf.CpmAntConfig(vocab_size=60, hidden_size=24, num_attention_heads=3, dim_head=8, dim_ff=32, num_hidden_layers=2, prompt_length=4, prompt_types=4, segment_types=4)
    model = randomise(hf.CpmAntForCausalLM(config)).double()
    ids = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    kept: list[Tensor] = []

    def enter(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kept.append(args[0].detach().requires_grad_())
        return (kept[0], *args[1:])

    handle = model.cpmant.encoder.layers[0].register_forward_pre_hook(enter)
    logits = model(input_ids=ids).logits
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[:, 3, 7].sum(), kept[0])
    wanted = (kept[0] * gradient).sum(-1)[:, 4:]
    e = whyformer.explain(model, {"input_ids": ids}, "input_x_gradient", whyformer.targets.Token(3, 7))
    assert torch.allclose(e.scores, wanted, atol=1e-10)
    assert whyformer.explain(model, {"input_ids": ids}, "rollout", whyformer.targets.Token(3, 7)).scores.shape == (2, 6)
