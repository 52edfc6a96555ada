"""Time and memory of every method, as ratios inside one run.

    python benchmarks/speed.py [--models vit bert] [--methods a,b] [--repeats 5] [--threads N] [--processor]

fwd = plain forward without gradients (SDPA), fb = plain forward and backward to the input with frozen parameters; both
are measured again next to each method, and the median of the ratios is printed. Memory: the largest rise of the
process's resident size over its start (Linux), sampled while the work runs in a fresh process for each figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


def vit_base() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """ViT-B/16 at 224, random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
    return model, {"pixel_values": torch.randn(1, 3, 224, 224)}


def bert_base(tokens: int = 128) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """BERT-base, random weights, ``tokens`` tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_labels=2)).eval()
    ids = torch.randint(1000, 20000, (1, tokens))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def llama(tokens: int = 128) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A language model of 135 M parameters (the shape of SmolLM2-135M), random weights, ``tokens`` tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), {"input_ids": torch.randint(1000, 20000, (1, tokens))}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]] = {
    "vit": vit_base,
    "bert": bert_base,
    "bert512": lambda: bert_base(512),
    "llama": llama,
}
COMPOSITES = ("ah", "ln", "ah_ln", "libra", "attnlrp", "cp_lrp", "gim")
# Limits the project sets itself: (ratio, of what); a method's settings are written name:key=value
LIMITS = {
    "transformer_attribution": (6.0, "fwd"), "lrp": (6.0, "fwd"), "gae": (1.1, "fb"), "input_x_gradient": (1.1, "fb"),
    "lrp_ah": (1.1, "fb"), "lrp_ln": (1.1, "fb"), "lrp_ah_ln": (1.1, "fb"), "rollout": (1.1, "fwd"),
    "raw_attention": (1.1, "fwd"), "partial_lrp": (1.3, "fwd"), "gradcam_attention": (1.3, "fwd"),
    "libragrad": (2.2, "fwd"), **{f"input_x_gradient:composite={one}": (1.05, "fb") for one in COMPOSITES},
}  # fmt: skip


ONE_ROW = {"LlamaForCausalLM": {"logits_to_keep": 1, "use_cache": False}}


def plain_forward(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        model(**inputs, **ONE_ROW.get(type(model).__name__, {}))


def plain_backward(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Forward and backward to the input; for text to the output of the embeddings."""
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    for parameter, _ in frozen:
        parameter.requires_grad_(False)
    feed = dict(inputs)
    roots: list[torch.Tensor] = []
    handle = None
    if "pixel_values" in feed:
        feed["pixel_values"] = feed["pixel_values"].clone().requires_grad_()
        roots.append(feed["pixel_values"])
    else:

        def root(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            roots.append(output.requires_grad_())
            return roots[0]

        first = model.bert.embeddings if hasattr(model, "bert") else model.get_input_embeddings()
        handle = first.register_forward_hook(root)
    logits = model(**feed, **ONE_ROW.get(type(model).__name__, {})).logits
    torch.autograd.grad(logits[..., -1, :][..., 0].sum() if logits.dim() == 3 else logits[:, 0].sum(), roots)
    if handle is not None:
        handle.remove()
    for parameter, state in frozen:
        parameter.requires_grad_(state)


clock = time.perf_counter


def seconds(work: Callable[[], Any]) -> float:
    start = clock()
    work()
    if torch.cuda.is_available():  # what was asked of a GPU goes on behind the call
        torch.cuda.synchronize()
    return clock() - start


def time_method(
    name: str, model: torch.nn.Module, inputs: dict[str, torch.Tensor], repeats: int, settings: dict[str, Any]
) -> tuple[float, float]:
    """(method / fwd, method / fb): medians over rounds that measure all three."""
    import whyformer

    ratios = []
    for _ in range(repeats + 1):
        forward = seconds(lambda: plain_forward(model, inputs))
        both = seconds(lambda: plain_backward(model, inputs))
        own = seconds(lambda: whyformer.explain(model, inputs, name, target=0, **settings))
        ratios.append((own / forward, own / both))
    ratios = ratios[1:]  # the first round warms up
    return statistics.median(r[0] for r in ratios), statistics.median(r[1] for r in ratios)


def batch_cost(
    name: str, model: torch.nn.Module, inputs: dict[str, torch.Tensor], repeats: int, batch: int = 8
) -> float:
    """Time a sample takes in a batch, over the time it takes alone."""
    import whyformer

    many = {k: v.repeat_interleave(batch, 0) for k, v in inputs.items()}
    ratios = []
    for _ in range(repeats + 1):
        alone = seconds(lambda: whyformer.explain(model, inputs, name, target=0))
        ratios.append(seconds(lambda: whyformer.explain(model, many, name, target=0)) / batch / alone)
    return statistics.median(ratios[1:])


def path_cost(model: torch.nn.Module, inputs: dict[str, torch.Tensor], repeats: int, steps: int = 32) -> float:
    """Integrated gradients of ``steps`` points, over that many plain forward and backward passes."""
    import whyformer

    ratios = []
    for _ in range(repeats + 1):
        both = seconds(lambda: [plain_backward(model, inputs) for _ in range(steps)])
        own = seconds(
            lambda: whyformer.explain(model, inputs, "integrated_gradients", target=0, steps=steps, progress=False)
        )
        ratios.append(own / both)
    return statistics.median(ratios[1:])


def zeroing_gain(model: torch.nn.Module, inputs: dict[str, torch.Tensor], repeats: int) -> tuple[float, float]:
    """(one plain pass for each token and block / value zeroing, one plain pass for each token / value zeroing)."""
    import whyformer

    tokens, blocks = 197 if "pixel_values" in inputs else inputs["input_ids"].shape[1], model.config.num_hidden_layers
    ratios = []
    for _ in range(repeats):
        alone = statistics.median(seconds(lambda: plain_forward(model, inputs)) for _ in range(5))
        own = seconds(lambda: whyformer.explain(model, inputs, "value_zeroing", target=0, progress=False))
        ratios.append(alone * tokens / own)
    return statistics.median(ratios) * blocks, statistics.median(ratios)


def peak_memory(work: Callable[[], Any]) -> float:
    """MB by which the resident size rises above its value before the work."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    gc.collect()
    start, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(0, peak - start) / 1e6


def measure_memory(model_name: str, what: str) -> float:
    """In a fresh process, after one warm forward pass."""
    command = [sys.executable, __file__, "--models", model_name, "--memory-of", what]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(result.stdout.strip().splitlines()[-1]))


def memory_of(model_name: str, what: str) -> None:
    import whyformer

    model, inputs = MODELS[model_name]()
    plain_forward(model, inputs)
    work = {"fwd": lambda: plain_forward(model, inputs), "fb": lambda: plain_backward(model, inputs)}
    print(json.dumps(peak_memory(work.get(what, lambda: whyformer.explain(model, inputs, what, target=0)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit", "bert"], choices=MODELS)
    parser.add_argument("--methods", help="comma-separated; default: those with a limit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor", action="store_true", help="processor time of one thread, on a busy machine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=1, help="in a batch, of the method and of the plain passes")
    parser.add_argument("--batch", action="store_true", help="also compare a batch of 8 with a single sample")
    parser.add_argument("--long", action="store_true", help="also integrated gradients and value zeroing: minutes")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.processor:
        global clock
        clock, arguments.threads = time.process_time, 1
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        return memory_of(arguments.models[0], arguments.memory_of)
    names = arguments.methods.split(",") if arguments.methods else list(LIMITS)
    for model_name in arguments.models:
        model, inputs = MODELS[model_name]()
        model = model.to(arguments.device)
        inputs = {k: v.repeat_interleave(arguments.samples, 0).to(arguments.device) for k, v in inputs.items()}
        base = None if arguments.no_memory else measure_memory(model_name, "fb")
        print(
            f"\n{model_name}: {arguments.device}, threads {torch.get_num_threads()}, repeats {arguments.repeats}"
            + f", {arguments.samples} at once"
            + (f", plain fb takes {base:.0f} MB" if base else "")
        )
        print(f"| {'method':<24} | × fwd | × fb | limit | extra memory × fb | a sample of 8 / alone |")
        print("|---|---|---|---|---|---|")
        for name in names:
            method, *given = name.split(":")
            settings = dict(one.split("=") for one in given)
            forward, both = time_method(method, model, inputs, arguments.repeats, settings)
            limit, unit = LIMITS.get(name, (None, ""))
            held = (
                ""
                if limit is None
                else f"{limit} {unit} {'ok' if (forward if unit == 'fwd' else both) <= limit else 'OVER'}"
            )
            memory = "" if base is None or given else f"{measure_memory(model_name, method) / base:.2f}"
            batched = f"{batch_cost(method, model, inputs, 1):.2f}" if arguments.batch and not given else ""
            print(f"| {name:<24} | {forward:.2f} | {both:.2f} | {held} | {memory} | {batched} |", flush=True)
        if arguments.long:
            path = path_cost(model, inputs, arguments.repeats)
            print(f"integrated gradients, 32 points: {path:.2f} × 32 fb (limit 0.95)", flush=True)
            pairs, tokens = zeroing_gain(model, inputs, 1)
            print(f"value zeroing: {pairs:.1f} × faster than a pass for each token and block (limit 5);", end=" ")
            print(f"a pass for each token alone would take {tokens:.1f} × its time", flush=True)
    return None


if __name__ == "__main__":
    main()
