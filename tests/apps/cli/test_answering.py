"""``whyformer explain --generate``, ``--continuation``, ``--contrast``: what is printed, written and refused."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from whyformer.apps import cli
from whyformer.apps.cli.output import make_schema

PROMPT = "<s>Once upon a time, there was a little"


@pytest.fixture
def model(shared: Path) -> str:
    return str(shared / "weights" / "stories260k")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["explain", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_an_answer_is_written_explained_and_put_into_files(model: str, tmp_path: Path) -> None:
    code, out, err = run(PROMPT, "-m", model, "--generate", "4", "-f", "html,png,json", "-o", str(tmp_path))
    assert (code, err) == (0, "")
    assert "attnlrp (share=0.8) · chosen automatically, log-probability of each token" in out
    assert " girl named" in out
    assert "or else" in out
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".html", ".json", ".png"]
    (written,) = tmp_path.glob("*.json")
    facts = json.loads(written.read_text())
    assert facts["generation"]["text"] == " girl named"
    assert len(facts["generation"]["matrix"]) == 4


def test_json_is_as_its_schema_says(model: str, tmp_path: Path) -> None:
    code, out, _ = run(PROMPT, "-m", model, "--continuation", " girl", "--json", "-f", "none", "-o", str(tmp_path))
    assert code == 0
    facts = json.loads(out)
    assert facts["explanations"] == []
    assert set(facts["generation"]) <= set(make_schema()["$defs"]["GenerationOutput"]["properties"])
    jsonschema.validate(facts, make_schema())


def test_one_token_rather_than_another(model: str, tmp_path: Path) -> None:
    code, out, err = run(PROMPT, "-m", model, "--method", "input_x_gradient", "--target", " was", "--contrast", " there", "-o", str(tmp_path))
    assert (code, err) == (0, "")
    assert "' was' rather than ' there'" in out
    code, out, _ = run(PROMPT, "-m", model, "--generate", "2", "--target", "contrast", "-o", str(tmp_path))
    assert code == 0
    assert "minus that of the best other token" in " ".join(out.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--generate", "3"], "an answer needs a language model"),
        (["--generate", "3", "-m", "M", "--check"], "without --check"),
        (["--generate", "3", "-m", "M", "--method", "lrp,saliency"], "one method"),
        (["--generate", "3", "-m", "M", "--method", "nothing"], "no method"),
        (["--generate", "3", "-m", "M", "--contrast", "x"], "give --target too"),
        (["--contrast", "x"], "give --target too"),
        (["--chat", "-m", "M"], "no chat template"),
        (["--generate", "3", "-m", "bundled:sst2"], "cannot generate"),
    ],
)
def test_what_is_refused(given: list[str], said: str, model: str) -> None:
    code, out, err = run("A little girl", *[model if g == "M" else g for g in given])
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_blocks_may_be_run_again(model: str, tmp_path: Path) -> None:
    code, _, _ = run(PROMPT, "-m", model, "--continuation", " girl", "--json", "-f", "none", "-o", str(tmp_path), "--checkpoint")
    assert code == 0
