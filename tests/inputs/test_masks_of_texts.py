"""A padding mask belongs to one text: the tokens of the others are real unless they have masks of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whyformer import explain
from zoo import randomise

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 0, 0]])
SECOND = torch.tensor([[11, 12, 13, 14, 15], [16, 17, 18, 19, 11]])
PADDED = torch.tensor([[11, 12, 13, 0, 0], [16, 17, 18, 19, 0]])


class Reader(nn.Module):
    """Reads two texts with one encoder, and compares the means of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 12), nn.Linear(24, 3)
        layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def read(self, *texts: tuple[Tensor, Tensor | None]) -> Tensor:
        means = []
        for ids, mask in texts:
            real = torch.ones_like(ids) if mask is None else mask
            x = self.encoder(self.embed(ids), src_key_padding_mask=real == 0)
            means.append((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))
        return self.head(torch.cat(means, 1))


class Numbered(Reader):
    def forward(self, input_ids: Tensor, input_ids_2: Tensor, attention_mask: Any = None, attention_mask_2: Any = None) -> Tensor:
        return self.read((input_ids, attention_mask), (input_ids_2, attention_mask_2))


class Named(Reader):
    def forward(self, input_ids: Tensor, second_ids: Tensor, attention_mask: Any = None, second_attention_mask: Any = None) -> Tensor:
        return self.read((input_ids, attention_mask), (second_ids, second_attention_mask))


class Lettered(Reader):
    def forward(self, ids_a: Tensor, ids_b: Tensor, attention_mask: Any = None, attention_mask_b: Any = None) -> Tensor:
        return self.read((ids_a, attention_mask), (ids_b, attention_mask_b))


class Marked(Reader):
    """Masks whose names do not say what they mark, such as True at padding."""

    def forward(self, query: Tensor, document: Tensor, query_pad_mask: Any = None, document_pad_mask: Any = None) -> Tensor:
        masks = [None if mask is None else (~mask).long() for mask in (query_pad_mask, document_pad_mask)]
        return self.read((query, masks[0]), (document, masks[1]))


NAMES = {
    Numbered: ("input_ids", "input_ids_2", "attention_mask", "attention_mask_2"),
    Named: ("input_ids", "second_ids", "attention_mask", "second_attention_mask"),
    Lettered: ("ids_a", "ids_b", "attention_mask", "attention_mask_b"),
    Marked: ("query", "document", "query_pad_mask", "document_pad_mask"),
}


def given(kind: type[Reader], second: Tensor, masked: tuple[bool, bool], positional: bool) -> Any:
    first_name, second_name, *masks = NAMES[kind]
    values = [(ids != 0) if kind is not Marked else ids == 0 for ids in (IDS, second)]
    values = [v if kind is Marked else v.long() for v in values]
    fed = {first_name: IDS, second_name: second, **{n: v for n, v, m in zip(masks, values, masked, strict=True) if m}}
    if not positional:
        return fed
    return tuple(fed.get(name) for name in NAMES[kind][: 4 if masked[1] else 3 if masked[0] else 2])


@pytest.mark.parametrize(("method", "positional"), [("input_x_gradient", False), ("saliency", True), ("occlusion", False)])
@pytest.mark.parametrize("masked", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", NAMES)
def test_each_text_has_the_scores_of_the_sample_without_padding(kind: Any, masked: Any, method: str, positional: bool) -> None:
    model, second = randomise(kind()).double(), PADDED if masked[1] else SECOND
    settings = {"baseline": 1} if method == "occlusion" else {}
    e = explain(model, given(kind, second, masked, positional), method, 1, **settings)
    for i in range(2):
        lengths = [int((ids[i] != 0).sum()) if m else 5 for ids, m in zip((IDS, second), masked, strict=True)]
        alone = dict(zip(NAMES[kind][:2], (IDS[i : i + 1, : lengths[0]], second[i : i + 1, : lengths[1]]), strict=True))
        wanted = explain(model, alone, method, 1, **settings)
        for name, count in zip(NAMES[kind][:2], lengths, strict=True):
            if method == "occlusion" and name != wanted.input:
                continue  # it removes tokens of the main input only
            scores = e.part(name).scores[i]
            torch.testing.assert_close(scores[:count], wanted.part(name).scores[0], rtol=1e-6, atol=1e-9)
            assert scores[:count].all() and not scores[count:].any()


@pytest.mark.parametrize("kind", [Numbered, Named, Lettered])
def test_deleting_tokens_of_one_text_keeps_the_mask_of_the_other(kind: Any) -> None:
    model = randomise(kind()).double()
    e = explain(model, given(kind, PADDED, (True, True), False), "occlusion", 1, baseline="delete")
    names = NAMES[kind]
    with torch.no_grad():
        for i, count in enumerate((5, 3)):
            second = PADDED[i : i + 1, : int((PADDED[i] != 0).sum())]
            whole = model(IDS[i : i + 1, :count], second)[0, 1]
            for j in range(count):
                kept = [k for k in range(count) if k != j]
                drop = whole - model(IDS[i : i + 1, kept], second)[0, 1]
                torch.testing.assert_close(e.part(names[0]).scores[i, j].double(), drop, rtol=1e-5, atol=1e-7)


class Crossing(Reader):
    """A decoder with cross attention; one mask, of the encoder's tokens."""

    def __init__(self, source: str) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(12, 3, 24, dropout=0, batch_first=True, norm_first=True)
        self.decoder, self.last = nn.TransformerDecoder(layer, 1), nn.Linear(12, 3)

    def cross(self, ids: Tensor, decoder_ids: Tensor, mask: Tensor | None) -> Tensor:
        padding = None if mask is None else mask == 0
        memory = self.encoder(self.embed(ids), src_key_padding_mask=padding)
        return self.last(self.decoder(self.embed(decoder_ids), memory, memory_key_padding_mask=padding).mean(1))


class OfSource(Crossing):
    def forward(self, src: Tensor, tgt: Tensor, attention_mask: Any = None) -> Tensor:
        return self.cross(src, tgt, attention_mask)


class OfInputs(Crossing):
    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Any = None) -> Tensor:
        return self.cross(input_ids, decoder_input_ids, attention_mask)


class DecoderFirst(Crossing):
    def forward(self, decoder_ids: Tensor, encoder_ids: Tensor, attention_mask: Any = None) -> Tensor:
        return self.cross(encoder_ids, decoder_ids, attention_mask)


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize(("kind", "names"), [
    (OfSource, ("src", "tgt")), (OfInputs, ("input_ids", "decoder_input_ids")), (DecoderFirst, ("encoder_ids", "decoder_ids")),
])  # fmt: skip
def test_the_mask_of_an_encoder_hides_no_token_of_the_decoder(kind: Any, names: Any, count: int, positional: bool) -> None:
    model, target = randomise(kind("")).double(), SECOND[:, :count]
    mask = (IDS != 0).long()
    fed: Any = {**dict(zip(names, (IDS, target), strict=True)), "attention_mask": mask}
    if positional:
        fed = (IDS, target, mask) if kind is not DecoderFirst else (target, IDS, mask)
    e = explain(model, fed, "input_x_gradient", 1)
    for i, length in enumerate((5, 3)):
        alone = explain(model, dict(zip(names, (IDS[i : i + 1, :length], target[i : i + 1]), strict=True)), "input_x_gradient", 1)
        for name, real in zip(names, (length, count), strict=True):
            scores = e.part(name).scores[i]
            torch.testing.assert_close(scores[:real], alone.part(name).scores[0], rtol=1e-6, atol=1e-9)
            assert not scores[real:].any()
