"""LaTeX: nothing of the input is a command, and what is written is balanced."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from show.made import ATTACK, picture, sentence
from whyformer.errors import InputError
from whyformer.show.tex import escaped, latex

# what a reader of LaTeX makes of each command that may appear in escaped text
PRINTED = {
    r"\textbackslash{}": "\\", r"\{": "{", r"\}": "}", r"\$": "$", r"\&": "&", r"\#": "#", r"\%": "%", r"\_": "_", r"\textasciicircum{}": "^",
    r"\textasciitilde{}": "~", r"\textless{}": "<", r"\textgreater{}": ">", r"\textbar{}": "|", r"\textquotedbl{}": '"', r"\textasciigrave{}": "`",
    "{[}": "[", "{]}": "]", "{}": "", "~": "\u00a0",
}  # fmt: skip


def read(source):
    """Escaped text as it is printed; fails on any special character that stands by itself."""
    printed, at = "", 0
    while at < len(source):
        known = next((k for k in PRINTED if source.startswith(k, at)), None)
        if known is None:
            assert source[at] not in "\\{}$&#^_%~", source[at:]
        printed += PRINTED[known] if known else source[at]
        at += len(known or " ")
    return printed


@given(st.text(st.sampled_from(string.printable.replace("\r", "").replace("\x0b", "").replace("\x0c", "") + "äß这א😀\u00a0")))
def test_every_text_is_printed_as_it_is(text):
    assert read(escaped(text)) == text.replace("\n", " ").replace("\t", " ")


@pytest.mark.parametrize("text", [ATTACK, r"\input{secret}", r"\write18{rm}", "100 % & $x_1^2$ {a} #1 ~ \\", "a\n\nb", "--- `` '' << ?` !`"])
def test_no_command_of_the_input_survives(text):
    labels = {0: text, 1: text}
    for e in (sentence(text + " end", labels=labels, method=text), sentence("x", [0, 1.0, -1.0], tokens=[["[CLS]", text, text]], offsets=None, texts=None, labels=labels)):
        source = latex(e)
        commands = set(re.findall(r"\\([a-zA-Z]+)", source))
        assert commands <= {
            "documentclass", "usepackage", "ifPDFTeX", "else", "fi", "providecommand", "whyword", "setlength", "fboxsep", "colorbox", "strut", "setmainfont",
            "begin", "end", "subsection", "paragraph", "par", "bigskip", "noindent", "footnotesize", "hspace", "emph", "ifdefined", "pardirection", "textdirection",
            "textbackslash", "textasciicircum", "textasciitilde", "textless", "textgreater", "textbar", "textquotedbl", "textasciigrave",
        }  # fmt: skip
        bare = re.sub(r"\\[\\{}$&#%_]", "", re.sub(r"(?m)^%.*$", "", source))
        assert bare.count("{") == bare.count("}")
        assert "$" not in bare and "&" not in bare and "%" not in bare
        assert "\n\n" not in source  # an empty line would end a paragraph inside an argument
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", source)


def test_the_document_has_a_paragraph_for_each_method_under_each_class():
    several = [sentence(method=m, target=t) for m in ("gae", "partial_lrp") for t in (0, 1)]
    source = latex(several)
    assert source.count(r"\subsection*{") == 2
    assert source.count(r"\paragraph{gae}") == source.count(r"\paragraph{partial\_lrp}") == 2
    assert source.index(r"\usepackage{xcolor}") < source.index(r"\begin{document}") < source.index(r"\end{document}")
    part = latex(several, document=False)
    assert r"\begin{document}" not in part and r"\documentclass" not in part
    assert part in source


def test_words_have_signed_colours_and_none_at_zero():
    source = latex(sentence("good bad none", [0, 2.0, -1.0, 0, 0]))
    warm, cold = (bytes.fromhex(re.search(rf"\\whyword\{{(\w{{6}})\}}\{{{word}\}}", source)[1]) for word in ("good", "bad"))
    assert warm[0] > warm[2] and cold[2] > cold[0]
    assert " none" in source and "{none}" not in source
    assert "all scores are 0" in latex(sentence("a b", [0, 0, 0, 0]))


def test_right_to_left_text_is_set_that_way_where_tex_can():
    assert r"\pardirection=1" in latex(sentence("שלום עולם"))
    assert r"\pardirection" not in latex(sentence("hello"))


def test_pictures_are_refused():
    with pytest.raises(InputError, match="LaTeX is for text"):
        latex(picture())
