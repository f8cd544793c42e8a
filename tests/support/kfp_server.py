"""A KFP API server for tests over real HTTP.

The test double's state is in memory. The test double has experiments, runs, pipelines, versions and
schedules, and follows the real server's rules. The test double applies the filters of list
requests. Names of pipelines and of a pipeline's versions are unique. A schedule needs exactly one
source, a valid cron expression, and 1 to 10 concurrent runs. An expression is valid if robfig/cron
accepts it. If an expression has five fields, the first field is the second and the last field is
the month. Several schedules may have the same name. `fire` starts a run of a schedule, `constants`
are the values for placeholders in the tasks of a pipeline, and `end` ends a run.

Tests can inject answers of any status, hanging requests, and answers that are lost after the server
has acted. Tests can also require a token, create a run after its client has given up, and call a
function between lookup and creation. The test double lacks access control, validation of the
pipeline and MySQL's collation. tests/pipelines/test_kfp_double.py compares its answers with those
of a real server.
"""

import json
import re
import threading
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.support.http_double import HttpDouble, Reply
from tests.support.yaml_texts import documents

FILTER_KEYS = {
    "run_id",
    "display_name",
    "name",
    "created_at",
    "state",
    "experiment_id",
    "namespace",
    "storage_state",
}
STATES = {"PENDING", "RUNNING", "SUCCEEDED", "SKIPPED", "FAILED", "CANCELING", "CANCELED", "PAUSED"}

INNER = ("body", "resource_name")
"""Fields of a run that the API does not return."""


CODES = {400: 3, 404: 5, 409: 6, 403: 7, 500: 13, 503: 14, 401: 16}
"""Maps an answer's status to gRPC's code."""
DEFAULT_EXPERIMENT = {"experiment_id": "default", "display_name": "Default"}


class ErrorAnswer(Exception):
    """Response with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status

    def document(self, path: str) -> dict:
        """Return the answer's body.

        Uploads do not pass through the gRPC gateway, so the errors of uploads have another form.
        """
        if "/pipelines/upload" in path:
            return {"error_message": str(self), "error_details": str(self)}
        return {"code": CODES.get(self.status, 2), "message": str(self)}


class Late(Exception):
    """Sends no answer. The server acts after its client has given up."""


CRON_FIELD = re.compile(r"(\*|\?|[0-9A-Za-z]+)([-/,][0-9A-Za-z*]+)*")


class KfpServer(HttpDouble):
    def __init__(self) -> None:
        self.experiments: list[dict] = []
        self.runs: list[dict] = []
        self.pipelines: list[dict] = []
        self.versions: list[dict] = []
        self.requests: list[tuple[str, str]] = []
        self.failure: int | None = None
        self.failure_text = "as the test says"
        self.failures: list[
            int
        ] = []  # HTTP statuses of the next responses. Later responses have status 200.
        self.lost: list[
            tuple[str, str]
        ] = []  # (method, end of path) of requests that are carried out but get no response
        self.num_late = 0  # number of requests for a run that get no answer, see `commit_late`
        self.late: list[dict] = []  # bodies of run requests that got no response
        self.token: str | None = None  # token that requests must send in `Authorization: Bearer`
        # Called outside the lock, so that a test can create another run.
        self.before_create = lambda body: None
        self.advance: dict[str, str] = {}  # maps a run's state to its state after the next read
        self.uploads: list[bytes] = []
        self.files: dict[str, bytes] = {}  # uploaded file by the id of its version
        self.schedules: list[dict] = []
        self.made_schedules = 0
        self.errors: dict[str, str] = {}  # error message by run id
        self.lock = threading.Lock()
        self.silence = threading.Event()  # if set, requests are accepted but get no response
        self.release = threading.Event()
        super().__init__()

    def answer(self, method, path, body, headers) -> Reply | None:
        if self.silence.is_set():
            self.release.wait(30)
            return None
        try:
            self.check_token(headers.get("Authorization"))
            status, document = 200, self.reply(method, path, body)
        except ErrorAnswer as refused:
            status, document = refused.status, refused.document(urlsplit(path).path)
        except Late:
            return None
        if self.loses(method, urlsplit(path).path):
            return None
        return Reply(json.dumps(document).encode(), status, {"Content-Type": "application/json"})

    def close(self) -> None:
        self.release.set()
        super().close()

    def add_run(self, name: str, state: str, experiment_id: str = "e1") -> dict:
        assert state in STATES
        run = {
            "run_id": f"{len(self.runs) + 0x3011424B:08x}-cce0-40c0-bea8-f11f49badc9c",
            "display_name": name,
            "state": state,
            "experiment_id": experiment_id,
            "created_at": f"2026-01-01T{len(self.runs) // 60:02d}:{len(self.runs) % 60:02d}:00Z",
            "storage_state": "AVAILABLE",
        }
        self.runs.append(run)
        return run

    def commit_late(self, created_at: str = "") -> list[dict]:
        """Create the runs whose clients have given up, and return these runs.

        By default, the new runs are the latest runs.
        """
        for body in self.late:
            self.create_run(body)
            self.runs[-1]["created_at"] = created_at or self.runs[-1]["created_at"]
        made = self.runs[len(self.runs) - len(self.late) :]
        self.late = []
        return made

    def named(self, name: str) -> list[dict]:
        return [run for run in self.runs if run["display_name"] == name]

    @property
    def active(self) -> list[dict]:
        return [
            run
            for run in self.runs
            if run["state"] not in ("SUCCEEDED", "SKIPPED", "FAILED", "CANCELED")
        ]

    def fire(self, schedule_id: str) -> dict:
        """Start a run of the schedule as its controller does.

        The run uses the pipeline template that was current when the schedule was created.
        """
        (schedule,) = (each for each in self.schedules if each["recurring_run_id"] == schedule_id)
        name = f"evergreen-retrainingb9625-1-{1829784550 + len(self.runs)}"
        run = self.add_run(name, "PENDING", schedule["experiment_id"])
        run |= {"recurring_run_id": schedule_id, "resource_name": name, "body": schedule}
        copied_fields = ("runtime_config", "pipeline_version_reference")
        run |= not_ended(run) | {key: schedule[key] for key in copied_fields if key in schedule}
        return run

    def constants(self, run: dict) -> dict[str, dict[str, object]]:
        """Map the name of each task of the run to the constants that the task receives.

        The server (2.17, driver/resolve.go) replaces a constant that consists of one placeholder.
        The placeholder of a run's display name becomes empty in a schedule, whose template has no
        display name.
        """
        reference = run["body"].get("pipeline_version_reference")
        if reference:
            spec = documents(self.files[reference["pipeline_version_id"]].decode())[0]
        else:
            spec = run["body"]["pipeline_spec"]["pipeline_spec"]
        known = {
            "{{$.pipeline_job_name}}": "" if "recurring_run_id" in run else run["display_name"],
            "{{$.pipeline_job_resource_name}}": run["resource_name"],
            "{{$.pipeline_job_uuid}}": run["run_id"],
        }
        found = {}
        for dag in [spec["root"], *spec["components"].values()]:
            for name, task in dag.get("dag", {}).get("tasks", {}).items():
                inputs = task.get("inputs", {}).get("parameters", {})
                values = {
                    key: value["runtimeValue"]["constant"]
                    for key, value in inputs.items()
                    if "runtimeValue" in value
                }
                found[name] = {key: known.get(value, value) for key, value in values.items()}
        return found

    def end(self, run: dict, state: str, **tasks: str) -> None:
        """End a run.

        `tasks` contains the states of the run's tasks by name, with `_` instead of `-`.
        """
        run["state"] = state
        run["finished_at"] = run["created_at"]
        before = ("RUNNING",) if "recurring_run_id" in run else ("PENDING", "RUNNING")
        run["state_history"] = [
            {"update_time": run["created_at"], "state": each} for each in (*before, state)
        ]
        details = [
            {"display_name": name.replace("_", "-"), "state": each} for name, each in tasks.items()
        ]
        run["run_details"] = {"task_details": details}

    def check_token(self, shown: str | None) -> None:
        if self.token is not None and shown != f"Bearer {self.token}":
            self.requests.append(("REFUSED", str(shown)))
            raise ErrorAnswer(
                401, "Request header error: there is no user identity header or token"
            )

    def loses(self, method: str, path: str) -> bool:
        for each in self.lost:
            if method == each[0] and path.endswith(each[1]):
                self.lost.remove(each)
                return True
        return False

    def reply(self, method: str, target: str, body: bytes) -> dict:
        path = urlsplit(target).path.removeprefix("/apis/v2beta1/")
        if (method, path) == ("POST", "runs"):
            self.before_create(json.loads(body))
        with self.lock:
            return self.locked_reply(method, target, body)

    def locked_reply(self, method: str, target: str, body: bytes) -> dict:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/apis/v2beta1/")
        self.requests.append((method, parts.path))
        if self.failure is not None:
            raise ErrorAnswer(self.failure, self.failure_text)
        if self.failures:
            raise ErrorAnswer(self.failures.pop(0), "as the test says, this once")
        if path == "pipelines/upload" and method == "POST":
            return self.upload_pipeline(query, body)
        if path == "pipelines/upload_version" and method == "POST":
            return self.upload_version(query, body)
        if "namespace" in query or (body and json.loads(body).get("namespace")):
            raise ErrorAnswer(400, "in single-user mode a request shouldn't contain a namespace")
        if (method, path) == ("GET", "experiments"):
            return without_empty({"experiments": self.select(self.experiments, query)})
        if (method, path) == ("POST", "experiments"):
            if any(
                each["display_name"] == json.loads(body)["display_name"]
                for each in self.experiments
            ):
                raise ErrorAnswer(409, "experiment already exists")
            new = {"experiment_id": f"e{len(self.experiments) + 1}", **json.loads(body)}
            self.experiments.append(new)
            return new
        if (method, path) == ("GET", "runs"):
            in_scope = [
                run
                for run in self.runs
                if run["experiment_id"] == query.get("experiment_id", run["experiment_id"])
            ]
            chosen = self.select(in_scope, query)
            answer = self.page(chosen, query)
            if "display_name" in unquote(query.get("filter", "")):
                for run in chosen:
                    run["state"] = self.advance.get(run["state"], run["state"])
            return answer
        if (method, path) == ("POST", "runs"):
            if self.num_late:
                self.num_late -= 1
                self.late.append(json.loads(body))
                raise Late
            return self.create_run(json.loads(body))
        if (method, path) == ("GET", "pipelines"):
            return without_empty({"pipelines": self.select(self.pipelines, query)})
        if method == "GET" and (found := re.fullmatch(r"pipelines/names/([^/]+)", path)):
            return self.pipeline_named(found[1])
        if method == "GET" and (found := re.fullmatch(r"pipelines/[^/]+/versions/([^/]+)", path)):
            self.check_version(found[1])
            return next(each for each in self.versions if each["pipeline_version_id"] == found[1])
        if method == "GET" and (found := re.fullmatch(r"pipelines/([^/]+)/versions", path)):
            return self.list_versions(found[1], query)
        if (method, path) == ("POST", "recurringruns"):
            return self.create_schedule(json.loads(body))
        if (method, path) == ("GET", "recurringruns"):
            return self.list_schedules(query)
        if method == "DELETE" and (found := re.fullmatch(r"recurringruns/([^/]+)", path)):
            return self.delete_schedule(found[1])
        if (method, path) == ("GET", "healthz"):
            return {
                "commit_sha": "unknown",
                "tag_name": "unknown",
                "multi_user": False,
                "pipeline_store": "database",
            }
        if found := re.fullmatch(r"runs/([^/:]+)(:terminate|:archive)?", path):
            return self.change_run(method, *found.groups())
        raise ErrorAnswer(404, f"{method} {path}")

    def pipeline_named(self, name: str) -> dict:
        for pipeline in self.pipelines:
            if pipeline["display_name"] == name:
                return pipeline
        text = (
            f"Failed to get a pipeline with name {name} and namespace . Check error stack.: "
            "Failed to get a pipeline "
        )
        raise ErrorAnswer(
            404,
            f"{text}named {name} in namespace : ResourceNotFoundError: Namespace/Pipeline /{name} "
            "not found",
        )

    def list_versions(self, pipeline_id: str, query: dict) -> dict:
        if unknown := query.get("sort_by", "").replace("created_at desc", ""):
            raise ErrorAnswer(400, f"this double does not sort by {unknown}")
        chosen = self.select(
            [each for each in self.versions if each["pipeline_id"] == pipeline_id], query
        )
        # The runs are stored in the order of their creation.
        ordered = chosen[::-1] if query.get("sort_by") else chosen
        start, size = int(query.get("page_token") or 0), int(query.get("page_size") or 10)
        token = str(start + size) if start + size < len(ordered) else ""
        shown = ordered[start : start + size]
        return without_empty(
            {"pipeline_versions": shown, "next_page_token": token, "total_size": len(ordered)}
        )

    def change_run(self, method: str, run_id: str, verb: str | None) -> dict:
        runs = [run for run in self.runs if run["run_id"] == run_id]
        if not runs:
            raise ErrorAnswer(
                404,
                f"Failed to get a run: Failed to fetch run {run_id}: ResourceNotFoundError: Run "
                f"{run_id} not found",
            )
        if (method, verb) == ("GET", None):
            error = (
                {"error": {"code": 13, "message": self.errors[run_id]}}
                if run_id in self.errors
                else {}
            )
            return {key: value for key, value in runs[0].items() if key not in INNER} | error
        if (method, verb) == ("POST", ":terminate"):
            if runs[0] not in self.active:
                text = (
                    f"Failed to terminate a run: Failed to terminate run {run_id}: Invalid "
                    "input error: "
                )
                raise ErrorAnswer(400, f"{text}Failed to terminate a run {run_id}. Row not found")
            runs[0]["state"] = "CANCELING"
            return {}
        if (method, verb) == ("POST", ":archive"):
            runs[0]["storage_state"] = "ARCHIVED"
            return {}
        raise ErrorAnswer(404, f"{method} {run_id}{verb}")

    def create_run(self, body: dict) -> dict:
        spec, reference = body.get("pipeline_spec"), body.get("pipeline_version_reference")
        if (spec is None) == (reference is None):
            raise ErrorAnswer(400, "exactly one of pipeline_spec and pipeline_version_reference")
        experiment = self.experiment_of(body)
        if not body.get("display_name"):
            text = (
                "CreateJob(job.ToV2())Failed to create a run due to conversion error: "
                "InternalServerError: Failed to "
            )
            text += "convert a API run detail to its internal representation: Invalid input error: "
            raise ErrorAnswer(500, f"{text}Run name cannot be empty")
        if reference:
            self.check_version(reference["pipeline_version_id"])
            self.check_parameters(reference["pipeline_version_id"], body)
        run = self.add_run(body["display_name"], "PENDING", experiment)
        run |= {"body": body, "resource_name": f"evergreen-retraining-{len(self.runs):05x}"}
        copied_fields = (
            "service_account",
            "description",
            "runtime_config",
            "pipeline_version_reference",
        )
        run |= {"service_account": "pipeline-runner"} | {
            key: body[key] for key in copied_fields if key in body
        }
        run |= not_ended(run)
        return {key: value for key, value in run.items() if key not in INNER}

    def experiment_of(self, body: dict) -> str:
        """Return the experiment that a run request names, or else the default experiment."""
        experiment = body.get("experiment_id", DEFAULT_EXPERIMENT["experiment_id"])
        if experiment not in {
            each["experiment_id"] for each in (*self.experiments, DEFAULT_EXPERIMENT)
        }:
            raise ErrorAnswer(404, f"experiment {experiment}")
        return str(experiment)

    def check_version(self, version_id: str) -> None:
        if version_id not in {each["pipeline_version_id"] for each in self.versions}:
            text = (
                "Failed to create a new run: InternalServerError: Failed to create a run due to "
                "error fetching "
            )
            text += (
                "manifest: Failed to fetch a template due to error retrieving pipeline "
                "version: Failed to fetch a "
            )
            text += (
                f"pipeline version and its manifest from pipeline version {version_id}: Failed "
                "to get a pipeline "
            )
            text += (
                f"version with id {version_id}: ResourceNotFoundError: PipelineVersion "
                f"{version_id} not found"
            )
            raise ErrorAnswer(500, text)

    def check_parameters(self, version_id: str, body: dict) -> None:
        """Refuse a parameter that the pipeline does not have.

        Versions that were not compiled accept any parameter.
        """
        given = body.get("runtime_config", {}).get("parameters", {})
        if version_id in self.files and given:
            known = documents(self.files[version_id].decode())[0]["root"]["inputDefinitions"][
                "parameters"
            ]
            if unknown := [name for name in given if name not in known]:
                text = (
                    "Failed to create a new run: Failed to generate the ExecutionSpec: invalid "
                    "pipeline job inputs: "
                )
                text += "Invalid input error: parameter(s) provided are not required by pipeline: "
                raise ErrorAnswer(400, text + ", ".join(unknown))

    def upload_pipeline(self, query: dict, body: bytes) -> dict:
        if "namespace" in query:
            raise ErrorAnswer(400, "in single-user mode a request shouldn't contain a namespace")
        if any(pipeline["display_name"] == query["name"] for pipeline in self.pipelines):
            raise ErrorAnswer(409, f"the name {query['name']} is taken")
        self.uploads.append(uploaded_pipeline(body))
        pipeline = {
            "pipeline_id": f"p{len(self.pipelines) + 1}",
            "display_name": query["name"],
            "name": query["name"],
        }
        pipeline |= {"created_at": "2026-01-01T00:00:00Z"}
        self.pipelines.append(pipeline)
        # The server creates a first version with the same name as the new pipeline.
        self.add_version({"pipelineid": pipeline["pipeline_id"], "name": query["name"]})
        return pipeline

    def upload_version(self, query: dict, body: bytes) -> dict:
        if query["pipelineid"] not in {pipeline["pipeline_id"] for pipeline in self.pipelines}:
            raise ErrorAnswer(404, f"pipeline {query['pipelineid']}")
        mine = [each for each in self.versions if each["pipeline_id"] == query["pipelineid"]]
        if any(version["display_name"] == query["name"] for version in mine):
            raise ErrorAnswer(409, "Failed to create a pipeline version")
        self.uploads.append(uploaded_pipeline(body))
        return self.add_version(query)

    def add_version(self, query: dict) -> dict:
        version = {
            "pipeline_version_id": f"v{len(self.versions) + 1}",
            "display_name": query["name"],
        }
        version |= {
            "pipeline_id": query["pipelineid"],
            "name": query["name"],
            "created_at": "2026-01-01T00:00:00Z",
        }
        version |= without_empty({"description": query.get("description", "")})
        version |= {"pipeline_spec": documents(self.uploads[-1].decode())[0]}
        self.versions.append(version)
        self.files[version["pipeline_version_id"]] = self.uploads[-1]
        return version

    def create_schedule(self, body: dict) -> dict:
        spec, reference = body.get("pipeline_spec"), body.get("pipeline_version_reference")
        if (spec is None) == (reference is None):
            raise ErrorAnswer(400, "exactly one of pipeline_spec and pipeline_version_reference")
        if reference:
            self.check_version(reference["pipeline_version_id"])
        experiment = self.experiment_of(body)
        expression = body["trigger"]["cron_schedule"]["cron"]
        cron = expression.split()
        if len(cron) not in (5, 6) or not all(CRON_FIELD.fullmatch(part) for part in cron):
            text = (
                "Failed to create a recurring run due to conversion error: Invalid input error: "
                "Schedule cron is not a "
            )
            text += "supported format(https://godoc.org/github.com/robfig/cron). Error: "
            raise ErrorAnswer(400, f"{text}Expected 5 to 6 fields, found {len(cron)}: {expression}")
        if not 1 <= int(body["max_concurrency"]) <= 10:
            raise ErrorAnswer(
                400, "Max concurrency of a recurring run must be at least 1 and at most 10"
            )
        self.made_schedules += 1
        made = {
            "created_at": "2026-01-01T00:00:00Z",
            "updated_at": "2026-01-01T00:00:00Z",
            "namespace": "kubeflow",
        }
        made |= {
            "status": f"{body['mode']}D",
            "recurring_run_id": f"s{self.made_schedules}",
            "experiment_id": experiment,
        }
        schedule = {"service_account": "pipeline-runner", **body, **made}
        self.schedules.append(schedule)
        return schedule

    def list_schedules(self, query: dict) -> dict:
        wanted = query.get("experiment_id")
        chosen = self.select(
            [s for s in self.schedules if wanted in (None, s["experiment_id"])], query
        )
        # Return smaller pages than requested, as a real server may do.
        start = int(query.get("page_token") or 0)
        token = str(start + 1) if start + 1 < len(chosen) else ""
        shown = chosen[start : start + 1]
        return without_empty(
            {"recurringRuns": shown, "total_size": len(chosen), "next_page_token": token}
        )

    def delete_schedule(self, schedule_id: str) -> dict:
        if schedule_id not in {each["recurring_run_id"] for each in self.schedules}:
            raise ErrorAnswer(404, f"recurring run {schedule_id}")
        self.schedules = [
            each for each in self.schedules if each["recurring_run_id"] != schedule_id
        ]
        return {}

    def select(self, rows: list[dict], query: dict) -> list[dict]:
        # The server unescapes the filter a second time.
        predicates = (
            json.loads(unquote(query["filter"]))["predicates"] if query.get("filter") else []
        )
        return [
            row for row in rows if all(self.matches(row, predicate) for predicate in predicates)
        ]

    def matches(self, row: dict, predicate: dict) -> bool:
        if predicate["key"] not in FILTER_KEYS:
            raise ErrorAnswer(
                400, f"no support for filtering on unrecognized field {predicate['key']}"
            )
        value = row.get(predicate["key"])
        if predicate["operation"] in ("EQUALS", 1):
            return value == predicate.get("stringValue", predicate.get("string_value"))
        if predicate["operation"] in ("IN", 8):
            return value in predicate["stringValues"]["values"]
        raise ErrorAnswer(400, f"operation {predicate['operation']}")

    def page(self, rows: list[dict], query: dict) -> dict:
        # Pages are smaller than requested, as a server may choose, so the caller must follow the
        # token.
        start = int(query.get("page_token") or 0)
        shown = [
            {k: v for k, v in row.items() if k not in INNER} for row in rows[start : start + 2]
        ]
        token = str(start + 2) if start + 2 < len(rows) else ""
        return without_empty({"runs": shown, "total_size": len(rows), "next_page_token": token})


def not_ended(run: dict) -> dict:
    """Return the fields of a new run that its request did not contain."""
    history = [{"update_time": run["created_at"], "state": "PENDING"}]
    return {
        "scheduled_at": run["created_at"],
        "finished_at": "1970-01-01T00:00:00Z",
        "state_history": history,
    }


def without_empty(answer: dict) -> dict:
    """Return the answer as protobuf's JSON, which omits empty fields."""
    return {key: value for key, value in answer.items() if value}


def uploaded_pipeline(body: bytes) -> bytes:
    """Return the one file of a multipart form, which must be a compiled pipeline."""
    content = uploaded_file(body)
    try:
        found = documents(content.decode())
    except (ValueError, yaml.YAMLError):
        found = []
    if not found or not isinstance(found[0], dict) or "pipelineInfo" not in found[0]:
        raise ErrorAnswer(400, "Failed to read a pipeline spec file")
    return content


def uploaded_file(body: bytes) -> bytes:
    """Return the one file of a multipart form."""
    boundary = body.partition(b"\r\n")[0]
    header, _, content = body.split(boundary)[1].partition(b"\r\n\r\n")
    assert b'name="uploadfile"' in header
    return content.removesuffix(b"\r\n")
