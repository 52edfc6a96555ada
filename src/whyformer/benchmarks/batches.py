"""Batches of preprocessed samples: pictures resized to the model's input, texts as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from whyformer.baselines import TOKENS, Filling
from whyformer.benchmarks.configurations import generator_for, random_scores
from whyformer.benchmarks.study import Batch, Exclusion, Scores, Study, usable
from whyformer.datasets.samples import Text
from whyformer.errors import InputError
from whyformer.explanation.result import Explanation
from whyformer.explanation.views import resize
from whyformer.inputs.pictures import normalisation_of
from whyformer.inputs.prepare import longest_text
from whyformer.inputs.removal import fill, patch_size


@dataclass(frozen=True)
class PixelSpec:
    """The preprocessing of pictures.

    Attributes:
        size: (height, width) of the input in pixels; the aspect ratio may change, and nothing is cropped.
        resample: name of Pillow's resampling filter.
        mean: ``[C]`` mean of the normalisation.
        std: ``[C]`` standard deviation of the normalisation.
    """

    size: tuple[int, int]
    resample: str
    mean: Tensor
    std: Tensor

    def pixels(self, picture: Image.Image) -> Tensor:
        """Return the normalised picture ``[C, H, W]``."""
        height, width = self.size
        mode = "RGB" if len(self.mean) == 3 else "L"
        squashed = picture.convert(mode).resize((width, height), Image.Resampling[self.resample.upper()])
        values = np.asarray(squashed, dtype=np.float32).reshape(height, width, -1) / 255
        return (torch.from_numpy(values).permute(2, 0, 1) - self.mean[:, None, None]) / self.std[:, None, None]

    def mask(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the mask ``[H, W]``, resized by nearest neighbour."""
        picture = Image.fromarray(mask.astype(np.uint8) * 255)
        return np.asarray(picture.resize(self.size[::-1], Image.Resampling.NEAREST)) > 127


def pixel_spec(model: nn.Module, processor: Any, resample: str | None = None) -> PixelSpec:
    """Return the preprocessing of a model's image processor; without ``resample``, its filter or bilinear."""
    processor = getattr(processor, "image_processor", processor)
    normalisation = normalisation_of(processor)
    if normalisation is None:
        raise InputError(
            "the normalisation is unknown: pass an image processor with image_mean and image_std"
        )
    default, filters = getattr(processor, "resample", None), [r.name.lower() for r in Image.Resampling]
    if resample is None:
        resample = "bilinear" if default is None else Image.Resampling(int(default)).name.lower()
    if resample not in filters:
        raise InputError(f"resample must be one of {', '.join(filters)}, not {resample!r}")
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in normalisation)
    return PixelSpec(_size(model, processor), resample, mean, std)


def _size(model: nn.Module, processor: Any) -> tuple[int, int]:
    configured = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(configured, int):
        return configured, configured
    if isinstance(configured, list | tuple) and len(configured) == 2:
        return int(configured[0]), int(configured[1])
    for name in ("crop_size", "size"):
        size = getattr(processor, name, None)
        if size is not None and {"height", "width"} <= set(dict(size)):
            return int(size["height"]), int(size["width"])
    raise InputError("the size of the model's input is unknown: pass a processor with a size")


@dataclass(frozen=True)
class PictureBatch(Batch):
    """A batch of preprocessed pictures; their removable features are patches.

    Attributes:
        pixels: ``[B, C, H, W]`` normalised pictures.
        spec: preprocessing.
        nearest: give each pixel the score of its patch; by default maps are resized bilinearly.
    """

    pixels: Tensor
    spec: PixelSpec
    nearest: bool = False
    baseline = "black"

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """Return the mask of the object at the size of the model's input."""
        load = self.samples[index].mask
        return None if load is None else self.spec.mask(load())

    def some(self, samples: Sequence[int]) -> PictureBatch:
        """Return a batch of some of the pictures."""
        indices = list(samples)
        samples = [self.samples[i] for i in indices]
        return replace(self, samples=samples, logits=self.logits[indices], pixels=self.pixels[indices])

    def inputs(self, samples: Sequence[int]) -> Tensor:
        return self.pixels[list(samples)]

    def random_map(self, index: int) -> NDArray[np.float64]:
        """Return a uniform score for each patch (16 pixels if the patch size is unknown), resized like other maps."""
        shape = (max(1, side // patch) for side, patch in zip(self.spec.size, self.patch, strict=True))
        drawn = random_scores(self.samples[index].id, tuple(shape), self.study.seed)
        return resize(torch.from_numpy(drawn)[None], self.spec.size, nearest=self.nearest)[0].numpy()

    def truth(self, index: int) -> Scores:
        mask = self.mask(index)
        return Exclusion("failed", "this picture has no mask") if mask is None else usable(mask.astype(np.float64))

    def read(self, index: int, explanation: Explanation) -> Scores:
        maps = explanation.heatmap(nearest=self.nearest)
        return usable(resize(maps, self.spec.size, nearest=True)[0].double().numpy())

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return patch_size(self.study.model)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        size, patch = self.spec.size, self.patch
        if size[0] % patch[0] or size[1] % patch[1]:
            raise InputError(f"the input of {size} pixels is not divisible into patches of {patch}")
        return size[0] // patch[0], size[1] // patch[1]

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean over the pixels of each patch."""
        (rows, columns), (height, width) = self.grid, self.patch
        return scores.reshape(rows, height, columns, width).mean((1, 3)).reshape(-1)

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return features.reshape(-1, *self.grid).repeat(self.patch[0], 1).repeat(self.patch[1], 2)

    def random_pixels(self, pixels: Tensor) -> Tensor:
        """Return uniform numbers in 0..1 ``[B, C, H, W]``, seeded by the ids of the samples."""
        shape = tuple(pixels.shape[1:])
        drawn = [generator_for(f"{s.id}/noise", self.study.seed).random(shape) for s in self.samples]
        return torch.from_numpy(np.stack(drawn)).to(pixels)

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        black, white = ((level - self.spec.mean) / self.spec.std for level in (0, 1))
        filling = Filling(self.pixels, black=black, white=white, uniform=self.random_pixels)
        empty = cache(partial(fill, filling=filling))

        def perturbed() -> Iterator[Tensor]:
            for index, removed, baseline in jobs:
                where = torch.from_numpy(removed).to(self.pixels.device)
                yield torch.where(where, empty(baseline)[index], self.pixels[index])

        return self.study.forwards.pixels(perturbed())


# -- text --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Encoded:
    """A tokenized text.

    Attributes:
        ids: ``[N]`` token ids, special tokens included.
        words: index of the word of each token; None for special tokens.
        spans: (start, end) character offsets of each token in the text; (0, 0) for special tokens.
        count: number of words of the text, truncated words included.
    """

    ids: NDArray[np.int64]
    words: tuple[int | None, ...]
    spans: tuple[tuple[int, int], ...]
    count: int

    @property
    def content(self) -> NDArray[np.bool_]:
        """``[N]`` True at tokens that are not special."""
        return np.array([word is not None for word in self.words])


def encode(text: Text, tokenizer: Any, longest: int) -> Encoded:
    """Tokenize a text, truncated to ``longest`` tokens; words are those of the data set if it defines words."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("this benchmark needs a fast tokenizer, which maps tokens to words")
    encoding = tokenizer(
        text.text if text.words is None else list(text.words), is_split_into_words=text.words is not None,
        truncation=True, max_length=longest, return_offsets_mapping=True,
    )  # fmt: skip
    words = encoding.word_ids(0)
    if all(w is None for w in words):
        raise InputError(f"{text.id}: the tokenizer returns no tokens for this text")
    count = len(text.words) if text.words is not None else max(w for w in words if w is not None) + 1
    spans = tuple((int(a), int(b)) for a, b in encoding["offset_mapping"])
    return Encoded(np.array(encoding["input_ids"]), tuple(words), spans, count)


@dataclass(frozen=True)
class TextBatch(Batch):
    """A batch of tokenized texts; their removable features are all tokens except special tokens."""

    encoded: Sequence[Encoded]
    baseline = "unk"

    def inputs(self, samples: Sequence[int]) -> list[dict[str, Tensor]]:
        rows = [torch.from_numpy(self.encoded[i].ids)[None].to(self.study.forwards.place["device"]) for i in samples]
        return [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in rows]

    def random_map(self, index: int) -> NDArray[np.float64]:
        encoded = self.encoded[index]
        drawn = random_scores(self.samples[index].id, (len(encoded.ids),), self.study.seed)
        return np.where(encoded.content, drawn, 0.0)

    def truth(self, index: int) -> Scores:
        """Return the flags of the human rationale for each token."""
        flags, words = self.samples[index].rationale, self.encoded[index].words
        return np.array([0.0 if word is None else float(flags[word]) for word in words])

    def read(self, index: int, explanation: Explanation) -> Scores:
        content = self.encoded[index].content
        scores, count = explanation.scores[0].double().numpy(), len(content)
        scores = scores[-count:] if self.ready.padding[1] else scores[:count]
        result = usable(self.features(index, scores) if content.sum() > 1 else scores)
        return result if isinstance(result, Exclusion) else scores

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores[self.encoded[index].content]

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        content = self.encoded[index].content
        masks = np.zeros((len(features), content.size), dtype=bool)
        masks[:, content] = features
        return masks

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        """Return the logits of texts with tokens replaced by the baseline, or removed with "delete"."""
        rows = []
        for index, removed, baseline in jobs:
            ids = self.encoded[index].ids
            rows.append(ids[~removed] if baseline == "delete" else np.where(removed, self._fill(baseline), ids))
        return self.study.forwards.ids(rows)

    def _fill(self, name: str) -> int:
        token = getattr(self.study.processor, f"{TOKENS[name]}_token_id", None)
        if not isinstance(token, int):
            raise InputError(f"the tokenizer has no {name} token: choose another baseline")
        return token


def read_pixels(study: Study, sample: Any) -> Tensor | None:
    """Read and preprocess a picture to ``[C, H, W]``; may be called by any thread. Texts return None."""
    if study.modality != "image":
        return None
    return pixel_spec(study.model, study.processor, study.options.get("resample")).pixels(sample.load())


def read_batch(study: Study, samples: Sequence[Any], read: Sequence[Tensor | None] | None = None) -> Batch:
    """Return a batch of preprocessed samples; ``read`` are their results of :func:`read_pixels`, if available."""
    if study.modality == "image":
        spec = pixel_spec(study.model, study.processor, study.options.get("resample"))
        pictures = [read_pixels(study, s) for s in samples] if read is None else read
        pixels = torch.stack([picture for picture in pictures if picture is not None])
        logits = study.forwards.pixels(pixels)
        return PictureBatch(study, samples, logits, pixels.to(**study.forwards.place), spec)
    limits = [study.options.get("longest"), longest_text(study.model, study.processor)]
    longest = min([n for n in limits if n] or [512])
    encoded = [encode(s, study.processor, longest) for s in samples]
    return TextBatch(study, samples, study.forwards.ids([e.ids for e in encoded]), encoded)
