"""The JSON documents that steps pass to each other. Manifests refer to large data by URI.

Each class names the step that writes it and the steps that read it. A manifest has its kind and
`format_version`, and a reader refuses any other kind or version. A number that is undefined is
`None`.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from evergreen.config.spec import Recommender
from evergreen.contracts.checks import Check, RuleCheck
from evergreen.runtime.durable import write_whole
from evergreen.runtime.errors import ContractError

_CHECKSUM = "crc32"
"""Key of a document's checksum. The checksum is optional, because a person may write a document by
hand."""
M = TypeVar("M", bound="Manifest")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Base class of all manifests. The class writes manifests, and reads them strictly."""

    FORMAT_VERSION: ClassVar[int] = 1

    def dumps(self) -> bytes:
        """Return the manifest as JSON."""
        document = {
            "kind": type(self).__name__,
            "format_version": self.FORMAT_VERSION,
            **dataclasses.asdict(self),
        }
        return (json.dumps(checksummed(document), indent=2, allow_nan=False) + "\n").encode()

    def write(self, path: str | Path) -> None:
        """Write the manifest as JSON to `path` atomically."""
        write_whole(Path(path), self.dumps())

    @classmethod
    def read(cls: type[M], path: str | Path) -> M:
        """Return the manifest at `path`.

        Raises:
            ContractError: The file is absent or is not JSON. Or the kind, the format version, the
                checksum or the fields of the manifest are wrong.
        """
        return cls.loads(read_content(path), source=str(path))

    @classmethod
    def loads(cls: type[M], content: bytes, *, source: str) -> M:
        """Return the manifest in `content`.

        Args:
            content: The bytes.
            source: Name of the source, for errors.

        Raises:
            ContractError: as in `read`.
        """
        fields = parse_document(
            content, kind=cls.__name__, version=cls.FORMAT_VERSION, source=source
        )
        return _from_fields(cls, fields, source=source)


def read_content(path: str | Path) -> bytes:
    """Return the content of the file as bytes.

    Raises:
        ContractError: the file cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}") from error


def parse_document(content: bytes, *, kind: str, version: int, source: str) -> dict[str, Any]:
    """Return the fields of a JSON document, except its kind and its format version.

    Args:
        content: The bytes.
        kind: Expected kind.
        version: Expected format version.
        source: Name of the source, for errors.

    Raises:
        ContractError: the content is not a JSON object, has another kind or format version, or does
            not match its checksum.
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
            f"{source} has {_CHECKSUM} {found}, expected {expected!r}; the file is corrupt, or a "
            f"person edited it and did not remove the key {_CHECKSUM}"
        )
    return document


def checksummed(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with its checksum, which `parse_document` verifies."""
    return {**document, _CHECKSUM: _crc32(document)}


def _crc32(document: Mapping[str, Any]) -> str:
    """Return the CRC-32 of a document's values, which does not depend on the layout of the text."""
    # JSON keys are texts. Before the keys are sorted, the values are converted to JSON and back, so
    # that numeric keys are texts as in the stored file.
    values = json.loads(json.dumps(document))
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def _from_fields(kind: type[_T], values: dict[str, Any], *, source: str) -> _T:
    """Create the dataclass `kind` from the values of its fields.

    Nested objects become dataclasses too.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {f.name for f in fields}
    required = {
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if wrong := (values.keys() - known) | (required - values.keys()):
        raise ContractError(f"{source} has unknown or missing fields {sorted(wrong)}")
    types = get_type_hints(kind)
    made = {
        name: _convert_nested(types[name], value, f"{source} {name}")
        for name, value in values.items()
    }
    try:
        return kind(**made)
    except ContractError as error:
        raise ContractError(f"{source}: {error}") from error


def _convert_nested(annotation: Any, value: Any, source: str) -> Any:
    """Convert `value` to the dataclass in `annotation`, or to a list or mapping of that dataclass.

    If `annotation` contains no dataclass, `value` is returned unchanged.
    """
    kinds = [
        k
        for k in (annotation, *get_args(annotation))
        if isinstance(k, type) and dataclasses.is_dataclass(k)
    ]
    if not kinds:
        return value
    if isinstance(value, list):
        return [_convert_nested(kinds[0], each, source) for each in value]
    if isinstance(value, dict) and get_origin(annotation) is Mapping:
        return {
            name: _convert_nested(kinds[0], each, f"{source} of {name}")
            for name, each in value.items()
        }
    if value is None and type(None) in get_args(annotation):
        return None
    if not isinstance(value, dict):
        raise ContractError(f"{source} is {value!r}, expected an object")
    return _from_fields(kinds[0], value, source=source)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Reference to the manifest of an earlier step (see `evergreen.storage.references`)."""

    uri: str
    """URI of a file in the shared folder or in the model registry."""
    sha256: str
    """SHA-256 of the file's bytes, 64 hex digits."""


@dataclass(frozen=True, kw_only=True)
class RawDataset(Manifest):
    """Rows of one window, split by time.

    Extraction writes this manifest, and validation and preprocessing get it as an input. Later
    steps find it through the references in other manifests.
    """

    source_uri: str
    window_start: str | None
    """Start of the window, inclusive, in ISO 8601 UTC. The run can set the start. If the run does
    not set a start, the window begins a number of days before its end, or directly after the
    parent's last training row. None = the window starts with the first row."""
    window_end: str | None
    """End of the window, exclusive. If the run sets an end, the window ends `attribution_hours`
    earlier, because the next run reads the rows of these hours. None means that the window ends
    with the last row."""
    first_event_time: str
    """Time of the oldest row of the window. Late rows (`num_late_rows`) can be older than the
    window."""
    last_event_time: str
    """Time of the newest row of the window."""
    watermark: str
    """Time of the newest training row, without late and replayed rows. The value is the time of the
    newest row of `train_uri`, or of the parent's newest training row if that is newer. Every
    held-out row is newer than the newest training row, and belongs to the next run's window."""
    train_uri: str
    """Folder of Parquet files in the raw schema (`contracts.raw_rows.raw_types`). The file names
    are in time order: first the late rows, then the rows of the window."""
    holdout_uri: str
    """Folder of the newest rows, which are held out from training. The schema is that of
    `train_uri`. The candidate, its parent and the champion were trained on older rows only. The
    rows of one request are never divided between this folder and the folders `train_uri` and
    `replay_uri`."""
    num_train_rows: int
    num_holdout_rows: int
    num_malformed: int
    """Number of malformed rows in the files that were read. `malformed_uri` lists the malformed
    rows with their reasons."""
    malformed_uri: str | None
    num_duplicates: int
    """Number of rows that were left out because another row has the same `request_id`, `row` and
    content."""
    digest: str
    """SHA-256 of the Parquet files, used as the version of the data."""
    parent_model_id: str | None = None
    """Model from whose weights the run starts. None = the run trains from scratch."""
    champion_model_id: str | None = None
    """Model with which the candidate is compared. None = no comparison."""
    num_updated: int = 0
    """Number of rows that were left out because another copy of the row is used. The copy has the
    same features, but a different label, time or score."""
    num_conflicting: int = 0
    """Number of rows that were left out because a copy with different features is used."""
    num_ahead: int = 0
    """Number of rows that were left out because their event times are in the future. A later run
    reads these rows. The file `ahead_uri` lists the files of these rows. For each file, it contains
    the number of rows that were left out, and the reason."""
    ahead_uri: str | None = None
    num_left_files: int = 0
    """Files that are new to the parent's lineage but too old for this run. The rows in these files
    are older than the limit of late rows, or older than the window that the run sets."""
    num_left_rows: int | None = 0
    """Number of rows in the files that the run left out (`num_left_files`). None if the rows of a
    file could not be counted."""
    num_straddling_rows: int = 0
    """Number of rows newer than `watermark` whose request also has training rows. These rows are
    neither used for training nor held out. They belong to the window of the next run."""
    replay_uri: str | None = None
    """Folder of training rows that were drawn from days before the window. The schema is that of
    `train_uri`. None = no replay."""
    num_replay_rows: int = 0
    replay_holdout_uri: str | None = None
    """Folder of rows from the replayed days that are held out from training. The gate uses these
    rows to measure how well the model performs on old data."""
    num_replay_holdout_rows: int = 0
    replay_share: float = 0.0
    """Requested share of replayed rows among the training rows, in [0, 1)."""
    replay_days: list[dict[str, Any]] = field(default_factory=list)
    """One entry per replayed day: day (YYYY-MM-DD), version, num_rows and num_holdout_rows.
    `num_rows` and `num_holdout_rows` count the rows that were drawn from the day."""
    num_late_clicks: int = 0
    """Number of rows whose label became 1 because of a click that arrived after the row was
    archived. The number covers the rows of the window and the late rows."""
    outcomes_digest: str | None = None
    """SHA-256 of the late-outcome files that were used, including those of replayed days. None if
    no late-outcome file was used."""
    excluded_columns: list[str] = field(default_factory=list)
    """Features that the run left out, in the order of files. Training, evaluation and serving
    ignore the excluded features. Excluded features are null in the rows, unless the champion needs
    them for scoring. Readers must therefore use this list of names, because nulls do not identify
    an excluded feature."""
    days: list[dict[str, Any]] = field(default_factory=list)
    """Number of rows that were read for each day of the window, and for each day with late rows.
    Each entry of the list has day (YYYY-MM-DD), version (int), digest (SHA-256) and num_rows. An
    entry also has num_late_rows if the day has late rows. An entry also has num_holdout_rows if the
    day has rows newer than `watermark`, which are not used for training."""
    num_late_rows: int = 0
    """Number of late rows. `num_train_rows` includes the late rows. Late rows are the first rows of
    `train_uri`. Late rows are older than the window. The files of late rows reached the lake after
    the parent's lineage was trained on newer rows. Late rows are never held out and never replayed.
    """
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Files of the lake that existed when a run of the lineage read it. Back-filled versions of
    files are not listed. Each day (YYYY-MM-DD) maps file names to sizes in bytes. The list covers
    the 366 days up to the last training row. If a file of these 366 days is not in the list, it is
    a late file. The first day always has an entry. If a day after the first day has no entry, the
    lake had no files of this day. Days before the first entry are not covered."""
    quarantined_files: list[dict[str, Any]] = field(default_factory=list)
    """Files of the lake that the run left out because their rows cannot be read. Each entry has
    four fields: file (relative to the lake), num_rows (of its footer, or None), reason, and known
    (whether an earlier run of the lineage also left the file out)."""
    unread_files: dict[str, dict[str, str]] = field(default_factory=dict)
    """Files that the lineage skipped and has not read since. Back-filled versions of files are not
    listed. The keys are day and file name. The value is a time (ISO 8601): the lineage was trained
    on the file's rows up to this time. The time is empty if the lineage was trained on no row of
    the file. When an unread file becomes readable, its rows are late rows."""
    schema_mismatches: list[dict[str, Any]] = field(default_factory=list)
    """Unexpected columns of the window's files. A column is unexpected if it is unknown, or if it
    contains no numbers although the recommender expects numbers. Each column has one entry with
    four keys: column, arrow_type, expected (None for a new column), and file (the first file with
    this type)."""
    num_quarantined: int = 0
    """Training rows that validation put into quarantine. `quarantine_uri` lists the quarantined
    rows with their reasons."""
    quarantine_uri: str | None = None
    validation_report: Reference | None = None
    """`ValidationReport` about these rows. None before validation."""
    texts_uri: str | None = None
    """File of the most frequent texts of string columns (`contracts.category_texts`), for display.
    None if no column has strings as categories. Texts of a column that identifies users are not
    stored."""
    recommender: Recommender
    """Recommender of the rows, including the settings that the run changed."""

    @property
    def num_quarantined_files(self) -> int:
        """Return the number of lake files that the run left out."""
        return len(self.quarantined_files)

    def seen_days(self) -> list[dict[str, Any]]:
        """Return `days`, followed by the days of replayed rows.

        The entry of a replayed day has `replay` set to true, and has no digest.
        """
        replayed = [
            {
                "day": each["day"],
                "version": each["version"],
                "num_rows": each["num_rows"],
                "replay": True,
            }
            for each in self.replay_days
            if each["num_rows"]
        ]
        return [*self.days, *replayed]


@dataclass(frozen=True, kw_only=True)
class ValidationReport(Manifest):
    """Result of the validation step: the checks of its rules, and what they measured.

    The report is written for people. The manifests of the later steps contain a reference to this
    report.
    """

    FORMAT_VERSION: ClassVar[int] = 2

    decision: str
    """`pass`, `warn` or `fail`: the worst result among the checks."""
    checks: list[RuleCheck]
    """Checks of all rules, the worst result first. A rule has no check if it is off, or if it had
    nothing to compare with."""
    drift: list[dict[str, Any]]
    """Drift of each checked feature, compared with the windows of the parent's lineage. Each entry
    has the form of `evergreen.statistics.comparison.ColumnDrift`. The list is empty if the model
    has no parent."""
    num_rows: int
    statistics_uri: str
    """DatasetFeatureStatisticsList of the training rows, binary protobuf."""
    schema_uri: str
    """TensorFlow Metadata schema, text protobuf."""
    report_uri: str
    """The report as self-contained HTML."""
    json_uri: str
    """The report as JSON, for programs."""
    parent_statistics_uri: str | None
    raw_digest: str
    reference_uri: str | None = None
    """Counts of the training rows, for the monitor (`evergreen.statistics.reference`)."""
    label: dict[str, Any] | None = None
    """Change of the click rate, as `components.validation.measure.LabelShift`. None if the model
    has no parent."""
    skew: list[dict[str, Any]] = field(default_factory=list)
    """Differences between training rows and served rows, one for each feature, in the form of
    `components.validation.skew.SkewEntry`. The list is empty if too few rows could be joined."""
    served: dict[str, Any] | None = None
    """Row counts of the skew check (`components.validation.skew.ServedRowFacts`). None if the run
    names no archive of served rows."""
    windows_uri: str | None = None
    """Column profiles of all training windows of the lineage, for the next run's drift check. None
    without rows."""

    @property
    def findings(self) -> list[RuleCheck]:
        """Return the checks with a finding, including findings with the action `info`."""
        return [check for check in self.checks if check.action]


@dataclass(frozen=True, kw_only=True)
class TrainingSet(Manifest):
    """Encoded rows in HugeCTR's Parquet format.

    Preprocessing writes this manifest, and training gets it as an input. Evaluation finds it
    through the reference in the model's manifest.
    """

    train_uri: str
    """Folder with Parquet files, `_metadata.json` and `_file_list.txt`. The label and the numeric
    columns (I1..I13 for Criteo) are float32, and the categorical columns (C1..C26) are int64."""
    holdout_uri: str
    """Folder of the held-out rows in the same format. The rows have the same order as in
    `RawDataset.holdout_uri`."""
    num_train_rows: int
    num_holdout_rows: int
    slot_sizes: list[int]
    """Number of ids for each categorical column, in column order. Ids are in [0, size)."""
    new_categories: list[int]
    """For each column, the number of categories that received an id in this run. The id is either
    new or reused from a tombstone."""
    workflow_uri: str
    """Folder of the fitted feature workflow (`contracts.workflow`)."""
    raw_digest: str
    last_event_time: str
    """See `RawDataset.last_event_time`."""
    watermark: str
    """See `RawDataset.watermark`. After the run, `watermark` is the model's
    watermark."""
    parent_model_uri: str | None
    window_start: str | None = None
    """See `RawDataset.window_start`."""
    replay_uri: str | None = None
    """Folder with the encoded form of the rows in `RawDataset.replay_uri`. None = no rows are
    replayed."""
    num_replay_rows: int = 0
    replay_holdout_uri: str | None = None
    num_replay_holdout_rows: int = 0
    replay_share: float = 0.0
    """Requested share of replayed rows among the training rows, in [0, 1)."""
    excluded_columns: list[str] = field(default_factory=list)
    """See `RawDataset.excluded_columns`."""
    negative_rate: float = 1.0
    """Share of rows that downsampling retained, in (0, 1], among the training and replayed rows
    without a click. The holdout is not downsampled. Training corrects the model's bias by the
    logarithm of `negative_rate` (`training.start`)."""
    num_sampled_out: int = 0
    """Number of training rows that were dropped because of `negative_rate`, not counting replayed
    rows."""
    days: list[dict[str, Any]] = field(default_factory=list)
    """See `RawDataset.seen_days`."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """See `RawDataset.files`."""
    unread_files: dict[str, dict[str, str]] = field(default_factory=dict)
    """See `RawDataset.unread_files`."""
    raw_dataset: Reference | None = None
    """Manifest of the dataset that was encoded. `raw_dataset` and `validation_report` are None only
    in a manifest that no step wrote."""
    validation_report: Reference | None = None
    """See `RawDataset.validation_report`."""
    tombstones: list[int] = field(default_factory=list)
    """Number of tombstones per categorical column. A tombstone is an id whose category was evicted
    and that was not reused. Empty if no column has tombstones."""
    recommender: Recommender
    """See `RawDataset.recommender`."""


@dataclass(frozen=True, kw_only=True)
class Model(Manifest):
    """One trained model: a self-contained folder of the model registry.

    Training writes this manifest. Evaluation reads it, and so does a run that continues the
    training of the model. The folder has `model.json` (this manifest) and the parts listed in
    `PARTS`.
    """

    FORMAT_VERSION: ClassVar[int] = 3
    MANIFEST: ClassVar[str] = "model.json"
    WEIGHTS: ClassVar[str] = "weights"
    """Weights, optimizer state and the network's own graph (`evergreen.networks.files`)."""
    WORKFLOW: ClassVar[str] = "workflow"
    """Name of the folder with the feature workflow (`contracts.workflow`)."""
    STATISTICS: ClassVar[str] = "statistics/statistics.pb"
    """TFDV statistics of the training rows."""
    SCHEMA: ClassVar[str] = "statistics/schema.pbtxt"
    REFERENCE: ClassVar[str] = "statistics/reference.npz"
    """Counts of the training rows for the monitor (`evergreen.statistics.reference`)."""
    WINDOWS: ClassVar[str] = "statistics/windows.npz"
    """Summaries of all training windows of the model's lineage
    (`components.validation.measure.LineageWindows`)."""
    PARTS: ClassVar[tuple[str, ...]] = (WEIGHTS, WORKFLOW, "statistics")
    """Names of the model's folders next to the manifest."""

    model_id: str
    uri: str
    """Folder of the model."""
    backend: str
    """`pytorch` or `hugectr`."""
    config: dict[str, Any]
    """Name and settings of the network (see `config.model`)."""
    slot_sizes: list[int]
    parent_model_id: str | None
    seed: int
    num_train_rows: int
    optimizer_step: int
    """Optimizer steps taken so far, over all runs of the lineage."""
    progressive: dict[str, float | None]
    """AUC and log loss on a tenth of the training rows, measured just before the model was trained
    on that tenth. An incremental run uses the newest tenth of its rows, and a first model uses a
    random tenth. If `negative_rate` is below 1, the rows are downsampled, and the log loss is not
    comparable with that of the holdout."""
    last_event_time: str
    """Time of the newest row read for this model. The rows after `watermark` are the
    model's holdout."""
    watermark: str
    """Time of the newest training row of the model or its parent. The next run continues at this
    time. Downsampled and quarantined rows count as training rows, but late and replayed rows do
    not."""
    raw_digest: str
    sha256: dict[str, str]
    """SHA-256 of the files of each part: `weights`, `workflow` and `statistics`."""
    created_at: str
    window_start: str | None = None
    """See `RawDataset.window_start`. Late and replayed rows are ignored."""
    negative_rate: float = 1.0
    """See `TrainingSet.negative_rate`. The stored weights are already corrected for downsampling,
    so that scores refer to all rows."""
    served_shift: float = 0.0
    """Amount that was added to the stored bias because a feature is served with a fixed value
    (`CategoricalOptions.served_as`). With the correction, the mean score equals the click rate of
    the log. Before an incremental run continues the training of the model, it removes this
    correction."""
    excluded_columns: list[str] = field(default_factory=list)
    """See `RawDataset.excluded_columns`. Serving ignores this list and uses the list in the feature
    workflow."""
    training_set: Reference | None = None
    """`TrainingSet` of the model. None in the model registry, because the encoded rows are deleted
    earlier than the models."""
    days: list[dict[str, Any]] = field(default_factory=list)
    """Days of the training rows of the model's own run. Each day has its version (see
    `RawDataset.seen_days`)."""
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Files that were in the lake at the time of the model's run (see `RawDataset.files`). If a
    file is not in this list, it is a late file."""
    unread_files: dict[str, dict[str, str]] = field(default_factory=dict)
    """See `RawDataset.unread_files`."""
    recommender: Recommender
    """See `RawDataset.recommender`."""


@dataclass(frozen=True, kw_only=True)
class ModelQuality:
    """Metrics of a model on one set of rows. An undefined number is None."""

    auc: float | None = None
    auc_low: float | None = None
    """Lower end of the 95 % interval."""
    auc_high: float | None = None
    log_loss: float | None = None
    normalized_entropy: float | None = None
    calibration: float | None = None
    """Predicted clicks divided by observed clicks."""
    gauc: float | None = None
    """See `metrics.UserQuality`. `gauc` and `user_ndcg` are also None if the recommender names no
    user."""
    user_ndcg: float | None = None


@dataclass(frozen=True, kw_only=True)
class AucLead:
    """The candidate's AUC minus the champion's AUC on the same rows (paired DeLong).

    Undefined values are None.
    """

    auc: float | None = None
    low: float | None = None
    """Lower end of the 95 % interval."""
    high: float | None = None
    p_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class RowsQuality:
    """Metrics of the candidate and the champion on the same held-out rows."""

    candidate: ModelQuality
    champion: ModelQuality | None
    difference: AucLead | None
    num_rows: int
    num_clicks: int


@dataclass(frozen=True, kw_only=True)
class ReorderingGain:
    """Estimated gain in clicks if lists were shown in the candidate's order.

    The gain is estimated from explored lists (`components.evaluation.exploration`). The estimate is
    None if exploration swapped too few pairs of neighbours. Only pairs that the candidate would
    swap count.
    """

    gain: float | None = None
    """Estimated gain in clicks from swapping neighbours that the candidate orders differently:
    clicks on swapped pairs minus clicks on unswapped pairs."""
    low: float | None = None
    """Lower end of the 95 % interval. The interval remains valid if it is computed repeatedly while
    lists accumulate."""
    high: float | None = None
    num_lists: int
    """Number of explored lists in the holdout."""
    num_swaps: int
    """Number of swaps that were shown to users and agree with the candidate's order. The gain is
    estimated from the clicks on the swapped pairs."""
    disputed_share: float
    """Share of all pairs of neighbours that the candidate would swap."""


@dataclass(frozen=True, kw_only=True)
class Verdict(Manifest):
    """The gate's decision on a candidate.

    Evaluation writes this manifest. The pipeline deploys the candidate only if the verdict accepts
    it.
    """

    candidate_model_id: str
    champion_model_id: str | None
    decision: str
    """`pass`, `fail` or `inconclusive`."""
    accepted: bool
    """Whether the run continues with deployment. The run continues after `pass`. After
    `inconclusive`, the run continues only if its rollout mode allows this."""
    reason: str
    """Headline of the decision (see `contracts.checks.headline`)."""
    num_rows: int
    num_clicks: int
    candidate: ModelQuality
    champion: ModelQuality | None
    difference: AucLead | None
    scores_uri: str
    """NumPy .npz file with the scores of the held-out rows in their order: float32 `candidate`, and
    `champion` if there is a champion."""
    model: Reference | None = None
    """`Model` of the candidate in the model registry. Verdicts of older revisions have neither
    `model` nor `raw_dataset`."""
    raw_dataset: Reference | None = None
    """`RawDataset` with the held-out rows on which the candidate was evaluated."""
    old_distribution: RowsQuality | None = None
    """Quality on rows of days before the window, which shows whether the models forget. None if no
    rows of earlier days were held out. The gate uses the quality on old rows only if the settings
    require it."""
    reordering_gain: ReorderingGain | None = None
    """Estimated gain in clicks from showing lists in the candidate's order. The estimate uses the
    randomized rankings of the holdout. None if there are no randomized rankings. The gate does not
    use this estimate."""
    champion_reference: str = "current"
    """Champion as it was specified for the run: `current`, `none` or a model id. Only a comparison
    with the reference `current` becomes outdated when another model goes live."""
    column_aucs: dict[str, float] = field(default_factory=dict)
    """AUC of each column alone on the held-out rows, highest first. The AUCs are measured only if
    the candidate's AUC is implausibly high (`components.evaluation.leaks`). If the AUCs are not
    measured, the mapping is empty."""
    warnings: list[str] = field(default_factory=list)
    """Warnings for people, one sentence each. Warnings do not change the decision."""
    advice: list[str] = field(default_factory=list)
    """Advice for each check that did not pass: one sentence on how it could pass."""
    checks: list[Check] = field(default_factory=list)
    """Checks of the gate, with values and limits. `decision` is the worst result of these
    checks."""

    @property
    def sentence(self) -> str:
        """Return the headline and the warnings."""
        return "; ".join([self.reason, *(f"WARNING: {each}" for each in self.warnings)])


@dataclass(frozen=True, kw_only=True)
class Release(Manifest):
    """Version of a model that Triton serves.

    Deployment writes this manifest, and the promotion journal refers to it. The next run finds its
    champion through this manifest.
    """

    model_name: str
    version: int
    previous_version: int | None
    model_id: str
    model_uri: str
    graph_uri: str
    """ONNX graph, stored in the model registry beside its golden rows."""
    sha256: dict[str, str]
    """SHA-256 of `graph`, `golden` (the golden rows), `weights` and `workflow`, and the raw
    dataset's digest as `data`."""
    raw_digest: str
    parity_max_abs_diff: float
    """Maximum absolute difference between the scores of the served graph and those of training, on
    the same raw rows."""
    parity_rows: int
    repository_uri: str
    trigger_id: str | None
    reason: str
    """Reason why the model was accepted, which is the headline of the verdict."""
    published_at: str
    """Time when the version's files were complete. The promotion journal has the time when the
    version went live."""
    parent_model_id: str | None = None
    """Parent of the model. None = trained from scratch."""


@dataclass(frozen=True, kw_only=True)
class ServingTarget(Manifest):
    """Deployment target of the last release.

    Deployment writes it. The next deployment uses this target by default.
    """

    repository_uri: str
    triton_urls: list[str]
    """Addresses of Triton, as the deployment received them: host:port, or dns:///name:port."""
    server: str
    """`python` or `onnxruntime`."""


CURRENT = "current"
"""Value of the parameters `parent` and `champion`: the model that is live according to the
promotion journal. If no model is live, the value has the same meaning as `NONE`."""
NONE = "none"
"""Value of the parameters `parent` and `champion` if there is no model. A run without a parent
trains from scratch. Without a champion, the gate only checks the minimum AUC and the calibration.
"""
RUN_PARAMETERS = (
    *("window_start", "window_end", "parent", "champion", "recommender", "settings"),
    *("trigger_id", "trigger_reason"),
)
"""Parameters of the pipeline. A person may set six of the parameters, and the monitor sets the
other two."""
SCRATCH = ("parent", "champion")
"""Parameters that `evergreen run --from-scratch` sets to `NONE`."""


@dataclass(frozen=True, kw_only=True)
class RetrainRequest(Manifest):
    """Request for one run: its reason and its window.

    The monitor writes a request when it starts a run. A person writes a request with a command. A
    retrain request sets parameters of the pipeline.
    """

    request_id: str
    """Name of the run. Two runs with the same id never run at the same time."""
    reason: str
    requested_at: str
    window_start: str
    """ISO 8601 UTC, inclusive. Empty = the window starts after the parent's last training row, or
    with the first row if there is no parent."""
    window_end: str
    """Exclusive end of the window. Empty = the window ends with the last row."""
    parent: str = CURRENT
    champion: str = CURRENT
    observed: dict[str, float | None]
    """Measured numbers that led to the request, such as auc, threshold, rows and clicks."""

    def __post_init__(self) -> None:
        if not self.request_id or not self.reason:
            raise ContractError(
                f"retrain request {self.request_id!r} has reason {self.reason!r}, expected an id "
                "and a reason"
            )

    def pipeline_arguments(self) -> dict[str, Any]:
        """Return the pipeline parameters that this request sets, by name."""
        return {
            "trigger_id": self.request_id,
            "trigger_reason": self.reason,
            "window_start": self.window_start,
            "window_end": self.window_end,
            "parent": self.parent,
            "champion": self.champion,
        }
