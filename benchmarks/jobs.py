"""What a data set costs: methods that share a pass, batches and workers, memory over many rows, engines, the server.

    python benchmarks/jobs.py [together] [sizes] [workers] [memory] [ray] [pictures] [serve] [--runs 5] [--rows 100000]

Every table is made of ratios inside one run, the figures of each line the least of ``--runs``, of processor time where
that says more than the clock on a machine that others use. Without a name all are made; "memory" takes minutes. The
figures in docs/jobs.md were made with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import whyformer
from whyformer import Explainer
from whyformer.comparing import each, read_method

NINE = (
    "raw_attention", "rollout", "gradcam_attention", "partial_lrp", "lrp", "transformer_attribution", "gae",
    "lrp_ah_ln", "input_x_gradient",
)  # fmt: skip
COMMAND = "from whyformer.apps.cli import main; main()"
PICTURE = Path(__file__).parents[1] / "examples" / "pictures" / "digits_37.png"
WORDS = ("charming", "dull", "superb", "awful", "fine", "slow", "clever", "empty")


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> float:
    """Of one call."""
    began = clock()
    work()
    return clock() - began


def table(*rows: tuple[Any, ...]) -> None:
    """Print a table in Markdown, its first row the names of the columns."""
    for number, row in enumerate(rows):
        print("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in row) + " |")
        if not number:
            print("|" + "---|" * len(row))
    print(flush=True)


def texts(count: int) -> Iterator[str]:
    """Short sentences, no two alike."""
    for i in range(count):
        yield f"{'Very ' * (i % 3)}{WORDS[i % 8]} and {WORDS[i // 8 % 8]} film number {i}."


# -- several methods at once -----------------------------------------------------------------------------------------
def _models() -> Iterator[tuple[str, torch.nn.Module, Any]]:
    from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

    size = {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "intermediate_size": 1536}
    for attention in ("sdpa", "eager"):
        torch.manual_seed(0)
        vit = ViTForImageClassification(ViTConfig(**size, num_labels=10, attn_implementation=attention)).eval()
        yield f"ViT, 2 × 197 rows, {attention}", vit, torch.randn(2, 3, 224, 224)
        bert = BertForSequenceClassification(BertConfig(**size, num_labels=3, attn_implementation=attention)).eval()
        ids = torch.randint(1000, 20000, (2, 128))
        yield f"BERT, 2 × 128 tokens, {attention}", bert, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def together(runs: int, **_: Any) -> None:
    """Nine methods of one input and class: together, over the sum of each alone (processor time)."""
    rows: list[tuple[Any, ...]] = [
        ("model", "sum of the nine, × one forward pass", "together, × one", "together / sum")
    ]
    for name, model, inputs in _models():
        ready = Explainer(model).prepare(inputs)
        list(each(ready, [read_method(m) for m in NINE], [1]))  # what is measured once for each model
        alone: dict[str, list[float]] = {m: [] for m in NINE}
        joint, plain = [], []
        for _run in range(runs):
            plain.append(seconds(lambda r=ready: r.task().forward()))
            for m in NINE:
                alone[m].append(seconds(lambda r=ready, m=m: r.explain(m, 1)))
            joint.append(seconds(lambda r=ready: list(each(r, [read_method(m) for m in NINE], [1]))))
        total = sum(min(times) for times in alone.values())
        rows.append((name, total / min(plain), min(joint) / min(plain), min(joint) / total))
    table(*rows)


# -- batches and workers -----------------------------------------------------------------------------------------------
def _streamed(*given: Any, **options: Any) -> list[Any]:
    return list(whyformer.explain_many(*given, **options))


def sizes(runs: int, **_: Any) -> None:
    """Throughput of ``explain_many`` by the size of the batch, one row at a time = 1 (processor time)."""
    listed = list(texts(192))
    rows: list[tuple[Any, ...]] = [("batch_size", *(m := ("transformer_attribution", "gae")))]
    base: dict[str, float] = {}
    for size in (1, 2, 4, 8, 16, 32):
        line = []
        for method in m:
            work = partial(_streamed, "bundled:sst2", listed, method, batch_size=size)
            took = min(seconds(work) for _run in range(runs))
            line.append(base.setdefault(method, took) / took)
        rows.append((size, *line))
    table(*rows)


def workers(runs: int, **_: Any) -> None:
    """Throughput by the number of threads that read (clock), over pictures of 6 megapixels."""
    with tempfile.TemporaryDirectory() as folder:
        large = Image.open(PICTURE).convert("RGB").resize((3000, 2000))
        for i in range(48):
            large.putpixel((i, 0), (255, 0, 0))
            large.save(f"{folder}/{i:02}.jpg", quality=92)
        rows: list[tuple[Any, ...]] = [("workers", "pictures a second, × one worker's")]
        took: dict[int, list[float]] = {1: [], 2: [], 4: []}
        for _run in range(runs):  # in turn, so that other work on the machine meets all of them
            for count, found in took.items():
                work = partial(_streamed, "bundled:digits", folder, "gae", batch_size=8, workers=count)
                found.append(seconds(work, time.perf_counter))
        rows += [(count, min(took[1]) / min(found)) for count, found in took.items()]
    table(*rows)


# -- memory ------------------------------------------------------------------------------------------------------------
def _resident() -> float:
    """Megabytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def memory(rows: int, **_: Any) -> None:
    """Resident memory while a job of many rows runs: a model of one narrow block, so that the engine is the work."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    narrow = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=50)
    model, seen = BertForSequenceClassification(narrow).eval(), list[tuple[Any, ...]]()

    def data() -> Iterator[dict[str, torch.Tensor]]:
        for i in range(rows):
            if i % max(1, rows // 10) == 0:
                seen.append((i, _resident()))
            yield {"input_ids": torch.tensor([[1, *((i * k) % 48 + 2 for k in (1, 3, 7, 11, 13))]])}

    with tempfile.TemporaryDirectory() as folder:
        maps = whyformer.explain_many(model, data(), "gae", batch_size=32, out=f"{folder}/maps")
        seen.append((rows, _resident()))
        assert len(maps) == rows
        assert sum(1 for _row in maps.table(["row"]).column("row")) == rows
    listed = [("rows read", "resident MB"), *((i, round(mb)) for i, mb in seen)]
    table(*listed)


# -- engines -----------------------------------------------------------------------------------------------------------
def ray(runs: int, **_: Any) -> None:
    """The same job on the local engine and on Ray with 1, 2 and 4 actors: the clock, with and without Ray's start."""
    listed = [("engine", "seconds", "× the local one", "of them in the parts, first to last")]
    with tempfile.TemporaryDirectory() as folder:
        lines = "".join(json.dumps({"text": t}) + "\n" for t in texts(2400))
        Path(folder, "texts.jsonl").write_text(lines)
        base = 0.0
        for name, options in (
            ("local", []),
            *((f"ray, {n} actors", ["--engine", "ray", "--actors", str(n)]) for n in (1, 2, 4)),
        ):
            took, span = float("inf"), 0.0
            for run in range(min(runs, 2)):
                out = Path(folder, f"{name} {run}".replace(", ", "-"))
                command = [
                    sys.executable,
                    "-c",
                    COMMAND,
                    "run",
                    "--model",
                    "bundled:sst2",
                    "--input",
                    f"{folder}/texts.jsonl",
                ]
                more = [
                    "--method",
                    "transformer_attribution",
                    "--out",
                    str(out),
                    "--rows-per-part",
                    "200",
                    "--batch-size",
                    "16",
                ]
                began = time.perf_counter()
                subprocess.run([*command, *more, *options], check=True, capture_output=True)
                if (now := time.perf_counter() - began) < took:
                    took = now
                    written = sorted(p.stat().st_mtime for p in out.glob("part-*.parquet"))
                    span = written[-1] - written[0]
            base = base or took
            listed.append((name, took, took / base, span))
    table(*listed)


def pictures(runs: int, **_: Any) -> None:
    """Seconds of one picture on one core, and what a million cost: read, forward, explain, write."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()  # ViT-B/16
    batch = torch.randn(4, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder:
        photo = Image.effect_noise((500, 375), 60).convert("RGB")
        photo.save(f"{folder}/photo.jpg", quality=90)
        read = min(
            seconds(lambda: Image.open(f"{folder}/photo.jpg").convert("RGB").resize((224, 224))) for _r in range(20)
        )
        ready = Explainer(model).prepare(batch)
        forward = min(seconds(lambda: ready.task().forward()) for _r in range(runs)) / 4
        found = {
            m: min(seconds(lambda m=m: ready.explain(m, 1)) for _r in range(runs)) / 4
            for m in ("gae", "transformer_attribution")
        }
        maps = whyformer.explain_many(
            model,
            ({"pixel_values": x[None]} for x in batch.repeat(4, 1, 1, 1)),
            "gae",
            batch_size=4,
            out=f"{folder}/maps",
        )
        size = sum(p.stat().st_size for p in Path(folder, "maps").glob("part-*.parquet")) / len(maps)
    rows: list[tuple[Any, ...]] = [("input", "measured here, one core")]
    rows += [
        ("read and resize a JPEG of 500 × 375", f"{read * 1e3:.1f} ms"),
        ("plain forward pass", f"{forward * 1e3:.0f} ms"),
    ]
    rows += [(m, f"{s * 1e3:.0f} ms = {s / forward:.1f} forward passes") for m, s in found.items()]
    rows += [("on the disk, 196 float32 scores and what belongs to them", f"{size / 1e3:.1f} kB")]
    table(*rows)


# -- the server ------------------------------------------------------------------------------------------------------
def serve(runs: int, **_: Any) -> None:
    """64 clients at once, each with inputs of its own (``clients.py``), against batches of one."""
    rows: list[tuple[Any, ...]] = [
        ("batch", "requests a second, × one by one", "median ms", "99 % ms", "answers", "lost or crossed")
    ]
    base = 0.0
    for batch in (1, 16):
        with _server("--batch", str(batch), "--queue", "256") as address:
            _clients(address, "5s")  # warm
            found = max((_clients(address, "30s") for _ in range(min(runs, 2))), key=lambda one: one["rate"])
        base = base or found["rate"]
        rows.append((batch, found["rate"] / base, *found["times"], found["answers"], found["wrong"]))
    table(*rows)


def _clients(address: str, lasting: str) -> dict[str, Any]:
    """What 64 clients of locust saw for so long."""
    users = str(Path(__file__).with_name("clients.py"))
    command = [sys.executable, "-m", "locust", "-f", users, "--headless", "-u", "64", "-r", "64", "-t", lasting]
    done = subprocess.run([*command, "--host", address, "--json", "--only-summary"], capture_output=True, text=True)
    try:
        (seen,) = json.loads(done.stdout)
    except ValueError as error:
        raise RuntimeError(f"locust did not run (pip install locust): {done.stderr[-500:]}") from error
    times = sorted(float(ms) for ms, count in seen["response_times"].items() for _ in range(count))
    lasted = seen["last_request_timestamp"] - seen["start_time"]
    middle, last = (round(times[int(len(times) * share)]) for share in (0.5, 0.99))
    return {
        "rate": seen["num_requests"] / lasted, "times": (middle, last), "answers": seen["num_requests"],
        "wrong": seen["num_failures"],
    }  # fmt: skip


class _server:  # noqa: N801 - used as a function
    """``whyformer serve`` in a process of its own."""

    def __init__(self, *options: str) -> None:
        import socket

        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        command = [
            sys.executable,
            "-c",
            COMMAND,
            "serve",
            "bundled:sst2",
            "--port",
            str(self.port),
            *options,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> str:
        import httpx

        address = f"http://127.0.0.1:{self.port}"
        for _try in range(600):
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{address}/ready", trust_env=False).status_code == 200:
                    return address
            except httpx.TransportError:
                pass
            threading.Event().wait(0.1)
        raise RuntimeError("the server did not come up")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()


PARTS = {f.__name__: f for f in (together, sizes, workers, memory, ray, pictures, serve)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=100_000)
    asked = parser.parse_args()
    for part in asked.parts or PARTS:
        print(f"## {part}: {PARTS[part].__doc__.splitlines()[0]}\n", flush=True)
        PARTS[part](runs=asked.runs, rows=asked.rows)
