"""Highlighted sentences as LaTeX, for papers; every character of the input is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from whyformer.errors import InputError
from whyformer.show import colours
from whyformer.show.layout import Section, sections
from whyformer.show.words import heading, right_to_left, visible, words

if TYPE_CHECKING:
    from whyformer.explanation.result import Explanation

# Braces after each name end it; those after - ' ` , ! ? keep fonts from joining two to a dash or another sign.
_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
        "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
        "|": r"\textbar{}", '"': r"\textquotedbl{}", "`": r"\textasciigrave{}", "'": "'{}", "-": "-{}", ",": ",{}",
        "!": "!{}", "?": "?{}", "[": "{[}", "]": "{]}", "\n": " ", "\t": " ", "\u00a0": "~",
    }
)  # fmt: skip
_PREAMBLE = r"""% pdfLaTeX sets Latin scripts; others need XeLaTeX or LuaLaTeX, and \setmainfont with a fitting font
\documentclass{article}
\usepackage{iftex}
\ifPDFTeX
  \usepackage[utf8]{inputenc}
  \usepackage[T1]{fontenc}
\else
  \usepackage{fontspec}
\fi
\usepackage{xcolor}
"""
_COMMANDS = r"""% \whyword{colour}{word}: a word on its colour; needs \usepackage{xcolor} and \usepackage[T1]{fontenc}
\providecommand{\whyword}[2]{{\setlength{\fboxsep}{1pt}\colorbox[HTML]{#1}{\strut#2}}}
"""


def latex(explanations: Explanation | Iterable[Explanation], document: bool = True) -> str:
    """Sentences on coloured paper, one method a paragraph under each class, as LaTeX.

    Args:
        document: a whole document; False gives what a paper can input, which then needs ``xcolor`` and T1 fonts.

    Raises:
        InputError: for pictures, which go into a paper as PDF.
    """
    parts = sections(explanations)
    if any(part.first.level != "token" for part in parts):
        raise InputError("LaTeX is for text; pictures go into a paper as PDF (format pdf)")
    body = _COMMANDS + "".join(_section(part) for part in parts) + _legend()
    return f"{_PREAMBLE}\\begin{{document}}\n{body}\\end{{document}}\n" if document else body


def escaped(raw: str) -> str:
    """Text as LaTeX prints it: special characters by their commands, control characters written out."""
    return visible(raw, keep="\n\t").translate(_ESCAPES)


def _section(part: Section) -> str:
    lines = []
    for column in range(len(part.targets)):
        cells = [(name, row[column]) for name, row in zip(part.methods, part.cells, strict=True)]
        shown = [(name, e) for name, e in cells if e is not None]
        named = next((e for _, e in shown if e.diagnostics.get("class_specific") is not False), shown[0][1])
        lines.append(f"\\subsection*{{{escaped(heading(named))}}}\n")
        lines += [f"\\paragraph{{{escaped(name)}}}\n{_sentence(e)}\n" for name, e in shown]
    return "".join(lines)


def _sentence(e: Explanation) -> str:
    pieces, rest = words(e)
    scale = colours.scale_of(e)
    made = []
    for piece in pieces:
        made.append(escaped(piece.gap))
        unit = float(scale.unit(np.array(piece.score)))
        made.append(_word(unit, escaped(piece.text)) if unit else escaped(piece.text))
    line = "".join(made) + escaped(rest.rstrip())
    line += "" if scale.note is None else f" \\emph{{({escaped(scale.note)})}}"
    if right_to_left("".join(piece.text for piece in pieces)):  # a primitive of LuaTeX; others set it left to right
        return f"{{\\ifdefined\\pardirection\\pardirection=1\\textdirection=1\\fi\n{line}\\par}}"
    return f"{line}\\par"


def _word(unit: float, inside: str) -> str:
    return f"\\whyword{{{colours.ground(unit)[1:].upper()}}}{{{inside}}}"


def _legend() -> str:
    boxes = "".join(_word(unit, r"\hspace{1em}") for unit in (-1.0, -0.5, 0.0, 0.5, 1.0))
    return f"\\bigskip\\noindent{{\\footnotesize against {boxes} for the class; each line by its own largest score}}\n"
