"""Every benchmark runs end to end on tiny models; what it writes; and how it treats what is wrong."""

from __future__ import annotations

import copy
import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from whyformer.benchmarks import BENCHMARKS
from whyformer.benchmarks.batches import pixel_spec, read_batch
from whyformer.benchmarks.configurations import parse_methods
from whyformer.benchmarks.perturbation import topk_mask
from whyformer.benchmarks.published import PUBLISHED
from whyformer.benchmarks.runner import run_benchmark
from whyformer.benchmarks.study import Exclusion, Study
from whyformer.datasets.readers import open_pictures, open_texts
from whyformer.errors import InputError
from whyformer.evaluation.forwards import activated
from whyformer.prepared import Prepared
from zoo_evaluate import movie_folder, picture_folder, processor, sentence_file, tiny_bert, tiny_vit

FEW = "raw_attention,transformer_attribution:start_layer=1"
TEXT = {"rationales": movie_folder, "bias": None, "activation": sentence_file}
OPTIONS = {
    "sanity": {"draws": 1, "subsets": 5},
    "ablation": {},
    "perturbation": {"measures": "positive,negative,deletion,insertion", "steps": 3},
}


@pytest.fixture(scope="module")
def vit():
    return tiny_vit()


@pytest.fixture(scope="module")
def bert():
    return tiny_bert()


def run(name: str, out: Path, data: Path | None, vit, bert, text: bool, **more):
    model, tool = bert if text else (vit, processor())
    methods = more.pop("methods", None if name == "ablation" else FEW)
    return run_benchmark(
        name,
        model,
        data,
        out,
        methods=methods,
        processor=tool,
        samples_per_batch=2,
        batch_size=7,
        **{**OPTIONS.get(name, {}), **more},
    )


@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - {"evidence"}))  # that one is of language models
def test_each_benchmark_end_to_end(name: str, tmp_path: Path, vit, bert) -> None:
    text = name in TEXT
    make = TEXT.get(name, picture_folder)
    data = make(tmp_path / "data") if make else None
    more = {"count": 6} if name == "bias" else {}
    outcome = run(name, tmp_path / "out", data, vit, bert, text, **more)
    report = outcome.report
    assert report.unscored == 0
    assert {"random"} <= set(report.counts)
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts["conventions"]["versions"]
    rows = list(csv.DictReader((tmp_path / "out" / "table.csv").read_text().splitlines()))
    assert rows and any(r["measured"] for r in rows)
    assert "### Conventions" in (tmp_path / "out" / "table.md").read_text()
    if report.curves:
        assert (tmp_path / "out" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    again = run(name, tmp_path / "out", data, vit, bert, text, **more)
    assert again.measured == 0
    assert again.resumed == outcome.measured
    assert [t.cells for t in again.report.tables] == [t.cells for t in report.tables]


@pytest.mark.parametrize("name", ["activation", "conservation", "sanity", "arbitration"])
def test_benchmarks_on_both_kinds_of_input(name: str, tmp_path: Path, vit, bert) -> None:
    text = name != "activation"
    data = (sentence_file if text else picture_folder)(tmp_path / "data")
    assert run(name, tmp_path / "out", data, vit, bert, text).report.unscored == 0


def test_the_floor_and_the_ceiling(tmp_path: Path, vit, bert) -> None:
    found = run("segmentation", tmp_path / "out", picture_folder(tmp_path / "data"), vit, bert, False).report
    cells = found.tables[0].cells
    for row in ("Pixel accuracy ↑", "mAP ↑", "mIoU ↑", "Pointing game ↑", "Energy in mask ↑"):
        assert cells[row, "ground_truth"].measured.value == pytest.approx(100)
        assert cells[row, "random"].measured.value < 100
    assert cells["mIoU ↑", "transformer_attribution"].published == 61.95


def test_published_figures_only_where_the_settings_are_the_papers() -> None:
    same, other = parse_methods(
        "transformer_attribution:start_layer=1,transformer_attribution:start_layer=0", BENCHMARKS["perturbation"].published
    )
    assert (same.label, same.published) == ("transformer_attribution", "transformer_attribution")
    assert (other.label, other.published) == ("transformer_attribution (start_layer=0)", None)


def test_published_figures_are_of_methods_whose_settings_are_known() -> None:
    assert set(PUBLISHED) <= set(BENCHMARKS)
    for name, section in PUBLISHED.items():
        tables = {title: figures for title, figures in section.items() if title != "methods"}
        assert tables
        for figures in tables.values():
            assert set(figures) <= {*BENCHMARKS[name].published, "random"}
            assert all(0 < figure < 100 for figure in figures.values())


def test_a_label_of_ones_own_brings_no_figures_of_another_method() -> None:
    variants = BENCHMARKS["ablation"].published
    published = BENCHMARKS["perturbation"].published | variants
    mine, lent, named = parse_methods("mine=lrp,partial_lrp=raw_attention,full method=rollout:start_layer=1", published)
    assert [c.published for c in (mine, lent, named)] == ["lrp", None, None]
    (full,) = parse_methods("full method=transformer_attribution:start_layer=1", variants)
    assert full.published == "full method"


def test_shared_forwards_give_the_figures_of_separate_runs(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    both = run("perturbation", tmp_path / "both", data, vit, bert, False).report.tables[0].cells
    for method in ("raw_attention", "transformer_attribution:start_layer=1"):
        alone = (
            run("perturbation", tmp_path / method[:3], data, vit, bert, False, methods=method).report.tables[0].cells
        )
        for (row, column), cell in alone.items():
            assert both[row, column].measured.value == pytest.approx(cell.measured.value)


def test_the_leaderboard_has_the_figures_of_the_other_benchmarks(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    methods = "raw_attention,libragrad,gae:affinity=True"
    (table,) = run("leaderboard", tmp_path / "a", data, vit, bert, False, methods=methods, explained="predicted").report.tables
    (other,) = run("perturbation", tmp_path / "b", data, vit, bert, False, methods=methods, explained="predicted").report.tables[:1]
    masked = run("segmentation", tmp_path / "c", data, vit, bert, False, methods=methods, explained="target").report.tables[0]
    for label in ("raw_attention", "libragrad", "gae (affinity=True)"):
        for mine, theirs in (("Positive ↓", "Positive, predicted ↓"), ("Negative ↑", "Negative, predicted ↑")):
            assert table.cells[label, mine].measured.value == pytest.approx(other.cells[theirs, label].measured.value)
        assert table.cells[label, "mIoU ↑"].measured.value == pytest.approx(masked.cells["mIoU ↑", label].measured.value)
        assert table.cells[label, "Cost, forwards"].measured.value > 0
        assert np.isfinite(table.cells[label, "Condition, %"].measured.value)
    positive = [table.cells[row, "Positive ↓"].measured.value for row in table.rows]
    assert positive == sorted(positive)
    behind = [table.cells[row, "Positive: behind the best"].measured for row in table.rows if row not in ("random", "ground_truth")]
    assert sum(one is None for one in behind) == 1
    assert all(one.value >= 0 for one in behind if one is not None)


def test_the_leaderboard_takes_the_masks_of_other_pictures(tmp_path: Path, vit, bert) -> None:
    masks, plain = picture_folder(tmp_path / "masks"), tmp_path / "plain"
    for name in "0123":  # class folders, which have no masks
        (plain / name).mkdir(parents=True)
    for i in range(4):
        (masks / "images" / f"{i}.png").rename(plain / "0123"[i] / f"plain{i}.png")
    masks = picture_folder(tmp_path / "more", 3)
    found = run("leaderboard", tmp_path / "a", plain, vit, bert, False, masks=str(masks), methods="libragrad,gae").report
    (table,) = found.tables
    other = run("perturbation", tmp_path / "b", plain, vit, bert, False, methods="gae").report.tables[0]
    masked = run("segmentation", tmp_path / "c", masks, vit, bert, False, methods="gae", explained="target").report.tables[0]
    assert table.cells["gae", "Positive ↓"].measured == other.cells["Positive, predicted ↓", "gae"].measured
    assert table.cells["gae", "Positive ↓"].measured.count == 4
    for title in ("mAP ↑", "mIoU ↑", "Energy in mask ↑"):
        assert table.cells["gae", title].measured == masked.cells[title, "gae"].measured
    assert "of 4" in found.conventions["clean accuracy"]


def test_the_leaderboard_of_digit_scenes_is_by_their_masks(tmp_path: Path) -> None:
    asked = {"model": "bundled:digits", "data": "scenes:2", "methods": "gae"}
    report = run_benchmark("leaderboard", out=tmp_path / "a", **asked).report
    (table,), (other,) = report.tables, run_benchmark("segmentation", out=tmp_path / "b", **asked).report.tables
    assert "Positive ↓" not in table.columns
    for title in ("mAP ↑", "Pixel accuracy ↑", "Energy in mask ↑"):
        assert table.cells["gae", title].measured == other.cells[title, "gae"].measured
    assert table.cells["gae", "Cost, forwards"].measured.value > 0
    assert report.conventions["class explained"] == "target"
    with pytest.raises(InputError, match="scenes have masks"):
        run_benchmark("leaderboard", out=tmp_path / "c", masks="scenes:2", **asked)


def test_the_leaderboard_of_texts(tmp_path: Path, vit, bert) -> None:
    data = sentence_file(tmp_path / "data")
    report = run("leaderboard", tmp_path / "a", data, vit, bert, True, methods="gae,libragrad,gae:affinity=True").report
    assert {"gae", "libragrad"} <= set(report.tables[0].rows)
    assert "gae (affinity=True)" not in report.tables[0].rows
    other = run("activation", tmp_path / "b", data, vit, bert, True, methods="gae,libragrad").report.tables[0]
    column = next(c for c in other.columns if "AUAC" in c)
    found = report.tables[0].cells["gae", "AUAC ↑"].measured.value
    assert found == pytest.approx(100 * other.cells["gae", column].measured.value)


@pytest.mark.parametrize("per", ["pixel", "nearest", "patch"])
def test_what_is_taken_out_is_pixels_or_whole_patches(per: str, tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    report = run("perturbation", tmp_path / "out", data, vit, bert, False, methods="rollout", per=per).report
    said = {"pixel": "bilinearly upsampled", "nearest": "score of its patch", "patch": "patches by their score"}
    assert said[per] in report.conventions["removed"]


def test_a_failing_method_is_recorded_and_the_rest_goes_on(tmp_path: Path, vit, bert, monkeypatch) -> None:
    plain = Prepared.explain

    def sometimes(ready, method, *rest, **settings):
        inputs = ready.inputs.tensor
        if method == "raw_attention" and len(inputs) == 1 and float(inputs.sum()) > 0:
            raise RuntimeError("boom")
        if method == "raw_attention" and len(inputs) > 1:
            raise RuntimeError("batch")
        return plain(ready, method, *rest, **settings)

    data = picture_folder(tmp_path / "data")
    monkeypatch.setattr(Prepared, "explain", sometimes)
    broken = run("segmentation", tmp_path / "out", data, vit, bert, False).report
    counts = broken.counts["raw_attention"]
    assert counts["failed"] + counts["scored"] == 5
    assert counts["failed"] > 0
    assert broken.counts["transformer_attribution"]["scored"] == 5
    assert broken.unscored == counts["failed"]
    assert "Samples without figures" in broken.markdown()
    monkeypatch.undo()
    mended = run("segmentation", tmp_path / "out", data, vit, bert, False)
    assert mended.report.unscored == 0  # what failed is tried again
    assert mended.measured == counts["failed"]


@pytest.fixture
def constant_raw_attention(monkeypatch) -> None:
    """The maps of raw attention come out constant, those of other methods as they are."""
    plain = Prepared.explain

    def flat(ready, method, *rest, **settings):
        e = plain(ready, method, *rest, **settings)
        return replace(e, scores=e.scores * 0 + 1) if method == "raw_attention" else e

    monkeypatch.setattr(Prepared, "explain", flat)


def test_constant_maps_are_counted_and_not_scored(tmp_path: Path, vit, bert, constant_raw_attention) -> None:
    found = run("perturbation", tmp_path / "out", picture_folder(tmp_path / "data"), vit, bert, False).report
    assert found.counts["raw_attention"] == {"scored": 0, "failed": 0, "constant": 5, "nan": 0}
    assert found.counts["transformer_attribution"]["scored"] == 5


@pytest.mark.parametrize("name", ["perturbation", "segmentation"])
def test_constant_maps_may_be_counted_as_the_reference_does(name: str, tmp_path: Path, vit, bert, constant_raw_attention) -> None:
    data = picture_folder(tmp_path / "data")
    left_out = run(name, tmp_path / "out", data, vit, bert, False)
    counted = run(name, tmp_path / "out", data, vit, bert, False, constant="count")
    assert left_out.report.unscored == 5
    assert counted.measured == 0  # the same records, summed up otherwise
    assert counted.report.unscored == 0
    assert any("5 maps of raw_attention are constant" in r for r in counted.report.remarks)
    if name == "segmentation":
        from sklearn.metrics import average_precision_score

        cells = counted.report.tables[0].cells
        masks = [np.asarray(Image.open(data / "masks" / f"{i}.png").resize((32, 32), 0)) > 127 for i in range(5)]
        ground = np.mean([1 - m.mean() for m in masks])
        assert cells["Pixel accuracy ↑", "raw_attention"].measured.value == pytest.approx(100 * ground)
        assert cells["mIoU ↑", "raw_attention"].measured.value == pytest.approx(50 * ground)
        truths = [np.concatenate([~m.ravel(), m.ravel()]) for m in masks]
        wanted = np.mean([average_precision_score(t, np.repeat([1.0, 0.0], 1024)) for t in truths])
        assert cells["mAP ↑", "raw_attention"].measured.value == pytest.approx(100 * wanted)


def test_empty_masks_are_left_out_and_said(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    Image.fromarray(np.zeros((40, 36), dtype=np.uint8)).save(data / "masks" / "1.png")
    report = run("segmentation", tmp_path / "out", data, vit, bert, False).report
    assert report.counts["random"]["scored"] == 4
    assert any("empty mask" in r for r in report.remarks)


def test_labels_outside_the_models_classes_are_refused(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    rows = json.loads((data / "index.json").read_text())
    rows[0]["imagenet_class"] = 500
    (data / "index.json").write_text(json.dumps(rows))
    with pytest.raises(InputError, match="label sets do not match"):
        run("perturbation", tmp_path / "out", data, vit, bert, False)
    for row in rows:
        row.pop("imagenet_class")
    (data / "index.json").write_text(json.dumps(rows))
    with pytest.raises(InputError, match="no label"):
        run("perturbation", tmp_path / "out", data, vit, bert, False)
    assert (
        run("segmentation", tmp_path / "out", data, vit, bert, False).report.unscored == 0
    )  # predicted class: no labels needed


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("perturbation", {"colour": 1}, "no option 'colour'"),
        ("perturbation", {"measures": "sideways"}, "measures"),
        ("perturbation", {"baseline": "snow"}, "baseline"),
        ("perturbation", {"files": ["nothing.jpg"]}, "not in the data"),
        ("segmentation", {"explained": "all"}, "explained"),
        ("sanity", {"checks": "smell"}, "checks"),
        ("perturbation", {"methods": "lpr"}, "Did you mean 'lrp'"),
        ("perturbation", {"methods": "lrp,lrp"}, "listed twice"),
        ("perturbation", {"methods": "rollout:first=1"}, "no setting 'first'"),
        ("perturbation", {"batch_size": 0}, "batch size"),
    ],
)
def test_bad_options_are_refused_before_any_work(
    name: str, options: dict, message: str, tmp_path: Path, vit, bert
) -> None:
    data = picture_folder(tmp_path / "data")
    with pytest.raises(InputError, match=message):
        if "batch_size" in options:
            run_benchmark(name, vit, data, tmp_path / "out", processor=processor(), **options)
        run(name, tmp_path / "out", data, vit, bert, False, **options)


def test_unknown_benchmark_and_missing_data(tmp_path: Path, vit) -> None:
    with pytest.raises(InputError, match="benchmarks: perturbation"):
        run_benchmark("beauty", vit, tmp_path)
    with pytest.raises(InputError, match="needs data"):
        run_benchmark("perturbation", vit, None, tmp_path / "out", processor=processor())


def test_cost_is_said_before_the_work(tmp_path: Path, vit) -> None:
    said: list[str] = []
    started: list[int] = []

    def track(work, title, total):
        started.append(len(said))
        return work

    run_benchmark(
        "segmentation",
        vit,
        picture_folder(tmp_path / "data"),
        tmp_path / "out",
        methods=FEW,
        processor=processor(),
        say=said.append,
        track=track,
    )
    assert started == [0, 1]  # the trial, and the work that its cost was said of
    assert re.search("about [1-9][0-9,]* forward passes, about", said[0])
    assert "20 explanations to score (5 samples)" in said[0]


def test_models_with_several_classes_at_once_have_sigmoid_probabilities(tmp_path: Path, vit) -> None:
    data = picture_folder(tmp_path / "data")
    model = copy.deepcopy(vit)
    model.config.problem_type = "multi_label_classification"
    found = {}
    for name, one in (("single", vit), ("several", model)):
        run_benchmark("perturbation", one, data, tmp_path / name, methods="rollout", processor=processor())
        lines = (tmp_path / name / "records.jsonl").read_text().splitlines()
        rows = [r for r in map(json.loads, lines) if "values" in r]
        found[name] = np.array([r["values"]["clean"]["probability"] for r in rows])
    assert not np.isclose(found["several"], found["single"]).any()
    logits = np.array([[0.0, np.log(3)]])
    assert activated(logits, "softmax") == pytest.approx(np.array([[0.25, 0.75]]))
    assert activated(np.zeros((0, 0)), "softmax").size == 0
    assert activated(logits, "sigmoid") == pytest.approx(np.array([[0.5, 0.75]]))


def test_a_processors_own_filter_is_taken(vit) -> None:
    """0 is nearest, not a filter that is missing."""
    for own, wanted in ((0, "nearest"), (3, "bicubic"), (None, "bilinear"), (4, "box")):
        tool = SimpleNamespace(image_mean=[0.0], image_std=[1.0], resample=own)
        assert pixel_spec(vit, tool).resample == wanted
    assert pixel_spec(vit, tool, "lanczos").resample == "lanczos"
    with pytest.raises(InputError, match="resample must be one of nearest"):
        pixel_spec(vit, tool, "sharp")


def test_files_may_be_named_with_commas(tmp_path: Path, vit) -> None:
    data = picture_folder(tmp_path / "data")
    every = run_benchmark("perturbation", vit, data, tmp_path / "all", methods="rollout", processor=processor())
    names = sorted({json.loads(line)["sample"] for line in (tmp_path / "all" / "records.jsonl").read_text().splitlines() if "sample" in line})
    few = run_benchmark("perturbation", vit, data, tmp_path / "few", methods="rollout", processor=processor(), files=",".join(names[:2]))
    assert few.report.counts["rollout"]["scored"] == 2 < every.report.counts["rollout"]["scored"]


def test_ties_may_go_as_topk_takes_them(tmp_path: Path, vit) -> None:
    """Other pixels may go, but as many of them; and the choice is stated."""
    data = picture_folder(tmp_path / "data")
    outcome = run_benchmark("perturbation", vit, data, tmp_path / "topk", methods="rollout", processor=processor(), ties="topk")
    assert outcome.report.counts["rollout"]["scored"]
    assert outcome.report.conventions["ties"] == "equal scores are ordered as by torch.topk on a CPU"
    with pytest.raises(InputError, match="ties must be one of index, last, topk"):
        run_benchmark("perturbation", vit, data, tmp_path / "x", methods="rollout", processor=processor(), ties="first")
    scores = np.array([[0.5, 0.5], [0.1, 0.9]])
    assert topk_mask(scores, 1, (2, 2)).tolist() == [[False, False], [False, True]]
    assert [int(topk_mask(np.zeros(9), k, (3, 3)).sum()) for k in range(10)] == list(range(10))


def test_texts_are_cut_off_where_roberta_ends(tmp_path: Path, bert) -> None:
    """Its positions count from behind the padding's, so of 12 only 10 are for tokens."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=28, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=12,
        pad_token_id=1, num_labels=2,
    )  # fmt: skip
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "good film " * 10 + "\t1\n")
    report = run("conservation", tmp_path / "out", tmp_path, None, (RobertaForSequenceClassification(config).eval(), bert[1]), True, methods="input_x_gradient")
    assert report.report.unscored == 0


@pytest.mark.parametrize("text", [False, True])
def test_methods_of_a_batch_share_forward_passes_and_give_what_they_give_alone(text, tmp_path):
    model, tool = tiny_bert() if text else (tiny_vit(), processor())
    data = open_texts(sentence_file(tmp_path / "text")) if text else open_pictures(picture_folder(tmp_path / "data"))
    samples = list(data[1])[:3]
    study = Study(model.double(), tool, "text" if text else "image", samples, (), {})
    chosen = parse_methods("transformer_attribution,gae,rollout,lrp_ah_ln,random", {})
    batch, passes = read_batch(study, samples), []
    alone = {(c, i): one for c in chosen for i, one in enumerate(batch.scores(c, [1, 0, 1]))}
    batch.maps(chosen, [1, 0, 1])  # its program is known from here on
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    found = batch.maps(chosen, [1, 0, 1])
    assert len(passes) == 1
    assert found.keys() == alone.keys()
    for key, scores in alone.items():
        assert np.abs(found[key] - scores).max() <= 1e-12 * np.abs(scores).max()


def test_what_fails_among_methods_that_share_is_told_of_its_own_sample(tmp_path, monkeypatch):
    """One sample that a method cannot explain takes neither the others nor the other methods with it."""
    study = Study(tiny_vit(), processor(), "image", (), (), {})
    batch = read_batch(study, list(open_pictures(picture_folder(tmp_path / "data"))[1])[:2])
    plain = Prepared.explain

    def explain(ready, method, target, **settings):
        if method == "gae" and 1 in target:
            raise InputError("not this one")
        return plain(ready, method, target, **settings)

    monkeypatch.setattr(Prepared, "explain", explain)
    chosen = parse_methods("transformer_attribution,gae,rollout", {})
    with pytest.raises(InputError, match="not this one"):  # then each sample is measured by itself
        batch.maps(chosen, [0, 1])
    found = [batch.some([i]).maps(chosen, [i]) for i in (0, 1)]
    failed = [(c.label, i, one.message) for i, maps in enumerate(found) for (c, _), one in maps.items() if isinstance(one, Exclusion)]
    assert failed == [("gae", 1, "InputError: not this one")]
