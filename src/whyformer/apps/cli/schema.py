"""The JSON Schema of the output of commands with ``--json``."""

from __future__ import annotations

import inspect
import re
from itertools import chain
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from whyformer.apps.cli import output
from whyformer.apps.cli.output import COMMANDS
from whyformer.apps.report.writing import WrittenReport
from whyformer.auditing import Audit
from whyformer.explanation.features import Features
from whyformer.explanation.generation import Generation
from whyformer.explanation.result import Explanation
from whyformer.explanation.schemas import BenchmarkCounts, BenchmarkFigure, BenchmarkTable
from whyformer.jobs.costs import Cost

_DESCRIBED: dict[type, tuple[type, ...]] = {
    output.ExplanationOutput: (Explanation, Features),
    output.GenerationOutput: (Generation,),
    output.AuditOutput: (Audit,),
    output.ReportOutput: (WrittenReport,),
    output.RunCost: (Cost,),
}
"""Results whose docstrings describe the keys of an output."""
_WHOLE = (output.ExplanationOutput, BenchmarkCounts, BenchmarkFigure, BenchmarkTable)
"""Outputs whose keys are always printed, also those that may be missing in files."""
_SOMETIMES = ("classes", "normalizer", "parts")
"""Keys of an explanation that may be missing."""


class _Schema(GenerateJsonSchema):
    """Remove titles that repeat a key, and defaults of optional keys; describe keys as the results do."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return _described(super().dataclass_schema(schema), (schema["cls"],), all_keys=True)

    def model_schema(self, schema: Any) -> dict[str, Any]:
        kind, made = schema["cls"], super().model_schema(schema)
        return _described(made, _DESCRIBED.get(kind, ()), all_keys=kind in _WHOLE)


def _attributes(result: type) -> dict[str, str]:
    """Return the descriptions in the section Attributes of a class by name, without the markup of Sphinx."""
    _, _, section = (inspect.getdoc(result) or "").partition("Attributes:\n")
    entries = re.findall(r"^    ((?:\w+, )*\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    plain = [(names, re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``", r"\1\2", about)) for names, about in entries]
    return {name: " ".join(about.split()) for names, about in plain for name in names.split(", ")}


def _described(schema: dict[str, Any], results: tuple[type, ...], *, all_keys: bool) -> dict[str, Any]:
    """Add descriptions to the keys of a schema; with ``all_keys`` none may be missing but :data:`_SOMETIMES`."""
    for name, about in chain.from_iterable(_attributes(result).items() for result in results):
        if name in schema["properties"]:
            schema["properties"][name].setdefault("description", about)
    if all_keys:
        schema["required"] = [name for name in schema["properties"] if name not in _SOMETIMES]
    return schema


def make_schema(command: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of the ``--json`` output of one of :data:`COMMANDS`, or of all.

    Returns:
        A schema whose ``$defs`` hold each command under its name, and the parts that commands share.
    """
    references, generated = models_json_schema(
        [(kind, "validation") for kind in COMMANDS.values()],
        title="Output of whyformer --json",
        description="One object for each run of a command. schema_version increases if a key changes its meaning "
        "or is removed; any version may add keys.",
        schema_generator=_Schema,
    )
    parts = generated["$defs"]
    for name, kind in COMMANDS.items():
        parts[name] = parts.pop(references[kind, "validation"]["$ref"].rpartition("/")[2])
    to = [{"$ref": f"#/$defs/{name}"} for name in COMMANDS]
    document = {"$schema": GenerateJsonSchema.schema_dialect, **generated}
    return document | ({"oneOf": to} if command is None else to[list(COMMANDS).index(command)])
