"""Comparison of cells, and the command that counts their outcomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .cells import AGREE, FOREIGN, NOWHERE, REFUSED, SILENT, Answer, Setting, compare
from .form import SIGNS, Form
from .measure import main

SETTING = Setting("raw_attention")


def form(way: str, compared: str = "scores", reference: bool = False) -> Form:
    return Form("kind", "function", way, "base", torch.nn.Identity, lambda: torch.zeros(1), compared=compared, reference=reference)


def outcomes(*answers: Answer) -> list[str]:
    return [cell.outcome for cell in compare([(form(str(i)), answer) for i, answer in enumerate(answers)], SETTING)]


def test_cells_are_compared_with_the_first_form_that_has_scores() -> None:
    first, same, other = (Answer(torch.tensor([1.0, v], dtype=torch.float64)) for v in (2.0, 2.0 + 1e-7, 2.1))
    refused, foreign = Answer(None, "no"), Answer(None, "KeyError", foreign=True)
    assert outcomes(first, same, other, refused, foreign) == [AGREE, AGREE, SILENT, REFUSED, FOREIGN]
    assert outcomes(refused, first, same) == [REFUSED, AGREE, AGREE]
    assert outcomes(refused, refused) == [NOWHERE, NOWHERE]
    assert outcomes(first, Answer(torch.ones(3))) == [AGREE, SILENT]


def test_signs_are_compared_with_any_reference() -> None:
    scores = [torch.tensor(v, dtype=torch.float64) for v in ([1.0, -2.0, 1e-9], [1.0, 2.0, 1.0], [3.0, -1.0, -1.0], [9.0, 1.0, 1.0])]
    forms = [form("first", SIGNS), form("second", SIGNS, reference=True), form("third", SIGNS), form("fourth", SIGNS)]
    cells = compare([(f, Answer(s)) for f, s in zip(forms, scores, strict=True)], SETTING)
    assert [cell.outcome for cell in cells] == [AGREE] * 4
    assert [c.outcome for c in compare([(forms[0], Answer(scores[0])), (forms[2], Answer(scores[1]))], SETTING)] == [AGREE, SILENT]


def test_counts_are_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "counts.json"
    main(["--kind", "placement", "--methods", "raw_attention", "saliency", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["cells"] == 8
    assert sum(report["counts"].values()) == 8
    assert report["wrong forms"] == []
    assert "placement" in capsys.readouterr().out


def test_unknown_kind_exits_with_the_list_of_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kind", "no such kind", "--out", str(tmp_path / "counts.json")])
    assert "causal softmax" in capsys.readouterr().err
