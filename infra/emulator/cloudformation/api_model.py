"""Types of resources that are made through the API of their service, as CloudFormation makes them on AWS.

The requests go to the embedded AWS itself, over HTTP: what the service refuses there, a stack is refused in its words.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from botocore import xform_name
from moto.cloudformation.utils import random_suffix

from infra.emulator.client import session
from infra.emulator.credentials import Credentials
from infra.emulator.resource_model import AccountRegion, ChangeableModel, Properties
from infra.emulator.shapes import to_api

_ACCOUNT_HEADER = "x-moto-account-id"


class Api:
    """One service, as the account and region of a stack see it."""

    endpoint: ClassVar[str]
    """The server's own address; set by `install`."""
    credentials: ClassVar[Credentials]
    """The server's own; set by `install`."""

    def __init__(self, service: str, place: AccountRegion) -> None:
        self.service = service
        self.place = place

    def __call__(self, operation: str, /, **properties: Any) -> dict[str, Any]:
        """Call an operation with properties of a template, in whose shape they are given.

        Raises botocore's ClientError where the service refuses, PropertyError on what the operation does not take.
        """
        request = to_api(self.service, operation, {name: item for name, item in properties.items() if item is not None})
        client = _client(self.endpoint, self.credentials, self.service, self.place)
        answer: dict[str, Any] = getattr(client, xform_name(operation))(**request)
        return answer


class ApiResource:
    """A resource as its stack knows it."""

    def __init__(self, name: str, properties: Properties, *, ref: str | None = None, **attributes: Any) -> None:
        """`ref`: what Ref gives, where it is not the name; `attributes`: what Fn::GetAtt gives."""
        self.name = name
        self.properties = properties
        self.physical_resource_id = ref or name
        self.attributes = attributes
        self.model: type[ApiModel] = ApiModel
        """The type; set by its `create` and `update`."""

    def delete(self, account_id: str, region: str) -> None:
        self.model.remove(Api(self.model.service, AccountRegion(account_id, region)), self)

    def get_cfn_attribute(self, attribute: str) -> Any:
        """Answer Fn::GetAtt. Raises NotImplementedError on an attribute that the type does not have."""
        if attribute not in self.attributes:
            raise NotImplementedError(attribute)
        return self.attributes[attribute]


class ApiModel(ChangeableModel):
    """A type of resource; `make`, `change` and `remove` say by which operations."""

    service: ClassVar[str] = ""
    """As boto3 calls it."""
    replaced_by: ClassVar[frozenset[str]] = frozenset()
    """Properties of which a change takes another resource, besides the name."""

    @classmethod
    def make(cls, api: Api, name: str, properties: Properties) -> ApiResource:
        """Make one."""
        raise NotImplementedError

    @classmethod
    def change(cls, api: Api, resource: ApiResource, properties: Properties) -> None:
        """Bring one to these properties in place; `resource` has those it had before."""
        raise NotImplementedError

    @classmethod
    def remove(cls, api: Api, resource: ApiResource) -> None:
        """Delete one."""
        raise NotImplementedError

    @classmethod
    def create(cls, name: str, properties: Properties, place: AccountRegion) -> ApiResource:
        return cls._own(cls.make(Api(cls.service, place), name, properties))

    @classmethod
    def update(cls, resource: Any, name: str, properties: Properties, place: AccountRegion) -> ApiResource:
        del name  # that of the template counts
        api, old = Api(cls.service, place), resource.properties
        given = properties.get(cls.name_property)
        renamed = given is not None and given != resource.name
        if renamed or any(properties.get(key) != old.get(key) for key in cls.replaced_by):
            replacement = cls.make(api, given or another_name(resource.name), properties)
            cls.remove(api, resource)
            return cls._own(replacement)
        cls.change(api, resource, properties)
        ref = resource.physical_resource_id
        return cls._own(ApiResource(resource.name, properties, ref=ref, **resource.attributes))

    @classmethod
    def _own(cls, resource: ApiResource) -> ApiResource:
        resource.model = cls
        return resource


def install(endpoint: str, credentials: Credentials) -> None:
    """Say where the server will answer, and to whom. Call it before the server starts."""
    Api.endpoint = endpoint
    Api.credentials = credentials


def document(value: Any) -> str | None:
    """A JSON document of a template, as APIs take it."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def without(properties: Properties, *names: str) -> dict[str, Any]:
    return {name: value for name, value in properties.items() if name not in names}


def another_name(name: str) -> str:
    """A fresh name beside one that CloudFormation made up: both exist for a moment."""
    return f"{name.rpartition('-')[0] or name}-{random_suffix()}"


def tag_changes(old: Properties, new: Properties) -> tuple[list[dict[str, str]], list[str]]:
    """The tags to set, and the keys of those to take away."""
    gone = _keys(old.get("Tags", [])) - _keys(new.get("Tags", []))
    return list(new.get("Tags", [])), sorted(gone)


def _keys(tags: Iterable[Mapping[str, str]]) -> set[str]:
    return {tag["Key"] for tag in tags}


@functools.cache
def _client(endpoint: str, credentials: Credentials, service: str, place: AccountRegion) -> Any:
    make: Any = session(credentials).client  # typed by service name, of which any may come
    client = make(service, region_name=place.region, endpoint_url=endpoint)

    def as_account(request: Any, **_: Any) -> None:
        request.headers[_ACCOUNT_HEADER] = place.account_id

    client.meta.events.register("before-sign", as_account)
    return client
