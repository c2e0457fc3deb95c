"""Checks of what has to be there before a stage is deployed, and of what must not be there twice."""

from collections.abc import Iterator

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, error_code, ok, problem
from infra.stages import Stage

BOOTSTRAP_VERSION = 8
"""What the templates' assets ask for (`requiresBootstrapStackVersion` in the cloud assembly's manifests)."""

_GITHUB = "token.actions.githubusercontent.com"

BOOTSTRAP = "CDK bootstrap"
ROLES = "service-linked roles"
IMAGE = "machine image"
BOUNDARY = "permissions boundary"
OIDC = "OIDC provider"


def bootstrap(account: Account, stage: Stage) -> Iterator[Finding]:
    command = " ".join(["cdk bootstrap", *stage.bootstrap_options, f"aws://{account.id}/{account.region}"])
    version = _parameter(account, stage.bootstrap_parameter)
    if version is None:
        yield problem(BOOTSTRAP, f"account {account.id} is not bootstrapped in {account.region}", command)
    elif int(version) < BOOTSTRAP_VERSION:
        yield problem(BOOTSTRAP, f"its version is {version}; {BOOTSTRAP_VERSION} is needed", command)
    else:
        yield ok(BOOTSTRAP, f"version {version}")


def service_linked_roles(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check Spot's role, the only one needed beforehand: a request on someone else's behalf does not make it."""
    services = ["spot", "batch", "ecs", *(["fsx"] if stage.fsx_gib else [])]
    for service in (f"{name}.amazonaws.com" for name in services):
        roles = account.pages("iam", "list_roles", "Roles", PathPrefix=f"/aws-service-role/{service}/")
        role = next(roles, None)
        if role is not None:
            yield ok(ROLES, f"{service} has {role['RoleName']}")
        elif service == "spot.amazonaws.com":
            text = f"{service} has none: EC2 starts no Spot instance for Batch without it"
            yield problem(ROLES, text, f"aws iam create-service-linked-role --aws-service-name {service}")
        else:
            yield ok(ROLES, f"{service} has none yet, and makes it when the stage is deployed")


def machine_image(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the AMI which the settings give is there, usable from this account, with the root device they name."""
    given = stage.machine_image
    if given is None:
        yield ok(IMAGE, "none is given: the stage's own, or AWS's for Batch")
        return
    if given.startswith("ssm:"):
        name = given.removeprefix("ssm:")
        ami_id = _parameter(account, name)
        if ami_id is None:
            yield problem(
                IMAGE,
                f"there is no parameter {name} in {account.region}",
                f"aws ssm put-parameter --region {account.region} --type String --data-type aws:ec2:image "
                f"--name {name} --value ami-…; or machine_image=None in infra/settings.py",
            )
            return
    else:
        name, ami_id = "`machine_image`", given
    try:
        images = account.client("ec2").describe_images(ImageIds=[ami_id])["Images"]
    except ClientError as error:
        if not error_code(error).startswith("InvalidAMIID"):
            raise
        images = []
    if not images:
        yield problem(
            IMAGE,
            f"{name} says {ami_id}, which this account does not see in {account.region}",
            "share the AMI with the account, copy it to the region, or name another",
        )
        return
    root = images[0].get("RootDeviceName", "")
    if root != stage.root_device_name:
        yield problem(
            IMAGE,
            f"the root device of {ami_id} is {root}, in the settings {stage.root_device_name}: instances would get a "
            "second volume beside a root that stays small",
            f'root_device_name="{root}" in infra/settings.py',
        )
    else:
        yield ok(IMAGE, f"{ami_id} ({images[0].get('Name', 'without a name')}) is visible")


def permissions_boundary(account: Account, stage: Stage) -> Iterator[Finding]:
    if stage.permissions_boundary is None:
        yield ok(BOUNDARY, "none is named: the stage makes one")
        return
    arn = f"arn:{account.partition}:iam::{account.id}:policy/{stage.permissions_boundary}"
    try:
        account.client("iam").get_policy(PolicyArn=arn)
    except ClientError as error:
        if error_code(error) != "NoSuchEntity":
            raise
        next_step = "correct `permissions_boundary` in infra/settings.py, or None to have one made"
        yield problem(BOUNDARY, f"there is no policy {arn}", next_step)
    else:
        yield ok(BOUNDARY, f"{arn} is there")


def oidc_provider(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check GitHub's OIDC provider: an account can have one, which the stage makes or is told of."""
    if stage.deploy_from is None:
        yield ok(OIDC, "none is needed: `deploy_from` is not set")
        return
    iam = account.client("iam")
    listed = [item["Arn"] for item in iam.list_open_id_connect_providers()["OpenIDConnectProviderList"]]
    there = next((arn for arn in listed if arn.endswith(f"/{_GITHUB}")), None)
    named = stage.deploy_from.oidc_provider_arn
    if named is not None:
        if named in listed:
            yield ok(OIDC, f"{named} is there")
        else:
            yield problem(
                OIDC,
                f"there is no provider {named}",
                f"oidc_provider_arn={f'{there!r}' if there else 'None, to have one made,'} in infra/settings.py",
            )
        return
    if there is None:
        yield ok(OIDC, "there is none of GitHub's yet: the stage makes it")
        return
    tags = {
        tag["Key"]: tag["Value"] for tag in iam.get_open_id_connect_provider(OpenIDConnectProviderArn=there)["Tags"]
    }
    if tags.get("trainyard:stage") == stage.name:
        yield ok(OIDC, f"{there} is the stage's own")
    else:
        yield problem(
            OIDC,
            f"{there} is there already, and an account can have one only",
            f'oidc_provider_arn="{there}" under `deploy_from` in infra/settings.py',
        )


def _parameter(account: Account, name: str) -> str | None:
    """Return a parameter's value; None where there is none."""
    try:
        value: str = account.client("ssm").get_parameter(Name=name)["Parameter"]["Value"]
    except ClientError as error:
        if error_code(error) != "ParameterNotFound":
            raise
        return None
    return value
