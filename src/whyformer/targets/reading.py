"""Read targets that users write: as objects, as text, as arrays, and as a list of one per sample."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from whyformer.errors import InputError
from whyformer.targets.outputs import OutputTarget
from whyformer.targets.rows import RowTarget


def read_target(target: Any) -> Any:
    """Return a target with text parsed, arrays as lists, and a list of targets of single samples joined."""
    target = to_python(target)
    if isinstance(target, list | tuple):
        targets = [read_target(t) for t in target]
        return _joined(targets) if any(map(is_target, targets)) else targets
    return _of_text(target)


def to_python(value: Any) -> Any:
    """Convert arrays and tensors to Python numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def is_target(target: Any) -> bool:
    """Return True for an object of :mod:`whyformer.targets`."""
    return isinstance(target, OutputTarget | RowTarget)


# -- one target per sample -------------------------------------------------------------------------------------------
def of_samples(target: Any, samples: Sequence[int]) -> Any:
    """Return the target for some samples of a batch."""
    target = read_target(target)
    if isinstance(target, list):
        return [target[i] for i in samples]
    return _joined([of_sample(target, i) for i in samples]) if is_target(target) else target


def of_sample(target: Any, sample: int) -> Any:
    """Return the target of one sample: every list of one value per sample, nested ones too, replaced by its value."""
    if not is_target(target):
        return target
    values = {}
    for name in (f.name for f in fields(target)):
        value = to_python(getattr(target, name))
        values[name] = value[sample] if isinstance(value, list | tuple) else of_sample(value, sample)
    return replace(target, **values)


def _joined(targets: Sequence[Any]) -> Any:
    """Join the targets of single samples into one, with lists of one value per sample where they differ."""
    kind: Any = type(targets[0])
    if any(type(t) is not kind for t in targets):
        kinds = ", ".join(type(t).__name__ for t in targets)
        raise InputError(f"the targets of a batch must be of one kind, not {kinds}")
    values = {f.name: [getattr(t, f.name) for t in targets] for f in fields(kind)}
    return kind(**{n: v[0] if all(x == v[0] for x in v) else _joined_values(v) for n, v in values.items()})


def _joined_values(values: list[Any]) -> Any:
    return _joined(values) if is_target(values[0]) else values


# -- targets as text --------------------------------------------------------------------------------------------------
def written_target(target: Any) -> Any:
    """Return a target of :mod:`whyformer.targets`, an object or text, as text; any other target is returned unchanged.

    Raises:
        InputError: the text cannot be read.
    """
    target = _of_text(target)
    if not is_target(target):
        return target
    target = replace(target, **{f.name: to_python(getattr(target, f.name)) for f in fields(target)})
    # every field, unlike short_text: manifests of jobs have this text, and a job resumes if it is the same
    return repr(_parsed(repr(target)))


def with_class(text: str, index: int) -> str:
    """Return a written target with another class within the row of the output that it reads, in its shortest form.

    Raises:
        InputError: the text is no target with a class in such a row.
    """
    target = read_target(text)
    if not isinstance(target, OutputTarget) or not target.within:
        raise InputError(f"{text} has no class to replace: choose no classes, or another target")
    return short_text(target.about(index))


def short_text(target: Any) -> str:
    """Write a target as text without the fields that have their defaults; names only for the fields after these."""
    parts, is_named = list[str](), False
    for f in fields(target):
        value = getattr(target, f.name)
        if value == f.default:
            is_named = True
            continue
        text = short_text(value) if is_target(value) else repr(value)
        parts.append(f"{f.name}={text}" if is_named else text)
    return f"{type(target).__name__}({', '.join(parts)})"


def reads_output(text: str) -> bool:
    """Return True if a text is a written target that reads a row of the output, in which it may have a class."""
    return isinstance(_of_text(text), OutputTarget)


def is_written_target(text: str) -> bool:
    """Return True if a text is a target of :mod:`whyformer.targets`, such as ``"targets.Token(5)"``, and no class."""
    return text.strip().endswith(")") and _kind_name(text.strip().partition("(")[0]) in _kinds()


def _of_text(target: Any) -> Any:
    """Parse a target written as text; return any other target unchanged."""
    return _parsed(target) if isinstance(target, str) and is_written_target(target) else target


def _parsed(text: str) -> Any:
    """Parse a target written as a Python call, such as ``Token(-1, "blue")`` or ``Pixel(4, 9, 2)``."""

    def evaluate(node: ast.expr) -> Any:
        kind = _kinds().get(_kind_name(ast.unparse(node.func))) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and kind is not None:
            return kind(*map(evaluate, node.args), **{str(k.arg): evaluate(k.value) for k in node.keywords})
        return ast.literal_eval(node)

    try:
        return evaluate(ast.parse(text.strip(), mode="eval").body)
    except InputError:
        raise
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise InputError(
            f"the target {text!r} cannot be read: put names in quotes, as in Contrast('cat', 'dog'), Probability(3), "
            "Token(-1, 'word'), Token(5, 17), Span(3, 7), Query(0, 3), Pixel(4, 9, 2) or Similarity()"
        ) from error


def _kinds() -> dict[str, Any]:
    """Return the target classes that text may name."""
    return {kind.__name__: kind for kind in (*OutputTarget.__subclasses__(), *RowTarget.__subclasses__())}


def _kind_name(written: str) -> str:
    """Return the name of a target class as it is written in Python: ``Token``, ``targets.Token`` ..."""
    return written.removeprefix("whyformer.").removeprefix("targets.")
