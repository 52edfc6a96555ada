"""``whyformer generate``: answers to a text and to a text about a picture; output, files and errors."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import jsonschema
import pytest
from PIL import Image
from typer.testing import CliRunner

import whyformer
from whyformer.apps.cli import app
from whyformer.apps.cli.schema import make_schema
from whyformer.errors import InputError
from whyformer.show import encode, film

PICTURE = Path(__file__).parents[3] / "examples/pictures/digits_37.png"
QUESTION = "What is on the left?"
READER = ["--model", "bundled:reader"]


PROMPT = "<s>Once upon a time, there was a little"


@pytest.fixture
def model(shared: Path) -> str:
    return str(shared / "weights" / "stories260k")


def run(*arguments: str, command: str = "generate") -> tuple[int, str]:
    result = CliRunner().invoke(app, [command, *arguments])
    return result.exit_code, result.output


def test_words_are_printed_and_film_strip_is_written(tmp_path: Path) -> None:
    code, output = run(QUESTION, "--image", str(PICTURE), *READER, "-n", "3", "--out", str(tmp_path))
    assert code == 0
    assert "attnlrp" in output and "chosen automatically" in output
    assert "picture" in output
    (file,) = tmp_path.glob("*.png")
    assert file.name == "What_is_on_the_left-attnlrp-generated.png"
    strip = Image.open(io.BytesIO(file.read_bytes()))
    assert 1 < strip.width / strip.height < 2  # the picture and one map; the end token has no map


def test_page_has_a_map_for_each_word(tmp_path: Path) -> None:
    code, _ = run(QUESTION, "--image", str(PICTURE), *READER, "--continuation", "3 7", "--method", "rollout", "--out", str(tmp_path), "--format", "html")
    assert code == 0
    page = (tmp_path / "What_is_on_the_left-rollout-generated.html").read_text(encoding="utf-8")
    assert page.count('alt="where on the picture: ') == 3  # two words and the whole answer
    assert "green: mattered (no sign)" in page  # rollout has no negative scores
    assert "orange" not in page


def test_picture_question_as_json(tmp_path: Path) -> None:
    code, output = run(QUESTION, "--image", str(PICTURE), *READER, "--continuation", "7", "--method", "rollout", "--json", "--format", "none")
    assert code == 0
    facts = json.loads(output)
    assert facts["explanations"] == []
    assert facts["generation"]["text"].strip() == "7"
    assert len(facts["generation"]["seen"]["pixel_values"]["scores"][0]) == 196


def test_explain_first_word_about_picture(tmp_path: Path) -> None:
    code, output = run(QUESTION, "--image", str(PICTURE), *READER, "--method", "rollout", "--out", str(tmp_path), command="explain")
    assert code == 0
    assert "Top 5 classes" in output
    assert list(tmp_path.glob("*.png"))


def test_answer_is_generated_explained_and_written(model: str, tmp_path: Path) -> None:
    arguments = [PROMPT, "-m", model, "-n", "4", "-f", "html,png,json", "-o", str(tmp_path)]
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    assert "attnlrp (share=0.8) · chosen automatically · log-probability of each token" in result.stdout
    assert " girl named" in result.stdout
    assert "or else" in result.stdout
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".html", ".json", ".png"]
    (file,) = tmp_path.glob("*.json")
    facts = json.loads(file.read_text())
    assert facts["generation"]["text"] == " girl named"
    assert len(facts["generation"]["matrix"]) == 4


def test_json_conforms_to_schema(model: str) -> None:
    code, out = run(PROMPT, "-m", model, "--continuation", " girl", "--checkpoint", "--json", "-f", "none")
    assert code == 0
    facts = json.loads(out)
    assert (facts["command"], facts["explanations"]) == ("generate", [])
    assert set(facts["generation"]) <= set(make_schema()["$defs"]["GenerationOutput"]["properties"])
    jsonschema.validate(facts, make_schema())


def test_contrast_targets(model: str, tmp_path: Path) -> None:
    code, out = run(PROMPT, "-m", model, "--method", "input_x_gradient", "--target", " was", "--contrast", " there", "-o", str(tmp_path), command="explain")
    assert code == 0
    assert "' was' rather than ' there'" in out
    code, out = run(PROMPT, "-m", model, "-n", "2", "--target", "contrast", "-o", str(tmp_path))
    assert code == 0
    assert "minus that of the best other token" in " ".join(out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(PICTURE)], "the prompt is a text"),
        ([QUESTION], "an answer needs a language model"),
        ([QUESTION, "--image", str(PICTURE), "--model", "bundled:sst2"], "reads no pictures"),
        ([QUESTION, "--image", str(PICTURE)], "no default model"),
        ([QUESTION, "--image", "nowhere.png", *READER], "no such file"),
        ([QUESTION, "--image", str(PICTURE), *READER, "--chat"], "leave --chat out"),
        ([QUESTION, "--image", str(PICTURE), "--contrast", "7", *READER], "give --target too"),
        ([QUESTION, "--method", "gae,rollout", *READER], "one method"),
        ([QUESTION, "--method", "nothing", *READER], "no method"),
        ([QUESTION, "--model", "bundled:sst2"], "cannot generate"),
        ([QUESTION, "--format", "gif", *READER], "html, json, safetensors or none, not 'gif'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert message in output
    assert output.count("error:") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QUESTION, "--image", str(PICTURE)], "no default model"),
        ([QUESTION, "--model", "bundled:reader"], "reads a text and a picture"),
        ([str(PICTURE), "--model", "bundled:reader"], "reads a text and a picture"),
        ([QUESTION, "--contrast", "x"], "give --target too"),
    ],
)
def test_explain_refuses_invalid_arguments(arguments: list[str], message: str) -> None:
    code, output = run(*arguments, "--format", "none", command="explain")
    assert code == 2
    assert message in output


def test_chat_without_chat_template_is_refused(model: str) -> None:
    assert "no chat template" in run("A little girl", "--chat", "-m", model)[1]


def test_film_strip_has_a_map_for_each_word() -> None:
    g = whyformer.explain_generation("bundled:reader", QUESTION, "3 7", "rollout", images=PICTURE)
    for pictures, columns in ((True, None), (False, 1)):
        figure = film(g, columns, picture=pictures)
        assert len(figure.axes) == len(g) + pictures
        texts = [t.get_text() for t in figure.texts]
        assert {"3", "7", "what is on the left ?"} <= set(texts)
        assert "rollout · any token" in texts  # its maps do not depend on the word
        assert " ".join(t for t in texts if "mattered" in t or "largest score" in t).startswith("green: mattered (no sign)")
    signed = whyformer.explain_generation("bundled:reader", QUESTION, "3 7", "attnlrp", images=PICTURE)
    content = " ".join(t.get_text() for t in film(signed).texts)
    assert "attnlrp · log-probability of each token" in content
    assert "orange: for the word, blue: against it; each map scaled by its own largest score" in content
    assert encode(film(g), "svg").startswith(b"<?xml")
    for columns in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="columns must be an integer of at least 1"):
            film(g, columns)
    assert "[picture] what is on the left" in str(g)
    assert re.search(r"' 3' .* picture \d+ % \(most at x \d+, y \d+\)", str(g))


def test_film_strip_without_picture_raises() -> None:
    from prompting import llava

    model, processor = llava()
    g = whyformer.explain_generation(model, "what is", [7], "rollout", processor.tokenizer)
    with pytest.raises(InputError, match="without a picture"):
        film(g)
    assert "what 0.45" in str(g)
