"""Limits on the source code; ``code_limits.json`` lists the remaining excesses and may only shrink.

After an improvement, ``python tests/test_code_limits.py`` rewrites the list.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "whyformer"
LIST = Path(__file__).with_name("code_limits.json")
RULES = {
    "C901": "complexity of at most 15",
    "PLR0913": "at most 8 parameters",
    "PLR0915": "at most 50 statements",
    "SLF001": "no private names of others",
    "LINES": "functions of at most 60 lines",
    "FMT": "no `fmt: skip`",
    "NAME": "a class name of its own",
}
LONGEST = 60
MOST_PARAMETERS = 8
COMMANDS = "apps/cli"  # ruff does not count parameters here: the parameters of a command are its options
Counts = dict[str, dict[str, int]]


def count_with_ruff() -> Counts:
    """Ruff's violations: rule -> file -> count."""
    command = [sys.executable, "-m", "ruff", "check", "src", "--no-cache", "--select", "C901,PLR0913,PLR0915,SLF001", "--output-format", "json", "--exit-zero"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    counted: dict[str, Counter[str]] = {}
    for violation in json.loads(completed.stdout):
        counted.setdefault(violation["code"], Counter())[Path(violation["filename"]).relative_to(SOURCE).as_posix()] += 1
    return {code: dict(files) for code, files in counted.items()}


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True if ``options.command`` decorates the function."""
    return any(isinstance(d, ast.Call) and ast.unparse(d.func).endswith("command") for d in function.decorator_list)


def count_with_ast() -> Counts:
    """Violations of rules that ruff lacks or skips in command files: rule -> file -> count."""
    lines, skipped, parameters = Counter[str](), Counter[str](), Counter[str]()
    classes: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        skipped[name] += text.count("# fmt: skip")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines[name] += (node.end_lineno or 0) - node.lineno >= LONGEST
                if name.startswith(COMMANDS) and not is_command(node):
                    parameters[name] += len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) > MOST_PARAMETERS
            elif isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(name)
    names = {name: len(where) - 1 for name, where in classes.items() if len(where) > 1}
    return {"PLR0913": dict(+parameters), "LINES": dict(+lines), "FMT": dict(+skipped), "NAME": names}


def count_all() -> Counts:
    ruff, parsed = count_with_ruff(), count_with_ast()
    return ruff | parsed | {"PLR0913": ruff.get("PLR0913", {}) | parsed["PLR0913"]}


@pytest.fixture(scope="module")
def counts() -> Any:
    return count_all()


@pytest.mark.parametrize("rule", RULES)
def test_no_new_code_exceeds_a_limit(rule: str, counts: Counts) -> None:
    listed = json.loads(LIST.read_text()).get(rule, {})
    more = {file: count for file, count in counts.get(rule, {}).items() if count > listed.get(file, 0)}
    assert more == {}, f"{RULES[rule]}: there is more of it than code_limits.json allows"


@pytest.mark.parametrize("rule", RULES)
def test_list_of_limits_has_no_stale_entries(rule: str, counts: Counts) -> None:
    listed = json.loads(LIST.read_text()).get(rule, {})
    less = {file: counts.get(rule, {}).get(file, 0) for file, count in listed.items() if counts.get(rule, {}).get(file, 0) < count}
    assert less == {}, f"{RULES[rule]}: it got better; write the list again (python tests/test_code_limits.py)"


if __name__ == "__main__":
    final = count_all()
    LIST.write_text(json.dumps({rule: dict(sorted(final.get(rule, {}).items())) for rule in RULES}, indent=1) + "\n")
