"""``whyformer maximize``: the pictures that units of a model answer to most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from whyformer.apps.cli import options as opt
from whyformer.apps.cli.telling import tell, working
from whyformer.errors import InputError
from whyformer.explanation.versions import record


@dataclass(kw_only=True)
class Maximize(opt.Common):
    units: list[str]
    model: str = "bundled:digits"
    recipe: str = "feature_visualisation"
    steps: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    jitter: int | None = None
    blur: float | None = None
    setting: list[str] | None = None
    seed: int = 0
    out: Path = Path("maximized.png")
    device: str | None = None


def maximize(asked: Maximize) -> None:
    """Draw the pictures that classes, neurons or tokens answer to most (activation maximisation)."""
    kind, several = asked.out.suffix.lower(), len(asked.units) > 1
    if several and kind not in (".png", ".svg", ".pdf"):
        raise InputError(f"--out of several units must end in .png, .svg or .pdf, not {asked.out.name!r}")
    if not several and kind not in (".png", ".safetensors"):
        raise InputError(f"--out must end in .png or .safetensors, not {asked.out.name!r}")
    if not asked.out.parent.is_dir():
        raise InputError(f"there is no folder {asked.out.parent}")
    settings = dict(map(opt.pair, asked.setting or []))
    for name in ("steps", "learning_rate", "weight_decay", "jitter", "blur"):
        if getattr(asked, name) is not None:
            settings[name] = getattr(asked, name)
    with working(asked) as bars:
        with bars.step(f"loading {asked.model}"):
            from whyformer.maximize import maximize_activation
            from whyformer.models import load
            from whyformer.show import encode, gallery

            loaded = load(asked.model, device=asked.device)
        made = [
            maximize_activation(
                loaded.model, int(unit) if unit.isdecimal() else unit, recipe=asked.recipe, seed=asked.seed,
                processor=loaded.processor, progress=bars.track, **settings,
            )
            for unit in asked.units
        ]  # fmt: skip
    if several:
        from whyformer.explanation.storage import written_whole

        with written_whole(asked.out) as partial:
            partial.write_bytes(encode(gallery(made), kind[1:]))
    else:
        made[0].save(asked.out)
    found = [{"unit": one.unit, "activation": one.activation, "history": one.history} for one in made]
    facts = record("maximize", units=found, model=asked.model, settings=made[0].settings)
    said = [
        f"{unit}: activation {one.history[0]:.3f} at the start, {one.activation:.3f} now"
        for unit, one in zip(asked.units, made, strict=True)
    ]
    tell(asked, facts, "\n".join(said), [asked.out])
