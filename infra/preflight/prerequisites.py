"""Checks of what a stage needs before its first deployment, and of resources that an account can have only once."""

import json
from collections.abc import Iterator

from botocore.exceptions import ClientError

from infra.preflight.account import Account, Finding, error_code, ok, problem, unknown
from infra.stages import Stage
from infra.stages.amis import ami_sources, is_ami, recorded_ami

BOOTSTRAP_VERSION = 8
"""Version that the templates' assets need (`requiresBootstrapStackVersion` in the cloud assembly's manifests)."""

_GITHUB = "token.actions.githubusercontent.com"

BOOTSTRAP = "CDK bootstrap"
ROLES = "service-linked roles"
EBS = "EBS key"
IMAGE = "machine image"
BOUNDARY = "permissions boundary"
OIDC = "OIDC provider"
SUBJECT = "OIDC subject"


def bootstrap(account: Account, stage: Stage) -> Iterator[Finding]:
    command = " ".join(["cdk bootstrap", *stage.bootstrap_options, f"aws://{account.id}/{account.region}"])
    version = account.parameter(stage.bootstrap_parameter)
    if version is None:
        yield problem(BOOTSTRAP, f"account {account.id} is not bootstrapped in {account.region}", command)
    elif int(version) < BOOTSTRAP_VERSION:
        yield problem(BOOTSTRAP, f"version {version} is too old; the stage needs {BOOTSTRAP_VERSION}", command)
    else:
        yield ok(BOOTSTRAP, f"version {version}")


def service_linked_roles(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check the roles. Only Spot's must exist beforehand, because requests by another service do not create it."""
    services = ["spot", "batch", "ecs", *(["fsx"] if stage.fsx_gib else [])]
    for service in (f"{name}.amazonaws.com" for name in services):
        roles = account.pages("iam", "list_roles", "Roles", PathPrefix=f"/aws-service-role/{service}/")
        role = next(roles, None)
        if role is not None:
            yield ok(ROLES, f"{service}: {role['RoleName']}")
        elif service == "spot.amazonaws.com":
            text = f"{service}: no role, and without it EC2 starts no Spot instances for Batch"
            yield problem(ROLES, text, f"aws iam create-service-linked-role --aws-service-name {service}")
        else:
            yield ok(ROLES, f"{service}: no role yet; the deployment creates it")


def ebs_key(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that the roles that start instances may use the key of the volumes; without it, no instance starts.

    Source: EC2 Auto Scaling user guide, "Required AWS KMS key policy for use with encrypted volumes".
    """
    key = stage.ebs_key_arn or str(account.client("ec2").get_ebs_default_kms_key_id()["KmsKeyId"])
    if key.endswith("alias/aws/ebs"):
        yield ok(EBS, "AWS's own, which needs no policy")
        return
    what, kms = f"{key} ({'ebs_key_arn' if stage.ebs_key_arn else 'default of the account'})", account.client("kms")
    try:
        state = kms.describe_key(KeyId=key)["KeyMetadata"]["KeyState"]
    except ClientError as error:
        if error_code(error) != "NotFoundException":
            raise
        state = "Missing"
    if state != "Enabled":
        yield problem(EBS, f"{what}: {state}", "enable the key, or set `ebs_key_arn` in infra/settings.py to another")
        return
    statements = json.loads(kms.get_key_policy(KeyId=key, PolicyName="default")["Policy"])["Statement"]
    grants = [grant["GranteePrincipal"] for grant in account.pages("kms", "list_grants", "Grants", KeyId=key)]
    admitted = json.dumps([grants, *(one.get("Principal") for one in statements if one["Effect"] == "Allow")])
    for role in (
        "autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling",
        "spot.amazonaws.com/AWSServiceRoleForEC2Spot",
    ):
        arn = f"arn:{account.partition}:iam::{account.id}:role/aws-service-role/{role}"
        if f'"{arn}"' in admitted or '"*"' in admitted:
            yield ok(EBS, f"{what} admits {role.rpartition('/')[2]}")
        else:
            yield problem(
                EBS,
                f"{what} does not admit {role.rpartition('/')[2]}, so instances cannot start",
                f"aws kms create-grant --region {account.region} --key-id {key} --grantee-principal {arn} --operations "
                "Encrypt Decrypt ReEncryptFrom ReEncryptTo GenerateDataKey GenerateDataKeyWithoutPlaintext DescribeKey "
                "CreateGrant",
            )


def machine_image(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check that custom and recorded AMIs exist, are visible to this account, and have the configured root device."""
    yield from _machine_image(account, stage, stage.pool.id, "machine_image", stage.root_device_name)
    yield from _machine_image(account, stage, stage.cpu_pool_id, "cpu_machine_image", stage.cpu_root_device_name)


def _machine_image(account: Account, stage: Stage, pool: str, setting: str, root_device_name: str) -> Iterator[Finding]:
    source, is_custom = ami_sources(stage)[pool], getattr(stage, setting) is not None
    recorded = recorded_ami(stage, source)
    command = f"python -m infra.amis update --stage {stage.name}"
    if recorded is None and not is_custom:
        yield ok(IMAGE, f"{pool}: every deployment takes the newest AMI; to record one, {command}")
        return
    name, ami_id, instead = f"`{setting}`", recorded or source, "share the AMI with the account, or name another"
    if recorded is not None:
        name, instead = "infra/amis.json", f"{command}, or rollback"
    elif not is_ami(source):
        name, value = source, account.parameter(source)
        if value is None:
            yield problem(
                IMAGE,
                f"SSM parameter {name} does not exist in {account.region}",
                f"aws ssm put-parameter --region {account.region} --type String --data-type aws:ec2:image "
                f"--name {name} --value ami-…; or set {setting}=None in infra/settings.py",
            )
            return
        ami_id = value
    image = account.image(ami_id)
    root = (image or {}).get("RootDeviceName", "")
    prefix = "" if setting == "machine_image" else "cpu_"
    if image is None:
        text = f"{name} is {ami_id}, which is not visible to this account in {account.region}"
        yield problem(IMAGE, text, instead)
    elif is_custom and root != root_device_name:
        yield problem(
            IMAGE,
            f"the root device of {ami_id} is {root}, but the settings have {root_device_name}: instances would "
            "get a second volume, and their root volume would stay small",
            f'set {prefix}root_device_name="{root}" in infra/settings.py',
        )
    else:
        yield ok(IMAGE, f"{ami_id} ({image.get('Name', 'unnamed')}) is visible")


def permissions_boundary(account: Account, stage: Stage) -> Iterator[Finding]:
    if stage.permissions_boundary is None:
        yield ok(BOUNDARY, "not configured; the stage creates one")
        return
    arn = f"arn:{account.partition}:iam::{account.id}:policy/{stage.permissions_boundary}"
    try:
        account.client("iam").get_policy(PolicyArn=arn)
    except ClientError as error:
        if error_code(error) != "NoSuchEntity":
            raise
        next_step = "correct `permissions_boundary` in infra/settings.py, or set None to let the stage create one"
        yield problem(BOUNDARY, f"policy {arn} does not exist", next_step)
    else:
        yield ok(BOUNDARY, f"{arn} exists")


def oidc_provider(account: Account, stage: Stage) -> Iterator[Finding]:
    """Check GitHub's OIDC provider: an account can have only one, which the stage creates or the settings name."""
    if stage.deploy_from is None:
        yield ok(OIDC, "not needed: `deploy_from` is not set")
        return
    iam = account.client("iam")
    listed = [item["Arn"] for item in iam.list_open_id_connect_providers()["OpenIDConnectProviderList"]]
    existing = next((arn for arn in listed if arn.endswith(f"/{_GITHUB}")), None)
    named = stage.deploy_from.oidc_provider_arn
    if named is not None:
        if named in listed:
            yield ok(OIDC, f"{named} exists")
        else:
            yield problem(
                OIDC,
                f"provider {named} does not exist",
                f"set oidc_provider_arn={f'{existing!r}' if existing else 'None'} in infra/settings.py"
                f"{'' if existing else ', to let the stage create one'}",
            )
        return
    if existing is None:
        yield ok(OIDC, "GitHub's does not exist yet; the stage creates it")
        return
    tags = {
        tag["Key"]: tag["Value"] for tag in iam.get_open_id_connect_provider(OpenIDConnectProviderArn=existing)["Tags"]
    }
    if tags.get("trainyard:stage") == stage.name:
        yield ok(OIDC, f"{existing} belongs to the stage")
    else:
        yield problem(
            OIDC,
            f"{existing} already exists, and an account can have only one",
            f'set oidc_provider_arn="{existing}" under `deploy_from` in infra/settings.py',
        )


def oidc_subject(account: Account, stage: Stage) -> Iterator[Finding]:
    """Report the subject that GitHub's tokens must have. Only GitHub knows the form that a repository uses."""
    del account
    source = stage.deploy_from
    if source is None:
        yield ok(SUBJECT, "not needed: `deploy_from` is not set")
    elif source.owner_id is not None:
        yield ok(SUBJECT, f"GitHub's tokens must have the subject {source.subject}")
    else:
        yield unknown(
            SUBJECT,
            f"the deploy role trusts {source.subject} only. If {source.repository} was created, renamed or transferred "
            "after 15 July 2026, GitHub's tokens also contain two ids, and AWS refuses them",
            f"run `gh api repos/{source.repository} --jq '.owner.id, .id, .created_at'`; for such a repository, set "
            "the first two numbers as owner_id and repository_id under `deploy_from` in infra/settings.py",
        )
