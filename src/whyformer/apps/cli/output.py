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
from whyformer.explanation.schemas import ExplanationSchema, GenerationSchema
from whyformer.jobs.costs import Cost


def _required(about: str) -> Any:
    """Return a key that is always there."""
    return Field(description=about)


def _optional(about: str | None = None) -> Any:
    """Return a key that may be missing."""
    return Field(default=None, description=about)


class _Command(BaseModel):
    """What one command prints; new keys may appear at any time."""

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
    target: list[int] = _required("[B] class explained; -1 for a target that is no class.")
    logits: list[list[float]]
    classes: list[list[int]] = _optional()
    normalizer: list[float] = _optional()
    probabilities: list[list[float]] | None = _required(
        "As logits: their softmax over all classes, or sigmoid where these do not exclude one another; null of numbers."
    )
    multi_label: bool = _required("True where the classes do not exclude one another.")
    geometry: list[Geometry | None] | None = None  # type: ignore[assignment]
    parts: dict[str, ExplanationOutput] = _optional()


class TrustOutput(BaseModel):
    """The deletion curve of a map beside those of random maps; one entry a sample.

    null: not measured, for all scores are equal.
    """

    method: str
    followed: list[int] = _required("The class whose probability is followed, or which number.")
    numeric: bool = _required("True where a number is followed (a regression) and no probability.")
    fractions: list[float] = _required("Share of the features taken out, the highest scores first.")
    curves: list[list[float | None]] = _required("Probability of the class, or the number, at each fraction.")
    areas: list[float | None] = _required("Area under the curve; lower is better.")
    random: list[list[list[float | None]]] = _required(
        "The same for random scores on the same cells: one entry a random map."
    )
    chance: list[list[float | None]] = _required("Areas under these.")
    verdicts: list[str]
    warnings: list[list[str]]
    baseline: str = _required("What stood in for a feature.")
    seeds: list[int] = _required("Of the random maps.")


class GenerationCandidate(BaseModel):
    """A token that could have come next."""

    id: int
    text: str
    logit: float
    probability: float
    log_probability: float


class GenerationOutput(GenerationSchema):
    """Every token of an answer."""

    model_config = ConfigDict(extra="ignore")
    matrix: list[list[float]]
    value: list[float]
    target: list[int]
    probabilities: list[float] = _required("Of each token of the answer.")
    candidates: list[list[GenerationCandidate]] = _required("The likeliest tokens at each step, and the answer's.")
    seen: dict[str, Any] = _optional()
    prompt: str
    text: str = _required("The answer.")


class _ExplanationsOutput(_Command):
    """The explanations of one input; also what --format json writes to a file."""

    versions: dict[str, str]
    model: str = _required("Name of the model.")
    input: str = _required("File name, or the beginning of the text.")
    explanations: list[ExplanationOutput] = _required("One for each method and target, method by method.")
    checks: list[TrustOutput] = _optional(
        "With --check: how far each of the explanations may be believed, in their order."
    )
    picture: str = _optional(
        "The picture given, at most 672 pixels long "
        "(what the model saw of it, where geometry is null), as a data URI (PNG). In files only."
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
    blocks: int = _required("Of the model.")
    heads: int = _required("Of its first block.")
    drawn: str = _required("What the figure shows, such as 'blocks' or 'block 3 head 1 matrix'.")
    files: list[str] = _required("Files that were written.")


class PerturbProbabilities(BaseModel):
    """Of the class, at each fraction."""

    highest_first: list[float]
    lowest_first: list[float]


class PerturbPredicted(BaseModel):
    """What the model says, at each fraction."""

    highest_first: list[str]
    lowest_first: list[str]


class PerturbOutput(_Command):
    """A picture with more and more removed, and what the model says."""

    command: Literal["perturb"]
    model: str
    input: str = _required("File name, or the beginning of the text.")
    method: str
    settings: dict[str, Any]
    target: str = _required("Name of the class.")
    baseline: Literal[names_for("image")] = _required("What stands in for removed pixels.")  # type: ignore[valid-type]
    fractions: list[float] = _required("Share of the pixels removed; the first is 0.")
    probabilities: PerturbProbabilities | None = _required("Of the class, at each fraction; null of a number.")
    values: PerturbProbabilities | None = _required("Of a regression, its number at each fraction; else null.")
    predicted: PerturbPredicted = _required("What the model says, at each fraction.")
    files: list[str] = _required("Files that were written.")


AuditOutput = create_model(
    "AuditOutput", __doc__="The structure of a model.", __base__=_Command, command=Literal["audit"], **_fields_of(Audit)
)


class MethodsMethod(BaseModel):
    """One method."""

    name: str
    summary: str
    family: str = _required("attention, propagation, gradient or perturbation.")
    level: str = _required("What its scores belong to.")
    modality: Literal["both", "image", "text"]
    class_specific: bool = _required("False where the map is the same for every class.")
    citation: str
    settings: dict[str, Any] = _required("Setting -> default.")


class MethodsOutput(_Command):
    """The methods asked for."""

    command: Literal["methods"]
    methods: list[MethodsMethod]


class BenchmarkCount(BaseModel):
    """What became of the samples of one configuration."""

    scored: int
    failed: int
    constant: int
    nan: int


class BenchmarkTable(BaseModel):
    """One table, without its figures."""

    table: str
    title: str
    corner: str = _required("What the rows are.")
    rows: list[str]
    columns: list[str]
    digits: int = _required("After the point.")
    note: str


class BenchmarkFigure(BaseModel):
    """One cell of a table."""

    table: str
    row: str
    column: str
    measured: float | None
    low: float | None = _required("Lower end of the 95 % interval.")
    high: float | None = _required("Upper end.")
    samples: int
    published: float | None


class BenchmarkCurve(BaseModel):
    """The points of one line."""

    x: list[float | None]
    y: list[float | None]


class BenchmarkOutput(_Command):
    """The figures of a benchmark: what report.json holds, and how the run went."""

    command: Literal["benchmark"]
    benchmark: str = _required("Its name.")
    conventions: dict[str, Any] = _required("Every choice behind the figures, in words.")
    counts: dict[str, BenchmarkCount] = _required("Configuration -> number of samples.")
    remarks: list[str] = _required("What a reader must know.")
    tables: list[BenchmarkTable] = _required("What stands around the figures.")
    figures: list[BenchmarkFigure] = _required("One for each cell.")
    curves: dict[str, dict[str, BenchmarkCurve]] = _required("Panel -> line -> points.")
    extra: dict[str, Any] = _required("What a benchmark has besides.")
    measured: int = _required("Samples x configurations measured in this run.")
    resumed: int = _required("Taken from an earlier run.")
    unscored: int = _required("Without figures; the exit status is 3 where there are any.")
    files: list[str] = _required("Files that were written.")


class MaximizeUnit(BaseModel):
    """One unit."""

    unit: str = _required("What was maximised.")
    activation: float = _required("At the end.")
    history: list[float] = _required("Before each step, and at the end.")


class MaximizeOutput(_Command):
    """The pictures that units answer to most."""

    command: Literal["maximize"]
    model: str
    units: list[MaximizeUnit] = _required("Each unit, in order.")
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
    """A web page that is being served; printed once it answers."""

    command: Literal["app"]
    url: str


RunCost = create_model(
    "RunCost",
    __doc__="With --dry-run.",
    warnings=(list[str], _required("Reasons not to start the job.")),
    **_fields_of(Cost),
)


class RunOutput(_Command):
    """How a job went, or with --dry-run what it would cost."""

    command: Literal["run"]
    out: str = _required("The folder.")
    rows: int = _optional("Of the input.")
    written: int = _optional("Rows of the table: one for each input, method and target.")
    failed: int = _optional("Rows of the table of failures.")
    complete: bool = _optional()
    cost: RunCost = _optional("With --dry-run.")  # type: ignore[valid-type]


class ServeOutput(_Command):
    """Where the server answers."""

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
