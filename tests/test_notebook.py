"""The example notebooks run completely and reproduce their stored outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HANG

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Executed in a separate process, as Jupyter would; the kernel gets the setup of the tests by its startup files.
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=int(sys.argv[4]), resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""
STARTUP = """
import sys
sys.path.insert(0, {tests!r})
import conftest
"""


def outputs(notebook: dict) -> list[list[tuple[str, tuple[str, ...], str]]]:
    """For each cell, the type, formats and text of its outputs (without numbers, which differ by machine)."""
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        row = []
        for output in cell["outputs"]:
            data = {**output.get("data", {}), **({"text": output["text"]} if "text" in output else {})}
            words = "".join(data.get("text/html", data.get("text", "")))
            words = re.sub(r"data:image/png;base64,[^\"]+|[\d.]+|#\w{6}", "", words)
            row.append((output["output_type"], tuple(sorted(data)), words))
        cells.append(row)
    return cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_reproduces_stored_outputs(path, tmp_path):
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00.py").write_text(STARTUP.format(tests=str(ROOT / "tests")))
    paths = [str(ROOT / "src"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    executed = tmp_path / "made.ipynb"
    completed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, str(path), str(path.parent), str(executed), str(HANG)], env=environment, capture_output=True,
        text=True, timeout=HANG, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert outputs(json.loads(executed.read_text())) == outputs(json.loads(path.read_text()))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_stored_outputs_are_small_and_self_contained(path):
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < 1_500_000
    assert sum(bool(row) for row in outputs(notebook)) >= 5
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error"
            html = "".join(output.get("data", {}).get("text/html", ""))
            assert not re.search(r"https?://|<script|<link|@import|url\(", html)
    assert not re.search(r"/(?:work|root|home|tmp)/", path.read_text())


def test_notebooks_exist():
    assert NOTEBOOKS
