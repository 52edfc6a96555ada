"""The JSON output of every command, of which :mod:`.schema` makes a JSON Schema."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from whyformer.baselines import names_for
from whyformer.explanation.geometry import Box


def _required(about: str) -> Any:
    """Return a key that is always there."""
    return Field(description=about)


def _optional(about: str | None = None) -> Any:
    """Return a key that may be missing."""
    return Field(default=None, description=about)


class _Command(BaseModel):
    """What one command prints; new keys may appear at any time."""

    schema_version: Literal[1]


class ExplanationGeometry(BaseModel):
    """Where the model's input lies on one picture."""

    size: list[int] = _required("Height and width of the picture given, in pixels.")
    box: list[float] = _required("Left, top, right and bottom of what the model saw, in its pixels.")


class ExplanationOutput(BaseModel):
    """Scores of one method for a batch of samples (on the command line one sample).

    Axis letters: B samples, P patches row by row, N tokens, C classes.
    """

    method: str = _required("Registry name.")
    settings: dict[str, Any] = _required("All settings of the method, defaults filled in.")
    model: str | None = _required("Name of the model, where it is known.")
    level: Literal["patch", "token", "pixel"] = _required("What the scores belong to.")
    scores: list[list[Any]] = _required("[B, P], [B, N] or [B, height, width]; padding is 0.")
    target: list[int] = _required("[B] class explained; -1 for a target that is no class.")
    target_names: list[str] | None = _required("[B] readable names of the targets.")
    logits: list[list[float]] = _required(
        "[B, C] the model's output; of more than 1,000 classes [B, K], the 20 highest and those that are explained."
    )
    classes: list[list[int]] = _optional("[B, K] which classes these are, where not all are there.")
    normalizer: list[float] = _optional(
        "[B] log of the sum of exp over the logits of all classes: logits - normalizer are log-probabilities."
    )
    probabilities: list[list[float]] | None = _required(
        "As logits: their softmax over all classes, or sigmoid where these do not exclude one another; null of numbers."
    )
    activation: Literal["softmax", "sigmoid", "identity"] = _required(
        "What makes probabilities of the logits; identity: the output is a number (a regression) and has none."
    )
    multi_label: bool = _required("True where the classes do not exclude one another.")
    labels: dict[str, str] | None = _required("Class number -> name.")
    frames: int | None = _required("Steps of time with a grid, or a frame of pixels, of their own, for a video.")
    grid: tuple[int, int] | None = _required("Rows and columns of patches.")
    image_size: tuple[int, int] | None = _required("Height and width of the model's input in pixels.")
    cells: Box | None = _required("Left, top, right, bottom of that grid in pixels of the input; null for all of it.")
    read: Box | None = _required("Left, top, right, bottom of the pixels that the model reads; null for all of them.")
    tokens: list[list[str]] | None = _required("[B, N] token strings.")
    offsets: list[list[tuple[int, int]]] | None = _required("[B, N] first and last character (exclusive) of tokens.")
    texts: list[str] | None = _required("[B] the sentences.")
    sampling_rate: int | None = _required("Samples a second of the waves, for sounds.")
    durations: list[float] | None = _required("[B] seconds that each sound lasts.")
    rate: float | None = _required("How many scores a second has, for sounds.")
    extent: list[tuple[int, int]] | None = _required(
        "[B] first and last character (exclusive) of each sentence that the model read, where a part was cut off."
    )
    unknown: list[list[int]] | None = _required("[B] places of the tokens that are unknown to the model ([UNK]).")
    special: list[list[int]] | None = _required("[B] places of the special tokens ([CLS], [SEP]), where known.")
    diagnostics: dict[str, Any] = _required("Measured facts about the run.")
    geometry: list[ExplanationGeometry] | None = _required("[B] where the model's input lies on the picture given.")
    input: str | None = _optional("The input of the model that these scores are of.")
    parts: dict[str, ExplanationOutput] = _optional("By name, the explanations of the model's other inputs.")


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


class GenerationOutput(BaseModel):
    """Every token of an answer."""

    seen: dict[str, Any] = _optional("Maps of the prompt's pictures at each step, by the name of their part.")
    tokens: list[str] = _required(
        "As the vocabulary has them: prompt, then answer; of an encoder-decoder first what the encoder read."
    )
    pieces: list[str] = _required("The text of each token.")
    ids: list[int] = _required("The number of each token.")
    start: int = _required("The first token of the answer.")
    source: int = _optional("How many tokens an encoder read.")
    prompt: str = _optional()
    text: str = _required("The answer.")
    matrix: list[list[float]] = _required(
        "A row for each token of the answer, a column for each token: scores of the tokens before it."
    )
    value: list[float] = _required("What was explained of each token of the answer.")
    explained: str = _required("What that is, such as log-probability.")
    target: list[int] = _optional()
    target_names: list[str] = _optional()
    probabilities: list[float] = _required("Of each token of the answer.")
    candidates: list[list[GenerationCandidate]] = _required("The likeliest tokens at each step, and the answer's.")
    turns: list[list[Any]] = _optional("(role, first token, one after the last) of each message.")
    special: list[int] | None = _optional("Places of special tokens and of those that a chat template writes.")
    notes: list[str] = _optional("What was done to the prompt.")
    method: str
    settings: dict[str, Any] = _optional()
    model: str | None = _optional()
    unit: str = _optional()
    input: str = _optional()
    part: str = _optional()
    labels: dict[str, Any] | None = _optional()
    groups: list[Any] | None = _optional()
    diagnostics: list[dict[str, Any]] = _optional("Facts measured at each step.")


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


class AuditStream(BaseModel):
    """The rows of one input."""

    name: str
    input: str = _required("What the model made these ids of.")
    level: str | None
    size: list[int] | None
    blocks: int = _required("Number of blocks that its rows run through.")


class AuditAttention(BaseModel):
    """One attention: whose rows attend to whose."""

    queries: list[str]
    keys: list[str]
    depth: int
    block: int | None
    shape: list[int] = _required("Samples, queries, keys.")


class AuditOperation(BaseModel):
    """Units of one name and kind, and the rule that each method has for them."""

    name: str
    kind: str
    count: int
    rules: dict[str, str | None] = _required(
        "Method to rule, null where it has none. Methods whose relevance does not arrive there are left out."
    )


class AuditUnit(BaseModel):
    """A line of the program: calls of torch with one meaning."""

    number: int = _required("Of the value that it makes.")
    kind: str
    name: str
    shape: list[int]
    entries: list[int] = _required("Numbers of the values that carry relevance into it.")
    module: str
    block: int = _required("In the order of execution; -1 outside of all.")
    unknown: list[str] = _required("Methods without a rule for it.")


class AuditOutput(_Command):
    """What was read off a model."""

    command: Literal["audit"]
    model: str
    streams: list[AuditStream] = _required("The rows of each input.")
    attentions: list[AuditAttention]
    operations: list[AuditOperation]
    program: list[AuditUnit]
    blocks: dict[str, dict[str, float]] = _required(
        "Method to block to relevance at its input, as a share of what started."
    )
    lost: dict[str, dict[str, float]] = _required("Method to kind of unit to relevance lost, in that share.")
    sums: dict[str, float] = _required("Method to sum of scores, as a share of the target's value.")
    methods: dict[str, str | None] = _required("Method to why it does not apply, null where it does.")


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


class ReportSkipped(BaseModel):
    """A file that is not in the report."""

    file: str
    why: str
    damaged: bool = _required("True where the file should have been in the report; the exit status is then 3.")


class ReportOutput(_Command):
    """A report that was written."""

    command: Literal["report"]
    files: list[str] = _required("Files that were written.")
    bytes: int = _required("Size of the report.")
    inputs: int = _required("Different pictures and sentences.")
    explanations: int = _required("Maps shown.")
    answers: int = _optional("Generated texts shown.")
    benchmarks: int = _required("Benchmark results shown.")
    jobs: int = _required("Folders of jobs shown.")
    skipped: list[ReportSkipped] = _required("Files that are not in the report.")


class AppOutput(_Command):
    """A web page that is being served; printed once it answers."""

    command: Literal["app"]
    url: str


class RunCost(BaseModel):
    """With --dry-run."""

    rows: int | None = _required("Of the input; null where it does not say.")
    there: int = _required("Of them that an earlier run has done.")
    sampled: int = _required("Rows on trial.")
    failed: int = _required("Of them.")
    reason: str | None = _required("Why the first of them failed.")
    explanations: float = _required("For each row.")
    batch_size: int
    memory: int = _required("Bytes that a batch keeps.")
    available: int = _required("Bytes of memory.")
    seconds: float | None = _required("For what is still to do.")
    bytes: int | None = _required("That it would write.")
    disk: int = _required("Bytes that are free.")
    warnings: list[str]


class RunOutput(_Command):
    """How a job went, or with --dry-run what it would cost."""

    command: Literal["run"]
    out: str = _required("The folder.")
    rows: int = _optional("Of the input.")
    written: int = _optional("Rows of the table: one for each input, method and target.")
    failed: int = _optional("Rows of the table of failures.")
    complete: bool = _optional()
    cost: RunCost = _optional("With --dry-run.")


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
