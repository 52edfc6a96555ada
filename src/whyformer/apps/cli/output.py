"""The JSON output of every command, of which :mod:`.schema` makes a JSON Schema.

Results that are printed as they are keep their types and descriptions.
"""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from whyformer.apps.report.writing import WrittenReport
from whyformer.auditing import Audit
from whyformer.baselines import names_for
from whyformer.explanation.geometry import Geometry
from whyformer.explanation.schemas import BenchmarkSchema, ExplanationSchema, GenerationSchema
from whyformer.jobs.costs import Cost


def _required(about: str) -> Any:
    """Return a key that is always present."""
    return Field(description=about)


def _optional(about: str | None = None) -> Any:
    """Return a key that may be missing."""
    return Field(default=None, description=about)


class _Command(BaseModel):
    """The output of one command; any version may add keys."""

    schema_version: Literal[1]


def _fields_of(result: type, *without: str) -> Any:
    """Return the types of the fields of a result, for :func:`pydantic.create_model`."""
    return {name: kind for name, kind in get_type_hints(result).items() if name not in without}


class ExplanationOutput(ExplanationSchema):
    """Scores of one method for a batch of samples (on the command line one sample).

    Axis letters: B samples, P patches row by row, N tokens, C classes, K some of the classes.
    """

    model_config = ConfigDict(extra="ignore")
    level: Literal["patch", "token", "pixel"]
    scores: list[list[Any]]
    target: list[int] = _required("[B] index of the explained class; -1 if the target is not a class.")
    logits: list[list[float]]
    classes: list[list[int]] = _optional()
    normalizer: list[float] = _optional()
    probabilities: list[list[float]] | None = _required(
        "In the order of logits: softmax over all classes, or sigmoid if multi_label is true; null for a regression."
    )
    multi_label: bool = _required("True if several classes can be true at once.")
    geometry: list[Geometry | None] | None = None  # type: ignore[assignment]
    parts: dict[str, ExplanationOutput] = _optional()


class TrustOutput(BaseModel):
    """The deletion curve of a map, compared with those of random maps; one entry per sample.

    null: not measured, because all scores are equal.
    """

    method: str
    followed: list[int] = _required("Index of the class whose probability is measured, or of the value.")
    numeric: bool = _required("True if a value (of a regression) is measured instead of a probability.")
    fractions: list[float] = _required("Share of the features removed, the highest scores first.")
    curves: list[list[float | None]] = _required("Probability of the class, or the value, at each fraction.")
    areas: list[float | None] = _required("Area under the curve; lower is better.")
    random: list[list[list[float | None]]] = _required(
        "The same for random scores of the same features: one entry per random map."
    )
    chance: list[list[float | None]] = _required("Areas under the curves of random maps.")
    verdicts: list[str]
    warnings: list[list[str]]
    baseline: str = _required("What replaced removed features.")
    seeds: list[int] = _required("Seeds of the random maps.")


class GenerationCandidate(BaseModel):
    """A possible next token."""

    id: int
    text: str
    logit: float
    probability: float
    log_probability: float


class GenerationOutput(GenerationSchema):
    """The explanation of every token of an answer."""

    model_config = ConfigDict(extra="ignore")
    matrix: list[list[float]]
    value: list[float]
    target: list[int]
    probabilities: list[float] = _required("Probability of each token of the answer.")
    candidates: list[list[GenerationCandidate]] = _required("Per step: the likeliest tokens, and the answer's.")
    seen: dict[str, Any] = _optional()
    prompt: str
    text: str = _required("The answer.")


class _ExplanationsOutput(_Command):
    """The explanations of one input; also what --format json writes to a file."""

    versions: dict[str, str]
    model: str = _required("Name of the model.")
    input: str = _required("File name, or the beginning of the text.")
    explanations: list[ExplanationOutput] = _required("One for each method and target, ordered by method.")
    checks: list[TrustOutput] = _optional(
        "With --check: the faithfulness of each explanation, in the same order."
    )
    picture: str = _optional(
        "The input picture, at most 672 pixels long "
        "(as the model saw it if geometry is null), as a data URI (PNG). In files only."
    )
    files: list[str] = _optional("Files that were written. Not in the files themselves.")


class ExplainOutput(_ExplanationsOutput):
    """The explanations of one input; also what --format json writes to a file."""

    command: Literal["explain"]
    generation: GenerationOutput = _optional("In files of answers: explanations is then empty.")


class GenerateOutput(_ExplanationsOutput):
    """An answer of a language model, each of its tokens explained; explanations is empty."""

    command: Literal["generate"]
    generation: GenerationOutput


class CompareOutput(_ExplanationsOutput):
    """The explanations of one input; also what --format json writes to a file."""

    command: Literal["compare"]


class AttentionOutput(_Command):
    """A figure of the attention maps inside a model."""

    command: Literal["attention"]
    model: str
    input: str = _required("File name, or the beginning of the text.")
    blocks: int = _required("Number of blocks of the model.")
    heads: int = _required("Number of heads of its first block.")
    drawn: str = _required("What the figure shows, such as 'blocks' or 'block 3 head 1 matrix'.")
    files: list[str] = _required("Files that were written.")


class PerturbProbabilities(BaseModel):
    """Probability of the class, or value of a regression, at each fraction."""

    highest_first: list[float]
    lowest_first: list[float]


class PerturbPredicted(BaseModel):
    """The predicted class at each fraction."""

    highest_first: list[str]
    lowest_first: list[str]


class PerturbOutput(_Command):
    """The model's output for a picture as parts of it are removed."""

    command: Literal["perturb"]
    model: str
    input: str = _required("File name, or the beginning of the text.")
    method: str
    settings: dict[str, Any]
    target: str = _required("Name of the class.")
    baseline: Literal[names_for("image")] = _required("What replaces removed pixels.")  # type: ignore[valid-type]
    fractions: list[float] = _required("Share of the pixels removed; the first is 0.")
    probabilities: PerturbProbabilities | None = _required(
        "Probability of the class at each fraction; null for a regression."
    )
    values: PerturbProbabilities | None = _required("Value of a regression at each fraction; else null.")
    predicted: PerturbPredicted = _required("The predicted class at each fraction.")
    files: list[str] = _required("Files that were written.")


AuditOutput = create_model(
    "AuditOutput", __doc__="The structure of a model.", __base__=_Command, command=Literal["audit"], **_fields_of(Audit)
)


class MethodsMethod(BaseModel):
    """A method."""

    name: str
    summary: str
    family: str = _required("attention, propagation, gradient or perturbation.")
    level: str = _required("Kind of features that have scores.")
    modality: Literal["both", "image", "text"]
    class_specific: bool = _required("False if the map is the same for every class.")
    citation: str
    settings: dict[str, Any] = _required("Setting -> default.")


class MethodsOutput(_Command):
    """The requested methods."""

    command: Literal["methods"]
    methods: list[MethodsMethod]


class BenchmarkOutput(BenchmarkSchema, _Command):
    """The figures of a benchmark, as in report.json, and the counts of the run."""

    command: Literal["benchmark"]
    extra: dict[str, Any] = _required("Further results of this benchmark.")
    measured: int = _required("Samples x configurations measured in this run.")
    resumed: int = _required("Number taken from an earlier run.")
    unscored: int = _required("Number without figures; if there are any, the exit status is 3.")
    files: list[str] = _required("Files that were written.")


class MaximizeUnit(BaseModel):
    """A unit of the model."""

    unit: str = _required("Name of the unit.")
    activation: float = _required("Activation at the end.")
    history: list[float] = _required("Activation before each step, and at the end.")


class MaximizeOutput(_Command):
    """The pictures that maximise the activation of units."""

    command: Literal["maximize"]
    model: str
    units: list[MaximizeUnit] = _required("The units, in the order of the arguments.")
    settings: dict[str, Any]
    files: list[str] = _required("Files that were written.")


ReportOutput = create_model(
    "ReportOutput",
    __doc__="A report that was written.",
    __base__=_Command,
    command=Literal["report"],
    files=(list[str], _required("Files that were written.")),
    **_fields_of(WrittenReport, "path"),
)


class AppOutput(_Command):
    """A running web page; printed as soon as it accepts requests."""

    command: Literal["app"]
    url: str


RunCost = create_model(
    "RunCost",
    __doc__="The expected cost of a job.",
    warnings=(list[str], _required("Reasons not to start the job.")),
    **_fields_of(Cost),
)


class RunOutput(_Command):
    """The outcome of a job, or its expected cost with --dry-run."""

    command: Literal["run"]
    out: str = _required("The output folder.")
    rows: int = _optional("Number of rows of the input.")
    written: int = _optional("Number of rows of the table: one for each input, method and target.")
    failed: int = _optional("Number of rows of the table of failures.")
    complete: bool = _optional()
    cost: RunCost = _optional("With --dry-run.")  # type: ignore[valid-type]


class ServeOutput(_Command):
    """A running server; printed as soon as it accepts requests."""

    command: Literal["serve"]
    url: str


COMMANDS: dict[str, type[_Command]] = {
    "explain": ExplainOutput,
    "generate": GenerateOutput,
    "compare": CompareOutput,
    "attention": AttentionOutput,
    "perturb": PerturbOutput,
    "audit": AuditOutput,
    "methods": MethodsOutput,
    "benchmark": BenchmarkOutput,
    "maximize": MaximizeOutput,
    "report": ReportOutput,
    "app": AppOutput,
    "run": RunOutput,
    "serve": ServeOutput,
}
"""Command -> its output."""
