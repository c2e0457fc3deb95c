from collections.abc import Callable
from typing import Any

import pytest

from jobs.runs import CHECKPOINT_TAG
from tests.infra.synthesis import Templates, resources

BUCKETS = {"AccessLogs8B620ECA", "Data666C94C7", "RunsE45A2291"}


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


def test_nothing_piles_up(synthesised: Callable[..., Templates]) -> None:
    storage = synthesised(noncurrent_retention_days=45)["storage"]
    for name, bucket in resources(storage, "AWS::S3::Bucket").items():
        rules = {rule["Id"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}
        swept = rules["abandoned-parts-and-old-versions"]
        assert swept["Status"] == "Enabled"
        assert swept["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
        assert swept["NoncurrentVersionExpiration"] == {"NoncurrentDays": 45}
        # Only the access logs themselves expire; data and models never do.
        assert swept.get("ExpirationInDays") == (365 if name == "AccessLogs8B620ECA" else None)


def test_old_checkpoints_expire_and_nothing_else_of_a_run_does(synthesised: Callable[..., Templates]) -> None:
    storage = synthesised(checkpoint_retention_days=12)["storage"]
    runs = resources(storage, "AWS::S3::Bucket")["RunsE45A2291"]
    expiring = [rule for rule in runs["LifecycleConfiguration"]["Rules"] if "ExpirationInDays" in rule]
    key, value = CHECKPOINT_TAG
    assert [(rule["ExpirationInDays"], rule["TagFilters"]) for rule in expiring] == [
        (12, [{"Key": key, "Value": value}])
    ]


def test_the_command_line_finds_both_buckets(storage: dict[str, Any]) -> None:
    published = {item["Name"]: item["Value"] for item in resources(storage, "AWS::SSM::Parameter").values()}
    assert published == {
        "/trainyard/dev/bucket/data": {"Ref": "Data666C94C7"},
        "/trainyard/dev/bucket/run": {"Ref": "RunsE45A2291"},
    }
