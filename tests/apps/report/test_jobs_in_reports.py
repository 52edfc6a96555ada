"""Jobs in a report: word shares with intervals, mean maps, failures, drift, and damaged folders."""

import json
import re

import pytest
from PIL import Image

import whyformer
from whyformer.apps.report import write_report

TEXTS = [f"The {thing} is {word}." for thing in ("plot", "cast", "music") for word in ("superb", "dull")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("work")
    whyformer.explain_many("bundled:sst2", [*TEXTS, ""], ["input_x_gradient", "rollout"], ["positive"], out=path / "first")
    whyformer.explain_many("bundled:sst2", [*TEXTS, ""], "input_x_gradient", ["positive"], out=path / "second")
    return path


def write_and_read(source, tmp_path):
    report = write_report(source, tmp_path / "report.html")
    return report, (tmp_path / "report.html").read_text()


def test_words_failures_and_drift_equal_those_of_read(folder, tmp_path):
    report, page = write_and_read(folder, tmp_path)
    assert (report.jobs, report.benchmarks, report.explanations, report.skipped) == (2, 0, 0, [])
    assert "2 data sets" in page
    assert "Data sets</a>" in page
    summary = whyformer.read(folder / "first").words("positive", "input_x_gradient")
    for word in summary.words:
        assert re.search(rf'<td>{word.word}</td>\s*<td data-by="{re.escape(str(word.share.value))}"', page), word.word
    assert "1 failure, the first: 6: the text is empty" in page
    drift = whyformer.read(folder / "first").drift(whyformer.read(folder / "second"))
    assert "from first to second" in page
    for name, value in (("rows", drift.rows), ("rows of another predicted class", 0)):
        assert re.search(rf'<td>{name}</td>\s*<td data-by="{value}"', page), name


def test_job_without_frequent_words_has_no_empty_table(tmp_path):
    whyformer.explain_many("bundled:sst2", ["A warm film.", "Dull!"], "input_x_gradient", ["positive"], out=tmp_path / "few")
    report, page = write_and_read(tmp_path / "few", tmp_path)
    assert report.jobs == 1
    assert "input_x_gradient: positive: no word occurs in 3 or more texts (2 texts in all)" in page
    assert 'aria-label="input_x_gradient: positive' not in page


def test_mean_maps_are_drawn(tmp_path):
    for i in range(3):
        Image.effect_noise((64, 64), 40 + i).save(tmp_path / f"{i}.png")
    files = sorted(tmp_path.glob("*.png"))
    whyformer.explain_many("bundled:digits", files, "gae", [3, 7], out=tmp_path / "maps")
    report, page = write_and_read(tmp_path / "maps", tmp_path)
    assert report.jobs == 1
    assert page.count("<figcaption>mean map, gae: ") == 2
    assert page.count('src="data:image/') >= 2


def test_damaged_part_is_reported_and_not_shown(folder, tmp_path):
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    part = tmp_path / "copy" / "second" / "part-000000.parquet"
    part.write_bytes(part.read_bytes()[:-7] + b"PAR1xyz")
    report, page = write_and_read(tmp_path / "copy", tmp_path)
    assert report.jobs == 1
    assert [s.damaged for s in report.skipped] == [True]
    assert "missing or damaged" in report.skipped[0].why
    assert "from first to second" not in page
    manifest = tmp_path / "copy" / "first" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "model": 3}))
    with pytest.raises(whyformer.WhyformerError, match="damaged"):
        write_and_read(tmp_path / "copy", tmp_path)
