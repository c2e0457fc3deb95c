from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates, flatten, resources


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
