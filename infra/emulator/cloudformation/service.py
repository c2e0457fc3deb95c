"""The stacks and change sets of one account and region, and the operations on them."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from threading import RLock
from typing import Any

from moto.cloudformation.exceptions import AlreadyExistsException, ValidationError
from moto.cloudformation.utils import get_stack_from_s3_url
from moto.core.exceptions import ServiceException

from infra.emulator.cloudformation.changes import changes_of
from infra.emulator.cloudformation.resources import is_recorded
from infra.emulator.cloudformation.stack import FINAL_FAILURES, Stack
from infra.emulator.cloudformation.template import TemplateError, parse_template

NO_CHANGES = "The submitted information didn't contain changes. Submit different information to create a change set."
"""The CDK CLI recognises an empty change set by these words of AWS."""


class ChangeSetNotFoundError(ServiceException):
    """The error AWS names ChangeSetNotFound."""

    code = "ChangeSetNotFound"


@dataclass(kw_only=True)
class Submission:
    """What CreateStack, UpdateStack and CreateChangeSet are given."""

    stack_name: str
    template_body: str | None
    """None: the stack's own template again."""
    parameters: list[dict[str, Any]]
    """Each with a ParameterValue, or UsePreviousValue."""
    tags: Mapping[str, str] | None
    """None: the stack's own tags."""
    role_arn: str | None
    client_request_token: str | None


@dataclass(kw_only=True)
class ChangeSet:
    """A change of a stack, to look at before it is executed."""

    name: str
    change_set_id: str
    stack: Stack
    kind: str
    """CREATE or UPDATE."""
    submission: Submission
    template_body: str
    parameters: Mapping[str, str]
    tags: Mapping[str, str]
    description: str | None
    changes: list[dict[str, Any]]
    status: str
    execution_status: str
    reason: str | None
    created_at: datetime = field(default_factory=lambda: datetime.now(timezone.utc))


class StackService:
    """All stacks of one account and region. Every operation holds `lock`: each request has a thread of its own."""

    def __init__(self, account_id: str, region: str) -> None:
        self.account_id = account_id
        self.region = region
        self.lock = RLock()
        self.stacks: dict[str, Stack] = {}
        """Those that exist, by name."""
        self.deleted: list[Stack] = []
        self.change_sets: dict[str, ChangeSet] = {}
        """By ARN."""

    # Stacks

    def create_stack(self, submission: Submission, *, rolls_back: bool) -> Stack:
        if submission.stack_name in self.stacks:
            raise AlreadyExistsException(f"Stack [{submission.stack_name}] already exists")
        stack = self._new_stack(submission.stack_name)
        try:
            self._fill_in(stack, submission)
            stack.create(submission.template_body or "", self._parameters(stack, submission), rolls_back=rolls_back)
        except TemplateError as error:
            del self.stacks[stack.name]
            raise ValidationError(message=str(error)) from None
        return stack

    def update_stack(self, submission: Submission) -> Stack:
        stack = self.stack(submission.stack_name)
        self._check_updatable(stack)
        body = stack.template_body if submission.template_body is None else submission.template_body
        tags = stack.tags if submission.tags is None else submission.tags
        try:
            parameters = self._parameters(stack, submission, body)
            if stack.is_same(body, parameters, tags):
                raise ValidationError(message="No updates are to be performed.")
            self._fill_in(stack, submission)
            stack.update(body, parameters)
        except TemplateError as error:
            raise ValidationError(message=str(error)) from None
        return stack

    def delete_stack(self, name_or_id: str, *, client_request_token: str | None) -> None:
        """Deleting what does not exist is no error, on AWS as here."""
        stack = next((item for item in self.stacks.values() if name_or_id in (item.name, item.stack_id)), None)
        if stack is None:
            return
        if stack.termination_protection:
            raise ValidationError(
                message=f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
            )
        stack.client_request_token = client_request_token
        stack.delete()
        if stack.status == "DELETE_COMPLETE":
            del self.stacks[stack.name]
            self.deleted.append(stack)

    def stack(self, name_or_id: str) -> Stack:
        """A stack by name, or by id even after it is gone. Raises ValidationError where there is none."""
        for stack in self.stacks.values():
            if name_or_id in (stack.name, stack.stack_id):
                return stack
        for stack in self.deleted:
            if name_or_id == stack.stack_id:
                return stack
        raise ValidationError(name_or_id)

    def recorded_types(self) -> set[str]:
        """Return types of resources that are on record without a service behind them."""
        with self.lock:
            found = {one.resource_type for stack in self.stacks.values() for one in stack.resources.values()}
            return {name for name in found if is_recorded(name)} - {"AWS::CDK::Metadata"}

    def template_from(self, body: str | None, url: str | None) -> str | None:
        """A template given as text, or lying in the emulated S3."""
        if url:
            return str(get_stack_from_s3_url(url, account_id=self.account_id, partition="aws"))
        return body

    # Change sets

    def create_change_set(self, submission: Submission, *, name: str, kind: str, description: str | None) -> ChangeSet:
        if kind == "IMPORT":
            raise ValidationError(message="The embedded AWS does not import resources into stacks.")
        exists = submission.stack_name in self.stacks or submission.stack_name.startswith("arn:")
        if kind == "UPDATE":
            stack = self.stack(submission.stack_name)
            self._check_updatable(stack)
        elif exists and self.stack(submission.stack_name).status != "REVIEW_IN_PROGRESS":
            raise ValidationError(
                message=f"Stack [{submission.stack_name}] already exists and cannot be created again with the "
                f"changeSet [{name}]."
            )
        else:
            stack = self.stacks.get(submission.stack_name) or self._new_stack(submission.stack_name)
        for item in [item for item in self.change_sets.values() if item.name == name and item.stack is stack]:
            if item.execution_status != "EXECUTE_COMPLETE":
                raise AlreadyExistsException(f"ChangeSet {name} already exists")
            del self.change_sets[item.change_set_id]
        body = stack.template_body if submission.template_body is None else submission.template_body
        tags = stack.tags if submission.tags is None else submission.tags
        try:
            parameters = self._parameters(stack, submission, body)
            same = stack.status != "REVIEW_IN_PROGRESS" and stack.is_same(body, parameters, tags)
            changes = changes_of(stack, parse_template(body), parameters)
        except TemplateError as error:
            if stack.status == "REVIEW_IN_PROGRESS" and not stack.change_set_id:
                del self.stacks[stack.name]
            raise ValidationError(message=str(error)) from None
        change_set = ChangeSet(
            name=name,
            change_set_id=f"arn:aws:cloudformation:{self.region}:{self.account_id}:changeSet/{name}/{uuid.uuid4()}",
            stack=stack,
            kind=kind,
            submission=submission,
            template_body=body,
            parameters=parameters,
            tags=tags,
            description=description,
            changes=[] if same else changes,
            status="FAILED" if same else "CREATE_COMPLETE",
            execution_status="UNAVAILABLE" if same else "AVAILABLE",
            reason=NO_CHANGES if same else None,
        )
        stack.change_set_id = change_set.change_set_id
        self.change_sets[change_set.change_set_id] = change_set
        return change_set

    def change_set(self, name_or_id: str, stack_name: str | None) -> ChangeSet:
        """Find a change set by ARN, or by its name among its own stack's. Raises ChangeSetNotFoundError."""
        for item in self.change_sets.values():
            if name_or_id == item.change_set_id or (
                name_or_id == item.name and stack_name in (item.stack.name, item.stack.stack_id)
            ):
                return item
        raise ChangeSetNotFoundError(f"ChangeSet [{name_or_id}] does not exist")

    def execute_change_set(self, change_set: ChangeSet, client_request_token: str | None, *, rolls_back: bool) -> None:
        if change_set.execution_status != "AVAILABLE":
            raise ValidationError(
                message=f"ChangeSet [{change_set.change_set_id}] cannot be executed in its current status of "
                f"[{change_set.status}]"
            )
        stack = change_set.stack
        self._fill_in(stack, change_set.submission)
        stack.client_request_token = client_request_token
        try:
            if stack.status == "REVIEW_IN_PROGRESS":
                stack.create(change_set.template_body, change_set.parameters, rolls_back=rolls_back)
            else:
                stack.update(change_set.template_body, change_set.parameters)
        except TemplateError as error:
            raise ValidationError(message=str(error)) from None
        change_set.execution_status = "EXECUTE_COMPLETE"
        # What was made for an older state of the stack can no longer be executed.
        self.change_sets = {
            key: item for key, item in self.change_sets.items() if item.stack is not stack or item is change_set
        }

    def delete_change_set(self, name_or_id: str, stack_name: str | None) -> None:
        """Deleting what does not exist is no error, on AWS as here."""
        try:
            change_set = self.change_set(name_or_id, stack_name)
        except ChangeSetNotFoundError:
            return
        del self.change_sets[change_set.change_set_id]

    # Ways to the rest

    def _new_stack(self, name: str) -> Stack:
        stack = Stack(
            name, account_id=self.account_id, region=self.region, neighbours=lambda: list(self.stacks.values())
        )
        self.stacks[name] = stack
        return stack

    def _fill_in(self, stack: Stack, submission: Submission) -> None:
        if submission.tags is not None:
            stack.tags = dict(submission.tags)
        stack.role_arn = submission.role_arn or stack.role_arn
        stack.client_request_token = submission.client_request_token

    def _parameters(self, stack: Stack, submission: Submission, body: str | None = None) -> dict[str, str]:
        """Return the values of all parameters. Raises ValidationError on one that should be as before and never was."""
        values = {}
        for parameter in submission.parameters:
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
            # else: before, it was the default; now it is the default of the new template
        if not submission.parameters and body is not None and body == stack.template_body:
            return dict(stack.given_parameters)
        return values

    def _check_updatable(self, stack: Stack) -> None:
        if stack.status in FINAL_FAILURES or not stack.status.endswith("_COMPLETE"):
            raise ValidationError(message=f"Stack:{stack.stack_id} is in {stack.status} state and can not be updated.")
