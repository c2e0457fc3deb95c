"""The variables that make programs on instances and in containers use the stage's proxy."""

from aws_cdk import Aws

from infra.stages import Stage
from infra.stages.network_plan import has_interface_endpoints

_ON_THE_INSTANCE = ("localhost", "127.0.0.1", "169.254.169.254", "169.254.170.2")
"""The instance itself, its metadata, and the credentials of its tasks (Amazon ECS developer guide, "Using an HTTP proxy
for Amazon ECS Linux container instances")."""


def proxy_variables(stage: Stage) -> dict[str, str]:
    """Return the variables, in upper and lower case because programs differ; none if the stage has no proxy."""
    if stage.proxy is None:
        return {}
    region = f"{Aws.REGION}.{Aws.URL_SUFFIX}"
    # S3 has a free gateway endpoint.
    aws = [f"s3.{region}", f".s3.{region}"] if stage.vpc is None or stage.vpc.private_route_table_ids else []
    if has_interface_endpoints(stage):
        aws = [f".{region}"]
    network = [stage.vpc_cidr] if stage.vpc is None else []
    url, direct = stage.proxy.url, ",".join((*_ON_THE_INSTANCE, *network, *aws, *stage.proxy.bypass))
    values = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": direct}
    return {**values, **{name.lower(): value for name, value in values.items()}}
