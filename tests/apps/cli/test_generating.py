"""``whyformer explain PROMPT --image PICTURE --generate N`` and its film strip."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import whyformer
from whyformer.apps.cli import app
from whyformer.errors import InputError
from whyformer.show import encode, film

PICTURE = Path(__file__).parents[3] / "examples/pictures/digits_37.png"
QUESTION = "What is on the left?"
READER = ["--model", "bundled:reader"]


def run(*given: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["explain", *given])
    return found.exit_code, found.output


def test_words_and_a_film_strip(tmp_path: Path) -> None:
    code, said = run(QUESTION, "--image", str(PICTURE), *READER, "--generate", "3", "--out", str(tmp_path))
    assert code == 0
    assert "attnlrp" in said and "chosen automatically" in said
    assert "picture" in said
    (written,) = tmp_path.glob("*.png")
    assert written.name == "What_is_on_the_left-attnlrp-generated.png"
    strip = Image.open(io.BytesIO(written.read_bytes()))
    assert strip.width > 2 * strip.height


def test_a_page_with_a_map_for_each_word(tmp_path: Path) -> None:
    code, _ = run(QUESTION, "--image", str(PICTURE), *READER, "--continuation", "3 7", "--method", "rollout", "--out", str(tmp_path), "--format", "html")
    assert code == 0
    page = (tmp_path / "What_is_on_the_left-rollout-generated.html").read_text(encoding="utf-8")
    assert page.count('alt="where on the picture: ') == 2
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
    code, said = run(QUESTION, "--image", str(PICTURE), *READER, "--method", "rollout", "--out", str(tmp_path))
    assert code == 0
    assert "Top 5 classes" in said
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([str(PICTURE), "--generate", "3"], "an answer needs a language model"),
        ([QUESTION, "--generate", "3"], "an answer needs a language model"),
        ([QUESTION, "--image", str(PICTURE), "--generate", "3", "--model", "bundled:sst2"], "reads no pictures"),
        ([QUESTION, "--image", str(PICTURE), "--generate", "3"], "no default model"),
        ([QUESTION, "--image", str(PICTURE)], "no default model"),
        ([QUESTION, "--image", "nowhere.png", "--generate", "3", *READER], "no such file"),
        ([QUESTION, "--image", str(PICTURE), "--generate", "3", "--chat"], "leave --chat out"),
        ([QUESTION, str(PICTURE), "--image", str(PICTURE), "--generate", "3"], "several inputs"),
        ([QUESTION, "--image", str(PICTURE), "--generate", "3", "--contrast", "7", *READER], "give --target too"),
        ([QUESTION, "--image", str(PICTURE), "--generate", "3", "--method", "gae,rollout"], "one method at a time"),
        ([QUESTION, "--image", str(PICTURE), "--generate", "3", "--check"], "for one prediction"),
        ([QUESTION, "--model", "bundled:reader"], "reads a text and a picture"),
        ([str(PICTURE), "--model", "bundled:reader"], "reads a text and a picture"),
    ],
)
def test_what_does_not_fit_is_told(given: list[str], said: str) -> None:
    code, output = run(*given, "--format", "none")
    assert code != 0
    assert said in output
    assert output.count("error:") == 1


def test_the_strip_has_a_picture_for_each_word() -> None:
    g = whyformer.explain_generation("bundled:reader", QUESTION, "3 7", "rollout", images=PICTURE)
    for pictures, columns in ((True, None), (False, 1)):
        figure = film(g, columns, picture=pictures)
        assert len(figure.axes) == len(g) + pictures
        texts = [t.get_text() for t in figure.texts]
        assert {"3", "7", "what is on the left ?"} <= {t.replace("<s> ", "") for t in texts}
        assert "rollout, any token" in texts  # its maps would be the same of another word
        assert " ".join(t for t in texts if "mattered" in t or "largest score" in t).startswith("green: mattered (no sign)")
    signed = whyformer.explain_generation("bundled:reader", QUESTION, "3 7", "attnlrp", images=PICTURE)
    said = " ".join(t.get_text() for t in film(signed).texts)
    assert "attnlrp, log-probability of each token" in said
    assert "orange: for the word, blue: against it; each map by its own largest score" in said
    assert encode(film(g), "svg").startswith(b"<?xml")
    assert "[picture] what is on the left" in str(g)
    assert re.search(r"' 3' .* picture \d+% \(most at x \d+, y \d+\)", str(g))


def test_a_text_without_a_picture_has_no_strip() -> None:
    from prompting import llava

    model, processor = llava()
    g = whyformer.explain_generation(model, "what is", [7], "rollout", processor.tokenizer)
    with pytest.raises(InputError, match="without a picture"):
        film(g)
    assert "what 0.45" in str(g)
