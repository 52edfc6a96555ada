"""The example of a spurious cue: a word planted into training data has the largest share in a summary of attributions."""

import runpy
from pathlib import Path

import pytest

import whyformer

SCRIPT = Path(__file__).parents[2] / "examples" / "spurious_cue.py"


@pytest.mark.slow
def test_planted_cue_ranks_first_only_after_training(tmp_path, capsys):
    example = runpy.run_path(str(SCRIPT))
    example["main"](str(tmp_path / "cue"), 600)
    before, after = (whyformer.read(tmp_path / "cue" / name) for name in ("before", "after"))
    assert len(before) == len(after) == 600
    words = after.words("positive", count=2, least=20).words
    assert words[0].word == example["CUE"]
    assert words[0].share.count > 150
    assert words[0].share.low > words[1].share.high  # the intervals do not overlap
    assert words[1].word in example["GOOD"]
    assert all(example["CUE"] in text for text in words[0].examples)
    trusted = [w.word for w in before.words("positive", count=6, least=20).words]
    assert set(trusted) <= set(example["GOOD"])
    changed = before.drift(after)
    assert changed.rows == 600
    assert changed.changed > 60
    output = capsys.readouterr().out
    assert float(output.partition("is meant: ")[2].partition("%")[0]) > 95  # accuracy does not reveal the cue
