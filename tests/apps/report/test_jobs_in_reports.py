"""What jobs wrote in a report: words with their intervals, mean maps, failures, drift; damaged folders are told."""

import json
import re

import pytest
from PIL import Image

import whyformer
from whyformer.apps.report import write_report

TEXTS = [f"The {thing} is {word}." for thing in ("plot", "cast", "music") for word in ("superb", "dull")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("work")
    whyformer.explain_many("bundled:sst2", [*TEXTS, ""], ["input_x_gradient", "rollout"], ["positive"], out=made / "first")
    whyformer.explain_many("bundled:sst2", [*TEXTS, ""], "input_x_gradient", ["positive"], out=made / "second")
    return made


def written(source, tmp_path):
    done = write_report(source, tmp_path / "report.html")
    return done, (tmp_path / "report.html").read_text()


def test_words_failures_and_drift_are_those_of_the_reader(folder, tmp_path):
    done, page = written(folder, tmp_path)
    assert (done.jobs, done.benchmarks, done.explanations, done.skipped) == (2, 0, 0, [])
    assert "2 data sets" in page
    assert "Data sets</a>" in page
    said = whyformer.read(folder / "first").words("positive", "input_x_gradient")
    for word in said.words:
        assert re.search(rf'<td>{word.word}</td>\s*<td data-by="{re.escape(str(word.share.value))}"', page), word.word
    assert "1 failures, the first: 6: the text is empty" in page
    changed = whyformer.read(folder / "first").drift(whyformer.read(folder / "second"))
    assert "from first to second" in page
    for name, value in (("rows", changed.rows), ("rows of another predicted class", 0)):
        assert re.search(rf'<td>{name}</td>\s*<td data-by="{value}"', page), name


def test_mean_maps_are_drawn(tmp_path):
    for i in range(3):
        Image.effect_noise((64, 64), 40 + i).save(tmp_path / f"{i}.png")
    files = sorted(tmp_path.glob("*.png"))
    whyformer.explain_many("bundled:digits", files, "gae", [3, 7], out=tmp_path / "maps")
    done, page = written(tmp_path / "maps", tmp_path)
    assert done.jobs == 1
    assert page.count("<figcaption>mean map, gae: ") == 2
    assert page.count('src="data:image/') >= 2


def test_a_damaged_part_is_told_and_nothing_of_it_is_shown(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    part = tmp_path / "copy" / "second" / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-7] + b"PAR1xyz")
    done, page = written(tmp_path / "copy", tmp_path)
    assert done.jobs == 1
    assert [s.damaged for s in done.skipped] == [True]
    assert "missing or damaged" in done.skipped[0].why
    assert "from first to second" not in page
    manifest = tmp_path / "copy" / "first" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "model": 3}))
    with pytest.raises(whyformer.WhyformerError, match="damaged"):
        written(tmp_path / "copy", tmp_path)
