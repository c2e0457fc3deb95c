"""CloudFormation's API in front of `StackService`, instead of moto's own: what the CDK CLI and the command line ask."""

import json
from typing import Any, ClassVar

from moto.cloudformation import urls
from moto.cloudformation.exceptions import ValidationError
from moto.cloudformation.responses import CloudFormationResponse, get_template_summary_response_from_template
from moto.cloudtrail.responses import CloudTrailResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import camelcase_to_underscores

from infra.emulator.cloudformation.records import StackResource
from infra.emulator.cloudformation.service import ChangeSet, StackService, Submission
from infra.emulator.cloudformation.stack import Stack
from infra.emulator.cloudformation.template import no_echo_parameters

_services: dict[tuple[str, str], StackService] = {}


def install() -> None:
    """Answer CloudFormation's requests from here on. Call it before the server starts."""
    urls.url_paths["{0}/$"] = StackResponse.dispatch
    CloudTrailResponse.lookup_events = _no_events


def _no_events(_response: CloudTrailResponse) -> str:
    """Answer CloudTrail's LookupEvents, by which the CDK CLI explains a failed deployment.

    moto has no answer, and the CLI asks again for half a minute.
    """
    return json.dumps({"Events": []})


def recorded_types() -> list[str]:
    """Return types of resources that exist on record only, in all accounts and regions."""
    return sorted({name for service in list(_services.values()) for name in service.recorded_types()})


class StackResponse(CloudFormationResponse):
    """Reads each request's parameters and shapes its answer."""

    RESPONSE_KEY_PATH_TO_TRANSFORMER: ClassVar[dict[str, Any]] = {}
    """Moto's bring its own stacks into shape."""

    @property
    def service(self) -> StackService:
        key = (self.current_account, self.region)
        return _services.setdefault(key, StackService(*key))

    def call_action(self) -> Any:
        name = camelcase_to_underscores(self._get_action())
        if name not in vars(StackResponse):
            setattr(self, name, self._refuse)  # moto's own knows none of these stacks
        with self.service.lock:
            return super().call_action()

    def _refuse(self) -> ActionResult:
        raise ValidationError(message=f"The embedded AWS does not implement {self._get_action()}.")

    # Stacks

    def create_stack(self) -> ActionResult:
        if self._get_param("OnFailure") == "DELETE":
            raise ValidationError(message="The embedded AWS does not implement OnFailure DELETE.")
        stack = self.service.create_stack(self._submission(), rolls_back=self._rolls_back)
        stack.termination_protection = bool(self._get_bool_param("EnableTerminationProtection"))
        return ActionResult({"StackId": stack.stack_id})

    def update_stack(self) -> ActionResult:
        return ActionResult({"StackId": self.service.update_stack(self._submission()).stack_id})

    def delete_stack(self) -> ActionResult:
        self.service.delete_stack(
            self._get_param("StackName"),
            client_request_token=self._get_param("ClientRequestToken"),
        )
        return EmptyResult()

    def update_termination_protection(self) -> ActionResult:
        self._stack.termination_protection = bool(self._get_bool_param("EnableTerminationProtection"))
        return ActionResult({"StackId": self._stack.stack_id})

    def describe_stacks(self) -> ActionResult:
        name = self._get_param("StackName")
        stacks = [self.service.stack(name)] if name else list(self.service.stacks.values())
        return ActionResult({"Stacks": [_describe(stack) for stack in stacks]})

    def describe_stack_events(self) -> ActionResult:
        stack = self._stack
        return ActionResult(
            {
                "StackEvents": [
                    {
                        "StackId": stack.stack_id,
                        "StackName": stack.name,
                        "EventId": event.event_id,
                        "LogicalResourceId": event.logical_id,
                        "PhysicalResourceId": event.physical_id,
                        "ResourceType": event.resource_type,
                        "Timestamp": event.timestamp,
                        "ResourceStatus": event.status,
                        "ResourceStatusReason": event.reason,
                        "ClientRequestToken": event.client_request_token,
                    }
                    for event in reversed(stack.events)
                ]
            }
        )

    def describe_stack_resource(self) -> ActionResult:
        stack, logical_id = self._stack, self._get_param("LogicalResourceId")
        if logical_id not in stack.resources:
            raise ValidationError(message=f"Resource {logical_id} does not exist for stack {stack.name}")
        return ActionResult({"StackResourceDetail": _resource(stack, stack.resources[logical_id])})

    def describe_stack_resources(self) -> ActionResult:
        stack, logical_id = self._stack, self._get_param("LogicalResourceId")
        return ActionResult(
            {
                "StackResources": [
                    _resource(stack, resource)
                    for resource in stack.resources.values()
                    if logical_id in (None, resource.logical_id)
                ]
            }
        )

    def list_stack_resources(self) -> ActionResult:
        stack = self._stack
        return ActionResult(
            {"StackResourceSummaries": [_resource(stack, resource) for resource in stack.resources.values()]}
        )

    # Templates

    def get_template(self) -> ActionResult:
        return ActionResult({"TemplateBody": self._stack.template_body, "StagesAvailable": ["Original", "Processed"]})

    def get_template_summary(self) -> ActionResult:
        name = self._get_param("StackName")
        body = self._stack.template_body if name else self._template()
        return ActionResult(get_template_summary_response_from_template(body))

    # Change sets

    def create_change_set(self) -> ActionResult:
        change_set = self.service.create_change_set(
            self._submission(),
            name=self._get_param("ChangeSetName"),
            kind=self._get_param("ChangeSetType") or "UPDATE",
            description=self._get_param("Description"),
        )
        return ActionResult({"Id": change_set.change_set_id, "StackId": change_set.stack.stack_id})

    def describe_change_set(self) -> ActionResult:
        change_set = self._change_set
        return ActionResult(
            _summary(change_set)
            | {
                "Parameters": [
                    {"ParameterKey": key, "ParameterValue": value} for key, value in change_set.parameters.items()
                ],
                "Changes": change_set.changes,
                "Tags": [{"Key": key, "Value": value} for key, value in change_set.tags.items()],
            }
        )

    def execute_change_set(self) -> ActionResult:
        token = self._get_param("ClientRequestToken")
        self.service.execute_change_set(self._change_set, token, rolls_back=self._rolls_back)
        return EmptyResult()

    def delete_change_set(self) -> ActionResult:
        self.service.delete_change_set(self._get_param("ChangeSetName"), self._get_param("StackName"))
        return EmptyResult()

    # Parts of requests

    @property
    def _rolls_back(self) -> bool:
        return not self._get_bool_param("DisableRollback")

    @property
    def _stack(self) -> Stack:
        return self.service.stack(self._get_param("StackName"))

    @property
    def _change_set(self) -> ChangeSet:
        return self.service.change_set(self._get_param("ChangeSetName"), self._get_param("StackName"))

    def _template(self) -> str | None:
        return self.service.template_from(self._get_param("TemplateBody"), self._get_param("TemplateURL"))

    def _submission(self) -> Submission:
        body = None if self._get_bool_param("UsePreviousTemplate") else self._template()
        if body is None and not self._get_bool_param("UsePreviousTemplate"):
            raise ValidationError(message="Either Template URL or Template Body must be specified.")
        tags = self._get_param("Tags")
        return Submission(
            stack_name=self._get_param("StackName"),
            template_body=body,
            parameters=self._get_param("Parameters", []),
            tags=None if tags is None else {tag["Key"]: tag["Value"] for tag in tags},
            role_arn=self._get_param("RoleARN"),
            client_request_token=self._get_param("ClientRequestToken"),
        )


def _describe(stack: Stack) -> dict[str, Any]:
    no_echo = no_echo_parameters(stack.template)
    return {
        "StackId": stack.stack_id,
        "StackName": stack.name,
        "ChangeSetId": stack.change_set_id,
        "Description": stack.description,
        "Parameters": [
            {
                "ParameterKey": key,
                "ParameterValue": "****" if key in no_echo else ",".join(value) if isinstance(value, list) else value,
            }
            for key, value in stack.parameters.items()
        ],
        "CreationTime": stack.created_at,
        "DeletionTime": stack.deleted_at,
        "LastUpdatedTime": stack.updated_at,
        "StackStatus": stack.status,
        "StackStatusReason": stack.reason,
        "DisableRollback": False,
        "NotificationARNs": [],
        "Capabilities": ["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM", "CAPABILITY_AUTO_EXPAND"],
        "Outputs": [
            {
                "OutputKey": output.key,
                "OutputValue": output.value,
                "Description": output.description,
                "ExportName": output.export_name,
            }
            for output in stack.outputs
        ],
        "RoleARN": stack.role_arn,
        "Tags": [{"Key": key, "Value": value} for key, value in stack.tags.items()],
        "EnableTerminationProtection": stack.termination_protection,
        "DriftInformation": {"StackDriftStatus": "NOT_CHECKED"},
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
        "DriftInformation": {"StackResourceDriftStatus": "NOT_CHECKED"},
    }


def _summary(change_set: ChangeSet) -> dict[str, Any]:
    return {
        "ChangeSetName": change_set.name,
        "ChangeSetId": change_set.change_set_id,
        "StackId": change_set.stack.stack_id,
        "StackName": change_set.stack.name,
        "Description": change_set.description,
        "CreationTime": change_set.created_at,
        "ExecutionStatus": change_set.execution_status,
        "Status": change_set.status,
        "StatusReason": change_set.reason,
    }
