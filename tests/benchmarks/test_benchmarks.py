"""Every benchmark end to end on tiny models: outputs, consistency between benchmarks, and errors."""

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

from whyformer.benchmarks import BENCHMARKS, evidence
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


@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - {"evidence"}))  # evidence needs a language model
def test_each_benchmark_end_to_end(name: str, tmp_path: Path, vit, bert) -> None:
    text = name in TEXT
    make = TEXT.get(name, picture_folder)
    data = make(tmp_path / "data") if make else None
    options = {"count": 6} if name == "bias" else {}
    outcome = run(name, tmp_path / "out", data, vit, bert, text, **options)
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
    resumed = run(name, tmp_path / "out", data, vit, bert, text, **options)
    assert resumed.measured == 0
    assert resumed.resumed == outcome.measured
    assert [t.cells for t in resumed.report.tables] == [t.cells for t in report.tables]


@pytest.mark.parametrize("name", ["activation", "conservation", "sanity", "arbitration"])
def test_benchmarks_on_both_kinds_of_input(name: str, tmp_path: Path, vit, bert) -> None:
    text = name != "activation"
    data = (sentence_file if text else picture_folder)(tmp_path / "data")
    assert run(name, tmp_path / "out", data, vit, bert, text).report.unscored == 0


def test_random_and_ground_truth_are_floor_and_ceiling(tmp_path: Path, vit, bert) -> None:
    report = run("segmentation", tmp_path / "out", picture_folder(tmp_path / "data"), vit, bert, False).report
    cells = report.tables[0].cells
    for row in ("Pixel accuracy ↑", "mAP ↑", "mIoU ↑", "Pointing game ↑", "Energy in mask ↑"):
        assert cells[row, "ground_truth"].measured.value == pytest.approx(100)
        assert cells[row, "random"].measured.value < 100
    assert cells["mIoU ↑", "transformer_attribution"].published == 61.95


def test_published_figures_require_settings_of_paper() -> None:
    same, other = parse_methods(
        "transformer_attribution:start_layer=1,transformer_attribution:start_layer=0", BENCHMARKS["perturbation"].published
    )
    assert (same.label, same.published) == ("transformer_attribution", "transformer_attribution")
    assert (other.label, other.published) == ("transformer_attribution (start_layer=0)", None)


def test_published_figures_belong_to_known_benchmarks_and_methods() -> None:
    assert set(PUBLISHED) <= set(BENCHMARKS)
    for name, section in PUBLISHED.items():
        tables = {title: figures for title, figures in section.items() if title != "methods"}
        assert tables
        for figures in tables.values():
            assert set(figures) <= {*BENCHMARKS[name].published, "random"}
            assert all(0 < figure < 100 for figure in figures.values())


def test_custom_label_has_no_published_figures_of_another_method() -> None:
    variants = BENCHMARKS["ablation"].published
    published = BENCHMARKS["perturbation"].published | variants
    labelled, reused, named = parse_methods("mine=lrp,partial_lrp=raw_attention,full method=rollout:start_layer=1", published)
    assert [c.published for c in (labelled, reused, named)] == ["lrp", None, None]
    (full,) = parse_methods("full method=transformer_attribution:start_layer=1", variants)
    assert full.published == "full method"


def test_settings_of_methods_may_have_commas_and_colons() -> None:
    first, second = parse_methods('mine=rollout:aggregation={"heads": "max", "layers": [0, 1]}:start_layer=1,gae', {})
    assert first.label == "mine"
    assert first.settings["aggregation"] == {"heads": "max", "layers": [0, 1]}
    assert (first.settings["start_layer"], second.label) == (1, "gae")


def test_shared_forward_passes_give_figures_of_separate_runs(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    both = run("perturbation", tmp_path / "both", data, vit, bert, False).report.tables[0].cells
    for method in ("raw_attention", "transformer_attribution:start_layer=1"):
        separate = (
            run("perturbation", tmp_path / method[:3], data, vit, bert, False, methods=method).report.tables[0].cells
        )
        for (row, column), cell in separate.items():
            assert both[row, column].measured.value == pytest.approx(cell.measured.value)


def test_leaderboard_has_figures_of_other_benchmarks(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    methods = "raw_attention,libragrad,gae:affinity=True"
    (table,) = run("leaderboard", tmp_path / "a", data, vit, bert, False, methods=methods, explained="predicted").report.tables
    (perturbed,) = run("perturbation", tmp_path / "b", data, vit, bert, False, methods=methods, explained="predicted").report.tables[:1]
    masked = run("segmentation", tmp_path / "c", data, vit, bert, False, methods=methods, explained="target").report.tables[0]
    for label in ("raw_attention", "libragrad", "gae (affinity=True)"):
        for title, perturbation_row in (("Positive ↓", "Positive, predicted ↓"), ("Negative ↑", "Negative, predicted ↑")):
            assert table.cells[label, title].measured.value == pytest.approx(perturbed.cells[perturbation_row, label].measured.value)
        assert table.cells[label, "mIoU ↑"].measured.value == pytest.approx(masked.cells["mIoU ↑", label].measured.value)
        assert table.cells[label, "Cost, forwards"].measured.value > 0
        assert np.isfinite(table.cells[label, "Condition, %"].measured.value)
    positive = [table.cells[row, "Positive ↓"].measured.value for row in table.rows]
    assert positive == sorted(positive)
    behind = [table.cells[row, "Positive: behind the best"].measured for row in table.rows if row not in ("random", "ground_truth")]
    assert sum(interval is None for interval in behind) == 1
    assert "in %" in table.title and "logits" not in table.title
    assert all(interval.value >= 0 for interval in behind if interval is not None)


def test_leaderboard_uses_masks_of_other_pictures(tmp_path: Path, vit, bert) -> None:
    masks, plain = picture_folder(tmp_path / "masks"), tmp_path / "plain"
    for name in "0123":  # class folders without masks
        (plain / name).mkdir(parents=True)
    for i in range(4):
        (masks / "images" / f"{i}.png").rename(plain / "0123"[i] / f"plain{i}.png")
    masks = picture_folder(tmp_path / "more", 3)
    report = run("leaderboard", tmp_path / "a", plain, vit, bert, False, masks=str(masks), methods="libragrad,gae").report
    (table,) = report.tables
    perturbed = run("perturbation", tmp_path / "b", plain, vit, bert, False, methods="gae").report.tables[0]
    masked = run("segmentation", tmp_path / "c", masks, vit, bert, False, methods="gae", explained="target").report.tables[0]
    assert table.cells["gae", "Positive ↓"].measured == perturbed.cells["Positive, predicted ↓", "gae"].measured
    assert table.cells["gae", "Positive ↓"].measured.count == 4
    for title in ("mAP ↑", "mIoU ↑", "Energy in mask ↑"):
        assert table.cells["gae", title].measured == masked.cells[title, "gae"].measured
    assert "of 4" in report.conventions["clean accuracy"]


def test_leaderboard_of_digit_scenes_uses_their_masks(tmp_path: Path) -> None:
    arguments = {"model": "bundled:digits", "data": "scenes:2", "methods": "gae"}
    report = run_benchmark("leaderboard", out=tmp_path / "a", **arguments).report
    (table,), (segmentation,) = report.tables, run_benchmark("segmentation", out=tmp_path / "b", **arguments).report.tables
    assert "Positive ↓" not in table.columns
    for title in ("mAP ↑", "Pixel accuracy ↑", "Energy in mask ↑"):
        assert table.cells["gae", title].measured == segmentation.cells[title, "gae"].measured
    assert table.cells["gae", "Cost, forwards"].measured.value > 0
    assert report.conventions["class explained"] == "target"
    with pytest.raises(InputError, match="scenes have masks"):
        run_benchmark("leaderboard", out=tmp_path / "c", masks="scenes:2", **arguments)


def test_medians_and_shares_have_intervals_that_shrink_with_more_samples() -> None:
    few, many = ({str(i): {"kind": "fact", "cost": float(i % 10), "hit": 1.0} for i in range(n)} for n in (10, 640))
    study = SimpleNamespace(configurations=parse_methods("gae", {}), samples=[])
    widths = []
    for results in (few, many):
        cell = evidence.summarize(study, {"gae": results}).tables[0].cells["gae", "forward + backward (median)"].measured
        assert cell.value == 4.5 and cell.low < 4.5 < cell.high
        widths.append(cell.high - cell.low)
    assert widths[1] < widths[0] / 2  # the range of the samples does not shrink


def test_leaderboard_of_texts_has_auac_of_activation(tmp_path: Path, vit, bert) -> None:
    data = sentence_file(tmp_path / "data")
    report = run("leaderboard", tmp_path / "a", data, vit, bert, True, methods="gae,libragrad,gae:affinity=True").report
    assert {"gae", "libragrad"} <= set(report.tables[0].rows)
    assert "gae (affinity=True)" not in report.tables[0].rows
    assert "AU-MSE in logits²" in report.tables[0].title
    activation = run("activation", tmp_path / "b", data, vit, bert, True, methods="gae,libragrad").report.tables[0]
    column = next(c for c in activation.columns if "AUAC" in c)
    value = report.tables[0].cells["gae", "AUAC ↑"].measured.value
    assert value == pytest.approx(100 * activation.cells["gae", column].measured.value)


@pytest.mark.parametrize("per", ["pixel", "nearest", "patch"])
def test_removal_unit_is_stated(per: str, tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    report = run("perturbation", tmp_path / "out", data, vit, bert, False, methods="rollout", per=per).report
    descriptions = {"pixel": "bilinearly upsampled", "nearest": "score of its patch", "patch": "patches by their score"}
    assert descriptions[per] in report.conventions["removed"]


def test_failing_method_is_recorded_and_others_are_scored(tmp_path: Path, vit, bert, monkeypatch) -> None:
    original = Prepared.explain

    def sometimes(prepared, method, *rest, **settings):
        inputs = prepared.inputs.tensor
        if method == "raw_attention" and len(inputs) == 1 and float(inputs.sum()) > 0:
            raise RuntimeError("boom")
        if method == "raw_attention" and len(inputs) > 1:
            raise RuntimeError("batch")
        return original(prepared, method, *rest, **settings)

    data = picture_folder(tmp_path / "data")
    monkeypatch.setattr(Prepared, "explain", sometimes)
    report = run("segmentation", tmp_path / "out", data, vit, bert, False).report
    counts = report.counts["raw_attention"]
    assert counts["failed"] + counts["scored"] == 5
    assert counts["failed"] > 0
    assert report.counts["transformer_attribution"]["scored"] == 5
    assert report.unscored == counts["failed"]
    assert "Samples without figures" in report.markdown()
    monkeypatch.undo()
    rerun = run("segmentation", tmp_path / "out", data, vit, bert, False)
    assert rerun.report.unscored == 0  # failed samples are retried
    assert rerun.measured == counts["failed"]


@pytest.fixture
def constant_raw_attention(monkeypatch) -> None:
    """Maps of raw_attention are constant; maps of other methods are unchanged."""
    original = Prepared.explain

    def flat(prepared, method, *rest, **settings):
        e = original(prepared, method, *rest, **settings)
        return replace(e, scores=e.scores * 0 + 1) if method == "raw_attention" else e

    monkeypatch.setattr(Prepared, "explain", flat)


def test_constant_maps_are_counted_but_not_scored(tmp_path: Path, vit, bert, constant_raw_attention) -> None:
    report = run("perturbation", tmp_path / "out", picture_folder(tmp_path / "data"), vit, bert, False).report
    assert report.counts["raw_attention"] == {"scored": 0, "failed": 0, "constant": 5, "nan": 0}
    assert report.counts["transformer_attribution"]["scored"] == 5


@pytest.mark.parametrize("name", ["perturbation", "segmentation"])
def test_constant_maps_can_be_scored_as_in_reference(name: str, tmp_path: Path, vit, bert, constant_raw_attention) -> None:
    data = picture_folder(tmp_path / "data")
    skipped = run(name, tmp_path / "out", data, vit, bert, False)
    counted = run(name, tmp_path / "out", data, vit, bert, False, constant="count")
    assert skipped.report.unscored == 5
    assert counted.measured == 0  # the same records with another summary
    assert counted.report.unscored == 0
    assert any("5 maps of raw_attention are constant" in r for r in counted.report.remarks)
    if name == "segmentation":
        from sklearn.metrics import average_precision_score

        cells = counted.report.tables[0].cells
        masks = [np.asarray(Image.open(data / "masks" / f"{i}.png").resize((32, 32), 0)) > 127 for i in range(5)]
        background = np.mean([1 - m.mean() for m in masks])
        assert cells["Pixel accuracy ↑", "raw_attention"].measured.value == pytest.approx(100 * background)
        assert cells["mIoU ↑", "raw_attention"].measured.value == pytest.approx(50 * background)
        truths = [np.concatenate([~m.ravel(), m.ravel()]) for m in masks]
        expected = np.mean([average_precision_score(t, np.repeat([1.0, 0.0], 1024)) for t in truths])
        assert cells["mAP ↑", "raw_attention"].measured.value == pytest.approx(100 * expected)


def test_empty_masks_are_skipped_with_remark(tmp_path: Path, vit, bert) -> None:
    data = picture_folder(tmp_path / "data")
    Image.fromarray(np.zeros((40, 36), dtype=np.uint8)).save(data / "masks" / "1.png")
    report = run("segmentation", tmp_path / "out", data, vit, bert, False).report
    assert report.counts["random"]["scored"] == 4
    assert any("empty mask" in r for r in report.remarks)


def test_labels_outside_classes_of_model_raise(tmp_path: Path, vit, bert) -> None:
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
    )  # the predicted class needs no labels


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
        ("perturbation", {"batch_size": True}, "batch size"),
        ("perturbation", {"batch_size": 4, "samples_per_batch": 0}, "samples_per_batch"),
    ],
)
def test_invalid_options_raise_before_work(
    name: str, options: dict, message: str, tmp_path: Path, vit, bert
) -> None:
    data = picture_folder(tmp_path / "data")
    with pytest.raises(InputError, match=message):
        if "batch_size" in options:
            run_benchmark(name, vit, data, tmp_path / "out", processor=processor(), **options)
        run(name, tmp_path / "out", data, vit, bert, False, **options)


def test_unknown_benchmark_and_missing_data_raise(tmp_path: Path, vit) -> None:
    with pytest.raises(InputError, match="benchmarks: perturbation"):
        run_benchmark("beauty", vit, tmp_path)
    with pytest.raises(InputError, match="needs data"):
        run_benchmark("perturbation", vit, None, tmp_path / "out", processor=processor())


def test_cost_is_reported_before_work(tmp_path: Path, vit) -> None:
    messages: list[str] = []
    started: list[int] = []

    def track(work, title, total):
        started.append(len(messages))
        return work

    run_benchmark(
        "segmentation",
        vit,
        picture_folder(tmp_path / "data"),
        tmp_path / "out",
        methods=FEW,
        processor=processor(),
        say=messages.append,
        track=track,
    )
    assert started == [0, 1]  # the trial, then the work after the message about its cost
    assert re.search("about [1-9][0-9,]* forward passes, about", messages[0])
    assert "20 explanations to score (5 samples)" in messages[0]


def test_multi_label_models_have_sigmoid_probabilities(tmp_path: Path, vit) -> None:
    data = picture_folder(tmp_path / "data")
    multi_label = copy.deepcopy(vit)
    multi_label.config.problem_type = "multi_label_classification"
    probabilities = {}
    for name, model in (("single", vit), ("several", multi_label)):
        run_benchmark("perturbation", model, data, tmp_path / name, methods="rollout", processor=processor())
        lines = (tmp_path / name / "records.jsonl").read_text().splitlines()
        rows = [r for r in map(json.loads, lines) if "values" in r]
        probabilities[name] = np.array([r["values"]["clean"]["probability"] for r in rows])
    assert not np.isclose(probabilities["several"], probabilities["single"]).any()
    logits = np.array([[0.0, np.log(3)]])
    assert activated(logits, "softmax") == pytest.approx(np.array([[0.25, 0.75]]))
    assert activated(np.zeros((0, 0)), "softmax").size == 0
    assert activated(logits, "sigmoid") == pytest.approx(np.array([[0.5, 0.75]]))


def test_resampling_filter_of_processor_is_used(vit) -> None:
    """Filter 0 is nearest, and not a missing filter."""
    for resample, expected in ((0, "nearest"), (3, "bicubic"), (None, "bilinear"), (4, "box")):
        tool = SimpleNamespace(image_mean=[0.0], image_std=[1.0], resample=resample)
        assert pixel_spec(vit, tool).resample == expected
    assert pixel_spec(vit, tool, "lanczos").resample == "lanczos"
    with pytest.raises(InputError, match="resample must be one of nearest"):
        pixel_spec(vit, tool, "sharp")


def test_files_option_is_comma_separated(tmp_path: Path, vit) -> None:
    data = picture_folder(tmp_path / "data")
    every = run_benchmark("perturbation", vit, data, tmp_path / "all", methods="rollout", processor=processor())
    names = sorted({json.loads(line)["sample"] for line in (tmp_path / "all" / "records.jsonl").read_text().splitlines() if "sample" in line})
    few = run_benchmark("perturbation", vit, data, tmp_path / "few", methods="rollout", processor=processor(), files=",".join(names[:2]))
    assert few.report.counts["rollout"]["scored"] == 2 < every.report.counts["rollout"]["scored"]


def test_ties_can_be_broken_as_by_topk(tmp_path: Path, vit) -> None:
    """The number of removed pixels is unchanged, and the choice is stated."""
    data = picture_folder(tmp_path / "data")
    outcome = run_benchmark("perturbation", vit, data, tmp_path / "topk", methods="rollout", processor=processor(), ties="topk")
    assert outcome.report.counts["rollout"]["scored"]
    assert outcome.report.conventions["ties"] == "equal scores are ordered as by torch.topk on a CPU"
    with pytest.raises(InputError, match="ties must be one of index, last, topk"):
        run_benchmark("perturbation", vit, data, tmp_path / "x", methods="rollout", processor=processor(), ties="first")
    scores = np.array([[0.5, 0.5], [0.1, 0.9]])
    assert topk_mask(scores, 1, (2, 2)).tolist() == [[False, False], [False, True]]
    assert [int(topk_mask(np.zeros(9), k, (3, 3)).sum()) for k in range(10)] == list(range(10))


def test_texts_are_truncated_to_positions_of_roberta(tmp_path: Path, bert) -> None:
    """RoBERTa's positions start after the padding index, so 10 of 12 are available for tokens."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=28, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=12,
        pad_token_id=1, num_labels=2,
    )  # fmt: skip
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "good film " * 10 + "\t1\n")
    report = run("conservation", tmp_path / "out", tmp_path, None, (RobertaForSequenceClassification(config).eval(), bert[1]), True, methods="input_x_gradient")
    assert report.report.unscored == 0


@pytest.mark.parametrize("text", [False, True])
def test_methods_of_batch_share_forward_pass_and_equal_separate_scores(text, tmp_path):
    model, tool = tiny_bert() if text else (tiny_vit(), processor())
    data = open_texts(sentence_file(tmp_path / "text")) if text else open_pictures(picture_folder(tmp_path / "data"))
    samples = list(data[1])[:3]
    study = Study(model.double(), tool, "text" if text else "image", samples, (), {})
    chosen = parse_methods("transformer_attribution,gae,rollout,lrp_ah_ln,random", {})
    batch, passes = read_batch(study, samples), []
    separate = {(c, i): map_ for c in chosen for i, map_ in enumerate(batch.scores(c, [1, 0, 1]))}
    batch.maps(chosen, [1, 0, 1])  # from now on the program of the model is cached
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    shared = batch.maps(chosen, [1, 0, 1])
    assert len(passes) == 1
    assert shared.keys() == separate.keys()
    for key, scores in separate.items():
        assert np.abs(shared[key] - scores).max() <= 1e-12 * np.abs(scores).max()


def test_failure_among_shared_methods_is_reported_for_its_sample(tmp_path, monkeypatch):
    """A sample that one method cannot explain affects neither other samples nor other methods."""
    study = Study(tiny_vit(), processor(), "image", (), (), {})
    batch = read_batch(study, list(open_pictures(picture_folder(tmp_path / "data"))[1])[:2])
    original = Prepared.explain

    def explain(prepared, method, target, **settings):
        if method == "gae" and 1 in target:
            raise InputError("not this one")
        return original(prepared, method, target, **settings)

    monkeypatch.setattr(Prepared, "explain", explain)
    chosen = parse_methods("transformer_attribution,gae,rollout", {})
    with pytest.raises(InputError, match="not this one"):  # the samples are measured one by one afterwards
        batch.maps(chosen, [0, 1])
    results = [batch.some([i]).maps(chosen, [i]) for i in (0, 1)]
    failed = [(c.label, i, outcome.message) for i, maps in enumerate(results) for (c, _), outcome in maps.items() if isinstance(outcome, Exclusion)]
    assert failed == [("gae", 1, "InputError: not this one")]
