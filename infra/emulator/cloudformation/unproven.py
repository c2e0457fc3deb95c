"""A resource whose type has no service behind it: kept on record, never silently skipped.

It shows in DescribeStackResources, its type is listed as "unproven" by /trainyard/health, and templates that refer to
it resolve: to the name it was given, or to values made from its stack and logical id, the same each time.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

INERT_TYPES = frozenset({"AWS::CDK::Metadata"})
"""Types that do nothing on AWS either, so that there is nothing left to prove."""

ARN_AS_REF = frozenset(
    {
        "AWS::IAM::OIDCProvider",
        "AWS::SNS::Subscription",
        "AWS::SecretsManager::Secret",
        "AWS::CertificateManager::Certificate",
    }
)
"""Types whose Ref is their ARN; of most others it is a name or an id."""


class UnprovenResource:
    """A resource on record: its type, name and properties."""

    def __init__(
        self,
        resource_type: str,
        *,
        stack_name: str,
        logical_id: str,
        properties: Mapping[str, Any],
        account_id: str,
        region: str,
    ) -> None:
        self.resource_type = resource_type
        self.properties = properties
        _, service, kind = (*resource_type.split("::"), "", "")[:3]
        suffix = hashlib.sha256(f"{stack_name}/{logical_id}".encode()).hexdigest()[:12]
        given = properties.get(f"{kind}Name") or properties.get("Name")
        name = given if isinstance(given, str) else f"{stack_name}-{logical_id}-{suffix}"
        self._arn = f"arn:aws:{service.lower()}:{region}:{account_id}:{kind.lower()}/{name}"
        self.physical_resource_id = self._arn if resource_type in ARN_AS_REF else name

    def get_cfn_attribute(self, attribute: str) -> Any:
        """An attribute as it could be: the property of that name, an ARN where it asks for one, else made up."""
        if attribute in self.properties:
            return self.properties[attribute]
        if attribute.endswith("Arn"):
            return self._arn
        if attribute.endswith("Id"):
            return self.physical_resource_id
        return f"{self.physical_resource_id}-{attribute}"

    def update(self, properties: Mapping[str, Any]) -> None:
        self.properties = properties
