from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from infra.network.stack import NetworkStack
from infra.stages import Stage, Team
from infra.storage.stack import StorageStack
from jobs.contract.run import CACHE_TAG, CHECKPOINT_TAG
from tests.support.infra.synthesis import Templates, flatten, new_app, only, read_assembly, resources

DATA, RUNS, LOGS = "Data666C94C7", "RunsE45A2291", "AccessLogs8B620ECA"
KEY = {"Fn::GetAtt": ["Key961B73FD", "Arn"]}
"""A new logical id of one of these is a new, empty bucket, or a key with which nothing old can be read."""
BY_S3 = [{"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]


@pytest.fixture(scope="module")
def plain(templates: Templates) -> dict[str, Any]:
    return templates["dev/storage"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Templates:
    """The network and storage stacks of a stage with a key and a file system."""
    row = Stage(
        name="test",
        teams=(Team(name="research"),),
        availability_zone_ids=("use1-az6", "use1-az2"),
        region="us-east-1",
        own_kms_key=True,
        fsx_gib=2_400,
        checkpoint_retention_days=12,
        noncurrent_retention_days=45,
    )
    folder = Path(tmp_path_factory.mktemp("storage"))
    app = new_app(folder)
    scope = cdk.Stage(app, row.name, env=cdk.Environment(region=row.region))
    StorageStack(scope, stage=row, network=NetworkStack(scope, stage=row))
    app.synth()
    return {path.split("/")[1]: template for path, template in read_assembly(folder).items()}


@pytest.fixture(scope="module")
def storage(made: Templates) -> dict[str, Any]:
    return made["storage"]


def test_buckets_are_versioned_closed_and_outlive_the_stack(plain: dict[str, Any], storage: dict[str, Any]) -> None:
    for template in (plain, storage):
        buckets = resources(template, "AWS::S3::Bucket")
        assert set(buckets) == {DATA, RUNS, LOGS}
        for bucket in buckets.values():
            assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
            assert list(bucket["PublicAccessBlockConfiguration"].values()) == [True] * 4
            # No access control lists: policies alone decide.
            assert bucket["OwnershipControls"]["Rules"] == [{"ObjectOwnership": "BucketOwnerEnforced"}]
            assert "BucketName" not in bucket
        kept = [item for item in template["Resources"].values() if item["Type"].startswith("AWS::S3::Bucket")]
        assert len(kept) == 6
        assert {(item["DeletionPolicy"], item["UpdateReplacePolicy"]) for item in kept} == {("Retain", "Retain")}


def test_plain_http_and_old_tls_are_refused(plain: dict[str, Any]) -> None:
    policies = resources(plain, "AWS::S3::BucketPolicy")
    assert {policy["Bucket"]["Ref"] for policy in policies.values()} == {DATA, RUNS, LOGS}
    for policy in policies.values():
        refused = [
            statement["Condition"]
            for statement in policy["PolicyDocument"]["Statement"]
            if (statement["Effect"], statement["Action"], statement["Principal"]) == ("Deny", "s3:*", {"AWS": "*"})
            and len(statement["Resource"]) == 2
        ]
        assert {"Bool": {"aws:SecureTransport": "false"}} in refused
        assert {"NumericLessThan": {"s3:TlsVersion": 1.2}} in refused


def test_access_to_data_and_runs_is_logged(plain: dict[str, Any]) -> None:
    buckets = resources(plain, "AWS::S3::Bucket")
    for name, prefix in ((DATA, "data/"), (RUNS, "runs/")):
        logged = {"DestinationBucketName": {"Ref": LOGS}, "LogFilePrefix": prefix}
        assert buckets[name]["LoggingConfiguration"] == logged


def test_old_versions_checkpoints_and_caches_expire_and_nothing_else_does(storage: dict[str, Any]) -> None:
    for name, bucket in resources(storage, "AWS::S3::Bucket").items():
        swept, *others = bucket["LifecycleConfiguration"]["Rules"]
        assert swept["Status"] == "Enabled"
        assert swept["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
        assert swept["NoncurrentVersionExpiration"] == {"NoncurrentDays": 45}
        assert swept.get("ExpirationInDays") == (365 if name == LOGS else None)
        tags = (CHECKPOINT_TAG, CACHE_TAG) if name == RUNS else ()
        assert [(rule["ExpirationInDays"], rule["TagFilters"]) for rule in others] == [
            (12, [{"Key": key, "Value": value}]) for key, value in tags
        ]


def test_without_asking_there_is_no_key_and_no_file_system_to_pay_for(plain: dict[str, Any]) -> None:
    assert {resource["Type"] for resource in plain["Resources"].values()} == {
        "AWS::EC2::SecurityGroup",  # free
        "AWS::S3::Bucket",
        "AWS::S3::BucketPolicy",
        "AWS::SSM::Parameter",
    }
    for bucket in resources(plain, "AWS::S3::Bucket").values():
        assert bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"] == BY_S3
    assert {item["Name"]: item["Value"] for item in resources(plain, "AWS::SSM::Parameter").values()} == {
        "/trainyard/dev/bucket/data": {"Ref": DATA},
        "/trainyard/dev/bucket/run": {"Ref": RUNS},
        "/trainyard/dev/security-group/fsx": {"Fn::GetAtt": ["FileServerSecurityGroup3100891C", "GroupId"]},
    }


def test_the_stages_own_key_encrypts_data_and_runs_and_outlives_the_stack(storage: dict[str, Any]) -> None:
    key = storage["Resources"]["Key961B73FD"]
    assert (key["DeletionPolicy"], key["UpdateReplacePolicy"]) == ("Retain", "Retain")
    assert key["Properties"]["EnableKeyRotation"] is True
    by_kms = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY}
    own = [{"BucketKeyEnabled": True, "ServerSideEncryptionByDefault": by_kms}]
    for name, encryption in (
        (DATA, own),
        (RUNS, own),
        (LOGS, BY_S3),  # Trap: S3 delivers no access log into a bucket that KMS encrypts.
    ):
        bucket = resources(storage, "AWS::S3::Bucket")[name]
        assert bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"] == encryption


def test_the_key_is_for_this_account_publishers_to_its_topics_and_fsx(storage: dict[str, Any]) -> None:
    account, publishers, fsx = only(storage, "AWS::KMS::Key")["KeyPolicy"]["Statement"]
    # Who of the account may use it is IAM's business: no other stack has to change this policy.
    assert flatten(account["Principal"]["AWS"]) == "arn:aws:iam::<AWS::AccountId>:root"
    services = ["budgets.amazonaws.com", "cloudwatch.amazonaws.com", "events.amazonaws.com"]
    assert publishers["Principal"] == {"Service": services}
    assert publishers["Action"] == ["kms:Decrypt", "kms:GenerateDataKey*"]
    # Trap: a condition on aws:SourceAccount would shut EventBridge out.
    topics = "arn:aws:sns:us-east-1:<AWS::AccountId>:*"
    [[operator, keys]] = publishers["Condition"].items()
    assert (operator, {key: flatten(value) for key, value in keys.items()}) == (
        "ArnLike",
        {"kms:EncryptionContext:aws:sns:topicArn": topics},
    )
    # Anyone, but for what follows: FSx's own role in this account, by way of S3.
    assert fsx["Principal"] == {"AWS": "*"}
    assert flatten(fsx["Condition"]["ArnLike"]["aws:PrincipalArn"]) == (
        "arn:aws:iam::<AWS::AccountId>:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/"
        "AWSServiceRoleForFSxS3Access_*"
    )
    assert flatten(fsx["Condition"]["StringEquals"]["kms:CallerAccount"]) == "<AWS::AccountId>"
    assert fsx["Condition"]["StringEquals"]["kms:ViaService"] == "s3.us-east-1.amazonaws.com"


def test_the_file_system_is_a_cache_of_what_all_teams_share(made: Templates, storage: dict[str, Any]) -> None:
    # One link, of one prefix: who mounts the file system sees all of it. Nothing flows back.
    link = only(storage, "AWS::FSx::DataRepositoryAssociation")
    assert flatten(link["DataRepositoryPath"]) == f"s3://<{DATA}>/shared/"
    assert (link["FileSystemPath"], link["BatchImportMetaDataOnCreate"]) == ("/", True)
    assert link["S3"] == {"AutoImportPolicy": {"Events": ["NEW", "CHANGED", "DELETED"]}}
    ((name, resource),) = ((k, v) for k, v in storage["Resources"].items() if v["Type"] == "AWS::FSx::FileSystem")
    assert (resource["DeletionPolicy"], resource["UpdateReplacePolicy"]) == ("Delete", "Delete")
    properties = resource["Properties"]
    assert properties["KmsKeyId"] == KEY
    assert [properties[key] for key in ("FileSystemType", "StorageType", "StorageCapacity")] == ["LUSTRE", "SSD", 2_400]
    lustre = properties["LustreConfiguration"]
    assert (lustre["DeploymentType"], lustre["PerUnitStorageThroughput"]) == ("PERSISTENT_2", 125)
    assert lustre["AutomaticBackupRetentionDays"] == 0
    # In the one subnet where accelerators are.
    (subnet,) = properties["SubnetIds"]
    assert _imported(made, subnet)["AvailabilityZoneId"] == "use1-az2"
    published = {item["Name"]: item["Value"] for item in resources(storage, "AWS::SSM::Parameter").values()}
    assert published["/trainyard/test/fsx/dns-name"] == {"Fn::GetAtt": [name, "DNSName"]}
    assert published["/trainyard/test/fsx/mount-name"] == {"Fn::GetAtt": [name, "LustreMountName"]}
    assert published["/trainyard/test/shared-data-mount"] == "/fsx"


def test_lustre_passes_between_jobs_and_file_servers_both_ways(made: Templates, storage: dict[str, Any]) -> None:
    (servers,) = resources(storage, "AWS::EC2::SecurityGroup")
    inside = {"Fn::GetAtt": [servers, "GroupId"]}
    (file_system,) = (item for item in storage["Resources"].values() if item["Type"] == "AWS::FSx::FileSystem")
    assert file_system["Properties"]["SecurityGroupIds"] == [inside]

    def name(group: dict[str, Any]) -> str:
        if group == inside:
            return "servers"
        assert _imported(made, group)["GroupDescription"].startswith("Instances that run jobs")
        return "jobs"

    wanted = {
        (one, other, "tcp", *ports)
        for one, other in (("servers", "servers"), ("servers", "jobs"), ("jobs", "servers"))
        for ports in ((988, 988), (1018, 1023))
    }
    for direction, peer in (("Ingress", "SourceSecurityGroupId"), ("Egress", "DestinationSecurityGroupId")):
        rules = resources(storage, f"AWS::EC2::SecurityGroup{direction}")
        assert wanted == {
            (name(rule["GroupId"]), name(rule[peer]), rule["IpProtocol"], rule["FromPort"], rule["ToPort"])
            for rule in rules.values()
        }
        # FSx tries the connections when the file system is made.
        assert rules.keys() <= set(file_system["DependsOn"])


def _imported(templates: Templates, value: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of the network's resource that the storage stack imports as `value`."""
    export = value["Fn::ImportValue"]
    (output,) = (item for item in templates["network"]["Outputs"].values() if item["Export"]["Name"] == export)
    name = output["Value"].get("Ref") or output["Value"]["Fn::GetAtt"][0]
    properties: dict[str, Any] = templates["network"]["Resources"][name]["Properties"]
    return properties
