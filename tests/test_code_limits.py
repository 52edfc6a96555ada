"""What code is measured by, with the list of what is still beyond it: ``code_limits.json`` may only shrink.

After a change for the better, ``python tests/test_code_limits.py`` writes the list again.
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
COMMANDS = "apps/cli"  # ruff does not count parameters here: those of a command are its options
Found = dict[str, dict[str, int]]


def by_ruff() -> Found:
    """rule -> file -> how often ruff finds it."""
    asked = [sys.executable, "-m", "ruff", "check", "src", "--no-cache", "--select", "C901,PLR0913,PLR0915,SLF001", "--output-format", "json", "--exit-zero"]
    made = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    counted: dict[str, Counter[str]] = {}
    for one in json.loads(made.stdout):
        counted.setdefault(one["code"], Counter())[Path(one["filename"]).relative_to(SOURCE).as_posix()] += 1
    return {code: dict(files) for code, files in counted.items()}


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether ``options.command`` decorates it."""
    return any(isinstance(one, ast.Call) and ast.unparse(one.func).endswith("command") for one in function.decorator_list)


def by_reading() -> Found:
    """The rules that ruff does not have, or does not check in files of commands."""
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


def found() -> Found:
    ruff, read = by_ruff(), by_reading()
    return ruff | read | {"PLR0913": ruff.get("PLR0913", {}) | read["PLR0913"]}


@pytest.fixture(scope="module")
def now() -> Any:
    return found()


@pytest.mark.parametrize("rule", RULES)
def test_nothing_new_is_beyond_a_limit(rule: str, now: Found) -> None:
    listed = json.loads(LIST.read_text()).get(rule, {})
    more = {file: count for file, count in now.get(rule, {}).items() if count > listed.get(file, 0)}
    assert more == {}, f"{RULES[rule]}: there is more of it than code_limits.json allows"


@pytest.mark.parametrize("rule", RULES)
def test_the_list_has_no_more_than_there_is(rule: str, now: Found) -> None:
    listed = json.loads(LIST.read_text()).get(rule, {})
    less = {file: now.get(rule, {}).get(file, 0) for file, count in listed.items() if now.get(rule, {}).get(file, 0) < count}
    assert less == {}, f"{RULES[rule]}: it got better; write the list again (python tests/test_code_limits.py)"


if __name__ == "__main__":
    kept = found()
    LIST.write_text(json.dumps({rule: dict(sorted(kept.get(rule, {}).items())) for rule in RULES}, indent=1) + "\n")
