"""Run a benchmark over a data set: in batches, resumable, with its cost said first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whyformer.benchmarks.configurations import CEILING, FLOOR, Configuration, parse_methods
from whyformer.benchmarks.cost import estimate
from whyformer.benchmarks.explaining import Unusable
from whyformer.benchmarks.report import Report
from whyformer.benchmarks.study import Benchmark, Study
from whyformer.errors import InputError
from whyformer.evaluate.forwards import Forwards
from whyformer.explanation.versions import versions
from whyformer.jobs.records import Record, RecordFile

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]


@dataclass(frozen=True)
class Outcome:
    """A finished benchmark: the report, the files written, and how many pairs were taken from an earlier run."""

    report: Report
    files: list[Path]
    resumed: int
    measured: int


def run_benchmark(
    name: str,
    model: nn.Module | str,
    data: str | Path | None = None,
    out: str | Path = "benchmark",
    *,
    methods: str | Sequence[Any] | None = None,
    processor: Any = None,
    reader: str | None = None,
    split: str | None = None,
    batch_size: int = 64,
    samples_per_batch: int = 4,
    seed: int = 0,
    device: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    track: Track = lambda work, title, total: work,
    **options: Any,
) -> Outcome:
    """Measure, resume where an earlier run stopped, and write the tables to ``out``.

    Args:
        name: one of :data:`whyformer.benchmarks.BENCHMARKS`.
        model: a classifier in eval mode with its ``processor``, or a name as for :func:`whyformer.explain`.
        data: a folder or file that :mod:`whyformer.datasets` reads, ``scenes:COUNT``; reader: which reader, if the
            layout does not tell; split: as the reader names it.
        methods: as for :func:`~whyformer.benchmarks.configurations.parse_methods`; the benchmark's own by default.
        batch_size: samples a plain forward; samples_per_batch: samples explained at once.
        say: told the cost and what goes on; track: wraps the work in a progress bar.
        **options: the benchmark's options.
    """
    from whyformer.benchmarks import find_benchmark

    benchmark = find_benchmark(name)
    study = _study(benchmark, model, data, methods, processor, reader, split, batch_size, seed, device, options)
    benchmark.prepare(study)
    study.configurations = [FLOOR, *study.configurations, *([CEILING] if benchmark.ceiling(study) else [])]
    common = {
        "benchmark": name,
        "options": _stated(benchmark, study.options),
        "model": fingerprint(study.model),
        "data": f"{study.reader}:{study.data_name}",
        "seed": seed,
    }
    keys = {c.label: c.key(common) for c in study.configurations}
    folder = Path(out)
    with RecordFile(folder / "records.jsonl") as store:
        todo = {
            s.id: missing
            for s in study.samples
            if (missing := [c for c in study.configurations if (s.id, keys[c.label]) not in store])
        }
        resumed = len(study.samples) * len(study.configurations) - sum(map(len, todo.values()))
        if resumed:
            say(f"{resumed} of {len(study.samples) * len(study.configurations)} are there from an earlier run")
        if todo:
            waiting = [s for s in study.samples if s.id in todo]
            say(estimate(benchmark, study, todo, waiting[:1]).sentence())
            _measure(benchmark, study, store, todo, keys, samples_per_batch, track)
        wanted = {s.id for s in study.samples}
        records: dict[str, dict[str, Record]] = {
            c.label: {s: r for (s, k), r in store.records.items() if k == keys[c.label] and s in wanted}
            for c in study.configurations
        }
    report = benchmark.summarize(study, records)
    report.conventions.update(_conventions(study))
    return Outcome(report, report.write(folder), resumed, sum(map(len, todo.values())))


def _measure(
    benchmark: Benchmark,
    study: Study,
    store: RecordFile,
    todo: dict[str, list[Configuration]],
    keys: dict[str, str],
    size: int,
    track: Track,
) -> None:
    """Batches of samples that lack the same configurations."""
    batches: list[tuple[list[Any], list[Configuration]]] = []
    for sample in (s for s in study.samples if s.id in todo):
        if batches and batches[-1][1] == todo[sample.id] and len(batches[-1][0]) < size:
            batches[-1][0].append(sample)
        else:
            batches.append(([sample], todo[sample.id]))
    for samples, configurations in track(batches, benchmark.name, len(batches)):
        for identity, configuration, values in benchmark.measure(study, samples, configurations):
            label = configuration.label
            record: Record = {"sample": identity, "configuration": label, "key": keys[label]}
            if isinstance(values, Unusable):
                record |= {"error": str(values), "kind": values.kind}
            else:
                record["values"] = values
            store.add(record)
        store.sync()


def _study(
    benchmark: Benchmark,
    model: nn.Module | str,
    data: str | Path | None,
    methods: Any,
    processor: Any,
    reader: str | None,
    split: str | None,
    batch_size: int,
    seed: int,
    device: str | None,
    options: dict[str, Any],
) -> Study:
    from whyformer.datasets.opening import modality_of, open_pictures, open_texts
    from whyformer.models.loading import opened

    for name in options:
        if name not in benchmark.options:
            known = ", ".join(f"{k}={v!r}" for k, v in benchmark.options.items())
            raise InputError(f"{benchmark.name} has no option '{name}'. Its options and defaults: {known}")
    if batch_size < 1:
        raise InputError("the batch size must be at least 1")
    full = {**benchmark.options, **options}
    configurations = parse_methods(methods or benchmark.methods, benchmark.published)
    title = model if isinstance(model, str) else type(model).__name__
    labels: Sequence[str] = ()
    if data is None:
        if benchmark.own_data is None:
            raise InputError(f"{benchmark.name} needs data: a folder, a file or scenes:COUNT")
        found, samples, labels = benchmark.own_data(full)
        modality = "text"
    else:
        modality = modality_of(data) if benchmark.modality == "both" else benchmark.modality
        if modality == "image":
            found, samples = open_pictures(data, reader, split=split)
        else:
            found, texts = open_texts(data, reader, split=split)
            samples, labels = texts.items, texts.labels
    model, processor = opened(model, processor, device=device)
    pad = getattr(processor, "pad_token_id", None)
    return Study(
        model,
        processor,
        modality,
        list(samples),
        configurations,
        full,
        Forwards(model, batch_size, pad or 0),
        found,
        labels,
        str(title),
        _data_name(data),
        seed,
    )


def _data_name(data: str | Path | None) -> str:
    """The last two parts of the place: enough to tell data sets apart, and the same from another working directory."""
    return "own" if data is None else "/".join(Path(str(data)).parts[-2:])


def _stated(benchmark: Benchmark, options: dict[str, Any]) -> dict[str, Any]:
    """Options not at their defaults that change a sample's figures: not which samples, nor how they are summed."""
    plain = ("count", "files", "constant")
    return {k: v for k, v in options.items() if k not in plain and v != benchmark.options.get(k)}


def fingerprint(model: nn.Module) -> str:
    """Sixteen hex digits of the weights: records of another model are never counted."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(
            parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            if parameter.dim()
            else str(parameter).encode()
        )
    return digest.hexdigest()[:16]


def _conventions(study: Study) -> dict[str, Any]:
    methods = "; ".join(
        f"{c.label}: {', '.join(f'{k}={v}' for k, v in c.settings.items()) or 'no settings'}"
        for c in study.configurations
        if c.kind == "method"
    )
    return {
        "methods": methods,
        "intervals": "95 %, percentile bootstrap over samples, 1000 draws",
        "published": "the papers' figures, for their own models and data; – where they give none or a setting differs",
        "model": study.model_name,
        "data": f"{len(study.samples)} samples ({study.reader}: {study.data_name})",
        "batch": f"{study.forwards.batch_size} a forward, seed {study.seed}, {study.forwards.place['dtype']}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }
