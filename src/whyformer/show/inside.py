"""Figure of the relevance of heads, blocks and neurons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from whyformer.show import colours
from whyformer.show.paper import DPI
from whyformer.show.typeface import dress, fitted, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from whyformer.inside import Inside


def figure(inside: Inside, sample: int = 0, k: int = 10) -> Figure:
    """See :meth:`whyformer.inside.Inside.figure`."""
    from matplotlib.figure import Figure

    rows = max(len(inside.attention_blocks), inside.blocks, k, 4)
    drawing = Figure(figsize=(10.5, 1.3 + 0.22 * rows), layout="constrained", facecolor="white", dpi=DPI)
    heads, layers, neurons = drawing.subplots(1, 3, width_ratios=(1, 0.8, 0.8))
    name = fitted(inside.target_names[sample], 7, 10, "bold")
    title = f"Where does “{name}” come from? ({inside.composite})"
    drawing.suptitle(printable(title), fontsize=10, fontweight="bold", parse_math=False)
    _heads(heads, inside, sample)
    _layers(layers, inside, sample)
    _neurons(neurons, inside, sample, k)
    dress(drawing)
    return drawing


def _named(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7, length=2)
    for edge in axes.spines.values():
        edge.set_color(colours.LIGHT["line"])


def _heads(axes: Axes, inside: Inside, sample: int) -> None:
    _named(axes, "Attention heads")
    scores = colours.array(inside.heads[sample])
    if not scores.size:
        axes.text(0.5, 0.5, "no attention heads", ha="center", color=colours.SOFT, fontsize=8, transform=axes.transAxes)
        return
    unknown = ~np.isfinite(scores)
    scale = colours.scale(scores[~unknown], signed=True)
    axes.set_facecolor("#f2f2f2")
    pixels = colours.paint(scale.unit(np.where(unknown, 0, scores)), scale.signed)
    rgba = np.concatenate([pixels, ~unknown[..., None]], -1)
    axes.imshow(rgba, aspect="auto", interpolation="none")
    numbers = inside.attention_blocks
    names = [str(b) if b not in numbers[:i] else "" for i, b in enumerate(numbers)]
    step = max(1, len(numbers) // 24)
    axes.set_yticks(range(0, len(numbers), step), names[::step])
    axes.set_xticks(range(0, scores.shape[1], max(1, scores.shape[1] // 12)))
    axes.set_ylabel("block", fontsize=8)
    axes.set_xlabel(f"head (full colour: ±{scale.ends[1]})", fontsize=8)


def _layers(axes: Axes, inside: Inside, sample: int) -> None:
    _named(axes, "Attention and MLP of each block")
    places = np.arange(inside.blocks)
    for scores, label, colour in zip(inside.layers(sample), ("attention", "MLP"), ("#333333", "#999999"), strict=True):
        axes.plot(colours.array(scores), places, marker="o", markersize=3, linewidth=1.2, color=colour, label=label)
    axes.axvline(0, color=colours.LIGHT["line"], linewidth=0.8)
    axes.set_yticks(places[:: max(1, inside.blocks // 24)])
    axes.set_ylim(inside.blocks - 0.5, -0.5)
    axes.set_xlabel("relevance", fontsize=8)
    axes.legend(fontsize=7, frameon=False)


def _neurons(axes: Axes, inside: Inside, sample: int, k: int) -> None:
    _named(axes, "Neurons")
    best = inside.top_neurons(k, sample)
    inks = [colours.code(colours.colour_of(neuron.relevance, True)) for neuron in best]
    axes.barh(range(len(best)), [neuron.relevance for neuron in best], color=inks)
    axes.axvline(0, color=colours.LIGHT["line"], linewidth=0.8)
    axes.set_yticks(range(len(best)), [f"block {neuron.block}, {neuron.index}" for neuron in best])
    axes.set_ylim(k - 0.5, -0.5)
    axes.set_xlabel(colours.legend(True), fontsize=8)
