"""Batch's HTTP API, on moto's routes. Source of limits: AWS Batch user guide, "Service quotas"."""

import json
import time
from typing import Any
from urllib.parse import urlsplit

from moto.batch.exceptions import ClientException
from moto.batch.models import batch_backends
from moto.batch.responses import BatchResponse as MotoBatchResponse

from infra.emulator.batch.backend import BatchBackend
from infra.emulator.batch.describe import page, summarize_job
from infra.emulator.batch.job import Job

MAX_SUBMIT_BYTES = 30 * 1024
MAX_DESCRIBED = 100
"""Maximum number of jobs in DescribeJobs, and of results on a page, except for ListJobs without filters."""
MAX_LISTED = 1000


class BatchResponse(MotoBatchResponse):
    """One method per operation. moto handles tags and scheduling policies."""

    @property
    def batch_backend(self) -> BatchBackend:
        backend: BatchBackend = batch_backends[self.current_account][self.region]
        return backend

    @property
    def _request(self) -> dict[str, Any]:
        """Return the body of the request, without nulls."""
        body = json.loads(self.body or "{}")
        return {name: value for name, value in body.items() if value is not None}

    def createcomputeenvironment(self) -> str:
        return json.dumps(self.batch_backend.create_environment(self._request).named)

    def updatecomputeenvironment(self) -> str:
        return json.dumps(self.batch_backend.update_environment(self._request).named)

    def deletecomputeenvironment(self) -> str:
        self.batch_backend.delete_environment(self._request["computeEnvironment"])
        return "{}"

    def describecomputeenvironments(self) -> str:
        return self._describe("computeEnvironments", self.batch_backend.environments)

    def createjobqueue(self) -> str:
        return json.dumps(self.batch_backend.create_queue(self._request).named)

    def updatejobqueue(self) -> str:
        return json.dumps(self.batch_backend.update_queue(self._request).named)

    def deletejobqueue(self) -> str:
        self.batch_backend.delete_queue(self._request["jobQueue"])
        return "{}"

    def describejobqueues(self) -> str:
        return self._describe("jobQueues", self.batch_backend.queues)

    def getjobqueuesnapshot(self) -> str:
        backend = self.batch_backend
        front = backend.scheduler.front(backend.queue(self._request.get("jobQueue", "")))[:MAX_DESCRIBED]
        jobs = [{"jobArn": job.arn, "earliestTimeAtPosition": job.created_at} for job in front]
        return json.dumps({"frontOfQueue": {"jobs": jobs, "lastUpdatedAt": int(time.time() * 1000)}})

    def registerjobdefinition(self) -> str:
        definition = self.batch_backend.register_definition(self._request)
        names = {"jobDefinitionName": definition.name, "jobDefinitionArn": definition.arn}
        return json.dumps({**names, "revision": definition.revision})

    def deregisterjobdefinition(self) -> str:
        self.batch_backend.deregister_definition(self._request["jobDefinition"])
        return "{}"

    def describejobdefinitions(self) -> str:
        request, backend = self._request, self.batch_backend
        if request.get("jobDefinitions"):
            found = backend.find_definitions(request["jobDefinitions"])
        elif request.get("jobDefinitionName"):
            found = backend.revisions(request["jobDefinitionName"])
        else:
            found = list(backend.definitions.values())
        return self._described(
            "jobDefinitions", [revision for revision in found if request.get("status") in (None, revision.status)]
        )

    def submitjob(self) -> str:
        size = len(self.body.encode() if isinstance(self.body, str) else self.body)
        if size > MAX_SUBMIT_BYTES:
            raise ClientException(f"SubmitJob request is {size} bytes long, the limit is {MAX_SUBMIT_BYTES} bytes")
        address = urlsplit(self.uri)
        job = self.batch_backend.submit(self._request, endpoint=f"{address.scheme}://{address.netloc}")
        return json.dumps({"jobId": job.id, "jobName": job.submission.name, "jobArn": job.arn})

    def describejobs(self) -> str:
        identifiers = self._request.get("jobs") or []
        if len(identifiers) > MAX_DESCRIBED:
            raise ClientException(f"DescribeJobs takes at most {MAX_DESCRIBED} jobs, but was given {len(identifiers)}")
        backend = self.batch_backend
        with backend.scheduler.lock:
            jobs = backend.find_jobs(identifiers)
            return json.dumps({"jobs": [backend.describe(job) for job in jobs]})

    def listjobs(self) -> str:
        request = self._request
        with self.batch_backend.scheduler.lock:
            found = self.batch_backend.list_selected(request)
            shown, token = page(found, request, most=MAX_DESCRIBED if request.get("filters") else MAX_LISTED)
            return _answer({"jobSummaryList": [summarize_job(job) for job in shown]}, token)

    def canceljob(self) -> str:
        job, reason = self._job_to_end()
        self.batch_backend.scheduler.cancel(job, reason)
        return "{}"

    def terminatejob(self) -> str:
        job, reason = self._job_to_end()
        self.batch_backend.scheduler.terminate(job, reason)
        return "{}"

    def _job_to_end(self) -> tuple[Job, str]:
        request = self._request
        for name in ("jobId", "reason"):
            if not request.get(name):
                raise ClientException(f"'{name}' is a required field (cannot be an empty string)")
        job = self.batch_backend.job(request["jobId"])
        if job.node is not None:
            raise ClientException(f"Job {job.id} is a node; end its multi-node parallel job instead")
        return job, request["reason"]

    def _describe(self, name: str, things: dict[str, Any]) -> str:
        identifiers = self._request.get(name)
        wanted = [
            thing for arn, thing in things.items() if not identifiers or arn in identifiers or thing.name in identifiers
        ]
        return self._described(name, wanted)

    def _described(self, name: str, things: list[Any]) -> str:
        shown, token = page(things, self._request, most=MAX_DESCRIBED)
        described = [thing.describe(self.batch_backend.list_tags_for_resource(thing.arn)) for thing in shown]
        return _answer({name: described}, token)


def _answer(shown: dict[str, Any], token: str | None) -> str:
    return json.dumps({**shown, "nextToken": token} if token else shown)
