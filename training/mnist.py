"""Train a small ViT on MNIST for the activation table; it is not shipped.

    python training/mnist.py --data ../shared/data/mnist --out runs/mnist

Interrupt it and run the same command again to go on from the last epoch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from checkpoints import keep, resume
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from whyformer.datasets.labelled import read_idx

PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 28, "width": 28},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": False,  # black is 0: what has no ink has no part in x ⊙ ∂f/∂x
    "do_convert_rgb": True,
}


def read(folder: Path, start: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(``[n, 3, 28, 28]`` in 0..1, labels)."""
    pixels, labels = (read_idx(next(folder.glob(f"{start}*-{kind}-*"))) for kind in ("images", "labels"))
    pictures = torch.from_numpy(pixels.astype(np.float32) / 255)[:, None].expand(-1, 3, -1, -1)
    return pictures, torch.from_numpy(labels.astype(np.int64))


def accuracy(model: torch.nn.Module, pictures: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        top = torch.cat([model(part).logits.argmax(-1) for part in pictures.split(500)])
    return float((top == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    pictures, labels = read(args.data, "train")
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=28,
            patch_size=4,
            num_labels=10,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.05)
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out / "state.pt"
    first = resume(state, model, optimizer)
    begin = time.perf_counter()
    for epoch in range(first, args.epochs):
        model.train()
        generator = torch.Generator().manual_seed(args.seed + epoch)
        for step, batch in enumerate(torch.randperm(len(labels), generator=generator).split(64)):
            done = (epoch + step * 64 / len(labels)) / args.epochs
            for group in optimizer.param_groups:
                group["lr"] = args.rate * min(1, 20 * done + 0.05) * (1 - done)
            shift = torch.randint(-2, 3, (2,), generator=generator).tolist()
            moved = torch.roll(pictures[batch], shift, (-2, -1))  # digits have a margin of 4 pixels
            loss = functional.cross_entropy(model(moved).logits, labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        keep(state, model, optimizer, epoch + 1)
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss.item():.4f} {time.perf_counter() - begin:.0f}s", flush=True)
    score = accuracy(model, *read(args.data, "t10k"))
    model.save_pretrained(args.out)
    (args.out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=1) + "\n")
    print(f"accuracy {100 * score:.2f} % of the 10,000 test digits", flush=True)


if __name__ == "__main__":
    main()
