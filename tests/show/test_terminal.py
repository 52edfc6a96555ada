import io
import re

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from show.builders import ATTACK, picture, sentence
from whyformer.show import terminal


def print_to_terminal(e, colours=None, width=80, **options):
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=colours, force_terminal=colours is not None, highlight=False, **options)
    console.print(terminal.render(e))
    return stream.getvalue()


def test_format_of_top_classes():
    lines = terminal.plain(picture(labels={0: "cat", 1: "bull mastiff", 2: "emu"})).splitlines()
    assert lines[0] == "Top 3 classes:"
    assert lines[1] == "  1 : bull mastiff  value =  3.000  prob =  90.9%"
    assert lines[3] == "  2 : emu           value = -1.000  prob =   1.7%"


@pytest.mark.parametrize("e", [picture(), sentence(), sentence(activation="identity", logits=torch.tensor([[0.3]]), target=0, target_names=None, labels={0: "output"})])
def test_no_classes_are_listed_if_none_are_wanted(e):
    text = terminal.plain(e, 0)
    assert not any(line.startswith(("Top", "Class", "Value")) for line in text.splitlines())
    assert text in terminal.plain(e, 1)


def test_plain_text_of_picture_is_map_and_without_grid_a_list():
    assert re.search(r"\n        ██\n[^█]* 2  patch in row 1, column 4\n", terminal.plain(picture()))
    assert "2  ████████████████  patch 10" in terminal.plain(picture(grid=None))


def test_plain_text_lists_words_in_order():
    text = terminal.plain(sentence("good bad", [0, 2.0, -1.0, 0]))
    assert text.index("good") < text.index("bad")
    assert re.search(r"-1 +-{8} +bad", text)


def test_long_text_shows_strongest_words():
    text = terminal.plain(sentence(" ".join(f"w{i}" for i in range(100))))
    assert "(24 of 100 words shown)" in text


def test_str_is_plain_text():
    assert str(sentence()) == terminal.plain(sentence())


def test_zero_scores_are_reported():
    assert "all scores are 0" in terminal.plain(picture(torch.zeros(4, 6)))
    assert "all scores are 0" in print_to_terminal(picture(torch.zeros(4, 6)), "truecolor")


@pytest.mark.part(times=2)
@pytest.mark.parametrize("system", ["truecolor", "256", "standard", None])
@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize(
    "e",
    [
        picture(), picture(torch.randn(37, 37), grid=(37, 37)), picture(torch.randn(64, 64), level="pixel", size=(64, 64)),
        sentence(), sentence("这部电影非常好看，" * 20), sentence("a\u200bb 👩‍👩‍👧 שלום " * 20), sentence("x" * 300 + " " + "y" * 5),
        picture(labels={0: "c" * 300, 1: "字" * 200, 2: "e"}),
    ],
)  # fmt: skip
def test_every_line_fits_width(e, system, width):
    for line in re.sub(r"\x1b\[[\d;]*m", "", print_to_terminal(e, system, width)).splitlines():
        assert cell_len(line.rstrip()) <= width


def test_positive_and_negative_words_have_different_colours():
    # segments instead of printed output, because rich caches the codes of a style for the first console that uses it
    console = Console(file=io.StringIO(), color_system="truecolor", force_terminal=True, no_color=False)
    segments = console.render(terminal.render(sentence("good bad", [0, 2.0, -2.0, 0])))
    cells = [s.style.bgcolor.get_truecolor() for s in segments if s.style is not None and s.style.bgcolor is not None]
    assert any(r > b + 50 for r, _, b in cells)
    assert any(b > r + 50 for r, _, b in cells)


def test_colourless_terminal_shows_bars_and_shades():
    assert "\x1b" not in print_to_terminal(sentence())
    assert "█" in print_to_terminal(sentence())
    assert "██" in print_to_terminal(picture())
    assert "-" in print_to_terminal(picture(-torch.eye(4), grid=(4, 4)))


@pytest.mark.parametrize("system", ["truecolor", None])
@pytest.mark.parametrize(
    "e",
    [picture(), sentence(), sentence("Un film énorme 字 😀"), picture(torch.randn(64, 64), level="pixel", size=(64, 64)), picture(grid=None), picture(labels={0: "chien", 1: "épagneul", 2: "emu"})],
    ids=["picture", "sentence", "other letters", "smoothed pixels", "no grid", "label"],
)
def test_ascii_console_receives_ascii(e, system):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    Console(file=stream, width=80, color_system=system, force_terminal=system is not None).print(terminal.render(e))
    stream.flush()
    assert stream.buffer.getvalue().strip()


@pytest.mark.parametrize("system", ["truecolor", None])
def test_control_characters_of_tokens_and_names_are_escaped(system):
    labels = {0: ATTACK, 1: ATTACK + "1", 2: "x"}
    tokens = [["[CLS]", ATTACK, "[SEP]"]]
    explanations = [
        sentence(ATTACK, labels=labels, method=ATTACK),
        sentence("x", [0, 1.0, 0], tokens=tokens, offsets=None, texts=None, labels=labels),
        picture(labels=labels, method=ATTACK),
    ]
    for e in explanations:
        output = print_to_terminal(e, system)
        without_colours = re.sub(r"\x1b\[[\d;]*m", "", output)
        assert "\x1b" not in without_colours
        assert "\u202e" not in without_colours
        assert "\\x1b[31m" in without_colours.replace("\n", "").replace(" ", "")
        assert "[bold]b[/bold]" in without_colours.replace("\n", "")
        assert "\x1b[31m" not in output
        assert "\x1b" not in terminal.plain(e)


def test_small_maps_are_side_by_side():
    output = print_to_terminal([picture(torch.rand(14, 14), grid=(14, 14), target=t) for t in (0, 1)], "truecolor")
    line = next(x for x in output.splitlines() if "cat" in x and "%" in x and "value" not in x)
    assert "dog" in line


def test_class_agnostic_map_is_printed_once():
    maps = [picture(method="rollout", target=t, diagnostics={"class_specific": False}) for t in (0, 1)]
    assert print_to_terminal(maps).count("any class") == 1


@pytest.mark.parametrize("make", [sentence, picture])
def test_warnings_of_run_are_printed_and_escaped(make):
    e = make(diagnostics={"warnings": [["the map is constant\x1b[31m"]]})
    for output in (print_to_terminal(e), print_to_terminal(e, "truecolor"), terminal.plain(e)):
        assert "warning: the map is constant\\x1b[31m" in output
    two = [make(target=t, diagnostics={"warnings": [["odd"]]} if t else {}) for t in (0, 1)]
    assert print_to_terminal(two).count("transformer_attribution, " + ("dog" if make is picture else "positive") + ": odd") == 1


def test_title_has_question_before_method():
    e = sentence(method="auto", diagnostics={"auto": {"method": "libragrad"}})
    for text in (print_to_terminal(e), terminal.plain(e)):
        lines = text.splitlines()
        assert lines.index("libragrad · chosen automatically") == lines.index("Why “positive”? 97.1 %") + 1
    lines = print_to_terminal(picture()).splitlines()
    assert [line.strip() for line in lines if "Why" in line or "transformer_attribution" in line] == ["Why “dog”? 90.9 %", "transformer_attribution"]
