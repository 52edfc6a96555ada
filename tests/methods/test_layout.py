"""Axis layouts: tokens before samples, frames of sound, and rows that a model adds to its tokens."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
from zoo import randomise

ModelAndInputs = tuple[nn.Module, dict[str, Tensor]]


def xlnet(kind: str = "ForSequenceClassification") -> ModelAndInputs:
    config = hf.XLNetConfig(vocab_size=50, d_model=24, n_layer=2, n_head=3, d_inner=32, num_labels=4, pad_token_id=5)
    ids = torch.randint(6, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    return randomise(getattr(hf, f"XLNet{kind}")(config)).double(), {"input_ids": ids}


@pytest.mark.parametrize("length", [7, 2])  # also as many tokens as samples
def test_token_first_model_input_x_gradient(length: int) -> None:
    """XLNet computes on ``[N, B, D]``."""
    model, inputs = xlnet()
    if length == 2:
        whyformer.explain(model, inputs, "saliency", [1, 3])  # caches the layout
        inputs = {"input_ids": inputs["input_ids"][:, :2]}
    vectors = model.transformer.word_embedding(inputs["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=vectors).logits
    (gradient,) = torch.autograd.grad(logits[0, 1] + logits[1, 3], vectors)
    e = whyformer.explain(model, inputs, "input_x_gradient", [1, 3])
    assert torch.allclose(e.scores, (vectors * gradient).sum(-1), atol=1e-10)


METHODS = ["transformer_attribution", "lrp", "gae", "rollout", "norm_attention", "value_zeroing", "gradcam", "gradcam_attention"]


@pytest.mark.parametrize("method", METHODS)
def test_token_first_model_batch_equals_single_samples(method: str) -> None:
    model, inputs = xlnet()
    batch = whyformer.explain(model, inputs, method, [1, 3])
    for i, target in enumerate([1, 3]):
        single = whyformer.explain(model, {"input_ids": inputs["input_ids"][i : i + 1]}, method, target)
        assert torch.allclose(batch.scores[i], single.scores[0], rtol=1e-6, atol=1e-9 * float(single.scores.abs().max()))


def test_token_first_model_raw_attention() -> None:
    model, inputs = xlnet()
    with torch.no_grad():
        maps = model(**inputs, output_attentions=True).attentions[-1]
    e = whyformer.explain(model, inputs, "raw_attention")
    assert torch.allclose(e.scores, maps.mean(1)[:, -1], atol=1e-8)  # the last token is read


def wav2vec2() -> ModelAndInputs:
    config = hf.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=[32, 32, 32], conv_kernel=[5, 3, 3],
        conv_stride=[4, 2, 2], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, num_labels=4, classifier_proj_size=16,
        attn_implementation="eager",
    )  # fmt: skip
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(0)).double()
    return randomise(hf.Wav2Vec2ForSequenceClassification(config)).double(), {"input_values": sound}


def test_frame_scores_are_distributed_over_audio_samples() -> None:
    """The score of a frame is distributed over its audio samples; frame i covers audio samples 16 i to 16 i + 28."""
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
    centers = 16 * torch.arange(count) + 14
    assert bool(((owner[centers] - torch.arange(count)).abs() <= 1).all())


class FrameEncoder(nn.Module):
    """A Transformer on frames of sound, in order or reversed."""

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
def test_scores_of_reversed_frames_are_mapped_to_their_audio_samples(method: str) -> None:
    """Blocks without position embeddings are equivariant to the order of frames."""
    sound = torch.randn(2, 160, generator=torch.Generator().manual_seed(0)).double()
    models = [randomise(FrameEncoder(reverse)).double() for reverse in (False, True)]
    plain, reversed_scores = (whyformer.explain(model, {"input_values": sound}, method, [1, 3]).scores for model in models)
    assert plain.std() > 0
    assert torch.allclose(plain, reversed_scores, rtol=1e-9, atol=1e-12)


def test_learned_prompt_rows_have_no_scores() -> None:
    """CPM-Ant puts 4 learned rows before those of the words."""
    config = hf.CpmAntConfig(vocab_size=60, hidden_size=24, num_attention_heads=3, dim_head=8, dim_ff=32, num_hidden_layers=2, prompt_length=4, prompt_types=4, segment_types=4)
    model = randomise(hf.CpmAntForCausalLM(config)).double()
    ids = torch.randint(4, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    block_inputs: list[Tensor] = []

    def make_leaf(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        block_inputs.append(args[0].detach().requires_grad_())
        return (block_inputs[0], *args[1:])

    handle = model.cpmant.encoder.layers[0].register_forward_pre_hook(make_leaf)
    logits = model(input_ids=ids).logits
    handle.remove()
    (gradient,) = torch.autograd.grad(logits[:, 3, 7].sum(), block_inputs[0])
    expected = (block_inputs[0] * gradient).sum(-1)[:, 4:]
    e = whyformer.explain(model, {"input_ids": ids}, "input_x_gradient", whyformer.targets.Token(3, 7))
    assert torch.allclose(e.scores, expected, atol=1e-10)
    assert whyformer.explain(model, {"input_ids": ids}, "rollout", whyformer.targets.Token(3, 7)).scores.shape == (2, 6)
