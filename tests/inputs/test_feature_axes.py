"""The feature axis of inputs of vectors, and scores along the time axis of a spectrogram."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import whyformer
from whyformer.errors import InputError
from zoo import CLASSES, WIDTH, randomise

MELS, STEPS = 20, 48


def whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = hf.WhisperConfig(**sizes, num_mel_bins=MELS, max_source_positions=STEPS // 2, num_labels=CLASSES, attn_implementation="eager")
    return randomise(hf.WhisperForAudioClassification(config)).double()


def spectrograms(*shape: int) -> Tensor:
    return torch.randn(shape if len(shape) == 3 else (*(shape or (2,)), MELS, STEPS), generator=torch.Generator().manual_seed(3)).double()


class SingleLayer(nn.Module):
    """A layer and a classifier head, without blocks."""

    def __init__(self, first: nn.Module, before: Callable[[Tensor], Tensor] = lambda x: x, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.before, self.head = first, before, nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = torch.relu(self.first(self.before(features)))
        return self.head(x.mean(-1) if isinstance(self.first, nn.Conv1d) else x.mean(1) if x.dim() == 3 else x)


def text_model() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    return randomise(hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=CLASSES))).double()


@pytest.mark.parametrize(
    ("model", "name", "shape", "features"),
    [
        (whisper, "input_features", (2, MELS, STEPS), STEPS),
        (text_model, "inputs_embeds", (2, 9, 16), 9),
        (text_model, "inputs_embeds", (2, 24, 16), 24),
        (lambda: SingleLayer(nn.Conv1d(MELS, WIDTH, 5, 3)), "features", (2, MELS, STEPS), STEPS),
        (lambda: SingleLayer(nn.Linear(MELS, WIDTH)), "features", (2, STEPS, MELS), STEPS),
        (lambda: SingleLayer(nn.Linear(MELS, WIDTH), lambda x: x.transpose(1, 2)), "features", (2, MELS, STEPS), STEPS),
        (lambda: SingleLayer(nn.Linear(MELS * 6, WIDTH), lambda x: x.flatten(1)), "features", (2, 6, MELS), 6),
        (lambda: SingleLayer(nn.Conv1d(MELS, WIDTH, 5, 3), lambda x: nn.functional.avg_pool1d(x, 2)), "features", (2, MELS, STEPS), STEPS),
    ],
)
def test_scores_are_indexed_by_the_feature_axis(model: Callable[[], nn.Module], name: str, shape: tuple[int, ...], features: int) -> None:
    network, x = model().double().eval(), spectrograms(*shape)
    e = whyformer.explain(network, {name: x}, "input_x_gradient", [1, 3])
    leaf = x.clone().requires_grad_()
    output = network(**{name: leaf})
    (gradient,) = torch.autograd.grad(getattr(output, "logits", output)[[0, 1], [1, 3]].sum(), leaf)
    channels = 1 if features == shape[2] != shape[1] and features == STEPS else 2
    expected = (x * gradient).sum(channels)
    assert e.scores.shape == (2, features)
    assert torch.allclose(e.scores, expected, atol=1e-10 * float(expected.abs().max()))


def test_inference_mode_of_caller_has_no_effect() -> None:
    x = spectrograms()
    expected = whyformer.explain(whisper(), {"input_features": x}, "input_x_gradient", 1)
    model = whisper()
    with torch.inference_mode():
        actual = whyformer.explain(model, {"input_features": x}, "input_x_gradient", 1)
    assert torch.equal(actual.scores, expected.scores)


def test_unmeasurable_feature_axis_raises() -> None:
    model = SingleLayer(nn.Linear(MELS, WIDTH), lambda x: x.mean(1, keepdim=True) + torch.zeros(1, 4, 1).to(x)).double().eval()
    with pytest.raises(InputError, match=r"the axis of features \[2, 48, 20\] that indexes features cannot be measured"):
        whyformer.explain(model, {"features": spectrograms(2, STEPS, MELS)}, "saliency", 1)


def test_attention_map_of_spectrogram_is_indexed_by_time() -> None:
    """A token of Whisper's encoder covers two frames, which share its score."""
    model, x = whisper(), spectrograms()
    e = whyformer.explain(model, {"input_features": x}, "raw_attention", [1, 3])
    outputs: list[Tensor] = []
    handle = model.encoder.layers[-1].register_forward_hook(lambda m, a, output: outputs.append(output if isinstance(output, Tensor) else output[0]))
    output = model(input_features=x, output_attentions=True)
    handle.remove()
    (gradient,) = torch.autograd.grad(output.logits.square().sum() / 2, outputs)
    readout = gradient.norm(dim=-1)  # the weight of each token in the readout
    expected = torch.einsum("bq,bqk->bk", readout / readout.sum(1, keepdim=True), output.attentions[-1].mean(1))
    assert e.scores.shape == (2, STEPS)
    assert torch.equal(e.scores[:, ::2], e.scores[:, 1::2])
    actual = e.scores.unflatten(1, (-1, 2)).sum(-1)
    assert torch.allclose(actual / actual.sum(1, keepdim=True), expected / expected.sum(1, keepdim=True), atol=1e-9)


def test_occlusion_silences_frames_of_spectrogram() -> None:
    model, x = whisper(), spectrograms()
    e = whyformer.explain(model, {"input_features": x}, "occlusion", 2, window=8)
    silent = x.clone()
    silent[:, :, 16:24] = 0
    with torch.no_grad():
        drop = (model(x).logits - model(silent).logits)[:, 2]
    assert torch.allclose(e.scores[:, 16:24], drop[:, None].expand(-1, 8), atol=1e-10)
    assert whyformer.evaluate(model, {"input_features": x}, e, "deletion", processor=None).value is not None


@pytest.mark.parametrize("method", ["input_x_gradient", "gae", "lrp_ah_ln"])
def test_change_at_one_time_changes_the_scores_there_most(method: str) -> None:
    """A burst in a quiet sound changes scores at its frames, and hardly elsewhere (a convolution reads neighbours)."""
    model, quiet = whisper(), 0.05 * spectrograms(1)
    loud = quiet.clone()
    loud[:, :, 30:34] += 3 * spectrograms(1, MELS, 4)
    scores = [whyformer.explain(model, {"input_features": x}, method, 1).scores[0] for x in (quiet, loud)]
    change = (scores[1] - scores[0]).abs()
    assert int(change.argmax()) in range(28, 36)
