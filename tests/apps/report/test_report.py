"""``whyformer report``: inputs, skipped files and output. Its appearance is tested in tests/apps/browser."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from apps.cli.test_json import assert_conforms
from apps.report.builders import benchmark_report, build_folder, with_names
from show.builders import ATTACK, picture, sentence
from whyformer import Explanation
from whyformer.apps import cli
from whyformer.apps.report import write_report
from whyformer.errors import InputError, LoadError
from whyformer.show import encode, figure, page

PICTURE = Path(__file__).parents[3] / "examples" / "pictures" / "digits_37.png"


class Page(HTMLParser):
    """The parsed page: tags with their attributes, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def write_page(sources, tmp_path: Path, **options) -> Page:
    report = write_report(sources, tmp_path / "report.html", **options)
    assert report.bytes == report.path.stat().st_size
    return Page(report.path.read_text(encoding="utf-8"))


# -- content ----------------------------------------------------------------------------------------------------
def test_nested_folders_are_reported_completely(tmp_path):
    report = write_report(build_folder(tmp_path / "in"), tmp_path / "r.html")
    assert (report.inputs, report.explanations, report.benchmarks) == (4, 6, 1)
    assert report.skipped == []
    page = Page(report.path.read_text())
    for text in (
        "An utterly charming film, though it drags.", "A dull one.", "night", "tiny-vit", "tiny-bert", "start_layer=0", "whyformer 0.0.9",
        "61.50 [58.00, 65.00]", "published 55.42", "20 pictures: few.", "rollout: boom (1 of 1 records)", "Chefer, Gur, Wolf", "emu", "90.9 %",
    ):  # fmt: skip
        assert text in page.text, text
    assert len([a for a in page.all("tr") if "data-map" in a]) == 6
    assert len({a["id"] for _, a in page.tags if a.get("id")}) == len([a for _, a in page.tags if a.get("id")])
    targets = {a["href"] for a in page.all("a")}
    assert targets <= {f"#{a['id']}" for _, a in page.tags if a.get("id")}


def test_page_loads_nothing_and_runs_only_its_script(tmp_path):
    page = write_page(build_folder(tmp_path / "in"), tmp_path)
    for _, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("data:image/", "#")), value
    source = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"url\((.{22})", source)) == {"data:font/woff2;base64"}
    assert "@import" not in source
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]{44}';", policy)
    assert len(page.all("script")) == 1


def test_report_is_deterministic(tmp_path):
    folder = build_folder(tmp_path / "in")
    write_report(folder, tmp_path / "a.html")
    write_report(folder, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_pictures_are_small_and_valid(tmp_path):
    large = torch.randint(0, 255, (1, 1200, 1600, 3), dtype=torch.uint8)
    with_names(picture(size=(1200, 1600), pictures=large), "m").save(tmp_path / "large.safetensors")
    page = write_page(tmp_path / "large.safetensors", tmp_path)
    thumbnails = [image for image in page.all("img") if image["alt"] in ("input", "map")]
    assert len(thumbnails) == 2
    for image in page.all("img"):
        assert image["alt"]
        data = base64.b64decode(image["src"].partition(",")[2])
        assert len(data) < 60_000
        with Image.open(io.BytesIO(data)) as shown:
            assert shown.size == ((128, 96) if image in thumbnails else (384, 288))


def test_many_pictures_are_compressed_more(tmp_path):
    noise = torch.Generator().manual_seed(0)
    for i in range(60):
        pixels = torch.randint(0, 255, (1, 320, 320, 3), dtype=torch.uint8, generator=noise)
        e = picture(torch.rand(4, 6, generator=noise), size=(320, 320), pictures=pixels)
        rows = [replace(e, method=f"method{k}", model="m") for k in range(2)]
        for k, explanation in enumerate(rows):
            explanation.save(tmp_path / f"{i}-{k}.safetensors")
    report = write_report(tmp_path, tmp_path / "r.html")
    assert report.explanations == 120
    assert report.bytes < 5_000_000


def test_batch_is_split_into_samples(tmp_path):
    e = sentence()
    twice = replace(
        e.with_features(tokens=e.tokens * 2, offsets=e.offsets * 2, texts=[e.texts[0], "An utterly charming film, though it drags?"]),
        scores=e.scores.repeat(2, 1), target=e.target.repeat(2), logits=e.logits.repeat(2, 1), target_names=e.target_names * 2,
    )  # fmt: skip
    twice.save(tmp_path / "two.safetensors")
    assert write_report(tmp_path, tmp_path / "r.html").inputs == 2


def test_class_agnostic_map_is_drawn_once(tmp_path):
    """Such a map is saved once for each requested class."""
    facts = {"method": "rollout", "diagnostics": {"class_specific": False}}
    for name, target in (("a", 0), ("b", 1)):
        picture(target=target, **facts).save(tmp_path / f"{name}.safetensors")
        picture(target=target).save(tmp_path / f"{name}2.safetensors")
    picture(torch.rand(4, 6), **facts).save(tmp_path / "c.safetensors")  # a different map, of other weights
    page = write_page(tmp_path, tmp_path)
    assert "1 input, 4 maps." in page.text
    assert sum(image["alt"].startswith("rollout: any class") for image in page.all("img")) == 2


def test_duplicate_explanations_are_shown_once(tmp_path):
    """Duplicates agree in input, method, settings, target and scores."""
    for name, e in (("a", picture()), ("b", picture()), ("c", sentence()), ("d", sentence())):
        e.save(tmp_path / f"{name}.safetensors")
    page = write_page(tmp_path, tmp_path)
    assert "2 inputs, 2 maps." in page.text
    assert all(f"{name}.safetensors" in page.text for name in "abcd")
    assert len([a for a in page.all("a") if a["href"] in ("#i1", "#i2")]) == 2
    e = picture()
    for name, explanation in (("e", replace(e, scores=e.scores * 2)), ("f", replace(e, settings={"start_layer": 3})), ("g", picture(target=0))):
        explanation.save(tmp_path / f"{name}.safetensors")
    assert write_report(tmp_path, tmp_path / "r.html").explanations == 5


def test_warnings_and_diagnostics_are_shown(tmp_path):
    e = replace(sentence(), diagnostics={"conservation": {"sum": [0.987654]}, "warnings": [["the audit found <odd> things"]], "class_specific": False})
    e.save(tmp_path / "e.safetensors")
    page = write_page(tmp_path, tmp_path)
    assert "the audit found <odd> things" in page.text
    assert "conservation: sum 0.9877" in page.text
    assert "any class" in page.text


def test_maps_that_cannot_be_drawn_have_reason(tmp_path):
    picture(torch.zeros(24), grid=None).save(tmp_path / "a.safetensors")
    sentence(scores=torch.zeros_like(sentence().scores[0])).save(tmp_path / "b.safetensors")
    text = write_page(tmp_path, tmp_path).text
    assert "without a grid" in text
    assert text.count("all scores are 0") == 2


def test_picture_explained_by_command_line_is_reported(tmp_path):
    arguments = ["explain", str(PICTURE), "-m", "bundled:digits", "-t", "3", "-t", "7", "--format", "json,png", "--out", str(tmp_path / "o"), "--quiet"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    report = write_report(tmp_path / "o", tmp_path / "r.html")
    assert (report.inputs, report.explanations, report.skipped) == (1, 2, [])
    page = Page(report.path.read_text())
    assert len(page.all("img")) == 3 + 2  # three images and two thumbnails: the picture and one map
    assert "10 classes: 0, 1, 2" in page.text


def test_untrusted_text_is_escaped(tmp_path):
    labels = {0: ATTACK, 1: f"{ATTACK}'\"", 2: "emu"}
    with_names(sentence(f"{ATTACK} {ATTACK}", labels=labels), ATTACK, ATTACK).save(tmp_path / "onload=alert(1) '\"&lt;.safetensors")
    with_names(picture(labels=labels), ATTACK, ATTACK).save(tmp_path / "p.safetensors")
    (tmp_path / "<img src=x onerror=alert(1)>.bin").write_text("junk")
    report = replace(benchmark_report(ATTACK), conventions={"model": ATTACK, ATTACK: ATTACK}, remarks=(ATTACK,), counts={ATTACK: {"failed": 1}})
    report.write(tmp_path)
    page = write_page(tmp_path, tmp_path, title=ATTACK)
    assert len(page.all("script")) == 1
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert [a for a in page.all("img") if not (a["src"] or "").startswith("data:image/")] == []
    assert page.text.count("alert") > 8


# -- skipped and invalid files -----------------------------------------------------------------------------------
def test_other_and_damaged_files_are_listed_separately(tmp_path):
    folder = build_folder(tmp_path / "in")
    (folder / "notes.txt").write_text("junk")
    (folder / "other.json").write_text("[1, 2]")
    (folder / "broken.json").write_text('{"schema_version": 1, "command": "explain", "explan')
    (folder / "torn.safetensors").write_bytes((folder / "text/dull.safetensors").read_bytes()[:300])
    (folder / ".hidden").write_text("x")
    facts = json.loads((folder / "text/film.json").read_text())
    facts["explanations"][0]["tokens"][0] = ["too", "few"]
    (folder / "misfit.json").write_text(json.dumps(facts))
    facts = json.loads((folder / "text/film.json").read_text())
    facts["explanations"][0]["diagnostics"]["warnings"] = 7
    (folder / "misfit2.json").write_text(json.dumps(facts))
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    report = write_report(folder, tmp_path / "r.html")
    assert report.benchmarks == 1
    assert {s.file for s in report.skipped if not s.damaged} == {"notes.txt", "other.json", "model.safetensors"}
    assert {s.file for s in report.skipped if s.damaged} == {"broken.json", "torn.safetensors", "misfit.json", "misfit2.json"}
    text = Page(report.path.read_text()).text
    assert "notes.txt" in text
    assert "no saved explanation" in text


def test_existing_report_is_not_read(tmp_path):
    folder = build_folder(tmp_path / "in")
    first = write_report(folder, folder / "report.html")
    second = write_report(folder, folder / "report.html")
    assert first == second


def test_table_without_report_and_unfinished_benchmark_are_skipped_with_reason(tmp_path):
    benchmark_report().write(tmp_path)
    (tmp_path / "report.json").unlink()
    (tmp_path / "records.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="nothing to report"):
        write_report(tmp_path, tmp_path / "r.html")
    sentence().save(tmp_path / "e.safetensors")
    reasons = {file.file: file.why for file in write_report(tmp_path, tmp_path / "r.html").skipped if not file.damaged}
    assert "report.json" in reasons["table.csv"]
    assert "unfinished" in reasons["records.jsonl"]


@pytest.mark.parametrize("change", [
    {"tables": 3}, {"tables": [3]}, {"tables": [{"table": "main"}]}, {"figures": [{"row": "rollout"}]}, {"counts": ["rollout"]}, {"curves": 1},
    {"conventions": "none"}, {"remarks": 7}, {"figures": [{"table": "main", "row": "mIoU", "column": "rollout", "measured": "x"}]},
])  # fmt: skip
def test_inconsistent_benchmark_is_damaged(change, tmp_path):
    benchmark_report().write(tmp_path)
    sentence().save(tmp_path / "e.safetensors")
    facts = json.loads((tmp_path / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**facts, **change}))
    report = write_report(tmp_path, tmp_path / "r.html")
    assert (report.explanations, report.benchmarks) == (1, 0)
    assert [(s.file, s.damaged) for s in report.skipped] == [("report.json", True)]


def test_figures_equal_csv(tmp_path):
    benchmark_report().write(tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    page = write_page(tmp_path, tmp_path)
    shown = {a["data-by"] for a in page.all("td") if a.get("data-by")}
    assert {str(float(row["measured"])) for row in rows if row["measured"]} <= shown


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda f: None, "0 files of other kinds"),
        (lambda f: (f / "a.txt").write_text("x"), "1 file of other kinds"),
        (lambda f: (f / "a.safetensors").write_text("x"), "nothing in .* can be read; a.safetensors"),
    ],
)
def test_input_without_explanations_raises(prepare, expected, tmp_path):
    (tmp_path / "in").mkdir()
    prepare(tmp_path / "in")
    with pytest.raises(InputError, match=expected):
        write_report(tmp_path / "in", tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_unreadable_input_and_unwritable_output_raise(tmp_path):
    with pytest.raises(LoadError, match="no such file"):
        write_report(tmp_path / "nowhere", tmp_path / "r.html")
    folder = build_folder(tmp_path / "in")
    with pytest.raises(InputError, match=r"\.html"):
        write_report(folder, tmp_path / "r.pdf")
    (tmp_path / "d.html").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        write_report(folder, tmp_path / "d.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="cannot write"):
        write_report(folder, tmp_path / "file" / "r.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.html", "file", "in"]


@pytest.mark.parametrize("change", [
    {"scores": None}, {"scores": [[1.0, "x"]]}, {"logits": [1.0]}, {"target": []}, {"offsets": 3}, {"labels": {"x": "y"}}, {"level": "word"},
    {"scores": [[float("nan")]]}, {"surprise": 1}, {"geometry": [{"size": [1, 1]}]},
])  # fmt: skip
def test_invalid_explanation_dictionary_raises(change):
    facts = json.loads(json.dumps(sentence().to_dict()))
    assert Explanation.from_dict(facts).method == facts["method"]
    with pytest.raises(InputError):
        Explanation.from_dict({**facts, **change})


def test_explanation_round_trip_through_json():
    for e in (sentence(), picture(), replace(picture(), model="m")):
        restored = Explanation.from_dict(json.loads(json.dumps(e.to_dict())))
        assert json.dumps(restored.to_dict()) == json.dumps(e.to_dict())
        assert torch.equal(restored.scores, e.scores)


# -- the command -------------------------------------------------------------------------------------------------
def test_report_command(tmp_path):
    folder = build_folder(tmp_path / "in")
    result = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "r.html")])
    assert result.exit_code == 0, result.output
    assert "4 inputs, 6 maps, 1 benchmark" in result.stdout
    result = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "r.html"), "--json"])
    assert_conforms("report", json.loads(result.stdout))
    result = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "r.html"), "--quiet"])
    assert (result.exit_code, result.output) == (0, "")
    result = CliRunner().invoke(cli.app, ["report", str(folder / "text"), "-o", str(tmp_path / "r.html")])
    assert result.stdout.startswith("2 inputs, 3 maps (")  # nothing about benchmarks, of which there are none
    result = CliRunner().invoke(cli.app, ["report", str(folder / "bench"), "-o", str(tmp_path / "r.html")])
    assert result.stdout.startswith("1 benchmark (")


def test_pictures_and_pages_are_ignored(tmp_path):
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    for kind in ("png", "svg", "pdf"):
        (drawn / f"a.{kind}").write_bytes(encode(figure(sentence()), kind))
    (drawn / "b.html").write_text(page(sentence()))
    with pytest.raises(InputError, match=r"pictures and pages have no scores.*--format png,json"):
        write_report(drawn, tmp_path / "r.html")
    sentence().save(drawn / "e.safetensors")
    (drawn / "list.txt").write_text("x")
    assert [file.file for file in write_report(drawn, tmp_path / "r.html").skipped] == ["list.txt"]


def test_report_command_with_damaged_files_has_status_3(tmp_path):
    folder = build_folder(tmp_path / "in")
    (folder / "torn.safetensors").write_bytes(b"torn")
    result = CliRunner().invoke(cli.app, ["report", str(folder), "-o", str(tmp_path / "r.html"), "--json"])
    assert result.exit_code == 3
    assert "torn.safetensors" in result.stderr
    assert_conforms("report", json.loads(result.stdout))
    assert (tmp_path / "r.html").is_file()
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "nowhere")])
    assert (result.exit_code, result.stdout) == (2, "")


def test_report_contains_no_paths(tmp_path):
    secret = tmp_path / "home-of-somebody" / "my-model"
    with_names(sentence(), str(secret)).save(tmp_path / "e.safetensors")
    replace(benchmark_report(), conventions={"model": str(secret)}).write(tmp_path)
    write_report(tmp_path, tmp_path / "r.html")
    source = (tmp_path / "r.html").read_text()
    assert "my-model" in source
    assert "home-of-somebody" not in source


# -- models ------------------------------------------------------------------------------------------------------
def test_models_are_described_from_stored_explanations(tmp_path):
    with_names(picture(), "bundled:digits").save(tmp_path / "a.safetensors")  # not the bundled model, whose classes are 0 to 9
    with_names(replace(picture(), labels=None), "owner/never-downloaded").save(tmp_path / "b.safetensors")
    with_names(sentence(), str(tmp_path / "my-model")).save(tmp_path / "c.safetensors")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(json.dumps({"architectures": ["Opened"], "id2label": {"0": "opened"}}))
    text = write_page([tmp_path / f"{name}.safetensors" for name in "abc"], tmp_path).text
    models = text[text.rindex("Models") : text.rindex("As stored with the maps")]
    rows = {name: models.index(name) for name in ("bundled:digits", "owner/never-downloaded", "my-model")}
    assert list(rows) == sorted(rows, key=rows.get)
    first, second, third = models[: rows["owner/never-downloaded"]], models[rows["owner/never-downloaded"] : rows["my-model"]], models[rows["my-model"] :]
    assert "picture 32 × 48" in first and "3 classes: cat, dog, emu" in first
    assert "3, without names" in second
    assert "positive" in third
    assert "pened" not in text


def test_stored_measurements_are_shown_below_map(tmp_path):
    result = CliRunner().invoke(cli.app, ["explain", str(PICTURE), "-m", "bundled:digits", "-t", "3", "--check", "--format", "json", "-o", str(tmp_path), "--json"])
    verdict = json.loads(result.stdout)["checks"][0]["verdicts"][0]
    saved = Explanation.from_dict(json.loads(result.stdout)["explanations"][0])
    saved.with_features(tokens=None).save(tmp_path / "again.safetensors")
    torn = replace(saved, diagnostics={"trust": [{"verdict": "Better."}]})
    torn.save(tmp_path / "torn.safetensors")
    report = write_report(tmp_path, tmp_path / "report.html")
    assert [(s.file, s.damaged) for s in report.skipped] == [("torn.safetensors", True)]
    page = Page((tmp_path / "report.html").read_text())
    assert page.text.count(verdict) == 2
    assert len(page.all("polyline")) == 4
