"""What ten words of an answer cost, over one forward and ten backward passes through the whole sequence.

    python benchmarks/answers.py [--models llava llama] [--methods attnlrp libragrad] [--repeats 5]

Both are counted in processor time of one thread, next to each other in every round; the medians of the ratios are
printed. The answer is given, so that writing it is in neither. llava: a tower of 196 patches and a Llama of 6 blocks
each, random weights, a picture of 224 × 224 through its processor; llama: a text of 200 tokens for the same Llama.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS, MARK = 1000, 999
TEXT = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
    "vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ANSWER = list(range(20, 30))


class Processor:
    """Pictures and words: the place of a picture is repeated for each of its rows."""

    image_token, image_token_id = "<image>", MARK

    def __init__(self) -> None:
        known = {f"w{i}": i for i in range(MARK)} | {"<image>": MARK}
        plain = Tokenizer(models.WordLevel(known, unk_token="w3"))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        marks = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
        self.tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=plain, **marks)
        self.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

        self.image_processor = CLIPImageProcessorPil()

    def __call__(self, images: Any, text: list[str], return_tensors: str, padding: bool) -> dict[str, Any]:
        pixels = dict(self.image_processor(images=[p for group in images for p in group], return_tensors="pt"))
        written = [t.replace("<image>", "<image> " * 196) for t in text]
        return {**self.tokenizer(written, return_tensors="pt", padding=padding), **pixels}


def llava() -> tuple[torch.nn.Module, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    tower = hf.CLIPVisionConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, patch_size=16
    )
    config = hf.LlavaConfig(vision_config=tower, text_config=hf.LlamaConfig(**TEXT), image_token_index=MARK)
    model, processor = hf.LlavaForConditionalGeneration(config).eval(), Processor()
    noise = np.random.default_rng(0).integers(0, 255, (224, 224, 3), np.uint8)
    given = {"prompt": "w5 w6 w7", "images": Image.fromarray(noise), "processor": processor}

    def fed() -> dict[str, torch.Tensor]:
        made = processor(images=[[given["images"]]], text=["<image>w5 w6 w7"], return_tensors="pt", padding=False)
        return {"input_ids": made["input_ids"], "pixel_values": made["pixel_values"]}

    return model, given, fed


def llama() -> tuple[torch.nn.Module, dict[str, Any], Callable[[], dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    ids = torch.randint(40, MARK, (200,))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)).eval(), {"prompt": ids}, lambda: {"input_ids": ids[None]}


MODELS = {"llava": llava, "llama": llama}


def plain(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> None:
    """One forward pass over prompt and answer, and a backward pass to the inputs for each token of the answer."""
    ids = torch.cat([given["input_ids"], torch.tensor([ANSWER[:-1]])], 1)
    roots = [given[n].clone().requires_grad_() for n in ("pixel_values",) if n in given]

    def looked_up(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        roots.append(output.detach().requires_grad_())
        return roots[-1].clone()

    frozen = [(p, p.requires_grad) for p in model.parameters()]
    handle = model.get_input_embeddings().register_forward_hook(looked_up)
    try:
        for parameter, _ in frozen:
            parameter.requires_grad_(False)
        pixels = {"pixel_values": roots[0]} if roots else {}
        logits = model(input_ids=ids, **pixels, use_cache=False, logits_to_keep=len(ANSWER)).logits
        for i, token in enumerate(ANSWER):
            torch.autograd.grad(logits[0, i].log_softmax(-1)[token], roots, retain_graph=i + 1 < len(ANSWER))
    finally:
        handle.remove()
        for parameter, state in frozen:
            parameter.requires_grad_(state)


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--methods", nargs="+", default=["attnlrp", "libragrad", "lrp_ah_ln", "input_x_gradient"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    import whyformer

    torch.set_num_threads(1)
    print("| model | method | × one forward and ten backward | plain, s |")
    print("|---|---|---|---|")
    for name in arguments.models:
        model, given, fed = MODELS[name]()
        tensors, times = fed(), dict[str, list[tuple[float, float]]]()
        for turn in range(arguments.repeats + 1):
            for method in arguments.methods:
                asked = {"continuation": ANSWER, "method": method, **given}
                both = seconds(partial(plain, model, tensors))
                own = seconds(partial(whyformer.explain_generation, model, **asked))
                if turn:  # the first round warms up
                    times.setdefault(method, []).append((own / both, both))
        for method, found in times.items():
            ratio, both = (statistics.median(t[i] for t in found) for i in (0, 1))
            print(f"| {name} | {method} | {ratio:.2f} | {both:.2f} |", flush=True)


if __name__ == "__main__":
    main()
