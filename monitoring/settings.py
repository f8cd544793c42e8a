"""Every setting of the monitor: one part for each concern, defined beside what it configures.

What belongs to the installation is read from flags and `EVERGREEN_MONITOR_*` variables, which follow from the fields
(`monitoring.flags`); the rules by which the monitor decides are the recommender's (`monitoring.judging_settings`).
"""

from dataclasses import dataclass, fields
from pathlib import Path

from evergreen.config.monitor import JudgingSettings, judging_settings
from evergreen.contracts.manifests import CURRENT
from evergreen.events.locations import partition_urls
from evergreen.events.urls import redacted
from evergreen.registry.recommenders import accepted, read_accepted
from evergreen.runtime.errors import TemporaryError, expect
from evergreen.runtime.plain_text import FORMATS, TEXT
from monitoring.retraining.acting import ActingSettings
from monitoring.web.server import HttpSettings

ENVIRONMENT_PREFIX = "EVERGREEN_MONITOR_"


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """How records are taken in, joined and archived."""

    conversion_window_seconds: float = 0.0
    """How long after its prediction a conversion counts in the conversion rate; 0 = conversions are archived only."""
    archive_roll_rows: int = 50_000
    """Matured rows that fill an archive file."""
    archive_roll_seconds: float = 300.0
    """Longest wait of a matured row for its archive file."""
    tick_seconds: float = 1.0
    """Pause between two turns of the loop."""
    pull_messages: int = 1000
    """Most messages stored in one transaction."""
    max_age_seconds: float = 40 * 86_400.0
    """Oldest record that is taken in; an older one is a dead letter. So an archive file is begun for at most so many
    days at a time, whatever the records say."""
    keep_ids_seconds: float = 7 * 86_400.0
    """How long ids of archived requests are remembered, to recognise redeliveries."""

    def __post_init__(self) -> None:
        expect(self, "at least 1", lambda value: value >= 1, "archive_roll_rows", "pull_messages")
        seconds = ("conversion_window_seconds", "archive_roll_seconds", "keep_ids_seconds")
        expect(self, "at least 0", lambda value: value >= 0, *seconds)
        expect(self, "above 0", lambda value: value > 0, "tick_seconds", "max_age_seconds")


@dataclass(frozen=True, kw_only=True)
class InstallationSettings:
    """Where one monitor process reads, keeps and asks, and at which intervals."""

    log: str
    """URL of the record log: `sqlite:///<path>`, `pubsub://<project>/<topic>` or `kafka://<host>:<port>/<topic>`; with
    `{0-3}` in it, of four partitions."""
    partition: int = 0
    """Which partition of the log is read. The monitor of the first judges by its own requests and acts for all; the
    others join, archive and show their numbers."""
    state: Path
    """Folder of the monitor's memory, timeline and events; survives restarts, one monitor at a time."""
    archive: Path
    """Folder where matured rows wait for the uploader, as Parquet."""
    store: Path
    """The model store, where runs leave their outcome, and whose accepted recommender decides."""
    log_format: str = TEXT
    """Lines on standard error: `text` for people, `json` for a cluster's log collector."""
    records: RecordSettings = RecordSettings()
    acting: ActingSettings = ActingSettings()
    http: HttpSettings = HttpSettings()

    def __post_init__(self) -> None:
        expect(self, f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS, "log_format")
        count = len(partition_urls(self.log))
        rule = f"0 to {count - 1}, the last partition of {redacted(self.log)!r}"
        expect(self, rule, lambda value: 0 <= value < count, "partition")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(InstallationSettings):
    """Settings of one monitor process."""

    judging: JudgingSettings = JudgingSettings()


def with_rules(installation: InstallationSettings) -> MonitorSettings:
    """The settings of a monitor that decides by the newest accepted recommender of its store.

    Raises:
        TemporaryError: nobody accepted one yet.
        ContractError: a setting of its section `monitor` is wrong.
    """
    if not read_accepted(installation.store):
        raise TemporaryError(f"store {installation.store} holds no recommender yet, by which the monitor decides")
    parts = {each.name: getattr(installation, each.name) for each in fields(installation)}
    return MonitorSettings(**parts, judging=judging_settings(accepted(installation.store, CURRENT)))
