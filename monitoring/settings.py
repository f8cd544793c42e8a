"""Every setting of the monitor, and their way in: flags, else `EVERGREEN_MONITOR_*` variables, else defaults.

Read once, in `__main__`; nothing below it looks at the environment. The policy's thresholds are described where they
are used, in `monitoring.deciding.threshold`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from components.runtime.errors import ContractError
from components.runtime.kubeflow import EXPERIMENT
from components.storage.uris import is_bucket_uri, local_path, typed_uri
from monitoring.acting.settings import ActingSettings
from monitoring.deciding.judge import JudgeSettings
from monitoring.deciding.policies import PolicySettings
from monitoring.drift.settings import DriftSettings
from monitoring.json_logs import FORMATS, TEXT
from monitoring.measures.window import WindowSettings

ENVIRONMENT_PREFIX = "EVERGREEN_MONITOR_"
TRIGGERS = ("none", "local", "kubeflow")
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class MonitorSettings(JudgeSettings, PolicySettings, ActingSettings, WindowSettings, DriftSettings):
    """Settings of one monitor process."""

    log: str
    """URL of the record log: `sqlite:///<path>`, `pubsub://<project>/<topic>` or `kafka://<host>:<port>/<topic>`."""
    state: Path
    """Folder of the monitor's memory, timeline and events; survives restarts, one monitor at a time."""
    archive: Path
    """Folder where matured rows wait for the uploader, as Parquet."""
    store: Path
    """The model store, where runs leave their outcome."""
    http_host: str = "127.0.0.1"
    """Address of /metrics, /healthz and /status."""
    http_port: int = 9464
    """Port of the same; 0 = a free one, written to `<state>/http.json`."""
    log_format: str = TEXT
    """Lines on standard error: `text` for people, `json` for a cluster's log collector."""
    conversion_window_seconds: float = 0.0
    """How long after its prediction a conversion counts; 0 = not awaited: archived for the lake, and in no number."""
    archive_roll_rows: int = 50_000
    """Matured rows that fill an archive file."""
    archive_roll_seconds: float = 300.0
    """Longest wait of a matured row for its archive file."""
    tick_seconds: float = 1.0
    """Pause between two turns of the loop."""
    pull_messages: int = 500
    """Most messages stored in one transaction."""
    keep_ids_seconds: float = 7 * 86_400.0
    """How long ids of archived requests are remembered, to recognise redeliveries."""
    trigger: str = "none"
    """Who runs the pipeline: `local` (a process), `kubeflow`, or `none` (only notify)."""
    run_command: str = ""
    """Local trigger: command line that runs the pipeline; `--request <file>` is appended."""
    upload_wait_seconds: float = 600.0
    """Longest wait for the uploader before a run is asked for; 0 = the archive is the lake, do not wait."""
    kubeflow_host: str = ""
    """Kubeflow trigger: URL of the KFP API."""
    kubeflow_namespace: str = ""
    """Namespace of a multi-user installation; empty on a single-user one."""
    kubeflow_experiment: str = EXPERIMENT
    """Experiment that the runs belong to; runs in it are the ones that make the trigger busy."""
    kubeflow_service_account: str = ""
    """Kubernetes service account of the runs' pods; empty = the server's default. A server that checks these names
    must allow it (ALLOWEDSERVICEACCOUNTS)."""
    pipeline_package: str = ""
    """Compiled pipeline (IR YAML) to run; or name an uploaded one by its name or id."""
    pipeline_name: str = ""
    """Uploaded pipeline to run, by its name; its newest version unless `pipeline_version_id` names one."""
    pipeline_id: str = ""
    """Uploaded pipeline to run; its newest version unless `pipeline_version_id` names one."""
    pipeline_version_id: str = ""
    """Version of the uploaded pipeline."""
    pipeline_arguments: str = "{}"
    """Kubeflow trigger: JSON object of further pipeline parameters, such as the store and the lake."""

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        JudgeSettings.__post_init__(self)
        PolicySettings.__post_init__(self)
        ActingSettings.__post_init__(self)
        WindowSettings.__post_init__(self)
        DriftSettings.__post_init__(self)
        at_least_one = ("archive_roll_rows", "pull_messages")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.window_rows < 2 * self.min_clicks:
            needed = f"{2 * self.min_clicks}: min_clicks clicks and as many rows without one, or no window is judged"
            raise ContractError(f"window_rows is {self.window_rows}, expected at least {needed}")
        for name in (
            "attribution_window_seconds",
            "conversion_window_seconds",
            "archive_roll_seconds",
            "upload_wait_seconds",
            "keep_ids_seconds",
        ):
            if not getattr(self, name) >= 0:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least 0")
        if not self.tick_seconds > 0:
            raise ContractError(f"tick_seconds is {self.tick_seconds}, expected above 0")
        if not 0 <= self.http_port < 65536:
            raise ContractError(f"http_port is {self.http_port}, expected 0 to 65535")
        if self.log_format not in FORMATS:
            raise ContractError(f"log_format is {self.log_format!r}, expected one of {', '.join(FORMATS)}")
        self._check_trigger()

    def _check_trigger(self) -> None:
        if self.trigger not in TRIGGERS:
            raise ContractError(f"trigger is {self.trigger!r}, expected one of {', '.join(TRIGGERS)}")
        if self.trigger == "local" and not self.run_command.strip():
            raise ContractError("run_command is empty, expected a command line for the local trigger")
        if self.trigger == "kubeflow" and not self.kubeflow_host:
            raise ContractError("kubeflow_host is empty, expected the URL of the KFP API for the kubeflow trigger")
        ways = (self.pipeline_package, self.pipeline_name, self.pipeline_id)
        if self.trigger == "kubeflow" and sum(map(bool, ways)) != 1:
            raise ContractError(
                "pipeline_package, pipeline_name or pipeline_id is expected, exactly one, for the kubeflow trigger"
            )
        if self.pipeline_package and self.pipeline_version_id:
            raise ContractError("pipeline_version_id is given with pipeline_package, expected it with an uploaded one")


@dataclass(frozen=True, kw_only=True)
class UploaderSettings:
    """Settings of one uploader process."""

    archive: Path
    """The monitor's archive."""
    lake: str
    """Where sealed files go, under `day=YYYY-MM-DD/`: a folder, or gs://bucket/prefix."""
    interval_seconds: float = 5.0
    """Pause between two looks at the archive; longer and longer, up to 5 minutes, while the lake cannot be reached."""
    once: bool = False
    """Move what is sealed now and end, as a CronJob does; else until SIGTERM."""
    log_format: str = TEXT
    """Lines on standard error: `text` for people, `json` for a cluster's log collector."""

    def __post_init__(self) -> None:
        """Refuses settings that cannot work."""
        if not self.interval_seconds > 0:
            raise ContractError(f"interval_seconds is {self.interval_seconds}, expected above 0")
        if self.log_format not in FORMATS:
            raise ContractError(f"log_format is {self.log_format!r}, expected one of {', '.join(FORMATS)}")
        if is_bucket_uri(self.lake_uri):
            return
        try:
            folder = local_path(self.lake_uri)
        except ContractError as error:
            raise ContractError(f"lake is {self.lake!r}, expected a folder or gs://bucket/prefix") from error
        if self.archive.resolve() == folder.resolve():
            raise ContractError(f"lake is {self.lake}, expected another folder than the archive")

    @property
    def lake_uri(self) -> str:
        """The lake as `storage.locations.open_objects` takes it; a relative path counts from the working folder."""
        return typed_uri(str(self.lake))


def build_parser(settings: type[Any], *, prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with one flag per field of the dataclass `settings`; flags not given are absent from its answer."""
    parser = argparse.ArgumentParser(prog=prog, description=description, argument_default=argparse.SUPPRESS)
    hints, texts = typing.get_type_hints(settings), _field_texts(settings)
    for field in dataclasses.fields(settings):
        default = "required" if field.default is dataclasses.MISSING else f"default: {field.default!r}"
        text = f"{texts[field.name]} ({default})".replace("%", "%%")
        flag = "--" + field.name.replace("_", "-")
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(flag, type=hints[field.name], metavar=hints[field.name].__name__.upper(), help=text)
    return parser


def read_settings(
    settings: type[S],
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    environment: Mapping[str, str],
    prefix: str = ENVIRONMENT_PREFIX,
) -> S:
    """The settings in `argv`, then in `environment` under `prefix`.

    Raises:
        ContractError: a value is missing, unreadable or out of range.
    """
    values = {**_from_environment(settings, environment, prefix), **vars(parser.parse_args(argv))}
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(settings)  # type: ignore[arg-type]
    if missing := [f.name for f in fields if f.default is dataclasses.MISSING and f.name not in values]:
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ContractError(f"settings are missing: expected {names} (or {prefix}{missing[0].upper()} and so on)")
    return settings(**values)


def _from_environment(settings: type[Any], environment: Mapping[str, str], prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(settings)
    known = {prefix + f.name.upper(): f.name for f in dataclasses.fields(settings)}
    if unknown := sorted(k for k in environment if k.startswith(prefix) and k not in known):
        raise ContractError(f"environment variable {unknown[0]} names no setting")
    return {
        name: _parse(variable, environment[variable], hints[name])
        for variable, name in known.items()
        if variable in environment
    }


def _parse(name: str, text: str, kind: type[Any]) -> Any:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ContractError(f"{name} is {text!r}, expected true or false")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError as error:
        raise ContractError(f"{name} is {text!r}, expected {kind.__name__}") from error


def _field_texts(settings: type[Any]) -> dict[str, str]:
    """The docstring under each field, which is the flag's help."""
    texts: dict[str, str] = {}
    for owner in reversed(settings.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in zip(definition.body, definition.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = str(text.value.value)
    return texts
