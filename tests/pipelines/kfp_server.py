"""The KFP API double with what a person's commands need beside the monitor's: uploads and recurring runs.

Rules of the real server that the double keeps: names of pipelines and of a pipeline's versions are taken once; a
schedule has exactly one source, a cron expression that robfig/cron takes (five fields too, read as seconds to months)
and between 1 and 10 runs at a time; several schedules may have one name. It runs no schedule.
"""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, urlsplit

from tests.monitoring.acting.kfp_double import KfpDouble, Refused

CRON_FIELD = re.compile(r"(\*|\?|[0-9A-Za-z]+)([-/,][0-9A-Za-z*]+)*")


class KfpWithPipelines(KfpDouble):
    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[bytes] = []
        self.schedules: list[dict] = []
        self.made_schedules = 0
        self.before_upload = lambda: None  # called before a version is stored: another client may upload meanwhile
        self.errors: dict[str, str] = {}  # id of a run -> message of its error

    def reply(self, method: str, target: str, body: bytes) -> dict:
        if (method, urlsplit(target).path) == ("POST", "/apis/v2beta1/pipelines/upload_version"):
            self.before_upload()
        return super().reply(method, target, body)

    def locked_reply(self, method: str, target: str, body: bytes) -> dict:
        parts = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = parts.path.removeprefix("/apis/v2beta1/")
        ours = {
            ("POST", "pipelines/upload"): lambda: self.upload_pipeline(query, body),
            ("POST", "pipelines/upload_version"): lambda: self.upload_version(query, body),
            ("POST", "recurringruns"): lambda: self.create_schedule(json.loads(body)),
            ("GET", "recurringruns"): lambda: self.list_schedules(query),
        }
        if (method, path) in ours and self.failure is None:
            self.requests.append((method, parts.path))
            return ours[method, path]()
        if method == "DELETE" and (found := re.fullmatch(r"recurringruns/([^/]+)", path)):
            self.requests.append((method, parts.path))
            return self.delete_schedule(found[1])
        document = super().locked_reply(method, target, body)
        if method == "GET" and document.get("run_id") in self.errors:
            return {**document, "error": {"code": 13, "message": self.errors[document["run_id"]]}}
        return document

    def upload_pipeline(self, query: dict, body: bytes) -> dict:
        if "namespace" in query:
            raise Refused(400, "in single-user mode a request shouldn't contain a namespace")
        if any(pipeline["display_name"] == query["name"] for pipeline in self.pipelines):
            raise Refused(409, f"the name {query['name']} is taken")
        self.uploads.append(uploaded_file(body))
        pipeline = {"pipeline_id": f"p{len(self.pipelines) + 1}", "display_name": query["name"]}
        self.pipelines.append(pipeline)
        # A pipeline comes with a first version of its own name.
        self.add_version({"pipelineid": pipeline["pipeline_id"], "name": query["name"]})
        return pipeline

    def upload_version(self, query: dict, body: bytes) -> dict:
        if query["pipelineid"] not in {pipeline["pipeline_id"] for pipeline in self.pipelines}:
            raise Refused(404, f"pipeline {query['pipelineid']}")
        mine = [each for each in self.versions if each["pipeline_id"] == query["pipelineid"]]
        if any(version["display_name"] == query["name"] for version in mine):
            raise Refused(409, f"the version {query['name']} is taken")
        self.uploads.append(uploaded_file(body))
        return self.add_version(query)

    def add_version(self, query: dict) -> dict:
        version = {"pipeline_version_id": f"v{len(self.versions) + 1}", "display_name": query["name"]}
        version |= {"pipeline_id": query["pipelineid"], "description": query.get("description", "")}
        self.versions.append(version)
        return version

    def create_schedule(self, body: dict) -> dict:
        spec, reference = body.get("pipeline_spec"), body.get("pipeline_version_reference")
        if (spec is None) == (reference is None):
            raise Refused(400, "exactly one of pipeline_spec and pipeline_version_reference")
        if reference and reference["pipeline_version_id"] not in {v["pipeline_version_id"] for v in self.versions}:
            raise Refused(404, f"pipeline version {reference['pipeline_version_id']}")
        if body["experiment_id"] not in {each["experiment_id"] for each in self.experiments}:
            raise Refused(404, f"experiment {body['experiment_id']}")
        cron = body["trigger"]["cron_schedule"]["cron"].split()
        if len(cron) not in (5, 6) or not all(CRON_FIELD.fullmatch(part) for part in cron):
            raise Refused(400, "Schedule cron is not a supported format")
        if not 1 <= int(body["max_concurrency"]) <= 10:
            raise Refused(400, "Max concurrency of a recurring run must be at least 1 and at most 10")
        self.made_schedules += 1
        schedule = {**body, "recurring_run_id": f"s{self.made_schedules}", "status": "ENABLED"}
        self.schedules.append(schedule)
        return schedule

    def list_schedules(self, query: dict) -> dict:
        chosen = self.select([s for s in self.schedules if s["experiment_id"] == query.get("experiment_id")], query)
        # Smaller pages than asked for, as a server may.
        start = int(query.get("page_token") or 0)
        token = str(start + 1) if start + 1 < len(chosen) else ""
        return {"recurringRuns": chosen[start : start + 1], "total_size": len(chosen), "next_page_token": token}

    def delete_schedule(self, schedule_id: str) -> dict:
        if schedule_id not in {each["recurring_run_id"] for each in self.schedules}:
            raise Refused(404, f"recurring run {schedule_id}")
        self.schedules = [each for each in self.schedules if each["recurring_run_id"] != schedule_id]
        return {}


def uploaded_file(body: bytes) -> bytes:
    """The one file of a multipart form."""
    boundary = body.partition(b"\r\n")[0]
    header, _, content = body.split(boundary)[1].partition(b"\r\n\r\n")
    assert b'name="uploadfile"' in header
    return content.removesuffix(b"\r\n")
