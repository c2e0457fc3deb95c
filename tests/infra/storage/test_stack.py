import json
import re
from typing import Any

import pytest

from infra.stages import Stage, Team
from jobs.core.run import CACHE_TAG, CHECKPOINT_TAG, KEPT_CHECKPOINT_TAG
from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import ROOT, Templates, flatten, resources, up_to


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    # With a new logical id, a bucket would be empty, and a key could not decrypt existing data.
    assert_as_reviewed(reviewed, "storage")


def test_by_default_there_is_no_key_and_no_file_system(templates: Templates) -> None:
    plain = templates["dev/storage"]
    assert {resource["Type"] for resource in plain["Resources"].values()} == {
        "AWS::EC2::SecurityGroup",  # free
        "AWS::S3::Bucket",
        "AWS::S3::BucketPolicy",
        "AWS::SSM::Parameter",
    }
    for bucket in resources(plain, "AWS::S3::Bucket").values():
        assert bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"] == [
            {"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
        ]
    # The file servers' security group always exists, because rules in a later stack may still refer to it.
    published = {item["Name"]: flatten(item["Value"]) for item in resources(plain, "AWS::SSM::Parameter").values()}
    assert published.keys() == {
        f"/trainyard/dev/{name}" for name in ("bucket/data", "bucket/run", "security-group/fsx")
    }


@pytest.mark.parametrize(
    ("tag", "retention", "days"),
    [
        (CHECKPOINT_TAG, 90, 3),
        (CACHE_TAG, 90, 3),
        (CHECKPOINT_TAG, 1, 1),
        (KEPT_CHECKPOINT_TAG, 90, 90),
        (None, 90, 90),
    ],
)
def test_deleted_checkpoints_are_billed_for_days_only(tag: tuple[str, str] | None, retention: int, days: int) -> None:
    row = Stage(name="test", teams=(Team(name="research"),), noncurrent_retention_days=retention)
    buckets = resources(up_to("network", row)["storage"], "AWS::S3::Bucket")
    (runs,) = (bucket for name, bucket in buckets.items() if name.startswith("Runs"))

    def applies(rule: dict[str, Any]) -> bool:
        return all((item["Key"], item["Value"]) == tag for item in rule.get("TagFilters", []))

    rules = [rule for rule in runs["LifecycleConfiguration"]["Rules"] if applies(rule)]
    # S3 deletes a version as soon as one rule says so.
    assert min(rule["NoncurrentVersionExpiration"]["NoncurrentDays"] for rule in rules) == days


@pytest.mark.parametrize(("stage", "more"), [("dev", set()), ("all", {"Key961B73FD"})])
def test_kept_buckets_can_be_imported_without_the_rest(
    templates: Templates, variants: Templates, stage: str, more: set[str]
) -> None:
    # The CDK CLI imports exactly these resources, as a template of their own.
    declared = {**templates, **variants}[f"{stage}/storage"]["Resources"]
    page = (ROOT / "infra/docs/deploying.md").read_text()
    adopted = {*json.loads(page.split("```json\n")[1].split("```")[0])} | more
    kinds = ("AWS::S3::Bucket", "AWS::S3::BucketPolicy", "AWS::KMS::Key")
    assert adopted == {name for name, resource in declared.items() if resource["Type"] in kinds}
    assert {declared[name]["DeletionPolicy"] for name in adopted} == {"Retain"}
    text = json.dumps([declared[name] for name in adopted])
    assert {*re.findall(r'"(?:Ref|Fn::GetAtt)": \[?"(\w+)"', text)} <= adopted
    assert not re.search("Fn::ImportValue|DependsOn", text)
    assert all(f'"{name}"' in page for name in more)
