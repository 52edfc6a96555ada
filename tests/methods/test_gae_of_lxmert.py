"""GAE for two streams with co-attention (ICCV 2021, Eq. 5 to 11) against a dense re-implementation on a tiny LXMERT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LxmertConfig, LxmertForQuestionAnswering
from transformers.models.lxmert import modeling_lxmert

import whyformer
from zoo import randomise

WORDS, BOXES, LABELS = 7, 5, 6


def lxmert(language: int, image: int, cross: int) -> tuple[Any, dict[str, Tensor]]:
    sizes = {"vocab_size": 50, "hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 48, "num_qa_labels": LABELS, "visual_feat_dim": 8}
    model = randomise(LxmertForQuestionAnswering(LxmertConfig(**sizes, l_layers=language, r_layers=image, x_layers=cross))).double()
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 50, (1, WORDS), generator=generator)
    feats, boxes = (torch.rand(1, BOXES, n, generator=generator).double() for n in (8, 4))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "visual_feats": feats, "visual_pos": boxes}


def weighted(model: Any, inputs: dict[str, Tensor], answer: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Tensor], Tensor]:
    """(Ā = mean_h (∇A ⊙ A)⁺ ``[Q, K]`` of every attention in order of execution, logits)."""
    maps: list[Tensor] = []

    def softmax(scores: Tensor, dim: int) -> Tensor:
        maps.append(scores.softmax(dim))
        maps[-1].retain_grad()
        return maps[-1]

    with monkeypatch.context() as patched:
        patched.setattr(modeling_lxmert.nn.functional, "softmax", softmax)
        logits = model(**inputs).question_answering_score
    logits[0, answer].backward()
    return [(torch.zeros_like(a) if a.grad is None else a.grad * a).clamp(min=0).mean(1)[0].detach() for a in maps], logits.detach()


def normalised(r: Tensor) -> Tensor:
    """R̄ = R̂ / rowsum(R̂) + I with R̂ = R − I; 0 / 0 is 0 (Eq. 8, 9)."""
    eye = torch.eye(len(r), dtype=r.dtype)
    sums = (r - eye).sum(-1, keepdim=True)
    return torch.where(sums == 0, 0, (r - eye) / torch.where(sums == 0, 1, sums)) + eye


class Dense:
    """R_tt, R_ii, R_ti, R_it of words t and boxes i."""

    def __init__(self) -> None:
        self.tt, self.ii = torch.eye(WORDS).double(), torch.eye(BOXES).double()
        self.ti, self.it = torch.zeros(WORDS, BOXES).double(), torch.zeros(BOXES, WORDS).double()

    def words(self, a: Tensor) -> None:  # Eq. 6, 7
        self.tt, self.ti = self.tt + a @ self.tt, self.ti + a @ self.ti

    def boxes(self, a: Tensor) -> None:
        self.ii, self.it = self.ii + a @ self.ii, self.it + a @ self.it

    def co_attend(self, a: Tensor, b: Tensor) -> None:
        """Words attend to boxes (a) and boxes to words (b): Eq. 10, 11, both from the previous values."""
        more = (normalised(self.tt).T @ a @ normalised(self.ii), a @ self.it, normalised(self.ii).T @ b @ normalised(self.tt), b @ self.ti)
        self.ti, self.tt, self.it, self.ii = (old + new for old, new in zip((self.ti, self.tt, self.it, self.ii), more, strict=True))


@pytest.mark.parametrize(("language", "image", "cross"), [(2, 2, 2), (3, 1, 2), (1, 2, 3), (2, 1, 1)])
@pytest.mark.parametrize("answer", [0, 4])
def test_co_attention_equals_dense_reference(language: int, image: int, cross: int, answer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = lxmert(language, image, cross)
    maps, logits = weighted(model, inputs, answer, monkeypatch)
    assert len(maps) == language + image + 4 * cross
    dense, remaining = Dense(), iter(maps)
    for _ in range(language):
        dense.words(next(remaining))
    for _ in range(image):
        dense.boxes(next(remaining))
    for _ in range(cross):
        dense.co_attend(next(remaining), next(remaining))
        dense.words(next(remaining))
        dense.boxes(next(remaining))
    e = whyformer.explain(model, inputs, "gae", answer)
    torch.testing.assert_close(e.logits, logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(e.part("input_ids").scores[0], dense.tt[0], rtol=1e-9, atol=1e-13)  # the row of [CLS] is classified
    torch.testing.assert_close(e.part("visual_feats").scores[0], dense.ti[0], rtol=1e-9, atol=1e-13)
    assert float(dense.ti[0].max()) > 1e-6 and (cross == 1 or float(dense.it.max()) > 0)  # only the words of the last layer are read out


def test_padded_batch_equals_single_questions() -> None:
    model, inputs = lxmert(2, 2, 2)
    short = {**inputs, "input_ids": inputs["input_ids"][:, :5], "attention_mask": inputs["attention_mask"][:, :5]}
    padded = torch.cat([short["input_ids"], torch.zeros(1, 2, dtype=torch.long)], 1)
    mask = torch.cat([short["attention_mask"], torch.zeros(1, 2, dtype=torch.long)], 1)
    other_feats = inputs["visual_feats"].flip(1)
    batch = {
        "input_ids": torch.cat([inputs["input_ids"], padded]), "attention_mask": torch.cat([inputs["attention_mask"], mask]),
        "visual_feats": torch.cat([inputs["visual_feats"], other_feats]), "visual_pos": inputs["visual_pos"].repeat(2, 1, 1),
    }  # fmt: skip
    e = whyformer.explain(model, batch, "gae", [4, 1])
    single = whyformer.explain(model, {**short, "visual_feats": other_feats}, "gae", 1)
    for name in ("input_ids", "visual_feats"):
        result, expected = e.part(name).scores[1], single.part(name).scores[0]
        torch.testing.assert_close(result[: len(expected)], expected, rtol=1e-8, atol=1e-12)
        assert not bool(result[len(expected) :].any())
