"""The JSON output of commands with ``--json``, and its JSON Schema.

:func:`whyformer.explanation.versions.record` adds ``schema_version`` and ``command`` to the keys of each. Results that
are printed as they are keep their types and descriptions.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema

from whyformer.apps.report.writing import WrittenReport
from whyformer.auditing import Audit
from whyformer.baselines import names_for
from whyformer.explanation import generation_files, storage
from whyformer.explanation.features import Features
from whyformer.explanation.generation import Generation
from whyformer.explanation.generation_files import GenerationCandidate
from whyformer.explanation.result import Explanation
from whyformer.explanation.schemas import (
    BenchmarkCounts,
    BenchmarkFigure,
    BenchmarkSchema,
    BenchmarkTable,
)
from whyformer.explanation.versions import SCHEMA_VERSION
from whyformer.jobs.costs import Cost


def _key(about: str) -> Any:
    """Return a key that is always present."""
    return Field(description=about)


def _optional(about: str | None = None) -> Any:
    """Return a key that may be missing."""
    return Field(default=None, description=about)


Title = Annotated[str, Field(description="File name, or the beginning of the text.")]
Files = Annotated[list[str], Field(description="Files that were written.")]
ByOrder = dict[Literal["highest_first", "lowest_first"], list[float]]


class ExplanationOutput(storage.schema(Explanation)):  # type: ignore[misc]
    """Scores of one method for a batch of samples (on the command line one sample).

    Axis letters: B samples, P patches row by row, N tokens, C classes, K some of the classes.
    """

    model_config = ConfigDict(extra="ignore")
    level: Literal["patch", "token", "pixel"]
    activation: Literal["softmax", "sigmoid", "identity"]
    scores: list[list[Any]]
    target: list[int] = _key("[B] index of the explained class; -1 if the target is not a class.")
    logits: list[list[float]]
    classes: list[list[int]] = _optional()
    normalizer: list[float] = _optional()
    probabilities: list[list[float]] | None = _key(
        "In the order of logits: softmax over all classes, or sigmoid if multi_label is true; null for a regression."
    )
    multi_label: bool = _key("True if several classes can be true at once.")
    parts: dict[str, ExplanationOutput] = _optional()


class TrustOutput(BaseModel):
    """The deletion curve of a map, compared with those of random maps; one entry per sample.

    null: not measured, because all scores are equal.
    """

    method: str
    followed: list[int] = _key("Index of the class whose probability is measured, or of the value.")
    numeric: bool = _key("True if a value (of a regression) is measured instead of a probability.")
    fractions: list[float] = _key("Share of the features removed, the highest scores first.")
    curves: list[list[float | None]] = _key("Probability of the class, or the value, at each fraction.")
    areas: list[float | None] = _key("Area under the curve; lower is better.")
    random: list[list[list[float | None]]] = _key(
        "The same for random scores of the same features: one entry per random map."
    )
    chance: list[list[float | None]] = _key("Areas under the curves of random maps.")
    verdicts: list[str]
    warnings: list[list[str]]
    baseline: str = _key("What replaced removed features.")
    seeds: list[int] = _key("Seeds of the random maps.")


class GenerationOutput(generation_files.schema(Generation)):  # type: ignore[misc]
    """The explanation of every token of an answer."""

    model_config = ConfigDict(extra="ignore")
    unit: Literal["token", "word", "sentence", "turn"]
    matrix: list[list[float]]
    value: list[float]
    target: list[int]
    probabilities: list[float] = _key("Probability of each token of the answer.")
    candidates: list[list[GenerationCandidate]] = _key("Per step: the likeliest tokens, and the answer's.")
    seen: dict[str, Any] = _optional()
    prompt: str
    text: str = _key("The answer.")


class ExplainOutput(BaseModel):
    """The explanations of one input; also what --format json writes to a file."""

    versions: dict[str, str]
    model: str = _key("Name of the model.")
    input: Title
    explanations: list[ExplanationOutput] = _key("One for each method and target, ordered by method.")
    generation: GenerationOutput = _optional("In files of answers: explanations is then empty.")
    checks: list[TrustOutput] = _optional(
        "With --check: the faithfulness of each explanation, in the same order."
    )
    picture: str = _optional(
        "The input picture, at most 672 pixels long "
        "(as the model saw it if geometry is null), as a data URI (PNG). In files only."
    )
    files: list[str] = _optional("Files that were written. Not in the files themselves.")


class GenerateOutput(ExplainOutput):
    """An answer of a language model, each of its tokens explained; explanations is empty."""

    generation: GenerationOutput


class AttentionOutput(BaseModel):
    """A figure of the attention maps inside a model."""

    model: str
    input: Title
    blocks: int = _key("Number of blocks of the model.")
    heads: int = _key("Number of heads of its first block.")
    drawn: str = _key("What the figure shows, such as 'blocks' or 'block 3 head 1 matrix'.")
    files: Files


class PerturbOutput(BaseModel):
    """The model's output for a picture as parts of it are removed."""

    model: str
    input: Title
    method: str
    settings: dict[str, Any]
    target: str = _key("Name of the class.")
    baseline: Literal[names_for("image")] = _key("What replaces removed pixels.")  # type: ignore[valid-type]
    fractions: list[float] = _key("Share of the pixels removed; the first is 0.")
    probabilities: ByOrder | None = _key("Probability of the class at each fraction; null for a regression.")
    values: ByOrder | None = _key("Value of a regression at each fraction; else null.")
    predicted: dict[Literal["highest_first", "lowest_first"], list[str]] = _key("The predicted class at each fraction.")
    files: Files


class MethodOutput(BaseModel):
    """A method."""

    name: str
    summary: str
    family: str = _key("attention, propagation, gradient or perturbation.")
    level: str = _key("Kind of features that have scores.")
    modality: Literal["both", "image", "text"]
    class_specific: bool = _key("False if the map is the same for every class.")
    citation: str
    settings: dict[str, Any] = _key("Setting -> default.")


class MethodsOutput(BaseModel):
    """The requested methods."""

    methods: list[MethodOutput]


class BenchmarkOutput(BenchmarkSchema):
    """The figures of a benchmark, as in report.json, and the counts of the run."""

    extra: dict[str, Any] = _key("Further results of this benchmark.")
    measured: int = _key("Samples x configurations measured in this run.")
    resumed: int = _key("Number taken from an earlier run.")
    unscored: int = _key("Number without figures; if there are any, the exit status is 3.")
    files: Files


class MaximizeUnit(BaseModel):
    """A unit of the model."""

    unit: str = _key("Name of the unit.")
    activation: float = _key("Activation at the end.")
    history: list[float] = _key("Activation before each step, and at the end.")


class MaximizeOutput(BaseModel):
    """The pictures that maximise the activation of units."""

    model: str
    units: list[MaximizeUnit] = _key("The units, in the order of the arguments.")
    settings: dict[str, Any]
    files: Files


@dataclass(frozen=True)
class ReportOutput(WrittenReport):
    """A report that was written."""

    files: Files


RunCost = create_model(
    "RunCost",
    __doc__="The expected cost of a job.",
    warnings=(list[str], _key("Reasons not to start the job.")),
    **get_type_hints(Cost),
)


class RunOutput(BaseModel):
    """The outcome of a job, or its expected cost with --dry-run."""

    out: str = _key("The output folder.")
    rows: int = _optional("Number of rows of the input.")
    written: int = _optional("Number of rows of the table: one for each input, method and target.")
    failed: int = _optional("Number of rows of the table of failures.")
    complete: bool = _optional()
    cost: RunCost = _optional("With --dry-run.")  # type: ignore[valid-type]


class ServerOutput(BaseModel):
    """A running server; printed as soon as it accepts requests."""

    url: str


COMMANDS: dict[str, type] = {
    "explain": ExplainOutput,
    "generate": GenerateOutput,
    "compare": ExplainOutput,
    "attention": AttentionOutput,
    "perturb": PerturbOutput,
    "audit": Audit,
    "methods": MethodsOutput,
    "benchmark": BenchmarkOutput,
    "maximize": MaximizeOutput,
    "report": ReportOutput,
    "app": ServerOutput,
    "run": RunOutput,
    "serve": ServerOutput,
}
"""Command -> its output."""

_DESCRIBED: dict[type, tuple[type, ...]] = {
    ExplanationOutput: (Explanation, Features),
    GenerationOutput: (Generation,),
    RunCost: (Cost,),
}
"""Results whose docstrings describe the keys of an output; those of a dataclass are its own."""
_WHOLE = (ExplanationOutput, BenchmarkCounts, BenchmarkFigure, BenchmarkTable)
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
        result = super().dataclass_schema(schema)
        result["description"] = _plain(result["description"].partition("Attributes:\n")[0])
        return _described(result, schema["cls"].__mro__, all_keys=True)

    def model_schema(self, schema: Any) -> dict[str, Any]:
        kind, result = schema["cls"], super().model_schema(schema)
        return _described(result, _DESCRIBED.get(kind, ()), all_keys=kind in _WHOLE)


def _plain(text: str) -> str:
    """Return the text of a docstring on one line, without the markup of Sphinx."""
    return " ".join(re.sub(r":\w+:`~?([^`]*)`|``([^`]*)``", r"\1\2", text).split())


def _described(schema: dict[str, Any], results: tuple[type, ...], *, all_keys: bool) -> dict[str, Any]:
    """Describe keys by the section Attributes of the docstrings of results; with ``all_keys`` none may be missing but
    :data:`_SOMETIMES`."""
    for result in results:
        _, _, section = (inspect.getdoc(result) or "").partition("Attributes:\n")
        for names, about in re.findall(r"^    ((?:\w+, )*\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
            for name in names.split(", "):
                if name in schema["properties"]:
                    schema["properties"][name].setdefault("description", _plain(about))
    if all_keys:
        schema["required"] = [name for name in schema["properties"] if name not in _SOMETIMES]
    return schema


def make_schema(command: str | None = None) -> dict[str, Any]:
    """Return the JSON Schema of the ``--json`` output of one of :data:`COMMANDS`, or of all.

    Returns:
        A schema whose ``$defs`` hold each command under its name, and the parts that commands share.
    """
    kinds = dict.fromkeys(COMMANDS.values())
    references, parts = TypeAdapter.json_schemas(
        [(kind, "validation", TypeAdapter(kind)) for kind in kinds], schema_generator=_Schema
    )
    outputs = {kind: parts["$defs"].pop(references[kind, "validation"]["$ref"].rpartition("/")[2]) for kind in kinds}
    for name, kind in COMMANDS.items():
        of_all = {"schema_version": {"const": SCHEMA_VERSION}, "command": {"const": name}}
        keys, required = {**of_all, **outputs[kind]["properties"]}, [*of_all, *outputs[kind]["required"]]
        parts["$defs"][name] = {**outputs[kind], "title": name, "properties": keys, "required": required}
    to = {name: {"$ref": f"#/$defs/{name}"} for name in COMMANDS}
    return {
        "$schema": GenerateJsonSchema.schema_dialect,
        "title": "Output of whyformer --json",
        "description": "One object for each run of a command. schema_version increases if a key changes its meaning "
        "or is removed; any version may add keys.",
        **parts,
        **({"oneOf": list(to.values())} if command is None else to[command]),
    }
