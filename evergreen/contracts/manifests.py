"""The small JSON documents that steps hand to each other; big data is named by URI inside them.

Joins each step to the next (see each class). A manifest carries its kind and `format_version`; a reader refuses
what it does not know instead of guessing. Numbers that do not exist are `None`.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from evergreen.config.spec import Recommender
from evergreen.contracts.checks import Check
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

_CHECKSUM = "crc32"
"""Key of a document's checksum; one that a person wrote may lack it."""
M = TypeVar("M", bound="Manifest")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What all manifests share: writing, and reading that refuses."""

    FORMAT_VERSION: ClassVar[int] = 1

    def dumps(self) -> bytes:
        """The manifest as JSON."""
        document = {
            "kind": type(self).__name__,
            "format_version": self.FORMAT_VERSION,
            **dataclasses.asdict(self),
        }
        return (json.dumps(checksummed(document), indent=2, allow_nan=False) + "\n").encode()

    def write(self, path: str | Path) -> None:
        """Writes the manifest as JSON to `path`, whole or not at all."""
        write_whole(Path(path), self.dumps())

    @classmethod
    def read(cls: type[M], path: str | Path) -> M:
        """The manifest at `path`.

        Raises:
            ContractError: absent, not JSON, another kind or format version, not as its checksum says, or missing or
                unknown fields.
        """
        return cls.loads(read_content(path), source=str(path))

    @classmethod
    def loads(cls: type[M], content: bytes, *, source: str) -> M:
        """The manifest in `content`; `source` is named in errors, which are those of `read`."""
        fields = parse_document(content, kind=cls.__name__, version=cls.FORMAT_VERSION, source=source)
        return _from_fields(cls, fields, source=source)


def read_content(path: str | Path) -> bytes:
    """The bytes of the file.

    Raises:
        ContractError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error


def parse_document(content: bytes, *, kind: str, version: int, source: str) -> dict[str, Any]:
    """The fields of a JSON document of that kind and format version, without these two; `source` is named in errors.

    Raises:
        ContractError: not a JSON object, another kind, another format version, or other than its checksum.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{source} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ContractError(f"{source} holds a {type(document).__name__}, expected a JSON object")
    found_kind, found_version = document.pop("kind", None), document.pop("format_version", None)
    if found_kind != kind:
        raise ContractError(f"{source} is a {found_kind} manifest, expected {kind}")
    if found_version != version:
        raise ContractError(f"{source} has format_version {found_version}, expected {version}")
    expected = document.pop(_CHECKSUM, None)
    whole = {"kind": kind, "format_version": version, **document}
    if expected is not None and expected != (found := _crc32(whole)):
        raise ContractError(
            f"{source} has {_CHECKSUM} {found}, expected {expected!r}: it was damaged, or edited without removing its "
            f"key {_CHECKSUM}"
        )
    return document


def checksummed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with its checksum, which `parse_document` compares."""
    return {**document, _CHECKSUM: _crc32(document)}


def _crc32(document: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a document's values, however its text is laid out."""
    # Once through JSON: keys that are numbers are sorted as the texts that a reader finds.
    values = json.loads(json.dumps(document))
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def _from_fields(kind: type[T], values: dict[str, Any], *, source: str) -> T:
    """The dataclass `kind` with these values; dataclasses among its fields are made of the objects in their place."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {f.name for f in fields}
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    if wrong := (values.keys() - known) | (required - values.keys()):
        raise ContractError(f"{source} has unknown or missing fields {sorted(wrong)}")
    types = get_type_hints(kind)
    made = {name: _nested(types[name], value, f"{source} {name}") for name, value in values.items()}
    try:
        return kind(**made)
    except ContractError as error:
        raise ContractError(f"{source}: {error}") from error


def _nested(annotation: Any, value: Any, source: str) -> Any:
    """`value` as the dataclass, or the list or mapping of them, that `annotation` names; itself where it names none."""
    kinds = [k for k in (annotation, *get_args(annotation)) if isinstance(k, type) and dataclasses.is_dataclass(k)]
    if not kinds:
        return value
    if isinstance(value, list):
        return [_nested(kinds[0], each, source) for each in value]
    if isinstance(value, dict) and get_origin(annotation) is Mapping:
        return {name: _nested(kinds[0], each, f"{source} of {name}") for name, each in value.items()}
    if value is None and type(None) in get_args(annotation):
        return None
    if not isinstance(value, dict):
        raise ContractError(f"{source} is {value!r}, expected an object")
    return _from_fields(kinds[0], value, source=source)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Manifest of an earlier step, by which a step finds what it was not handed (`evergreen.storage.references`)."""

    uri: str
    """File of the shared folder or of the model registry."""
    sha256: str
    """Of the file's bytes, 64 hex digits."""


@dataclass(frozen=True, kw_only=True)
class RawDataset(Manifest):
    """Rows of one window, split by time. Extraction -> validation -> preprocessing; then by reference."""

    source_uri: str
    window_start: str | None
    """Where the window begins, ISO 8601 UTC, inclusive: as asked for, a number of days before its end, or after the
    parent's last learned row; None = from the first row."""
    window_end: str | None
    """Where it ends, exclusive: as asked for, less the hours of rows that are left for the next round; None = to the
    last row."""
    first_event_time: str
    """Oldest row read of the window; the late rows (`num_late_rows`) are older."""
    last_event_time: str
    """Newest row read of the window."""
    last_learned_time: str
    """Newest row that the model of this round will have learned, late and replayed rows aside: of `train_uri`, or of
    the parent's rows where those are newer. Every row held out is newer, and is in the next round's window."""
    train_uri: str
    """Folder of Parquet files in the raw schema (`contracts.raw_rows.raw_types`), in time order of file names: the late
    rows, then those of the window."""
    holdout_uri: str
    """Folder of the newest rows, kept from training; same schema. Neither the candidate nor its parent nor the champion
    learned a row that is as new, and no request has rows here and in `train_uri` or `replay_uri`."""
    num_train_rows: int
    num_holdout_rows: int
    num_malformed: int
    """Malformed rows, kept beside their reason in `malformed_uri`."""
    malformed_uri: str | None
    num_duplicates: int
    """Rows left out because another row has their (request_id, row) and the same content."""
    digest: str
    """SHA-256 over the Parquet files: the version of the data."""
    parent_model_id: str | None = None
    """The model that the round continues; None = from scratch."""
    champion_model_id: str | None = None
    """The model that the candidate must beat; None = it is judged alone."""
    num_updated: int = 0
    """Rows left out because another copy counts, which has the same features and another label, time or score."""
    num_conflicting: int = 0
    """Rows left out because another copy counts, which has other features."""
    num_ahead: int = 0
    """Rows that were not read because their event times are ahead of the clock; a later round reads them. Their files
    are in `ahead_uri`, each with its number of rows and a reason."""
    ahead_uri: str | None = None
    num_left_files: int = 0
    """Files that the parent's line has not seen and that this round does not learn: they are older than late rows are
    learned, or than the window that somebody asked for."""
    num_left_rows: int | None = 0
    """Their rows; None where a file could not be counted."""
    num_straddling_rows: int = 0
    """Rows newer than `last_learned_time` that are not held out either, because training rows belong to their requests.
    Like the rows held out they are in the window of the next round."""
    replay_uri: str | None = None
    """Folder of rows drawn from days before the window, to be learned beside it; same schema. None = no replay."""
    num_replay_rows: int = 0
    replay_holdout_uri: str | None = None
    """Folder of other rows of those days, kept from training: how well the old distribution is remembered."""
    num_replay_holdout_rows: int = 0
    replay_share: float = 0.0
    """Share of replayed rows among the rows learned that the run asked for, in [0, 1)."""
    replay_days: list[dict[str, Any]] = field(default_factory=list)
    """Each: day (YYYY-MM-DD), num_rows, num_holdout_rows drawn from it and its version."""
    num_late_clicks: int = 0
    """Rows of the window, and late ones, whose label a click made 1 that came after they were archived."""
    outcomes_digest: str | None = None
    """SHA-256 over the files of late outcomes that were joined, those of replayed days too; None = there was none."""
    excluded_columns: list[str] = field(default_factory=list)
    """Features that the run left out, in the order of files: nothing that is learned, judged or served depends on them.
    Null in the rows, but where the champion learns from them, which the gate must score fairly; so go by this list."""
    days: list[dict[str, Any]] = field(default_factory=list)
    """What was read of each day of the window, and of days with late rows: day (YYYY-MM-DD), version (int), digest
    (SHA-256), num_rows; where there are any, num_late_rows, how many of them came late, and num_holdout_rows, how many
    are newer than `last_learned_time` and so are not learned in this round."""
    num_late_rows: int = 0
    """The first rows of `train_uri` as extraction wrote it, counted in `num_train_rows`: older than the window, and of
    files that came to the lake after the parent's line had learned newer rows. Never held out, and never among the
    rows replayed beside them."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the line has seen of the lake's days up to the last row learned, and of the 366 days before: bytes by file
    name by day (YYYY-MM-DD), back-filled versions aside. Files that are not here are late. The first day has an entry
    even without files; a later day without an entry had none, and of earlier days nothing is known."""
    quarantined_files: list[dict[str, Any]] = field(default_factory=list)
    """Files of the lake that the run left out because their rows cannot be read. Each: file (relative to the lake),
    num_rows (by its footer; None = not readable), reason, known (whether an earlier round of the line left it out)."""
    unread_files: dict[str, dict[str, str]] = field(default_factory=dict)
    """By day and name, the files that the line has left out so and not read since, back-filled versions aside: the
    time up to which it has learned their rows, ISO 8601; empty = it learned none. They are late once they are fit."""
    schema_mismatches: list[dict[str, Any]] = field(default_factory=list)
    """Columns of the window's files that nobody agreed on, or that hold no numbers where numbers were agreed on (they
    were cast): column, arrow_type, expected (None for a new one), file, the first that has it so. Each column once."""
    num_quarantined: int = 0
    """Training rows that validation put into quarantine, with their reason, in `quarantine_uri`."""
    quarantine_uri: str | None = None
    validation_report: Reference | None = None
    """The `ValidationReport` on these rows. None before validation."""
    words_uri: str | None = None
    """The most frequent words of columns of words (`contracts.words`), for people; None = there is no such column.
    Those of the column that names users are not kept."""
    recommender: Recommender
    """Whose rows they are, with the settings of the run."""

    @property
    def num_quarantined_files(self) -> int:
        """How many files the run left out."""
        return len(self.quarantined_files)

    def seen_days(self) -> list[dict[str, Any]]:
        """`days`, then those of which rows are replayed, marked by `replay`: true; these have no digest."""
        replayed = [
            {"day": each["day"], "version": each["version"], "num_rows": each["num_rows"], "replay": True}
            for each in self.replay_days
            if each["num_rows"]
        ]
        return [*self.days, *replayed]


@dataclass(frozen=True, kw_only=True)
class ValidationReport(Manifest):
    """What TFDV found, and what the rules made of it. Validation -> people; training, evaluation by reference."""

    decision: str
    """`pass`, `warn` or `block`."""
    reasons: list[str]
    """One sentence per finding that led to `warn` or `block`."""
    findings: list[dict[str, Any]]
    """Each as `components.validation.findings.Finding`; `rule` is its name in `RULES`."""
    drift: list[dict[str, Any]]
    """Per judged feature, as `evergreen.statistics.comparison.ColumnDrift`, against the windows of the parent's line;
    empty without a parent."""
    num_rows: int
    statistics_uri: str
    """DatasetFeatureStatisticsList of the training rows, binary protobuf."""
    schema_uri: str
    """TensorFlow Metadata schema, text protobuf."""
    report_uri: str
    """Self-contained HTML."""
    json_uri: str
    """The report for machines."""
    parent_statistics_uri: str | None
    raw_digest: str
    reference_uri: str | None = None
    """The training rows counted for the monitor (`evergreen.statistics.reference`)."""
    label: dict[str, Any] | None = None
    """Change of the click rate, as `components.validation.drift.LabelShift`; None without a parent."""
    skew: list[dict[str, Any]] = field(default_factory=list)
    """Per feature, training rows against served rows, as `components.validation.skew.SkewEntry`; empty if too few
    joined."""
    served: dict[str, Any] | None = None
    """What was compared, as `components.validation.skew.ServedRowFacts`; None if no served rows were named."""
    windows_uri: str | None = None
    """Summaries of the windows that the model will have learned from, for the next round's drift; None if there
    are no rows."""


@dataclass(frozen=True, kw_only=True)
class TrainingSet(Manifest):
    """Encoded rows in HugeCTR's Parquet form. Preprocessing -> training; evaluation by reference."""

    train_uri: str
    """Folder with Parquet files, `_metadata.json` and `_file_list.txt`: label and I1..I13 float32, C1..C26 int64."""
    holdout_uri: str
    """The same for the held-out rows, in the row order of `RawDataset.holdout_uri`."""
    num_train_rows: int
    num_holdout_rows: int
    slot_sizes: list[int]
    """Number of ids per categorical column, in column order; ids lie in [0, size)."""
    new_categories: list[int]
    """Categories per column that got an id in this round, appended or a tombstone's."""
    workflow_uri: str
    """Folder of the fitted feature workflow (`contracts.workflow`)."""
    raw_digest: str
    last_event_time: str
    """See `RawDataset.last_event_time`."""
    last_learned_time: str
    """See `RawDataset.last_learned_time`; the model keeps it as its watermark."""
    parent_model_uri: str | None
    window_start: str | None = None
    """See `RawDataset.window_start`."""
    replay_uri: str | None = None
    """The rows of `RawDataset.replay_uri`, encoded as the others are; None = no replay."""
    num_replay_rows: int = 0
    replay_holdout_uri: str | None = None
    num_replay_holdout_rows: int = 0
    replay_share: float = 0.0
    """Share of replayed rows among the rows that training learns from, asked for by the run, in [0, 1)."""
    excluded_columns: list[str] = field(default_factory=list)
    """See `RawDataset.excluded_columns`."""
    negative_rate: float = 1.0
    """Share of the training and replayed rows without a click that is here, in (0, 1]; held-out rows are all there. The
    model's bias is corrected by its logarithm (`training.start`)."""
    num_sampled_out: int = 0
    """Training rows left out by `negative_rate`, replayed ones not counted."""
    days: list[dict[str, Any]] = field(default_factory=list)
    """See `RawDataset.seen_days`."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """See `RawDataset.files`."""
    unread_files: dict[str, dict[str, str]] = field(default_factory=dict)
    """See `RawDataset.unread_files`."""
    raw_dataset: Reference | None = None
    """The `RawDataset` that was encoded. None only where no step made the manifest, likewise the next."""
    validation_report: Reference | None = None
    """See `RawDataset.validation_report`."""
    tombstones: list[int] = field(default_factory=list)
    """Per categorical column, ids whose category was evicted and that no category has now; empty = none anywhere."""
    recommender: Recommender
    """See `RawDataset.recommender`."""


@dataclass(frozen=True, kw_only=True)
class Model(Manifest):
    """One trained model: a self-contained folder of the model store. Training -> evaluation, next round.

    The folder holds `model.json` (this manifest) and the parts named by the constants below.
    """

    FORMAT_VERSION: ClassVar[int] = 3
    MANIFEST: ClassVar[str] = "model.json"
    WEIGHTS: ClassVar[str] = "weights"
    """Weights, optimizer state and the network's own graph (`evergreen.networks.files`)."""
    WORKFLOW: ClassVar[str] = "workflow"
    """The feature workflow (`contracts.workflow`)."""
    STATISTICS: ClassVar[str] = "statistics/statistics.pb"
    """TFDV statistics of the training rows."""
    SCHEMA: ClassVar[str] = "statistics/schema.pbtxt"
    REFERENCE: ClassVar[str] = "statistics/reference.npz"
    """The same rows counted for the monitor (`evergreen.statistics.reference`)."""
    WINDOWS: ClassVar[str] = "statistics/windows.npz"
    """Summaries of the windows that its line learned from (`components.validation.windows`)."""
    PARTS: ClassVar[tuple[str, ...]] = (WEIGHTS, WORKFLOW, "statistics")
    """The folders beside the manifest."""

    model_id: str
    uri: str
    """This folder."""
    backend: str
    """`pytorch` or `hugectr`."""
    config: dict[str, Any]
    """The network's name and settings (`config.model`)."""
    slot_sizes: list[int]
    parent_model_id: str | None
    seed: int
    num_train_rows: int
    optimizer_step: int
    """Optimizer steps taken so far, over all incremental rounds."""
    progressive: dict[str, float | None]
    """AUC and log loss of a tenth of the training rows just before it was learned: a round's newest, any of a first
    model's. Of thinned rows where `negative_rate` is below 1, so the log loss compares with no held-out rows' then."""
    last_event_time: str
    """Newest row read for this model; those after `last_learned_time` judged it."""
    last_learned_time: str
    """Newest row that it learned, itself or through its parent: the watermark of the round that continues it. Rows
    thinned away and quarantined ones count as learned; late and replayed rows do not move it."""
    raw_digest: str
    sha256: dict[str, str]
    """Hash of each part's tree: `weights`, `workflow`, `statistics`."""
    created_at: str
    window_start: str | None = None
    """See `RawDataset.window_start`: what its own round learned begins there, late and replayed rows aside."""
    negative_rate: float = 1.0
    """See `RawDataset.negative_rate`. The stored weights are corrected already: scores are of all rows."""
    served_shift: float = 0.0
    """By what the stored bias is moved so that rows have the log's click rate as they are served, where a feature is
    served as one value (`CategoricalOptions.served_as`); the round that continues the model begins without it."""
    excluded_columns: list[str] = field(default_factory=list)
    """See `RawDataset.excluded_columns`; what serving goes by is in the workflow."""
    training_set: Reference | None = None
    """The `TrainingSet` that it learned. None in the store, where a model outlives its encoded rows."""
    days: list[dict[str, Any]] = field(default_factory=list)
    """Which version of which day it learned from in its own round; see `RawDataset.seen_days`."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Files that were in the lake in its round: what is not among them is late. See `RawDataset.files`."""
    unread_files: dict[str, dict[str, str]] = field(default_factory=dict)
    """See `RawDataset.unread_files`."""
    recommender: Recommender
    """See `RawDataset.recommender`."""


@dataclass(frozen=True, kw_only=True)
class ModelQuality:
    """How well a model scores one set of rows; a number that does not exist is None."""

    auc: float | None = None
    auc_low: float | None = None
    """Lower end of the 95 % interval."""
    auc_high: float | None = None
    log_loss: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None
    """Expected clicks divided by observed ones."""
    gauc: float | None = None
    """See `metrics.UserQuality`; None too where the recommender names no user, likewise the next."""
    user_ndcg: float | None = None


@dataclass(frozen=True, kw_only=True)
class AucLead:
    """The candidate's AUC minus the champion's on the same rows (paired DeLong); None where it does not exist."""

    auc: float | None = None
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class RowsQuality:
    """Both models on the same held-out rows."""

    candidate: ModelQuality
    champion: ModelQuality | None
    difference: AucLead | None
    num_rows: int
    num_clicks: int


@dataclass(frozen=True, kw_only=True)
class ReorderingGain:
    """What the candidate's order of neighbours is worth in clicks, from lists that a client explored.

    None where too few disputed pairs were swapped to tell (`components.evaluation.exploration`).
    """

    gain: float | None = None
    """Clicks on two neighbours that the candidate would order otherwise, if they change places, less those if not."""
    low: float | None = None
    """Lower end of the 95 % interval, which holds at all numbers of lists at once."""
    high: float | None = None
    num_lists: int
    """Explored lists that are held out."""
    num_swaps: int
    """Shown swaps of pairs that the candidate would order so: what the estimate rests on."""
    disputed_share: float
    """Share of pairs of neighbours that the candidate would order otherwise."""


@dataclass(frozen=True, kw_only=True)
class Verdict(Manifest):
    """The gate's answer. Evaluation -> deployment, the pipeline's condition, people."""

    candidate_model_id: str
    champion_model_id: str | None
    decision: str
    """`pass`, `fail` or `inconclusive`."""
    accepted: bool
    """Whether the run goes on to deployment: `pass`, or `inconclusive` where the run's rollout can take that."""
    reason: str
    """Headline of the checks (`contracts.checks.headline`)."""
    num_rows: int
    num_clicks: int
    candidate: ModelQuality
    champion: ModelQuality | None
    difference: AucLead | None
    scores_uri: str
    """NumPy .npz with float32 `candidate` (and `champion`) scores of the held-out rows, in their order."""
    model: Reference | None = None
    """The candidate's `Model` in the store. None in verdicts of older revisions, likewise the next."""
    raw_dataset: Reference | None = None
    """The `RawDataset` whose held-out rows it was evaluated on."""
    old_distribution: RowsQuality | None = None
    """On rows of days before the window: what both models remember. None = no such rows were held out. The gate judges
    by it on request only."""
    reordering_gain: ReorderingGain | None = None
    """None = no held-out list was explored. Information: the gate does not judge by it."""
    champion_reference: str = "current"
    """How the run asked for the champion: `current`, `none` or a model id. Only a comparison with `current` grows stale
    when another model goes live."""
    column_aucs: dict[str, float] = field(default_factory=dict)
    """AUC of each column alone on the held-out rows, highest first. Measured only of a candidate whose AUC is too good
    to be true (`components.evaluation.leaks`), else empty."""
    warnings: list[str] = field(default_factory=list)
    """One sentence each for people. They refuse nothing."""
    advice: list[str] = field(default_factory=list)
    """What would make the gate pass such a model, one sentence for each check that did not pass."""
    checks: list[Check] = field(default_factory=list)
    """The gate's checks with their numbers. The worst of them is `decision`."""

    @property
    def sentence(self) -> str:
        """The headline and the warnings."""
        return "; ".join([self.reason, *(f"WARNING: {each}" for each in self.warnings)])


@dataclass(frozen=True, kw_only=True)
class Release(Manifest):
    """One version that Triton serves. Deployment -> the promotion journal, the next run's champion, people."""

    model_name: str
    version: int
    previous_version: int | None
    model_id: str
    model_uri: str
    graph_uri: str
    """The ONNX graph, kept in the model store beside its golden rows."""
    sha256: dict[str, str]
    """`graph`, `golden` (its golden rows), `weights`, `workflow`, and `data` (the raw dataset's digest)."""
    raw_digest: str
    parity_max_abs_diff: float
    """Largest difference between the graph on raw rows and the training-side scores of the same rows."""
    parity_rows: int
    repository_uri: str
    trigger_id: str | None
    reason: str
    """Why it was accepted: the headline of the verdict."""
    published_at: str
    """When its files were complete; the journal tells when it went live."""
    parent_model_id: str | None = None
    """The model that this one continued; None = from scratch."""


@dataclass(frozen=True, kw_only=True)
class ServingPlace(Manifest):
    """Where the last release went, as its process saw it. Deployment -> whoever deploys next without naming a place."""

    repository_uri: str
    triton_urls: list[str]
    """As given: host:port, or dns:///name:port."""
    server: str
    """`python` or `onnxruntime`."""


CURRENT = "current"
"""As parent or champion: whatever the promotion journal says is live; none where nothing is."""
NONE = "none"
"""As parent: train from scratch; as champion: judge by floor and calibration alone."""
RUN_PARAMETERS = (
    *("window_start", "window_end", "parent", "champion", "recommender", "settings"),
    *("trigger_id", "trigger_reason"),
)
"""Parameters of the pipeline: six that a person changes, and two that the monitor gives."""
SCRATCH = ("parent", "champion")
"""The run's parameters that are `NONE` by `evergreen run --from-scratch`."""


@dataclass(frozen=True, kw_only=True)
class RetrainRequest(Manifest):
    """One run that is asked for: why, and from which rows. The monitor, people -> the pipeline's parameters."""

    request_id: str
    """Names the run; the same id is never run twice at a time."""
    reason: str
    requested_at: str
    window_start: str
    """ISO 8601 UTC, inclusive; empty = after the last row that the parent learned; without a parent, the first row."""
    window_end: str
    """Exclusive; empty = to the last row."""
    parent: str = CURRENT
    champion: str = CURRENT
    observed: dict[str, float | None]
    """What the decision was based on, such as auc, threshold, rows, clicks."""

    def __post_init__(self) -> None:
        if not self.request_id or not self.reason:
            raise ContractError(f"retrain request {self.request_id!r} has reason {self.reason!r}, expected both")

    def pipeline_arguments(self) -> dict[str, Any]:
        """The pipeline parameters that this request decides."""
        return {
            "trigger_id": self.request_id,
            "trigger_reason": self.reason,
            "window_start": self.window_start,
            "window_end": self.window_end,
            "parent": self.parent,
            "champion": self.champion,
        }
