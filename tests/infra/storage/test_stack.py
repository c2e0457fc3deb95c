from collections.abc import Callable
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.network.stack import NetworkStack
from infra.stages import Stage, Team
from infra.storage.stack import StorageStack
from jobs.contract.run import CACHE_TAG, CHECKPOINT_TAG
from tests.support.infra.synthesis import Templates, flatten, new_app, only, read_assembly, resources

BUCKETS = {"AccessLogs8B620ECA", "Data666C94C7", "RunsE45A2291"}

Made = Callable[..., Templates]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The network and storage stacks of a stage with the given settings."""

    def make(**settings: Any) -> Templates:
        row = Stage(**{"name": "test", "teams": (Team(name="research"),), **settings})
        app = new_app(tmp_path)
        scope = cdk.Stage(app, row.name, env=cdk.Environment(account=row.account, region=row.region))
        StorageStack(scope, stage=row, network=NetworkStack(scope, stage=row))
        app.synth()
        return {path.split("/")[1]: template for path, template in read_assembly(tmp_path).items()}

    return make


@pytest.fixture(scope="module")
def storage(templates: Templates) -> dict[str, Any]:
    return templates["dev/storage"]


@pytest.fixture(scope="module")
def buckets(storage: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return resources(storage, "AWS::S3::Bucket")


@pytest.mark.parametrize("stage", ["dev", "prod"])
def test_buckets_keep_their_logical_ids(templates: Templates, stage: str) -> None:
    # A new logical id is a new, empty bucket.
    assert set(resources(templates[f"{stage}/storage"], "AWS::S3::Bucket")) == BUCKETS


def test_buckets_outlive_the_stack(storage: dict[str, Any]) -> None:
    for name in BUCKETS:
        resource = storage["Resources"][name]
        assert (resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == ("Retain", "Retain")


def test_a_bucket_that_outlives_the_stack_keeps_its_rules(storage: dict[str, Any]) -> None:
    policies = [item for item in storage["Resources"].values() if item["Type"] == "AWS::S3::BucketPolicy"]
    assert len(policies) == len(BUCKETS)
    for policy in policies:
        assert (policy["DeletionPolicy"], policy["UpdateReplacePolicy"]) == ("Retain", "Retain")


def test_buckets_are_versioned_encrypted_and_closed(buckets: dict[str, dict[str, Any]]) -> None:
    for bucket in buckets.values():
        assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
        assert bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"] == [
            {"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        ]
        assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
        assert len(bucket["PublicAccessBlockConfiguration"]) == 4
        # No access control lists: policies alone decide.
        assert bucket["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]


def test_names_are_generated(buckets: dict[str, dict[str, Any]]) -> None:
    assert not any("BucketName" in bucket for bucket in buckets.values())


def test_plain_http_and_old_tls_are_refused(storage: dict[str, Any]) -> None:
    policies = resources(storage, "AWS::S3::BucketPolicy")
    assert {policy["Bucket"]["Ref"] for policy in policies.values()} == BUCKETS
    for policy in policies.values():
        refused = [
            statement["Condition"]
            for statement in policy["PolicyDocument"]["Statement"]
            if statement["Effect"] == "Deny"
            and statement["Action"] == "s3:*"
            and statement["Principal"] == {"AWS": "*"}
            and len(statement["Resource"]) == 2
        ]
        assert {"Bool": {"aws:SecureTransport": "false"}} in refused
        assert {"NumericLessThan": {"s3:TlsVersion": 1.2}} in refused


def test_access_to_data_and_runs_is_logged(buckets: dict[str, dict[str, Any]]) -> None:
    destination = {"Ref": "AccessLogs8B620ECA"}
    assert buckets["Data666C94C7"]["LoggingConfiguration"] == {
        "DestinationBucketName": destination,
        "LogFilePrefix": "data/",
    }
    assert buckets["RunsE45A2291"]["LoggingConfiguration"] == {
        "DestinationBucketName": destination,
        "LogFilePrefix": "runs/",
    }


def test_nothing_piles_up(made: Made) -> None:
    storage = made(noncurrent_retention_days=45)["storage"]
    for name, bucket in resources(storage, "AWS::S3::Bucket").items():
        rules = {rule["Id"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}
        swept = rules["abandoned-parts-and-old-versions"]
        assert swept["Status"] == "Enabled"
        assert swept["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
        assert swept["NoncurrentVersionExpiration"] == {"NoncurrentDays": 45}
        # Only the access logs themselves expire; data and models never do.
        assert swept.get("ExpirationInDays") == (365 if name == "AccessLogs8B620ECA" else None)


def test_old_checkpoints_and_caches_expire_and_nothing_else_of_a_run_does(made: Made) -> None:
    storage = made(checkpoint_retention_days=12)["storage"]
    runs = resources(storage, "AWS::S3::Bucket")["RunsE45A2291"]
    expiring = [rule for rule in runs["LifecycleConfiguration"]["Rules"] if "ExpirationInDays" in rule]
    assert [(rule["ExpirationInDays"], rule["TagFilters"]) for rule in expiring] == [
        (12, [{"Key": key, "Value": value}]) for key, value in (CHECKPOINT_TAG, CACHE_TAG)
    ]


def test_the_command_line_finds_both_buckets(storage: dict[str, Any]) -> None:
    published = {item["Name"]: item["Value"] for item in resources(storage, "AWS::SSM::Parameter").values()}
    assert published == {
        "/trainyard/dev/bucket/data": {"Ref": "Data666C94C7"},
        "/trainyard/dev/bucket/run": {"Ref": "RunsE45A2291"},
        # Stays where the file system goes, so that teams' instances need not let go of it in a deployment of its own.
        "/trainyard/dev/security-group/fsx": {"Fn::GetAtt": ["FileServerSecurityGroup3100891C", "GroupId"]},
    }


def test_without_asking_there_is_no_key_and_no_file_system_to_pay_for(storage: dict[str, Any]) -> None:
    assert {resource["Type"] for resource in storage["Resources"].values()} == {
        "AWS::EC2::SecurityGroup",  # free
        "AWS::S3::Bucket",
        "AWS::S3::BucketPolicy",
        "AWS::SSM::Parameter",
    }


def test_the_stages_own_key_encrypts_data_and_runs_and_outlives_the_stack(made: Made) -> None:
    storage = made(own_kms_key=True)["storage"]
    # A new logical id is a new key, with which nothing old can be read.
    resource = storage["Resources"]["Key961B73FD"]
    assert (resource["Type"], resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == (
        "AWS::KMS::Key",
        "Retain",
        "Retain",
    )
    assert resource["Properties"]["EnableKeyRotation"] is True
    buckets = resources(storage, "AWS::S3::Bucket")
    assert set(buckets) == BUCKETS
    for name in ("Data666C94C7", "RunsE45A2291"):
        assert buckets[name]["BucketEncryption"]["ServerSideEncryptionConfiguration"] == [
            {
                # One request to KMS for many objects.
                "BucketKeyEnabled": True,
                "ServerSideEncryptionByDefault": {
                    "SSEAlgorithm": "aws:kms",
                    "KMSMasterKeyID": {"Fn::GetAtt": ["Key961B73FD", "Arn"]},
                },
            }
        ]
    # Trap: S3 delivers no access log into a bucket that KMS encrypts.
    assert buckets["AccessLogs8B620ECA"]["BucketEncryption"]["ServerSideEncryptionConfiguration"] == [
        {"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    ]


def test_the_key_is_for_this_account_and_for_publishers_to_its_topics(made: Made) -> None:
    statements = only(made(own_kms_key=True)["storage"], "AWS::KMS::Key")["KeyPolicy"]["Statement"]
    assert len(statements) == 2
    account, publishers = statements
    # Who of the account may use it is IAM's business: no other stack has to change this policy.
    assert flatten(account["Principal"]["AWS"]) == "arn:<AWS::Partition>:iam::<AWS::AccountId>:root"
    assert publishers["Principal"] == {
        "Service": ["budgets.amazonaws.com", "cloudwatch.amazonaws.com", "events.amazonaws.com"]
    }
    assert publishers["Action"] == ["kms:Decrypt", "kms:GenerateDataKey*"]
    # Trap: a condition on aws:SourceAccount would shut EventBridge out.
    assert publishers["Condition"].keys() == {"ArnLike"}
    (context,) = publishers["Condition"]["ArnLike"].items()
    assert (context[0], flatten(context[1])) == (
        "kms:EncryptionContext:aws:sns:topicArn",
        "arn:<AWS::Partition>:sns:<AWS::Region>:<AWS::AccountId>:*",
    )


def test_the_file_system_shows_what_all_teams_share_and_nothing_of_any_team(made: Made) -> None:
    storage = made(fsx_gib=2_400)["storage"]
    # One link, of one prefix: who mounts the file system sees all of it.
    link = only(storage, "AWS::FSx::DataRepositoryAssociation")
    assert flatten(link["DataRepositoryPath"]) == "s3://<Data666C94C7>/shared/"
    assert link["FileSystemPath"] == "/"
    assert link["BatchImportMetaDataOnCreate"] is True
    # What is put into the bucket shows; nothing flows back.
    assert link["S3"] == {"AutoImportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]}}


def test_the_file_system_is_a_cache_of_the_size_that_was_asked_for(made: Made) -> None:
    storage = made(fsx_gib=2_400)["storage"]
    ((_, resource),) = ((k, v) for k, v in storage["Resources"].items() if v["Type"] == "AWS::FSx::FileSystem")
    assert (resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == ("Delete", "Delete")
    properties = resource["Properties"]
    assert (properties["FileSystemType"], properties["StorageType"], properties["StorageCapacity"]) == (
        "LUSTRE",
        "SSD",
        2_400,
    )
    lustre = properties["LustreConfiguration"]
    assert (lustre["DeploymentType"], lustre["PerUnitStorageThroughput"]) == ("PERSISTENT_2", 125)
    # FSx backs nothing up that is linked to a bucket.
    assert lustre["AutomaticBackupRetentionDays"] == 0
    assert "KmsKeyId" not in properties  # encrypted with AWS's key for FSx: it cannot be otherwise


def test_the_file_system_is_in_the_one_subnet_where_accelerators_are(made: Made) -> None:
    templates = made(fsx_gib=1_200, region="us-east-1", availability_zone_ids=("use1-az6", "use1-az2"))
    (subnet,) = only(templates["storage"], "AWS::FSx::FileSystem")["SubnetIds"]
    assert _imported(templates, subnet)["AvailabilityZoneId"] == "use1-az2"


def test_lustre_passes_between_jobs_and_file_servers_both_ways_and_nothing_else_does(made: Made) -> None:
    templates = made(fsx_gib=1_200)
    storage = templates["storage"]
    (servers,) = resources(storage, "AWS::EC2::SecurityGroup")
    assert only(storage, "AWS::FSx::FileSystem")["SecurityGroupIds"] == [{"Fn::GetAtt": [servers, "GroupId"]}]
    inside = {"Fn::GetAtt": [servers, "GroupId"]}

    def name(group: dict[str, Any]) -> str:
        if group == inside:
            return "servers"
        assert _imported(templates, group)["GroupDescription"].startswith("Instances that run jobs")
        return "jobs"

    rules = {
        direction: {
            (name(rule["GroupId"]), name(rule[peer]), rule["IpProtocol"], rule["FromPort"], rule["ToPort"])
            for rule in resources(storage, f"AWS::EC2::SecurityGroup{direction}").values()
        }
        for direction, peer in (("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId"))
    }
    wanted = {
        (one, other, "tcp", *ports)
        for one, other in (("servers", "servers"), ("servers", "jobs"), ("jobs", "servers"))
        for ports in ((988, 988), (1018, 1023))
    }
    assert rules == {"Ingress": wanted, "Egress": wanted}
    # FSx tries the connections when the file system is made.
    (resource,) = (item for item in storage["Resources"].values() if item["Type"] == "AWS::FSx::FileSystem")
    assert {
        name
        for direction in ("Ingress", "Egress")
        for name in resources(storage, f"AWS::EC2::SecurityGroup{direction}")
    } <= set(resource["DependsOn"])


def test_the_file_system_reads_buckets_that_the_stages_own_key_encrypts(made: Made) -> None:
    storage = made(fsx_gib=1_200, own_kms_key=True)["storage"]
    assert only(storage, "AWS::FSx::FileSystem")["KmsKeyId"] == {"Fn::GetAtt": ["Key961B73FD", "Arn"]}
    (statement,) = (
        statement
        for statement in only(storage, "AWS::KMS::Key")["KeyPolicy"]["Statement"]
        if statement["Principal"] == {"AWS": "*"}
    )
    # Anyone, but for what follows: FSx's own role in this account, by way of S3.
    condition = statement["Condition"]
    assert flatten(condition["ArnLike"]["aws:PrincipalArn"]) == (
        "arn:<AWS::Partition>:iam::<AWS::AccountId>:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/"
        "AWSServiceRoleForFSxS3Access_*"
    )
    assert flatten(condition["StringEquals"]["kms:CallerAccount"]) == "<AWS::AccountId>"
    assert flatten(condition["StringEquals"]["kms:ViaService"]) == "s3.<AWS::Region>.amazonaws.com"


def test_instances_and_jobs_find_the_file_system_by_parameters(made: Made) -> None:
    storage = made(fsx_gib=1_200)["storage"]
    (file_system,) = resources(storage, "AWS::FSx::FileSystem")
    published = {item["Name"]: item["Value"] for item in resources(storage, "AWS::SSM::Parameter").values()}
    assert {name: published[f"/trainyard/test/{name}"] for name in ("fsx/dns-name", "fsx/mount-name")} == {
        "fsx/dns-name": {"Fn::GetAtt": [file_system, "DNSName"]},
        "fsx/mount-name": {"Fn::GetAtt": [file_system, "LustreMountName"]},
    }
    assert published["/trainyard/test/shared-data-mount"] == "/fsx"


@pytest.mark.parametrize(
    "settings", [{"own_kms_key": True}, {"fsx_gib": 1_200}, {"own_kms_key": True, "fsx_gib": 2_400}]
)
def test_a_key_or_a_file_system_moves_no_bucket(made: Made, settings: dict[str, Any]) -> None:
    assert set(resources(made(**settings)["storage"], "AWS::S3::Bucket")) == BUCKETS


def _imported(templates: Templates, value: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of the network's resource that the storage stack imports as `value`."""
    export = value["Fn::ImportValue"]
    (output,) = (item for item in templates["network"]["Outputs"].values() if item["Export"]["Name"] == export)
    name = output["Value"].get("Ref") or output["Value"]["Fn::GetAtt"][0]
    properties: dict[str, Any] = templates["network"]["Resources"][name]["Properties"]
    return properties
