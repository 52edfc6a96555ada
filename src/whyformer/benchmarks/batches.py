"""The samples as the model sees them: pictures squashed to its size, texts as token ids."""

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
from whyformer.benchmarks.study import Batch, Scores, Study, Unusable, usable
from whyformer.datasets.samples import Text
from whyformer.errors import InputError
from whyformer.evaluation.forwards import padded
from whyformer.explanation.result import Explanation
from whyformer.explanation.views import resize
from whyformer.inputs.prepare import longest_text
from whyformer.inputs.removal import fill, patch_size


@dataclass(frozen=True)
class PixelSpec:
    """How a picture becomes the model's input.

    Attributes:
        size: (height, width); the aspect ratio is not kept and nothing is cropped.
        resample: name of Pillow's filter; mean, std: of the normalisation, ``[C]``.
    """

    size: tuple[int, int]
    resample: str
    mean: Tensor
    std: Tensor

    def pixels(self, picture: Image.Image) -> Tensor:
        """``[C, H, W]`` normalised."""
        height, width = self.size
        mode = "RGB" if len(self.mean) == 3 else "L"
        squashed = picture.convert(mode).resize((width, height), Image.Resampling[self.resample.upper()])
        values = np.asarray(squashed, dtype=np.float32).reshape(height, width, -1) / 255
        return (torch.from_numpy(values).permute(2, 0, 1) - self.mean[:, None, None]) / self.std[:, None, None]

    def mask(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """``[H, W]``, nearest neighbour."""
        picture = Image.fromarray(mask.astype(np.uint8) * 255)
        return np.asarray(picture.resize(self.size[::-1], Image.Resampling.NEAREST)) > 127


def pixel_spec(model: nn.Module, processor: Any, resample: str | None = None) -> PixelSpec:
    """Size, filter (the processor's by default, or bilinear) and normalisation of a model's image processor."""
    processor = getattr(processor, "image_processor", processor)
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if mean is None or std is None:
        raise InputError(
            "what black is in the model's space is unknown: pass an image processor with image_mean and image_std"
        )
    if getattr(processor, "do_normalize", True) is False:
        mean, std = [0.0] * len(mean), [1.0] * len(mean)
    own, known = getattr(processor, "resample", None), [r.name.lower() for r in Image.Resampling]
    if resample is None:
        resample = "bilinear" if own is None else Image.Resampling(int(own)).name.lower()
    if resample not in known:
        raise InputError(f"resample must be one of {', '.join(known)}, not {resample!r}")
    normalisation = (torch.tensor(v, dtype=torch.float32) for v in (mean, std))
    return PixelSpec(_size(model, processor), resample, *normalisation)


def _size(model: nn.Module, processor: Any) -> tuple[int, int]:
    configured = getattr(getattr(model, "config", None), "image_size", None)
    if isinstance(configured, int):
        return configured, configured
    if isinstance(configured, list | tuple) and len(configured) == 2:
        return int(configured[0]), int(configured[1])
    for name in ("crop_size", "size"):
        found = getattr(processor, name, None)
        if found is not None and {"height", "width"} <= set(dict(found)):
            return int(found["height"]), int(found["width"])
    raise InputError("the model's input size is unknown: its config has no image_size and the processor no size")


@dataclass(frozen=True)
class PictureBatch(Batch):
    """Some pictures as the model sees them: ``pixels [B, C, H, W]``; what can be taken out are patches.

    With ``nearest`` a map of patches is laid over the pixels as it is, each patch with its own score throughout; else
    it is resized bilinearly.
    """

    pixels: Tensor
    spec: PixelSpec
    nearest: bool = False
    baseline = "black"

    def mask(self, index: int) -> NDArray[np.bool_] | None:
        """The object's mask at the model's size."""
        load = self.samples[index].mask
        return None if load is None else self.spec.mask(load())

    def some(self, which: Sequence[int]) -> PictureBatch:
        """Some of the pictures."""
        chosen = list(which)
        samples = [self.samples[i] for i in chosen]
        return replace(self, samples=samples, logits=self.logits[chosen], pixels=self.pixels[chosen])

    def inputs(self, which: Sequence[int]) -> Tensor:
        return self.pixels[list(which)]

    def drawn(self, index: int) -> NDArray[np.float64]:
        """One uniform score a patch (16 pixels where the model tells no patch size), resized like any map."""
        shape = (max(1, side // patch) for side, patch in zip(self.spec.size, self.patch, strict=True))
        drawn = random_scores(self.samples[index].id, tuple(shape), self.study.seed)
        return resize(torch.from_numpy(drawn)[None], self.spec.size, nearest=self.nearest)[0].numpy()

    def truth(self, index: int) -> Scores:
        mask = self.mask(index)
        return Unusable("failed", "this picture has no mask") if mask is None else usable(mask.astype(np.float64))

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
            raise InputError(f"the input of {size} pixels is not a whole number of patches of {patch}")
        return size[0] // patch[0], size[1] // patch[1]

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each patch has the mean of its pixels."""
        (rows, columns), (height, width) = self.grid, self.patch
        return scores.reshape(rows, height, columns, width).mean((1, 3)).reshape(-1)

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return features.reshape(-1, *self.grid).repeat(self.patch[0], 1).repeat(self.patch[1], 2)

    def drawn_pixels(self, pixels: Tensor) -> Tensor:
        """``[B, C, H, W]`` numbers between 0 and 1, drawn for each sample by its name."""
        shape = tuple(pixels.shape[1:])
        drawn = [generator_for(f"{s.id}/noise", self.study.seed).random(shape) for s in self.samples]
        return torch.from_numpy(np.stack(drawn)).to(pixels)

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        black, white = ((level - self.spec.mean) / self.spec.std for level in (0, 1))
        given = Filling(self.pixels, black=black, white=white, uniform=self.drawn_pixels)
        empty = cache(partial(fill, given=given))

        def perturbed() -> Iterator[Tensor]:
            for index, gone, baseline in jobs:
                where = torch.from_numpy(gone).to(self.pixels.device)
                yield torch.where(where, empty(baseline)[index], self.pixels[index])

        return self.study.forwards.pixels(perturbed())


# -- text --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Encoded:
    """One text as the model sees it.

    Attributes:
        ids: with special tokens; words: word of each token, None at special ones.
        spans: (start, end) characters of each token in the text, (0, 0) at special ones.
        count: words of the whole text, also those that truncation cut off.
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
    """Tokens of one text, cut off after ``longest``; words are the data set's own where it has them."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("this evaluation needs a fast tokenizer (one that can tell which word a token belongs to)")
    made = tokenizer(
        text.text if text.words is None else list(text.words), is_split_into_words=text.words is not None,
        truncation=True, max_length=longest, return_offsets_mapping=True,
    )  # fmt: skip
    words = made.word_ids(0)
    if all(w is None for w in words):
        raise InputError(f"{text.id}: the text holds no tokens the tokenizer knows")
    count = len(text.words) if text.words is not None else max(w for w in words if w is not None) + 1
    spans = tuple((int(a), int(b)) for a, b in made["offset_mapping"])
    return Encoded(np.array(made["input_ids"]), tuple(words), spans, count)


@dataclass(frozen=True)
class TextBatch(Batch):
    """Some texts as the model sees them; what can be taken out are the tokens that are not special."""

    encoded: Sequence[Encoded]
    baseline = "unk"

    def inputs(self, which: Sequence[int]) -> dict[str, Tensor]:
        made = padded([self.encoded[i].ids for i in which], self.study.forwards.pad)
        ids, mask = (tensor.to(self.study.forwards.place["device"]) for tensor in made)
        return {"input_ids": ids, "attention_mask": mask}

    def drawn(self, index: int) -> NDArray[np.float64]:
        encoded = self.encoded[index]
        drawn = random_scores(self.samples[index].id, (len(encoded.ids),), self.study.seed)
        return np.where(encoded.content, drawn, 0.0)

    def truth(self, index: int) -> Scores:
        """The flags of the human rationale, a word's at each of its tokens."""
        flags, words = self.samples[index].rationale, self.encoded[index].words
        return np.array([0.0 if word is None else float(flags[word]) for word in words])

    def read(self, index: int, explanation: Explanation) -> Scores:
        content = self.encoded[index].content
        scores = explanation.scores[0].double().numpy()[: len(content)]
        judged = usable(self.features(index, scores) if content.sum() > 1 else scores)
        return judged if isinstance(judged, Unusable) else scores

    def features(self, index: int, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores[self.encoded[index].content]

    def covered(self, index: int, features: NDArray[np.bool_]) -> NDArray[np.bool_]:
        content = self.encoded[index].content
        made = np.zeros((len(features), content.size), dtype=bool)
        made[:, content] = features
        return made

    def run(self, jobs: Iterable[tuple[int, NDArray[np.bool_], str]]) -> NDArray[np.float64]:
        """Baselines are tokens that stand where others were, or "delete"."""
        rows = []
        for index, gone, by in jobs:
            ids = self.encoded[index].ids
            rows.append(ids[~gone] if by == "delete" else np.where(gone, self._fill(by), ids))
        return self.study.forwards.ids(rows)

    def _fill(self, name: str) -> int:
        found = getattr(self.study.processor, f"{TOKENS[name]}_token_id", None)
        if not isinstance(found, int):
            raise InputError(f"the tokenizer has no {name} token to put in place of others")
        return found


def read_pixels(study: Study, sample: Any) -> Tensor | None:
    """``[C, H, W]`` of a picture, which may be read beside other work; of a text nothing."""
    if study.modality != "image":
        return None
    return pixel_spec(study.model, study.processor, study.options.get("resample")).pixels(sample.load())


def read_batch(study: Study, samples: Sequence[Any], read: Sequence[Tensor | None] | None = None) -> Batch:
    """The samples as the model sees them; ``read``: what :func:`read_pixels` gave for each."""
    if study.modality == "image":
        spec = pixel_spec(study.model, study.processor, study.options.get("resample"))
        given = [read_pixels(study, s) for s in samples] if read is None else read
        pixels = torch.stack([one for one in given if one is not None])
        logits = study.forwards.pixels(pixels)
        return PictureBatch(study, samples, logits, pixels.to(**study.forwards.place), spec)
    limits = [study.options.get("longest"), longest_text(study.model, study.processor)]
    longest = min([n for n in limits if n] or [512])
    encoded = [encode(s, study.processor, longest) for s in samples]
    return TextBatch(study, samples, study.forwards.ids([e.ids for e in encoded]), encoded)
