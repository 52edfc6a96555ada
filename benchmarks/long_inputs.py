"""Peak extra memory and time of explaining the last token of a long text, beside a plain forward and backward pass.

    python benchmarks/long_inputs.py [--tokens 512,2048] [--methods NAMES] [--layers 8] [--width 512 | --model FOLDER]
                                     [--device cuda]

A method's setting stands behind a colon (``attnlrp:share=0``); with ``+checkpoint`` blocks run again on the way back.
A Llama with random weights, or the language model of a folder (with random weights where the folder holds none), in
float32 on one thread. Memory is the highest resident memory during the work beyond that before it, of the second of two
runs (the first has learned the model's structure), in a process of its own; time the processor's, the least of two runs
that take turns with two of the plain pass. The plain pass computes the logits of the last token alone and keeps what
its backward pass to the embeddings needs. On a GPU memory is what tensors take, and time the clock's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

METHODS = (
    "plain,input_x_gradient,attnlrp:share=0,attnlrp:share=0.8,cp_lrp,libra,lrp_ah_ln,input_x_gradient+checkpoint,"
    "attnlrp:share=0+checkpoint,attnlrp:share=0.8+checkpoint,libra+checkpoint"
)

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Where memory is measured, what is freed goes back to the system, which takes time."""


def peak_reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def resident(what: str) -> float:
    """Resident memory in MiB: "VmRSS" now, "VmHWM" the highest since the last reset."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(what))
    return int(line.split()[1]) / 1024


def one(
    name: str, tokens: int, layers: int, width: int, folder: str | None, timed: bool, device: str
) -> dict[str, float]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    import whyformer
    from whyformer import targets

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=width * 8 // 3 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), max_position_embeddings=16384,
    )  # fmt: skip
    if folder is None:
        made = LlamaForCausalLM(config)
    elif any(Path(folder).glob("*.safetensors")):
        made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model = made.eval().requires_grad_(False).to(device)
    gpu = torch.device(device).type == "cuda"
    finish = torch.cuda.synchronize if gpu else lambda: None
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(3, 32000, (1, tokens), generator=generator).to(device)
    name, _, checkpoint = name.partition("+")
    method, _, given = name.partition(":")
    settings: dict[str, Any] = {k: float(v) for k, _, v in [given.partition("=")] if k}
    if method == "libra":
        method, settings = "input_x_gradient", {"composite": "libra"}
    settings |= {"checkpoint": True} if checkpoint else {}

    def plain() -> None:
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        row = model(inputs_embeds=embedded, use_cache=False, logits_to_keep=1).logits[:, -1]
        torch.autograd.grad(row.log_softmax(-1)[:, 5].sum(), embedded)

    def work() -> None:
        if method == "plain":
            plain()
        else:
            whyformer.explain(model, {"input_ids": ids}, method, targets.LogProbability(5), **settings)

    def seconds(done: Callable[[], None]) -> float:
        clock = time.perf_counter if gpu else time.process_time
        finish()
        start = clock()
        done()
        finish()
        return clock() - start

    ids = whole[:, :64]
    work()
    before, ids = resident("VmRSS"), whole
    if timed:
        work()
        pairs = [(seconds(work), seconds(plain)) for _ in range(2)]
        return dict(zip(("seconds", "of plain"), map(min, *pairs), strict=True))
    for _ in range(2):
        peak_reset()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() / 2**20
        work()
    return {"MiB": (torch.cuda.max_memory_allocated() / 2**20 if gpu else resident("VmHWM")) - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        size = (int(asked.tokens), asked.layers, asked.width)
        print(json.dumps(one(asked.one, *size, asked.model, asked.timed, asked.device)))
        return
    print("| tokens | method | MiB | × plain | seconds | × plain |\n| ---: | --- | ---: | ---: | ---: | ---: |")
    for tokens in asked.tokens.split(","):
        plain = 0.0
        for name in asked.methods.split(","):
            size = ["--tokens", tokens, "--layers", str(asked.layers), "--width", str(asked.width)]
            size += ["--model", asked.model] if asked.model else []
            command = [sys.executable, __file__, *size, "--device", asked.device, "--one", name]
            timed, weighed = (
                subprocess.run(
                    [*command, *more], capture_output=True, text=True, check=False, env={**os.environ, **own}
                )
                for more, own in ((["--timed"], {}), ([], RETURNED))
            )
            if timed.returncode or weighed.returncode:
                said = (timed.stderr + weighed.stderr).strip().splitlines()[-1]
                print(f"| {tokens} | {name} | failed: {said[:80]} | | | |", flush=True)
                continue
            took, kept = (json.loads(ran.stdout.splitlines()[-1]) for ran in (timed, weighed))
            plain = plain or kept["MiB"]
            print(
                f"| {tokens} | {name} | {kept['MiB']:.0f} | {kept['MiB'] / plain:.2f} | {took['seconds']:.2f} | "
                f"{took['seconds'] / took['of plain']:.2f} |", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
