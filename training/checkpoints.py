"""Going on after an interruption: the state after each epoch, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import torch


def resume(state: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what was kept, if anything was; the number of epochs that are done."""
    if not state.is_file():
        return 0
    saved = torch.load(state, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epoch"])


def keep(state: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Replace what was kept by the state after ``epochs`` epochs."""
    new = state.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epochs}, new)
    new.replace(state)
