"""Replace moto's CloudFormation API by the operations that the CDK CLI and the trainyard command use."""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from threading import RLock
from typing import Any, ClassVar

from moto.cloudformation import urls
from moto.cloudformation.exceptions import AlreadyExistsException, ValidationError
from moto.cloudformation.responses import CloudFormationResponse, get_template_summary_response_from_template
from moto.cloudformation.utils import get_stack_from_s3_url
from moto.cloudtrail.responses import CloudTrailResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import camelcase_to_underscores
from moto.ec2.responses.elastic_block_store import ElasticBlockStore

from infra.emulator.cloudformation.api import Account
from infra.emulator.cloudformation.changes import ChangeSet, changes_of
from infra.emulator.cloudformation.drift import drifts_of
from infra.emulator.cloudformation.resources import is_recorded
from infra.emulator.cloudformation.stack import FINAL_FAILURES, Stack, StackResource
from infra.emulator.cloudformation.template import parse_template

_DETECTABLE = ("CREATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE", "UPDATE_ROLLBACK_FAILED")
"""States in which drift can be detected (CloudFormation user guide, "What is drift?")."""


class ChangeSetNotFoundError(ServiceException):
    """AWS's error ChangeSetNotFound."""

    code = "ChangeSetNotFound"


class Stacks:
    """All stacks and change sets of an account and region. Each request runs in a thread that holds `lock`."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.lock = RLock()
        self.by_name: dict[str, Stack] = {}
        """Existing stacks."""
        self.deleted: list[Stack] = []
        self.change_sets: dict[str, ChangeSet] = {}
        """By ARN."""
        self.detections: dict[str, Stack] = {}
        """Stacks by the id of a drift detection."""

    def add(self, name: str) -> Stack:
        self.by_name[name] = Stack(name, self.account, neighbours=lambda: list(self.by_name.values()))
        return self.by_name[name]

    def existing(self, name_or_id: str) -> Stack | None:
        return next((stack for stack in self.by_name.values() if name_or_id in (stack.name, stack.stack_id)), None)

    def find(self, name_or_id: str) -> Stack:
        """Find a stack by name or id; a deleted stack by id only. Raises ValidationError if it does not exist."""
        gone = (stack for stack in self.deleted if name_or_id == stack.stack_id)
        stack = self.existing(name_or_id) or next(gone, None)
        if stack is None:
            raise ValidationError(name_or_id)
        return stack

    def find_change_set(self, name_or_id: str, stack_name: str | None) -> ChangeSet:
        """Find a change set by ARN, or by name and stack. Raises ChangeSetNotFoundError."""
        for item in self.change_sets.values():
            if name_or_id == item.change_set_id or (
                name_or_id == item.name and stack_name in (item.stack.name, item.stack.stack_id)
            ):
                return item
        raise ChangeSetNotFoundError(f"ChangeSet [{name_or_id}] does not exist")


_stacks: dict[Account, Stacks] = {}


def install() -> None:
    """Replace moto's API of CloudFormation. Call it before the server starts."""
    urls.url_paths["{0}/$"] = StackResponse.dispatch
    CloudTrailResponse.lookup_events = _no_events
    ElasticBlockStore.get_ebs_default_kms_key_id = _default_ebs_key


def _no_events(_response: CloudTrailResponse) -> str:
    """Answer CloudTrail's LookupEvents with no events.

    The CDK CLI calls it to explain a failed deployment. moto does not implement it, and the CLI would retry for half a
    minute.
    """
    return json.dumps({"Events": []})


def _default_ebs_key(response: ElasticBlockStore) -> ActionResult:
    """Answer EC2's GetEbsDefaultKmsKeyId, which the preflight calls and moto lacks.

    Until another key is set, the answer is an alias (AWS CLI reference, example of get-ebs-default-kms-key-id).
    """
    return ActionResult({"KmsKeyId": response.ec2_backend.default_kms_key_id or "alias/aws/ebs"})


def recorded_types() -> list[str]:
    """Return the types of resources that are only recorded, in all accounts and regions."""
    found = {
        resource.resource_type
        for stacks in list(_stacks.values())
        for stack in list(stacks.by_name.values())
        for resource in list(stack.resources.values())
    }
    return sorted(name for name in found if is_recorded(name) and name != "AWS::CDK::Metadata")


class StackResponse(CloudFormationResponse):
    """One method per operation."""

    RESPONSE_KEY_PATH_TO_TRANSFORMER: ClassVar[dict[str, Any]] = {}
    """Empty, because moto's transformers are for its own stacks."""

    @property
    def stacks(self) -> Stacks:
        account = Account(self.current_account, self.region)
        return _stacks.setdefault(account, Stacks(account))

    def call_action(self) -> Any:
        name = camelcase_to_underscores(self._get_action())
        if name not in vars(StackResponse):
            setattr(self, name, self._refuse)  # moto's implementation has none of these stacks
        with self.stacks.lock:
            return super().call_action()

    def _refuse(self) -> ActionResult:
        raise ValidationError(message=f"The emulator does not implement {self._get_action()}.")

    # Stacks

    def create_stack(self) -> ActionResult:
        name = self._get_param("StackName")
        if self._get_param("OnFailure") == "DELETE":
            raise ValidationError(message="The emulator does not implement OnFailure DELETE.")
        if name in self.stacks.by_name:
            raise AlreadyExistsException(f"Stack [{name}] already exists")
        with self._new_stack(name) as stack:
            self._begin(stack, self._tags(stack), self._get_param("RoleARN"))
            stack.create(self._template(), self._parameters(stack), rolls_back=self._rolls_back)
        stack.termination_protection = bool(self._get_bool_param("EnableTerminationProtection"))
        return ActionResult({"StackId": stack.stack_id})

    def update_stack(self) -> ActionResult:
        stack = self._stack
        _check_updatable(stack)
        body, parameters, tags = self._template(), self._parameters(stack), self._tags(stack)
        if stack.is_same(body, parameters, tags):
            raise ValidationError(message="No updates are to be performed.")
        self._begin(stack, tags, self._get_param("RoleARN"))
        stack.update(body, parameters)
        return ActionResult({"StackId": stack.stack_id})

    def delete_stack(self) -> ActionResult:
        """Delete a stack. As on AWS, deleting a missing stack succeeds."""
        stack = self.stacks.existing(self._get_param("StackName"))
        if stack is None:
            return EmptyResult()
        if stack.termination_protection:
            raise ValidationError(
                message=f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
            )
        stack.client_request_token = self._get_param("ClientRequestToken")
        stack.delete()
        if stack.status == "DELETE_COMPLETE":
            del self.stacks.by_name[stack.name]
            self.stacks.deleted.append(stack)
        return EmptyResult()

    def update_termination_protection(self) -> ActionResult:
        self._stack.termination_protection = bool(self._get_bool_param("EnableTerminationProtection"))
        return ActionResult({"StackId": self._stack.stack_id})

    def describe_stacks(self) -> ActionResult:
        name = self._get_param("StackName")
        stacks = [self.stacks.find(name)] if name else list(self.stacks.by_name.values())
        return ActionResult({"Stacks": [_describe(stack) for stack in stacks]})

    def describe_stack_events(self) -> ActionResult:
        return ActionResult({"StackEvents": self._stack.events[::-1]})

    def describe_stack_resources(self) -> ActionResult:
        return ActionResult({"StackResources": self._resources()})

    def list_stack_resources(self) -> ActionResult:
        return ActionResult({"StackResourceSummaries": self._resources()})

    def get_template(self) -> ActionResult:
        return ActionResult({"TemplateBody": self._stack.template_body, "StagesAvailable": ["Original", "Processed"]})

    def get_template_summary(self) -> ActionResult:
        body = self._stack.template_body if self._get_param("StackName") else self._template()
        return ActionResult(get_template_summary_response_from_template(body))

    # Change sets

    def create_change_set(self) -> ActionResult:
        name, kind = self._get_param("ChangeSetName"), self._get_param("ChangeSetType") or "UPDATE"
        if kind == "IMPORT":
            raise ValidationError(message="The emulator does not import resources into stacks.")
        stack = self.stacks.existing(self._get_param("StackName"))
        if kind == "UPDATE":
            stack = self._stack
            _check_updatable(stack)
        elif stack is not None and stack.status != "REVIEW_IN_PROGRESS":
            raise ValidationError(
                message=f"Stack [{stack.name}] already exists and cannot be created again with the changeSet [{name}]."
            )
        if stack is not None:
            change_set = self._prepare(stack, name)
        else:
            with self._new_stack(self._get_param("StackName")) as stack:
                change_set = self._prepare(stack, name)
        stack.change_set_id = change_set.change_set_id
        self.stacks.change_sets[change_set.change_set_id] = change_set
        return ActionResult({"Id": change_set.change_set_id, "StackId": stack.stack_id})

    def _prepare(self, stack: Stack, name: str) -> ChangeSet:
        if any(other.name == name and other.stack is stack for other in self.stacks.change_sets.values()):
            raise AlreadyExistsException(f"ChangeSet {name} already exists")
        body, parameters, tags = self._template(), self._parameters(stack), self._tags(stack)
        same = stack.status != "REVIEW_IN_PROGRESS" and stack.is_same(body, parameters, tags)
        return ChangeSet(
            name=name,
            change_set_id=f"arn:aws:cloudformation:{self.region}:{self.current_account}:changeSet/{name}/{uuid.uuid4()}",
            stack=stack,
            template_body=body,
            parameters=parameters,
            tags=tags,
            role_arn=self._get_param("RoleARN"),
            description=self._get_param("Description"),
            changes=None if same else changes_of(stack, parse_template(body), parameters, tags),
        )

    def describe_change_set(self) -> ActionResult:
        return ActionResult(self._change_set.describe())

    def execute_change_set(self) -> ActionResult:
        change_set = self._change_set
        if change_set.changes is None:
            raise ValidationError(
                message=f"ChangeSet [{change_set.change_set_id}] cannot be executed in its current status of [FAILED]"
            )
        stack = change_set.stack
        self._begin(stack, change_set.tags, change_set.role_arn)
        if stack.status == "REVIEW_IN_PROGRESS":
            stack.create(change_set.template_body, change_set.parameters, rolls_back=self._rolls_back)
        else:
            stack.update(change_set.template_body, change_set.parameters)
        # Change sets for an older state of the stack can no longer be executed.
        kept = {key: other for key, other in self.stacks.change_sets.items() if other.stack is not stack}
        self.stacks.change_sets = kept
        return EmptyResult()

    def delete_change_set(self) -> ActionResult:
        """Delete a change set. As on AWS, deleting a missing change set succeeds."""
        with suppress(ChangeSetNotFoundError):
            del self.stacks.change_sets[self._change_set.change_set_id]
        return EmptyResult()

    # Drift

    def detect_stack_drift(self) -> ActionResult:
        stack = self._stack
        if stack.status not in _DETECTABLE:
            raise ValidationError(message=f"Drift detection cannot be performed on stack in {stack.status} state.")
        stack.drifts = drifts_of(stack)
        detection = str(uuid.uuid4())
        self.stacks.detections[detection] = stack
        return ActionResult({"StackDriftDetectionId": detection})

    def describe_stack_drift_detection_status(self) -> ActionResult:
        detection = self._get_param("StackDriftDetectionId")
        stack = self.stacks.detections[detection]
        drifted = sum(drift["StackResourceDriftStatus"] != "IN_SYNC" for drift in stack.drifts)
        status = {
            "StackId": stack.stack_id,
            "StackDriftDetectionId": detection,
            "DetectionStatus": "DETECTION_COMPLETE",
            "StackDriftStatus": "DRIFTED" if drifted else "IN_SYNC",
            "DriftedStackResourceCount": drifted,
            "Timestamp": datetime.now(timezone.utc),
        }
        return ActionResult(status)

    def describe_stack_resource_drifts(self) -> ActionResult:
        wanted = self._get_param("StackResourceDriftStatusFilters", ["IN_SYNC", "MODIFIED", "DELETED"])
        found = [drift for drift in self._stack.drifts if drift["StackResourceDriftStatus"] in wanted]
        return ActionResult({"StackResourceDrifts": found})

    # Parts of requests

    @property
    def _rolls_back(self) -> bool:
        return not self._get_bool_param("DisableRollback")

    @property
    def _stack(self) -> Stack:
        return self.stacks.find(self._get_param("StackName"))

    @property
    def _change_set(self) -> ChangeSet:
        return self.stacks.find_change_set(self._get_param("ChangeSetName"), self._get_param("StackName"))

    def _resources(self) -> list[dict[str, Any]]:
        stack, logical_id = self._stack, self._get_param("LogicalResourceId")
        return [
            _resource(stack, resource)
            for resource in stack.resources.values()
            if logical_id in (None, resource.logical_id)
        ]

    def _template(self) -> str:
        """Return the template of the request: its text, or the object at its S3 address."""
        body, url = self._get_param("TemplateBody"), self._get_param("TemplateURL")
        if url:
            body = get_stack_from_s3_url(url, account_id=self.current_account, partition="aws")
        if body is None:
            raise ValidationError(message="Either Template URL or Template Body must be specified.")
        return str(body)

    def _tags(self, stack: Stack) -> Mapping[str, str]:
        tags = self._get_param("Tags")
        return stack.tags if tags is None else {tag["Key"]: tag["Value"] for tag in tags}

    def _parameters(self, stack: Stack) -> dict[str, str]:
        """Return all parameter values. Raises ValidationError if usePreviousValue names an unknown parameter."""
        values = {}
        for parameter in self._get_param("Parameters", []):
            key = parameter["ParameterKey"]
            if not parameter.get("UsePreviousValue"):
                values[key] = str(parameter.get("ParameterValue", ""))
            elif key in stack.given_parameters:
                values[key] = stack.given_parameters[key]
            elif key not in (stack.template.get("Parameters") or {}):
                raise ValidationError(
                    message=f"Invalid input for parameter key {key}. Cannot specify usePreviousValue "
                    "as true for a parameter key not in the previous template"
                )
            # Otherwise the parameter had its default, and now gets the new template's default.
        return values

    def _begin(self, stack: Stack, tags: Mapping[str, str], role_arn: str | None) -> None:
        stack.tags, stack.role_arn = tags, role_arn or stack.role_arn
        stack.client_request_token = self._get_param("ClientRequestToken")

    @contextmanager
    def _new_stack(self, name: str) -> Iterator[Stack]:
        """Add a stack, and remove it again if the request is refused."""
        try:
            yield self.stacks.add(name)
        except ServiceException:
            del self.stacks.by_name[name]
            raise


def _check_updatable(stack: Stack) -> None:
    if stack.status in FINAL_FAILURES or not stack.status.endswith("_COMPLETE"):
        raise ValidationError(message=f"Stack:{stack.stack_id} is in {stack.status} state and can not be updated.")


def _describe(stack: Stack) -> dict[str, Any]:
    return {
        "StackId": stack.stack_id,
        "StackName": stack.name,
        "ChangeSetId": stack.change_set_id,
        "Description": stack.template.get("Description"),
        "Parameters": [
            {"ParameterKey": key, "ParameterValue": ",".join(value) if isinstance(value, list) else value}
            for key, value in stack.parameters.items()
        ],
        "CreationTime": stack.created_at,
        "DeletionTime": stack.deleted_at,
        "LastUpdatedTime": stack.updated_at,
        "StackStatus": stack.status,
        "StackStatusReason": stack.reason,
        "DisableRollback": False,
        "NotificationARNs": [],
        "Outputs": stack.outputs,
        "RoleARN": stack.role_arn,
        "Tags": [{"Key": key, "Value": value} for key, value in stack.tags.items()],
        "EnableTerminationProtection": stack.termination_protection,
    }


def _resource(stack: Stack, resource: StackResource) -> dict[str, Any]:
    return {
        "StackId": stack.stack_id,
        "StackName": stack.name,
        "LogicalResourceId": resource.logical_id,
        "PhysicalResourceId": resource.physical_id,
        "ResourceType": resource.resource_type,
        "Timestamp": resource.updated_at,
        "LastUpdatedTimestamp": resource.updated_at,
        "ResourceStatus": resource.status,
        "ResourceStatusReason": resource.reason,
    }
