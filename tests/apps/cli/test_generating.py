"""``whyformer generate``: answers to a text and to a text about a picture, what is printed, written and refused."""

from __future__ import annotations

import io
import json
import re
import shlex
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


def run(*given: str, command: str = "generate") -> tuple[int, str]:
    found = CliRunner().invoke(app, [command, *given])
    return found.exit_code, found.output


def test_words_and_a_film_strip(tmp_path: Path) -> None:
    code, said = run(QUESTION, "--image", str(PICTURE), *READER, "-n", "3", "--out", str(tmp_path))
    assert code == 0
    assert "attnlrp" in said and "chosen automatically" in said
    assert "picture" in said
    (written,) = tmp_path.glob("*.png")
    assert written.name == "What_is_on_the_left-attnlrp-generated.png"
    strip = Image.open(io.BytesIO(written.read_bytes()))
    assert 1 < strip.width / strip.height < 2  # the picture, and that of the one word: the token that ends the answer has none


def test_a_page_with_a_map_for_each_word(tmp_path: Path) -> None:
    code, _ = run(QUESTION, "--image", str(PICTURE), *READER, "--continuation", "3 7", "--method", "rollout", "--out", str(tmp_path), "--format", "html")
    assert code == 0
    page = (tmp_path / "What_is_on_the_left-rollout-generated.html").read_text(encoding="utf-8")
    assert page.count('alt="where on the picture: ') == 3  # of the whole answer too
    assert "green: mattered (no sign)" in page  # rollout cannot speak against a word
    assert "orange" not in page


def test_as_json(tmp_path: Path) -> None:
    code, said = run(QUESTION, "--image", str(PICTURE), *READER, "--continuation", "7", "--method", "rollout", "--json", "--format", "none")
    assert code == 0
    facts = json.loads(said)
    assert facts["explanations"] == []
    assert facts["generation"]["text"].strip() == "7"
    assert len(facts["generation"]["seen"]["pixel_values"]["scores"][0]) == 196


def test_one_word_about_a_picture(tmp_path: Path) -> None:
    code, said = run(QUESTION, "--image", str(PICTURE), *READER, "--method", "rollout", "--out", str(tmp_path), command="explain")
    assert code == 0
    assert "Top 5 classes" in said
    assert list(tmp_path.glob("*.png"))


def test_an_answer_is_written_explained_and_put_into_files(model: str, tmp_path: Path) -> None:
    given = [PROMPT, "-m", model, "-n", "4", "-f", "html,png,json", "-o", str(tmp_path)]
    made = CliRunner().invoke(app, ["generate", *given])
    assert (made.exit_code, made.stderr) == (0, "")
    assert "attnlrp (share=0.8) · chosen automatically · log-probability of each token" in made.stdout
    assert " girl named" in made.stdout
    assert "or else" in made.stdout
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".html", ".json", ".png"]
    (written,) = tmp_path.glob("*.json")
    facts = json.loads(written.read_text())
    assert facts["generation"]["text"] == " girl named"
    assert len(facts["generation"]["matrix"]) == 4


def test_json_is_as_its_schema_says(model: str) -> None:
    code, out = run(PROMPT, "-m", model, "--continuation", " girl", "--checkpoint", "--json", "-f", "none")
    assert code == 0
    facts = json.loads(out)
    assert (facts["command"], facts["explanations"]) == ("generate", [])
    assert set(facts["generation"]) <= set(make_schema()["$defs"]["GenerationOutput"]["properties"])
    jsonschema.validate(facts, make_schema())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["--generate", "2"], ["-n", "2"]),
        (["--generate=2", "--top", "3"], ["-n", "2"]),
        (["-g2"], ["-n", "2"]),
        (["-g", "2", "--target", "contrast"], ["-n", "2", "--target", "contrast"]),
        (["--continuation", " girl"], ["--continuation", " girl"]),
    ],
)
def test_what_was_an_option_of_explain_still_works_and_names_the_command(before: list[str], now: list[str], model: str) -> None:
    rest = ["-m", model, "--json", "-f", "none"]
    made = CliRunner().invoke(app, ["explain", PROMPT, *before, *rest])
    assert made.exit_code == 0, made.output
    (said,) = made.stderr.splitlines()
    copied = CliRunner().invoke(app, shlex.split(said.partition(": whyformer ")[2]))
    same = CliRunner().invoke(app, ["generate", PROMPT, *now, *rest])
    assert json.loads(made.stdout) == json.loads(copied.stdout) == json.loads(same.stdout)
    assert CliRunner().invoke(app, ["explain", PROMPT, *before, *rest, "-q"]).stderr == ""


def test_one_token_rather_than_another(model: str, tmp_path: Path) -> None:
    code, out = run(PROMPT, "-m", model, "--method", "input_x_gradient", "--target", " was", "--contrast", " there", "-o", str(tmp_path), command="explain")
    assert code == 0
    assert "' was' rather than ' there'" in out
    code, out = run(PROMPT, "-m", model, "-n", "2", "--target", "contrast", "-o", str(tmp_path))
    assert code == 0
    assert "minus that of the best other token" in " ".join(out.split())


@pytest.mark.parametrize(
    ("given", "said"),
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
        ([QUESTION, "--format", "gif", *READER], "unknown format 'gif'"),
    ],
)
def test_what_does_not_fit_is_told(given: list[str], said: str) -> None:
    code, output = run(*given)
    assert code == 2
    assert said in output
    assert output.count("error:") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([QUESTION, "--image", str(PICTURE)], "no default model"),
        ([QUESTION, "--model", "bundled:reader"], "reads a text and a picture"),
        ([str(PICTURE), "--model", "bundled:reader"], "reads a text and a picture"),
        ([QUESTION, "--contrast", "x"], "give --target too"),
    ],
)
def test_what_explain_refuses(given: list[str], said: str) -> None:
    code, output = run(*given, "--format", "none", command="explain")
    assert code == 2
    assert said in output


def test_a_tokenizer_without_a_chat_template_is_told(model: str) -> None:
    assert "no chat template" in run("A little girl", "--chat", "-m", model)[1]


def test_the_strip_has_a_picture_for_each_word() -> None:
    g = whyformer.explain_generation("bundled:reader", QUESTION, "3 7", "rollout", images=PICTURE)
    for pictures, columns in ((True, None), (False, 1)):
        figure = film(g, columns, picture=pictures)
        assert len(figure.axes) == len(g) + pictures
        texts = [t.get_text() for t in figure.texts]
        assert {"3", "7", "what is on the left ?"} <= set(texts)
        assert "rollout · any token" in texts  # its maps would be the same of another word
        assert " ".join(t for t in texts if "mattered" in t or "largest score" in t).startswith("green: mattered (no sign)")
    signed = whyformer.explain_generation("bundled:reader", QUESTION, "3 7", "attnlrp", images=PICTURE)
    said = " ".join(t.get_text() for t in film(signed).texts)
    assert "attnlrp · log-probability of each token" in said
    assert "orange: for the word, blue: against it; each map by its own largest score" in said
    assert encode(film(g), "svg").startswith(b"<?xml")
    assert "[picture] what is on the left" in str(g)
    assert re.search(r"' 3' .* picture \d+ % \(most at x \d+, y \d+\)", str(g))


def test_a_text_without_a_picture_has_no_strip() -> None:
    from prompting import llava

    model, processor = llava()
    g = whyformer.explain_generation(model, "what is", [7], "rollout", processor.tokenizer)
    with pytest.raises(InputError, match="without a picture"):
        film(g)
    assert "what 0.45" in str(g)
