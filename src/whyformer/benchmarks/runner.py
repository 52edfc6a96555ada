"""Run a benchmark over a data set, in batches and resumable, after an estimate of its cost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import nn

from whyformer.benchmarks.batches import pixel_spec, read_batch
from whyformer.benchmarks.configurations import CEILING, FLOOR, Configuration, parse_methods
from whyformer.benchmarks.measuring import Engine, Measurer, Piece, measured, pieces_of
from whyformer.benchmarks.published import conventions
from whyformer.benchmarks.records import Record, RecordFile
from whyformer.benchmarks.registry import find_benchmark
from whyformer.benchmarks.report import Report, Results
from whyformer.benchmarks.study import Batch, Benchmark, Study
from whyformer.datasets.samples import content_digest
from whyformer.errors import FOREIGN_ERRORS, InputError, WhyformerError, check_count
from whyformer.explanation.counts import amount
from whyformer.explanation.display import format_settings
from whyformer.explanation.versions import versions
from whyformer.inputs.settings import settings_of
from whyformer.jobs.actors import check_engine
from whyformer.jobs.description import check_values
from whyformer.jobs.disk import reporting_write_errors
from whyformer.models.loading import fingerprint, resolve_model
from whyformer.models.readout import read_logits
from whyformer.progress import Track
from whyformer.tape.modules import module_hooks

Todo = dict[str, list[Configuration]]
"""Sample -> configurations without a record."""


@dataclass(frozen=True)
class Outcome:
    """A finished benchmark.

    Attributes:
        report: the report.
        files: written files.
        resumed: number of records of an earlier run.
        measured: number of records of this run.
    """

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
    engine: str = "local",
    workers: int = 2,
    address: str | None = None,
    actors: int = 1,
    say: Callable[[str], None] = lambda text: None,
    track: Track = lambda work, title, total: work,
    **options: Any,
) -> Outcome:
    """Run a benchmark, or resume it, and write its tables to ``out``.

    Args:
        name: one of :data:`whyformer.benchmarks.BENCHMARKS`.
        model: a classifier in eval mode, or a name as for :func:`whyformer.explain`.
        data: a folder or file that :mod:`whyformer.datasets` reads, or ``scenes:COUNT``.
        out: output folder.
        methods: as for :func:`~whyformer.benchmarks.configurations.parse_methods`; by default those of the benchmark.
        processor: processor of the model.
        reader: name of the reader; by default the layout of the data decides.
        split: split of the data, as the reader names it.
        batch_size: samples in one plain forward pass.
        samples_per_batch: samples explained in one batch.
        seed: random seed.
        device: device of a model that is loaded by name.
        engine: "local" or "ray". Figures do not depend on it.
        workers: threads that read ahead, for "local".
        address: address of the Ray cluster; by default a cluster is started on this machine.
        actors: number of Ray actors, each with a copy of the model.
        say: called with the estimated cost and other messages.
        track: (iterable, title, total) -> iterable, a progress bar.
        **options: options of the benchmark.

    Raises:
        WhyformerError: an option, a method or the data is invalid, or a file cannot be written.
    """
    benchmark = find_benchmark(name)
    for option in options:
        if option not in benchmark.options:
            listing = ", ".join(f"{k}={v!r}" for k, v in benchmark.options.items())
            raise InputError(f"{benchmark.name} has no option '{option}'. Its options and defaults: {listing}")
    check_count("the batch size", batch_size)
    check_count("samples_per_batch", samples_per_batch)
    place = Engine(engine, workers, address, actors)
    check_values(vars(place))
    check_engine(engine, address, actors)
    configurations = parse_methods(methods or benchmark.methods, benchmark.published)
    study = _open(benchmark, model, processor, device, data, reader, split, {**benchmark.options, **options})
    study.configurations, study.seed, study.batch_size = configurations, seed, batch_size
    for option, valid in benchmark.choices.items():
        study.check(option, valid, isinstance(benchmark.options[option], tuple))
    benchmark.prepare(study)
    study.configurations = [FLOOR, *study.configurations, *([CEILING] if benchmark.ceiling(study) else [])]
    # options that change the figures of a sample, unlike those for the choice and the summary of samples
    changed = {k: v for k, v in study.options.items() if v != benchmark.options.get(k)}
    common = {
        "benchmark": name,
        "options": {k: v for k, v in changed.items() if k not in ("count", "files", "constant")},
        "model": fingerprint(study.model),
        "data": f"{study.reader}:{study.data_name}" + (f":{split}" if split else ""),
        "seed": seed,
        "processor": settings_of(study.processor),
    }
    labels = {c.label: c.key(common) for c in study.configurations}
    contents = {s.id: content_digest(s) for s in study.samples}
    keys = {(s, label): f"{key}-{content}" for label, key in labels.items() for s, content in contents.items()}
    total = len(study.samples) * len(study.configurations)
    folder = Path(out)
    with RecordFile(folder / "records.jsonl") as store:
        lacking = {s: [c for c in study.configurations if (s, keys[s, c.label]) not in store] for s in contents}
        todo = {s: missing for s, missing in lacking.items() if missing}
        missing = sum(map(len, todo.values()))
        if store.dropped:
            lines = amount(store.dropped, "damaged line")
            others = ", and records measured with them," if store.torn else ""
            say(f"{lines} of {store.path.name} ignored: these records{others} are measured again")
        if missing < total:
            say(f"{total - missing} of {total} records of an earlier run found")
        if todo:
            say(estimated_cost(benchmark, _trial(study, todo), todo, track))
            measurer, pieces = Measurer(benchmark, study, keys), pieces_of(study, lacking, samples_per_batch)
            written = _written(store, measured(measurer, pieces, place, model, device))
            for _ in track(written, f"{benchmark.name}: samples", len(todo)):
                pass
        by_label = {
            label: {s: store.records[s, key] for s in sorted(contents) if (s, key := keys[s, label]) in store.records}
            for label in labels
        }
    report = _report(benchmark, study, by_label)
    return Outcome(report, report.write(folder), total - missing, missing)


def _written(store: RecordFile, results: Generator[tuple[Piece, list[Record]], None, None]) -> Iterator[int]:
    """Write the records of pieces, and yield the index of each sample when its records are written."""
    with closing(results):
        for piece, records in results:
            with reporting_write_errors(store.path):
                store.add(*records)
                store.sync()
            yield from piece.samples


def _report(benchmark: Benchmark, study: Study, by_label: dict[str, dict[str, Record]]) -> Report:
    """Return the report of a benchmark with conventions, counts and remarks."""

    def kind(record: Record) -> str:
        """Return "scored", or the reason for having no figures; a constant map that counts is scored."""
        if "error" in record:
            return str(record["kind"])
        return "constant" if record["values"].get("constant") and study.options.get("constant") != "count" else "scored"

    results: Results = {}
    counts = {}
    for label, records in by_label.items():
        kinds = {s: kind(record) for s, record in records.items()}
        results[label] = {s: records[s]["values"] for s, kind in kinds.items() if kind == "scored"}
        counts[label] = {k: list(kinds.values()).count(k) for k in ("scored", "failed", "constant", "nan")}
    summary = benchmark.summarize(study, results)
    texts: dict[str, Any] = {}
    if study.modality == "image":
        spec = pixel_spec(study.model, study.processor, study.options.get("resample"))
        texts |= conventions("pictures", size="{}×{}".format(*spec.size), resample=spec.resample, seed=study.seed)
    methods = [c for c in study.configurations if c.kind == "method"]
    texts |= summary.conventions | conventions(
        "all", methods="; ".join(f"{c.label}: {format_settings(c.settings) or 'no settings'}" for c in methods),
        study=study, count=len(study.samples), dtype=study.forwards.place["dtype"],
        versions=", ".join(f"{name} {number}" for name, number in versions().items()),
    )  # fmt: skip
    remarks = (*study.remarks, *summary.remarks)
    return replace(summary, benchmark=benchmark.name, conventions=texts, counts=counts, remarks=remarks)


def _open(
    benchmark: Benchmark, model: nn.Module | str, processor: Any, device: str | None, data: str | Path | None,
    reader: str | None, split: str | None, options: dict[str, Any],
) -> Study:  # fmt: skip
    from whyformer.datasets.readers import modality_of, open_pictures, open_texts

    modality = "text" if data is None or benchmark.modality == "text" else benchmark.modality
    place = "own" if data is None else "/".join(Path(str(data)).parts[-2:])  # independent of the working directory
    samples: Sequence[Any]
    if data is None:
        if benchmark.own_data is None:
            raise InputError(f"{benchmark.name} needs data: a folder, a file or scenes:COUNT")
        reader_name, samples = benchmark.own_data(options)
    else:
        modality = modality_of(data) if modality == "both" else modality
        reader_name, samples = (open_pictures if modality == "image" else open_texts)(data, reader, split=split)
    title = model if isinstance(model, str) else type(model).__name__
    model, processor = resolve_model(model, processor, device=device)
    labels = getattr(samples, "labels", ())
    return Study(model, processor, modality, samples, (), options, reader_name, labels, title, place)


def _trial(study: Study, todo: Todo) -> Batch:
    """Return a batch of the first sample that can be read."""
    first: Exception | None = None
    for sample in (s for s in study.samples if s.id in todo):
        try:
            return read_batch(study, [sample])
        except FOREIGN_ERRORS as error:
            first = first or InputError(f"no sample can be read. The first, {sample.id}: {error}")
    raise first or InputError("there are no samples")


# -- estimate of the cost ---------------------------------------------------------------------------
def estimated_cost(benchmark: Benchmark, trial: Batch, todo: Todo, track: Track) -> str:
    """Return the estimated cost of the remaining work, by measuring each configuration on the trial samples.

    The results of the trial are discarded. The run is cheaper if methods share forward passes.
    """
    total, shares = 0, {}
    missing = Counter(c for cs in todo.values() for c in cs)
    for configuration, times in track(missing.items(), f"{benchmark.name}: methods on trial", len(missing)):
        with forward_passes(trial.study.model) as passes:
            start = time.perf_counter()
            list(benchmark.measure(trial, [configuration]))
            shares[configuration] = (time.perf_counter() - start) / len(trial.samples)
        total += round(sum(passes) * times / len(trial.samples))
    needed = timedelta(seconds=1 + round(sum(shares[c] * times for c, times in missing.items())))
    slow = sorted(((share, c.label) for c, share in shares.items()), reverse=True)[:3]
    work = f"{amount(missing.total(), 'explanation')} to score ({amount(len(todo), 'sample')})"
    return (
        f"{work}: about {total:,} forward passes, about {needed} (h:mm:ss), estimated on one sample (time per sample: "
        f"{', '.join(f'{label} {share:.2g} s' for share, label in slow)})"
    )


@contextmanager
def forward_passes(model: nn.Module) -> Iterator[list[int]]:
    """Context manager that returns a list, to which each forward pass of a model adds its number of samples."""
    passes = list[int]()

    def count(module: Any, args: Any, output: Any) -> None:
        if module is model:
            with suppress(WhyformerError):
                passes.append(read_logits(output).shape[0])

    with module_hooks(lambda module: None, count):
        yield passes
