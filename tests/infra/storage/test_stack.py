from tests.support.infra.goldens import assert_as_reviewed
from tests.support.infra.synthesis import Templates, flatten, resources


def test_the_template_is_as_reviewed(reviewed: Templates) -> None:
    # A new logical id of a bucket or key is a new, empty bucket, or a key with which nothing old can be read.
    assert_as_reviewed(reviewed, "storage")


def test_without_asking_there_is_no_key_and_no_file_system_to_pay_for(templates: Templates) -> None:
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
    # The group of file servers is there without them: rules of teams' groups, in a later stack, may still name it.
    published = {item["Name"]: flatten(item["Value"]) for item in resources(plain, "AWS::SSM::Parameter").values()}
    assert published.keys() == {
        f"/trainyard/dev/{name}" for name in ("bucket/data", "bucket/run", "security-group/fsx")
    }
