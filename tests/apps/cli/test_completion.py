"""Shell completion, by the protocol of the shells' scripts and in bash itself."""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HANG

ROOT = Path(__file__).parents[3]
PROGRAM = "import sys; sys.argv[0] = 'whyformer'; from whyformer.apps.cli import main; main()"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def complete(**protocol: str) -> list[str]:
    completed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**ENVIRONMENT, **protocol}, timeout=HANG, check=False)
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr == ""
    return [line for line in completed.stdout.splitlines() if line]


def bash(*words: str) -> list[str]:
    """Completions in bash for the last of the words, which are split as bash splits them."""
    return complete(_WHYFORMER_COMPLETE="complete_bash", COMP_WORDS="\n".join(["whyformer", *words]), COMP_CWORD=str(len(words)))


def zsh(line: str) -> str:
    return "\n".join(complete(_WHYFORMER_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=f"whyformer {line}"))


def test_names_file_equals_registries():
    names = runpy.run_path(str(ROOT / "scripts" / "names"))["names"]()
    file = ROOT / "src" / "whyformer" / "apps" / "cli" / "names.json"
    assert file.read_text(encoding="utf-8") == names, "run scripts/names"


def test_completion_imports_neither_torch_nor_numpy():
    code = PROGRAM.replace("main()", "import atexit; atexit.register(lambda: print('torch' in sys.modules, 'numpy' in sys.modules)); main()")
    environment = {**ENVIRONMENT, "_WHYFORMER_COMPLETE": "complete_bash", "COMP_WORDS": "whyformer\nexplain\nx\n-s\n", "COMP_CWORD": "4"}
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=HANG, check=False)
    assert completed.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["comp"], ["compare"]),
        (["explain", "x", "--method", "roll"], ["rollout"]),
        (["explain", "x", "--method", "gae,roll"], ["gae,rollout"]),
        (["explain", "x", "--method", "rollout,roll"], []),
        (["explain", "x", "--format", "png,p"], ["png,pdf"]),
        (["generate", "x", "--format", "s"], ["svg", "safetensors"]),
        (["perturb", "x", "--format", "h"], []),
        (["explain", "x", "-m", "bund"], ["bundled:digits", "bundled:sst2", "bundled:reader"]),
        (["explain", "x", "--method", "gae", "-s", "side"], ["side=auto", "side=image", "side=text"]),
        (["explain", "x", "--method", "rollout", "-s", "side"], []),
        (["methods", "rollo"], ["rollout"]),
        (["benchmark", "segm"], ["segmentation"]),
        (["benchmark", "sanity", "--option", "radius"], ["radius=0.1"]),
        (["schema", "max"], ["maximize"]),
        (["explain", "x", "--device", "c"], ["cpu", "cuda"]),
        (["explain", "x", "--dtype", "b"], ["bfloat16"]),
    ],
)  # fmt: skip
def test_bash_completion(words, offered):
    assert bash(*words) == offered


def test_zsh_completion_has_summaries_and_falls_back_to_files():
    assert '"rollout":"' in zsh("explain x --method ro")
    assert '"start_layer=0":"default"' in zsh("explain x --method gae -s ")
    assert zsh("explain x --model ./fold") == "_files"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_installed_completion_script_works_in_bash(tmp_path):
    """``whyformer --show-completion`` registers a function that bash calls."""
    program = tmp_path / "whyformer"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = """
eval "$(whyformer --show-completion bash)"
complete -p whyformer
COMP_WORDS=(whyformer explain x --model bund); COMP_CWORD=4
_whyformer_completion whyformer
echo "got ${COMPREPLY[*]}"
"""
    completed = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, env=environment, timeout=HANG, check=False)
    assert completed.returncode == 0, completed.stderr
    assert "-F _whyformer_completion whyformer" in completed.stdout
    assert completed.stdout.splitlines()[-1] == "got bundled:digits bundled:sst2 bundled:reader"
