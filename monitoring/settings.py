"""Settings of the monitor.

Settings of the installation come from flags and `EVERGREEN_MONITOR_*` variables, which
`evergreen.config.reader` derives from the fields. The rules for decisions are settings of the
recommender (`evergreen.config.monitor`).
"""

from dataclasses import dataclass, fields
from pathlib import Path

from evergreen.config.monitor import DecisionSettings, decision_settings
from evergreen.contracts.manifests import CURRENT
from evergreen.events.locations import partition_urls
from evergreen.events.urls import redacted
from evergreen.registry.recommenders import accepted, read_accepted
from evergreen.runtime.errors import TemporaryError, expect
from evergreen.runtime.plain_text import FORMATS, TEXT
from monitoring.retraining.actions import ActionSettings
from monitoring.web.server import HttpSettings

ENVIRONMENT_PREFIX = "EVERGREEN_MONITOR_"


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """How records are accepted, joined and archived."""

    conversion_window_seconds: float = 0.0
    """Maximum seconds from a prediction to a conversion that is included in the conversion rate. 0
    = conversions are archived, but no rate is computed."""
    archive_roll_rows: int = 50_000
    """Number of matured rows in a full archive file."""
    archive_roll_seconds: float = 300.0
    """Maximum wait of a matured row for its archive file, in seconds."""
    tick_seconds: float = 1.0
    """Pause between two iterations of the loop, in seconds."""
    pull_messages: int = 1000
    """Maximum number of messages stored in one transaction."""
    max_age_seconds: float = 40 * 86_400.0
    """Maximum age of a record, in seconds. An older record becomes a dead letter. The limit bounds
    the number of days with open archive files."""
    keep_ids_seconds: float = 7 * 86_400.0
    """Seconds for which ids of archived requests are stored, so that redeliveries are
    recognized."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "archive_roll_rows", "pull_messages")
        seconds = ("conversion_window_seconds", "archive_roll_seconds", "keep_ids_seconds")
        expect(self, "at least 0", lambda value: value >= 0, *seconds)
        expect(self, "above 0", lambda value: value > 0, "tick_seconds", "max_age_seconds")


@dataclass(frozen=True, kw_only=True)
class InstallationSettings:
    """Locations and intervals of one monitor process."""

    log: str
    """URL of the event log: `sqlite:///<path>`, `pubsub://<project>/<topic>` or
    `kafka://<host>:<port>/<topic>`. `{0-3}` in the URL means four partitions."""
    partition: int = 0
    """Partition of the log that is read. Only the monitor of partition 0 decides and triggers runs,
    from its own partition. Monitors of other partitions only join records, archive rows and export
    metrics."""
    state: Path
    """Folder of the monitor's state, timeline and events. The folder must survive restarts. Only
    one monitor at a time uses the folder."""
    archive: Path
    """Folder where matured rows wait for the uploader, as Parquet files."""
    store: Path
    """Model registry, which contains the outcomes of runs and the accepted recommender."""
    log_format: str = TEXT
    """Format of log lines on standard error: `text` for people, `json` for a log collector."""
    records: RecordSettings = RecordSettings()
    actions: ActionSettings = ActionSettings()
    http: HttpSettings = HttpSettings()

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS, "log_format")
        count = len(partition_urls(self.log))
        rule = f"0 to {count - 1}, the last partition of {redacted(self.log)!r}"
        expect(self, rule, lambda value: 0 <= value < count, "partition")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(InstallationSettings):
    """Settings of one monitor process."""

    decisions: DecisionSettings = DecisionSettings()


def with_rules(installation: InstallationSettings) -> MonitorSettings:
    """Add the rules of the newest accepted recommender in the registry.

    Raises:
        TemporaryError: No recommender was accepted yet.
        ContractError: a setting in the recommender's section `monitor` is invalid.
    """
    if not read_accepted(installation.store):
        raise TemporaryError(
            f"model registry {installation.store} has no accepted recommender yet, expected a "
            "recommender with the monitor's rules"
        )
    parts = {each.name: getattr(installation, each.name) for each in fields(installation)}
    decisions = decision_settings(accepted(installation.store, CURRENT))
    return MonitorSettings(**parts, decisions=decisions)
