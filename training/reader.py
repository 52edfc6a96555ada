"""Train the bundled reader: a small LLaVA that reads the digits of a scene and answers four questions about them.

    python training/reader.py --work runs/reader

Interrupt it and run the same command again to go on after the last epoch. The tower is that of the bundled digits
model and stays as it is, so each scene goes through it once; the projector and the Llama are trained from scratch on
its rows. A picture is the beginning of all its questions: they are answered side by side, each seeing the picture and
itself alone. Throw-away heads ask the projected rows which column they are of and which digit's ink they hold, so that
both can soon be looked up; in the first part of the training most patches of the ground are left out. Scenes are drawn
while it trains, from the digit images of the split "train" only.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from checkpoints import keep, resume
from digits import NOTHING, Muon, patch_targets, rate, scaled
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    ViTForImageClassification,
)

from whyformer.datasets.reading import reading_scenes
from whyformer.datasets.scenes import Scene

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "src/whyformer/bundled"
SIDE = 14
PATCHES = SIDE * SIDE
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
WORDS = [*"0123456789", *"read what is on the from left to right : ?".split()]  # noqa: SIM905
IDS = {word: number for number, word in enumerate(SPECIAL + WORDS)}
PAD, START, END, IMAGE = IDS["<pad>"], IDS["<s>"], IDS["</s>"], IDS["<image>"]
QUESTIONS = {  # what each asks for, of the digits from left to right
    "read from left to right :": lambda digits: digits,
    "read from right to left :": lambda digits: digits[::-1],
    "what is on the left ?": lambda digits: digits[:1],
    "what is on the right ?": lambda digits: digits[-1:],
}
LONGEST = 6 + 5
CHAT = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words, small letters, signs apart; a text begins with <s>."""
    plain = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    plain.normalizer = normalizers.Lowercase()
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
        model_max_length=256,
    )


def build(args: argparse.Namespace) -> LlavaForConditionalGeneration:
    """The model with the digits model's tower, the rest as initialised."""
    digits = ViTForImageClassification.from_pretrained(BUNDLED / "digits")
    text = LlamaConfig(
        vocab_size=len(IDS),
        hidden_size=args.hidden,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=256,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    config = LlavaConfig(
        vision_config=digits.config,
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=PATCHES,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(digits.vit.state_dict(), strict=False)
    model.model.vision_tower.requires_grad_(False)
    return model


Shard = tuple[torch.Tensor, torch.Tensor, list[tuple[int, ...]]]


class Stock:
    """The latest shards of scenes: the tower's rows, what is on each patch, and the digits from left to right."""

    def __init__(self, args: argparse.Namespace, model: LlavaForConditionalGeneration) -> None:
        self.args, self.model = args, model
        self.shards: dict[int, Shard] = {}

    @torch.inference_mode()
    def shard(self, number: int) -> Shard:
        """One shard; the rows that LLaVA takes from its tower are kept in half precision."""
        args = self.args
        clutter = min(1.0, 0.4 + 0.2 * number)
        rows, digits = [], []
        far = {"clutter": clutter, "apart": args.apart}
        scenes = list(reading_scenes(args.shard, seed=1000 * args.seed + number, split="train", **far))
        for start in range(0, len(scenes), 100):
            part = scenes[start : start + 100]
            pixels = scaled(torch.from_numpy(np.stack([np.asarray(scene.image) for scene in part])))
            states = self.model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
            rows.append(states[self.model.config.vision_feature_layer][:, 1:].half())
            digits += [scene.digits for scene in part]
        patches = torch.from_numpy(np.stack([patch_targets(scene) for scene in scenes]))
        return torch.cat(rows), patches, digits

    def advance(self, epoch: int) -> None:
        """Hold the shards of this epoch: the newest and some before it."""
        wanted = range(max(0, epoch - self.args.shards + 1), epoch + 1)
        self.shards = {n: self.shards[n] if n in self.shards else self.shard(n) for n in wanted}

    def sample(self, size: int, generator: np.random.Generator) -> Shard:
        """A random batch."""
        held, each = list(self.shards), self.args.shard
        picks = [(int(generator.choice(held)), int(generator.integers(each))) for _ in range(size)]
        rows, patches = (torch.stack([self.shards[n][part][i] for n, i in picks]) for part in (0, 1))
        return rows.float(), patches, [self.shards[n][2][i] for n, i in picks]


def asked(digits: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of questions and answers of each scene, ``[B, questions, LONGEST]``, and what follows each, or -100."""
    words = torch.full((len(digits), len(QUESTIONS), LONGEST), PAD)
    following = torch.full_like(words, -100)
    for i, told in enumerate(digits):
        for j, (question, answer) in enumerate(QUESTIONS.items()):
            before = [IDS[word] for word in question.split()]
            after = [IDS[str(digit)] for digit in answer(told)]
            words[i, j, : len(before) + len(after)] = torch.tensor(before + after)
            begin = len(before) - 1
            following[i, j, begin : begin + len(after) + 1] = torch.tensor([*after, END])
    return words, following


def side_by_side(patches: int) -> torch.Tensor:
    """The mask ``[1, 1, N, N]`` with which the questions share one picture of so many patches."""
    shared, own = 1 + patches, len(QUESTIONS) * LONGEST
    branch = torch.cat([torch.full((shared,), -1), torch.arange(own) // LONGEST])
    earlier = torch.ones(shared + own, shared + own, dtype=torch.bool).tril()
    seen = earlier & ((branch[None] == -1) | (branch[None] == branch[:, None]))
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]


def chosen(patches: torch.Tensor, count: int) -> torch.Tensor:
    """``[B, count]`` patches to look at, in order: all that may hold ink, then others at random."""
    worth = (patches != NOTHING) + torch.rand(patches.shape)
    return worth.topk(count).indices.sort().values


def loss_of(
    model: LlavaForConditionalGeneration, heads: nn.ModuleList, rows: torch.Tensor, patches: torch.Tensor,
    digits: list[tuple[int, ...]], count: int = PATCHES,
) -> tuple[torch.Tensor, torch.Tensor, float]:  # fmt: skip
    """Cross-entropy of the answers' words, that of the throw-away heads, and the share of words that are right."""
    words, following = asked(digits)
    embed = model.model.language_model.embed_tokens
    start = embed(torch.full((len(rows), 1), START))
    at = chosen(patches, count)
    seen = model.model.multi_modal_projector(rows.gather(1, at[..., None].expand(-1, -1, rows.shape[-1])))
    columns, patches = at % SIDE, patches.gather(1, at)
    told = sum(
        functional.cross_entropy(head(seen).flatten(0, 1), truth.flatten(), ignore_index=-100)
        for head, truth in zip(heads, (columns, patches), strict=True)
    )
    whole = torch.cat([start, seen, embed(words.flatten(1))], 1)
    behind = (PATCHES + 1 + torch.arange(words[0].numel()) % LONGEST).expand(len(rows), -1)
    positions = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), 1 + at, behind], 1)
    states = model.model.language_model(
        inputs_embeds=whole, attention_mask=side_by_side(count), position_ids=positions, use_cache=False
    ).last_hidden_state[:, 1 + count :]
    logits, truth = model.lm_head(states).flatten(0, 1), following.flatten()
    right = (logits.argmax(-1) == truth)[truth != -100].float().mean().item()
    return functional.cross_entropy(logits, truth), told, right


def optimizer_of(model: nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers and the projector, AdamW for the rest."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    inner = [value for name, value in named if value.ndim == 2 and (".layers." in name or "projector" in name)]
    known = {id(value) for value in inner}
    rest = [value for _, value in named if id(value) not in known]
    return [Muon(inner, args.muon), torch.optim.AdamW(rest, betas=(0.9, 0.98), weight_decay=0.0)]


class Both(torch.optim.Optimizer):
    """Two optimizers with one state."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    def state_dict(self):
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state):
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def train(args: argparse.Namespace) -> LlavaForConditionalGeneration:
    """Train, or go on training."""
    torch.manual_seed(args.seed)
    model = build(args)
    heads = nn.ModuleList(nn.Sequential(nn.LayerNorm(args.hidden), nn.Linear(args.hidden, n)) for n in (SIDE, 11))
    whole = nn.ModuleDict({"model": model, "heads": heads})
    parts = optimizer_of(whole, args)
    state, both = args.work / "state.pt", Both(parts)
    done = resume(state, whole, both)
    stock, begin = Stock(args, model), time.perf_counter()
    for epoch in range(done, args.epochs):
        stock.advance(epoch)
        torch.manual_seed(args.seed + epoch)
        count = args.patches if epoch < args.coarse else PATCHES
        generator = np.random.default_rng([args.seed, epoch])
        model.train()
        sums = []
        for step in range(args.steps):
            learning = rate(epoch * args.steps + step + 1, args.epochs * args.steps, args.rate)
            for part in parts:
                for group in part.param_groups:
                    group["lr"] = learning
            loss, told, right = loss_of(model, heads, *stock.sample(args.batch, generator), count)
            whole.zero_grad(set_to_none=True)
            (loss + 0.3 * told).backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            for part in parts:
                part.step()
            sums.append((loss.item(), told.item(), right))
            if (step + 1) % 50 == 0 or step + 1 == args.steps:
                answers, rows, words = np.mean(sums, axis=0)
                sums.clear()
                passed = time.perf_counter() - begin
                said = f"answers {answers:.4f}, rows {rows:.4f}, words right {words:.1%}, {passed:.0f}s"
                print(f"epoch {epoch}, {step + 1}: {said}", flush=True)
        keep(state, whole, both, epoch + 1)
    return model


def save(model: LlavaForConditionalGeneration, folder: Path) -> None:
    """Write an ordinary folder that AutoProcessor and AutoModelForImageTextToText load."""
    model.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["vision_config"].pop("_name_or_path", None)  # where the tower was loaded from
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_bytes((BUNDLED / "digits/preprocessor_config.json").read_bytes())
    how = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": 8,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    (folder / "processor_config.json").write_text(json.dumps(how, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT + "\n", encoding="utf-8")


@torch.inference_mode()
def measure(folder: Path, count: int, seed: int) -> dict[str, float]:
    """How often each answer of the saved model is right to the word, on held-out scenes, asked the ordinary way."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder, backend="pil")
    right: dict[str, list[bool]] = {question: [] for question in QUESTIONS}
    scenes: list[Scene] = list(reading_scenes(count, seed=seed))
    for start in range(0, count, 20):
        part = scenes[start : start + 20]
        for question, answer in QUESTIONS.items():
            asked = [f"<image> {question}"] * len(part)
            given = processor(images=[scene.image for scene in part], text=asked, return_tensors="pt")
            told = model.generate(**given, max_new_tokens=6, do_sample=False)[:, given["input_ids"].shape[1] :]
            said = [text.split() for text in processor.batch_decode(told, skip_special_tokens=True)]
            right[question] += [
                own == [str(digit) for digit in answer(scene.digits)] for own, scene in zip(said, part, strict=True)
            ]
    return {question: float(np.mean(found)) for question, found in right.items()}


def card(model: LlavaForConditionalGeneration, found: dict[str, float], count: int) -> str:
    """The model card."""
    text = model.config.text_config
    rows = "\n".join(f"| {question} | **{share:.1%}** |" for question, share in found.items())
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# A small LLaVA that reads handwritten digits

A small `LlavaForConditionalGeneration`: it reads the digits of a 112 x 112 picture with two to four different
handwritten digits on a cluttered background, and answers four questions about them. It comes with `whyformer`, so that
there is a vision-language model to explain without a download, and its explanations can be checked:
`whyformer.datasets.reading.reading_scenes` draws such pictures with a mask of the ink of every digit, in reading order,
so that the part of the picture from which each generated word must come is known.

- **Architecture**: the tower of `bundled:digits` (ViT, 5 layers, width 96; the 14 x 14 rows before its last
  layer are used, as in LLaVA), a projector of two layers, and a Llama of {text.num_hidden_layers} layers, width
  {text.hidden_size}, {text.num_attention_heads} heads, with {text.vocab_size} words in its vocabulary;
  {model.num_parameters():,} parameters, stored as 32-bit safetensors.
- **Words**: the ten digits and `read what is on the from left to right : ?`; any other word is `<unk>`. A chat
  template puts the picture before the text.
- **Data**: scenes made of the 1797 digit images that scikit-learn ships (`load_digits`), which are from the UCI data
  set *Optical Recognition of Handwritten Digits* (E. Alpaydin and C. Kaynak, 1998), CC BY 4.0. The data is not
  shipped here. A fifth of the images (by digit, at random) is held out; `split_indices()` lists them.
- **Training**: projector and Llama from scratch on the rows of the frozen tower; about 900 steps of 40 scenes (some
  3,000 different ones), each with all four questions. Auxiliary heads on the projected rows were trained to predict the
  column of each row and the digit whose ink it holds, and then removed. In the first part of the training, most patches
  of the background were left out. The weights are those of the last step.
- **Licence of the weights**: Apache-2.0.

## Measured

Answers in which every word is right, by greedy generation, on {count} scenes of held-out digit images with two,
three or four digits, whose centres are at least 6 pixels apart horizontally:

| question | right |
| --- | --- |
{rows}

    python training/reader.py --measure --scenes {count}

The checkpoint is the last one. Other scenes of held-out digits were evaluated during the training, which showed when
whole pictures were needed.

## Retrain

    python training/reader.py

See `training/README.md` for the time it takes, and for how the shipped weights were trained.

## Limits

It recognises light digits on a darker background, about 28 to 40 pixels high and hardly rotated, as in the pictures of
`reading_scenes`, each digit once; if one digit is above another, their order is a guess. It knows no other questions,
and its answers to photographs mean nothing. The digits were written by few people.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=BUNDLED / "reader")
    parser.add_argument("--work", type=Path, default=ROOT / "runs/reader", help="folder of checkpoints")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--inner", type=int, default=192)
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=120, help="of one epoch")
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--shard", type=int, default=350, help="new scenes of an epoch")
    parser.add_argument("--shards", type=int, default=9, help="how many epochs a scene is kept")
    parser.add_argument("--apart", type=float, default=3.0, help="pixels between the middles of digits, at least")
    parser.add_argument("--patches", type=int, default=72, help="to look at in the first part of the training")
    parser.add_argument("--coarse", type=int, default=5, help="epochs of that part")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--muon", type=float, default=7.0, help="Muon's rate as a multiple of AdamW's")
    parser.add_argument("--scenes", type=int, default=600, help="held-out scenes to measure on")
    parser.add_argument("--measure", action="store_true", help="only measure the model in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.measure:
        args.work.mkdir(parents=True, exist_ok=True)
        save(train(args), args.out)
    found = measure(args.out, args.scenes, seed=2026)
    if not args.measure:
        model = LlavaForConditionalGeneration.from_pretrained(args.out)
        (args.out / "README.md").write_text(card(model, found, args.scenes), encoding="utf-8")
    print(", ".join(f"{name} {value:.4f}" for name, value in found.items()), f"on {args.scenes} held-out scenes")


if __name__ == "__main__":
    main()
