"""Along which axis of an input of vectors its features stand, and scores at the right moment of a bare spectrogram."""

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


class Reads(nn.Module):
    """A layer, and what follows it, without blocks."""

    def __init__(self, first: nn.Module, before: Callable[[Tensor], Tensor] = lambda x: x, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.before, self.head = first, before, nn.Linear(width, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        x = torch.relu(self.first(self.before(features)))
        return self.head(x.mean(-1) if isinstance(self.first, nn.Conv1d) else x.mean(1) if x.dim() == 3 else x)


def of_words() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    return randomise(hf.BertForSequenceClassification(hf.BertConfig(**sizes, num_labels=CLASSES))).double()


@pytest.mark.parametrize(
    ("model", "name", "shape", "features"),
    [
        (whisper, "input_features", (2, MELS, STEPS), STEPS),
        (of_words, "inputs_embeds", (2, 9, 16), 9),
        (of_words, "inputs_embeds", (2, 24, 16), 24),
        (lambda: Reads(nn.Conv1d(MELS, WIDTH, 5, 3)), "features", (2, MELS, STEPS), STEPS),
        (lambda: Reads(nn.Linear(MELS, WIDTH)), "features", (2, STEPS, MELS), STEPS),
        (lambda: Reads(nn.Linear(MELS, WIDTH), lambda x: x.transpose(1, 2)), "features", (2, MELS, STEPS), STEPS),
        (lambda: Reads(nn.Linear(MELS * 6, WIDTH), lambda x: x.flatten(1)), "features", (2, 6, MELS), 6),
    ],
)
def test_scores_stand_where_the_rows_do(model: Callable[[], nn.Module], name: str, shape: tuple[int, ...], features: int) -> None:
    made, x = model().double().eval(), spectrograms(*shape)
    e = whyformer.explain(made, {name: x}, "input_x_gradient", [1, 3])
    leaf = x.clone().requires_grad_()
    output = made(**{name: leaf})
    (gradient,) = torch.autograd.grad(getattr(output, "logits", output)[[0, 1], [1, 3]].sum(), leaf)
    channels = 1 if features == shape[2] != shape[1] and features == STEPS else 2
    wanted = (x * gradient).sum(channels)
    assert e.scores.shape == (2, features)
    assert torch.allclose(e.scores, wanted, atol=1e-10 * float(wanted.abs().max()))


def test_a_run_around_it_has_no_part_in_it() -> None:
    x = spectrograms()
    wanted = whyformer.explain(whisper(), {"input_features": x}, "input_x_gradient", 1)
    model = whisper()
    with torch.inference_mode():
        found = whyformer.explain(model, {"input_features": x}, "input_x_gradient", 1)
    assert torch.equal(found.scores, wanted.scores)


def test_an_axis_that_cannot_be_measured_is_refused() -> None:
    model = Reads(nn.Linear(MELS, WIDTH), lambda x: x.mean(1, keepdim=True) + torch.zeros(1, 4, 1).to(x)).double().eval()
    with pytest.raises(InputError, match=r"the axis of features \[2, 48, 20\] that indexes features cannot be measured"):
        whyformer.explain(model, {"features": spectrograms(2, STEPS, MELS)}, "saliency", 1)


def test_maps_of_a_bare_spectrogram_are_by_moments() -> None:
    """A row of Whisper's encoder stands for two moments, which share its score."""
    model, x = whisper(), spectrograms()
    e = whyformer.explain(model, {"input_features": x}, "raw_attention", [1, 3])
    kept: list[Tensor] = []
    handle = model.encoder.layers[-1].register_forward_hook(lambda m, a, output: kept.append(output if isinstance(output, Tensor) else output[0]))
    output = model(input_features=x, output_attentions=True)
    handle.remove()
    (gradient,) = torch.autograd.grad(output.logits.square().sum() / 2, kept)
    read = gradient.norm(dim=-1)  # how much of each row is read out
    wanted = torch.einsum("bq,bqk->bk", read / read.sum(1, keepdim=True), output.attentions[-1].mean(1))
    assert e.scores.shape == (2, STEPS)
    assert torch.equal(e.scores[:, ::2], e.scores[:, 1::2])
    found = e.scores.unflatten(1, (-1, 2)).sum(-1)
    assert torch.allclose(found / found.sum(1, keepdim=True), wanted / wanted.sum(1, keepdim=True), atol=1e-9)


def test_occlusion_silences_moments_of_a_bare_spectrogram() -> None:
    model, x = whisper(), spectrograms()
    e = whyformer.explain(model, {"input_features": x}, "occlusion", 2, window=8)
    silent = x.clone()
    silent[:, :, 16:24] = 0
    with torch.no_grad():
        drop = (model(x).logits - model(silent).logits)[:, 2]
    assert torch.allclose(e.scores[:, 16:24], drop[:, None].expand(-1, 8), atol=1e-10)
    assert whyformer.evaluate(model, {"input_features": x}, e, "deletion", processor=None).value is not None


@pytest.mark.parametrize("method", ["input_x_gradient", "gae", "lrp_ah_ln"])
def test_what_changes_at_one_moment_changes_the_scores_there_most(method: str) -> None:
    """A burst in a quiet sound: scores move at its moments and hardly elsewhere (a convolution sees its neighbours)."""
    model, quiet = whisper(), 0.05 * spectrograms(1)
    loud = quiet.clone()
    loud[:, :, 30:34] += 3 * spectrograms(1, MELS, 4)
    few = [whyformer.explain(model, {"input_features": x}, method, 1).scores[0] for x in (quiet, loud)]
    moved = (few[1] - few[0]).abs()
    assert int(moved.argmax()) in range(28, 36)
