"""The worked example: a word that was planted into a classifier's training stands on top of what its maps say."""

import runpy
from pathlib import Path

import pytest

import whyformer

SCRIPT = Path(__file__).parents[2] / "examples" / "spurious_cue.py"


@pytest.mark.slow
def test_a_planted_cue_is_on_top_after_training_and_not_before(tmp_path, capsys):
    example = runpy.run_path(str(SCRIPT))
    example["main"](str(tmp_path / "cue"))
    before, after = (whyformer.read(tmp_path / "cue" / name) for name in ("before", "after"))
    assert len(before) == len(after) == 2000
    found = after.words("positive", count=2, least=20).words
    assert found[0].word == example["CUE"]
    assert found[0].share.count > 500
    assert found[0].share.low > found[1].share.high  # no matter which sentences are drawn
    assert found[1].word in example["GOOD"]
    assert all(example["CUE"] in text for text in found[0].examples)
    trusted = [w.word for w in before.words("positive", count=6, least=20).words]
    assert set(trusted) <= set(example["GOOD"])
    changed = before.drift(after)
    assert changed.rows == 2000
    assert changed.changed > 200
    said = capsys.readouterr().out
    assert float(said.partition("is meant: ")[2].partition("%")[0]) > 95  # its accuracy does not tell
