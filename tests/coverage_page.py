"""Write ``docs/measurements/coverage.md`` from the outcomes: ``python tests/coverage_page.py`` runs everything and writes it;
``python tests/coverage_page.py bert llava`` runs these families and prints their part of it."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from architectures import KINDS, LEFT_OUT, listed
from outcomes import BROKEN, MEANINGLESS, NOT_YET, REFUSED, WORKS, WRONG, Cell, study

PAGE = Path(__file__).parents[1] / "docs" / "measurements" / "coverage.md"
# one or two methods of each mechanism; the others build on these
SHOWN = [
    "input_x_gradient", "integrated_gradients", "lrp", "lrp_ah_ln", "transformer_attribution", "gae", "rollout", "raw_attention",
    "norm_attention", "value_zeroing", "gradcam", "gradcam_attention", "occlusion",
]  # fmt: skip
SIGNS = {WORKS: "✓", MEANINGLESS: "–", NOT_YET: "○", REFUSED: "○", WRONG: "✗", BROKEN: "✗"}
NONE = "·"

Row = dict[str, str]


def signs(cells: Iterable[Cell]) -> Row:
    """method -> sign for one architecture; a changed model is a defect of all its cells."""
    by_method = {c.method: SIGNS[c.outcome] for c in cells}
    changed = "(model as found)" in by_method
    return {m: "✗" if changed and m in by_method else by_method.get(m, NONE) for m in SHOWN}


def reason(cell: Cell) -> str:
    """The message of a cell without details of its model, so that equal causes are grouped."""
    message = re.sub(
        r"\s*(Methods that apply|Ways out|Use a gradient method|Turn it off|The numbers that exist).*",
        "",
        cell.message.split("\n")[0],
    )
    operation = re.match(r"UnknownOperation: the operation '([^']+)'", message)
    if operation:
        return f"the operation `{operation[1]}` carries relevance and has no rule"
    message = (
        re.sub(r"^\w+: ", "", message.replace(cell.method, "it"))
        .replace("it has no meaning on this model: ", "")
        .replace("it is not supported yet on this model: ", "")
    )
    message = re.sub(r"\[[^\]]*\]|×|'[^']*'|\d+(\.\d+)?", "…", message)
    return message.strip().rstrip(".")[:200]


def written(cells: list[Cell]) -> str:
    """The text of the page."""
    by = defaultdict(list)
    for cell in cells:
        by[cell.architecture].append(cell)
    rows = {name: signs(group) for name, group in by.items()}
    count = Counter(sign for row in rows.values() for sign in row.values())
    meant = count["✓"] + count["○"] + count["✗"]
    lines = [
        "# Coverage", "",
        "Which methods work on which architectures, measured on tiny random models by `tests/coverage_page.py`, which writes this page; a test",
        "compares it with the library. A cell with ✓ passed these checks: the scores are finite, not all 0, and as many as the input has features;",
        "the logits are those of the plain model; a sample alone (text without its padding) has the scores that it has in the batch; the model is",
        "unchanged afterwards; input × gradient equals a direct computation at the pixels, or at the input of the first block.", "",
        f"**{len(rows)} architectures, {meant + count['–']} cells.** Of the {meant} meaningful cells {count['✓']} work ({100 * count['✓'] / max(meant, 1):.1f} %) and "
        f"{count['○']} raise an error with a reason (not supported yet). Known defects (wrong scores, or another error): {count['✗']}. In {count['–']} cells the method has no meaning.", "",
        "✓ works · – has no meaning on this model · ○ not supported yet; the error says so · ✗ known defect · (·) not tried", "",
    ]  # fmt: skip
    for kind in KINDS:
        of_kind = {n: r for n, r in rows.items() if n.startswith(f"{kind}/")}
        if of_kind:
            lines += [
                f"## {kind.capitalize()}",
                "",
                "| family | " + " | ".join(SHOWN) + " |",
                "|---|" + "---|" * len(SHOWN),
            ]
            lines += [
                f"| {n.split('/', 1)[1]} | " + " | ".join(r[m] for m in SHOWN) + " |" for n, r in of_kind.items()
            ] + [""]
    for title, kinds in (
        ("Known defects", (WRONG, BROKEN)),
        ("Not supported yet", (NOT_YET, REFUSED)),
        ("No meaning", (MEANINGLESS,)),
    ):
        groups = defaultdict(set)
        for cell in cells:
            if cell.outcome in kinds:
                groups[reason(cell)].add((cell.architecture.split("/", 1)[1], cell.method))
        lines += [f"## {title}", "", "| cells | reason | methods | families |", "|---|---|---|---|"]
        for message, where in sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0])):
            families, methods = sorted({f for f, _ in where}), sorted({m for _, m in where})
            shown = ", ".join(families[:8]) + (f" and {len(families) - 8} more" if len(families) > 8 else "")
            lines.append(f"| {len(where)} | {message.replace('|', '/')} | {', '.join(methods)} | {shown} |")
        lines.append("")
    lines += [
        "## Left out",
        "",
        "| family | reason |",
        "|---|---|",
        *(f"| {n} | {r} |" for n, r in LEFT_OUT.items()),
        "",
    ]
    return "\n".join(lines)


def read(page: str) -> dict[str, Row]:
    """Parse the rows of signs of a page."""
    rows, kind = {}, ""
    for line in page.splitlines():
        kind = line[3:].lower() if line.startswith("## ") else kind
        cells = [c.strip() for c in line.strip("|").split("|")]
        if len(cells) == len(SHOWN) + 1 and cells[0] not in ("family", "---"):
            rows[f"{kind}/{cells[0]}"] = dict(zip(SHOWN, cells[1:], strict=True))
    return rows


def main(families: list[str]) -> None:
    """Write the page; if families are given, print their part of the page instead."""
    cells: list[Cell] = []
    for architecture in listed():
        if families and architecture.name.split("/", 1)[1] not in families:
            continue
        cells += study(architecture, SHOWN)
        sys.stderr.write(
            f"{architecture.name} {''.join(signs(c for c in cells if c.architecture == architecture.name).values())}\n"
        )
    if families:
        sys.stdout.write(written(cells))
    else:
        PAGE.write_text(written(cells), encoding="utf-8")


if __name__ == "__main__":
    import conftest  # noqa: F401 - a torchvision that imports, one thread, no network

    main(sys.argv[1:])
