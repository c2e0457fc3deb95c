import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import infra.machine_image.build as build_module
from infra.machine_image.build import DOCUMENTS
from infra.stages import Pool, Stage, Team
from jobs.contract.releases import release
from tests.support.infra.synthesis import Templates, flatten, only, resources, synthesise

DL1 = "dl1-24xlarge-1-21-0"
AMI = "ami-0123456789abcdef0"

Synthesised = Callable[..., Templates]


@pytest.fixture(scope="module")
def stack(templates: Templates) -> dict[str, Any]:
    return templates["dev/machine-image"]


def ordered(template: dict[str, Any], recipe: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the documents that a recipe runs, in their order, with the parameters that it gives them."""
    return {
        yaml.safe_load(template["Resources"][item["ComponentArn"]["Fn::GetAtt"][0]]["Properties"]["Data"])["name"]: {
            parameter["Name"]: flatten(parameter["Value"][0]) for parameter in item.get("Parameters", [])
        }
        for item in recipe["Components"]
    }


def recipes(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["Name"]: item for item in resources(template, "AWS::ImageBuilder::ImageRecipe").values()}


# Which AMIs there are, and who reads them


def test_the_compute_stack_reads_the_ami_that_is_built(templates: Templates, assembly: Path) -> None:
    for stage in ("dev", "prod"):
        name = f"/imagebuilder/trainyard-{stage}/machine-image/{DL1}"
        template = templates[f"{stage}/machine-image"]
        parameter = only(template, "AWS::SSM::Parameter")
        assert (parameter["Name"], parameter["DataType"], parameter["Type"]) == (name, "aws:ec2:image", "String")
        image, attribute = parameter["Value"]["Fn::GetAtt"]
        assert (template["Resources"][image]["Type"], attribute) == ("AWS::ImageBuilder::Image", "ImageId")
        # Read anew at each deployment, and after the AMI's stack.
        read = templates[f"{stage}/compute"]["Parameters"].values()
        assert {"Type": "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>", "Default": name} in list(read)
        manifest = json.loads((assembly / f"assembly-{stage}" / "manifest.json").read_text())
        by_name = {
            artifact["properties"].get("stackName"): (key, artifact)
            for key, artifact in manifest["artifacts"].items()
            if artifact["type"] == "aws:cloudformation:stack"
        }
        dependencies = by_name[f"trainyard-{stage}-compute"][1]["dependencies"]
        assert by_name[f"trainyard-{stage}-machine-image"][0] in dependencies


def test_what_the_pipeline_builds_takes_the_place_of_what_the_deployment_built(stack: dict[str, Any]) -> None:
    distributions = resources(stack, "AWS::ImageBuilder::DistributionConfiguration")
    (pipelines,) = only(stack, "AWS::ImageBuilder::ImagePipeline")["DistributionConfigurationArn"].values()
    (deployments,) = only(stack, "AWS::ImageBuilder::Image")["DistributionConfigurationArn"].values()
    # GIVEN the parameter that the compute stack reads, made by CloudFormation with the id of its own build
    name = only(stack, "AWS::SSM::Parameter")["Name"]
    # THEN the pipeline writes it too, where Image Builder's service-linked role may
    (written,) = distributions[pipelines[0]]["Distributions"]
    assert written["SsmParameterConfigurations"] == [{"ParameterName": name, "DataType": "aws:ec2:image"}]
    assert name.startswith("/imagebuilder/")
    # AND the deployment's own build does not: CloudFormation could not make the parameter any more
    (unwritten,) = distributions[deployments[0]]["Distributions"]
    assert "SsmParameterConfigurations" not in unwritten
    assert len({item["Name"] for item in distributions.values()}) == len(distributions) == 2


def test_no_ami_is_built_if_one_is_given_or_aws_has_one(variants: Templates) -> None:
    assert "all/machine-image" in variants
    assert not {"closed/machine-image", "p4d-24xlarge/machine-image"} & variants.keys()


def test_the_ami_of_a_retiring_pool_keeps_the_image_of_its_release(synthesised: Synthesised) -> None:
    new, old = Pool(instance_type="p4d.24xlarge"), Pool(instance_type="dl1.24xlarge")
    retired = synthesised(instance_type=new.instance_type, image_tag="1.21.0-fix1", retiring=(old,))["machine-image"]
    # The image_tag is the stage's; what retires keeps the image that its release's jobs were submitted with.
    assert _steps(retired)["job-image"]["Image"] == "ssm:/trainyard/test/image/gaudi/1.21.0"
    current = synthesised(image_tag="1.21.0-fix1")["machine-image"]
    assert _steps(current)["job-image"]["Image"].endswith(":1.21.0-fix1")


def _steps(template: dict[str, Any]) -> dict[str, dict[str, str]]:
    (recipe,) = recipes(template).values()
    return ordered(template, recipe)


def test_driver_and_job_image_follow_one_value(synthesised: Synthesised) -> None:
    row = release()
    made = synthesised(release=row.name)
    steps = _steps(made["machine-image"])
    assert steps["gaudi"] == {
        "Release": row.name,
        "PackageVersion": f"{row.name}-{row.build}",
        "HugePages": "15000",
    }
    assert steps["job-image"]["Image"] == f"ssm:/trainyard/test/image/gaudi/{row.name}"
    read = {item["Default"] for item in made["jobs"]["Parameters"].values()}
    assert {name for name in read if "/image/" in name} >= {f"/trainyard/test/image/gaudi/{row.name}"}
    assert all(name.endswith(f"/{row.name}") for name in read if "/image/" in name)


# What it is made of


def test_documents_run_in_the_order_in_which_they_need_each_other(stack: dict[str, Any]) -> None:
    (recipe,) = recipes(stack).values()
    assert list(ordered(stack, recipe)) == ["kernel", "container-host", "gaudi", "efa", "scratch", "job-image"]


def test_with_fsx_the_ami_has_its_client(variants: Templates, stack: dict[str, Any]) -> None:
    for found, wanted in ((variants["all/machine-image"], "true"), (stack, "false")):
        recipe = next(iter(recipes(found).values()))
        assert ordered(found, recipe)["kernel"] == {"LustreClient": wanted}


def test_it_starts_from_canonicals_ubuntu_on_an_encrypted_volume(stack: dict[str, Any]) -> None:
    (recipe,) = recipes(stack).values()
    assert recipe["ParentImage"] == (
        "ssm:/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"
    )
    (volume,) = recipe["BlockDeviceMappings"]
    assert volume["DeviceName"] == "/dev/sda1"
    assert volume["Ebs"] == {"Encrypted": True, "VolumeType": "gp3", "VolumeSize": 100, "DeleteOnTermination": True}
    assert recipe["AmiTags"]["trainyard:release"] == release().name


def test_the_build_waits_for_its_tests_on_an_instance_that_boots_it(stack: dict[str, Any]) -> None:
    for kind in ("Image", "ImagePipeline"):
        made = only(stack, f"AWS::ImageBuilder::{kind}")
        assert made["ImageTestsConfiguration"]["ImageTestsEnabled"] is True
    for name in ("kernel", "container-host", "gaudi", "efa", "scratch"):
        phases = [phase["name"] for phase in yaml.safe_load((DOCUMENTS / f"{name}.yaml").read_text())["phases"]]
        assert "test" in phases, name
    # No unasked builds.
    assert "Schedule" not in only(stack, "AWS::ImageBuilder::ImagePipeline")


# Where it is built


def test_the_instance_is_private_and_ends_with_the_build(stack: dict[str, Any]) -> None:
    site = only(stack, "AWS::ImageBuilder::InfrastructureConfiguration")
    assert site["InstanceMetadataOptions"] == {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
    assert site["TerminateInstanceOnFailure"] is True
    assert "PrivateSubnet" in flatten(site["SubnetId"])
    assert "KeyPair" not in site
    # The RAID's test needs NVMe disks, huge pages need memory beside them.
    assert site["InstanceTypes"] == ["m6id.4xlarge"]
    assert site["ResourceTags"]["trainyard:pool"] == DL1


def test_it_reaches_out_by_http_and_nothing_reaches_in(stack: dict[str, Any]) -> None:
    group = only(stack, "AWS::EC2::SecurityGroup")
    assert {(rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) for rule in group["SecurityGroupEgress"]} == {
        ("tcp", 443, 443),
        ("tcp", 80, 80),
    }
    assert "SecurityGroupIngress" not in group
    assert not resources(stack, "AWS::EC2::SecurityGroupIngress")


@pytest.mark.parametrize("name", ["all", "existing"])
def test_it_is_let_into_the_endpoints_that_aws_answers_at_in_its_subnet(variants: Templates, name: str) -> None:
    # GIVEN endpoints that the services' usual names lead to, from every subnet
    network, template = variants[f"{name}/network"], variants[f"{name}/machine-image"]
    endpoints = [item for item in resources(network, "AWS::EC2::VPCEndpoint").values() if "SecurityGroupIds" in item]
    assert {endpoint["PrivateDnsEnabled"] for endpoint in endpoints} == {True}
    (group,) = {flatten(group) for endpoint in endpoints for group in endpoint["SecurityGroupIds"]}
    # THEN their group admits the instance's
    rule = only(template, "AWS::EC2::SecurityGroupIngress")
    (build,) = resources(template, "AWS::EC2::SecurityGroup")
    assert rule["SourceSecurityGroupId"] == {"Fn::GetAtt": [build, "GroupId"]}
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 443, 443)
    parameter = template["Parameters"][rule["GroupId"]["Ref"]]["Default"]
    values = {item["Name"]: flatten(item["Value"]) for item in resources(network, "AWS::SSM::Parameter").values()}
    assert values[parameter] == group


# How it changes and goes


def test_an_ami_that_is_replaced_stays_while_instances_may_boot_it(stack: dict[str, Any]) -> None:
    (image,) = [item for item in stack["Resources"].values() if item["Type"] == "AWS::ImageBuilder::Image"]
    # The compute stack names it until it is deployed, after this one.
    assert image["UpdateReplacePolicy"] == "Retain"
    # When the stack goes, the AMI and its snapshots go too.
    assert image["DeletionPolicy"] == "Delete"
    assert "ExecutionRole" in image["Properties"]["DeletionSettings"]
    policy = only(stack, "AWS::ImageBuilder::LifecyclePolicy")
    assert policy["ResourceSelection"]["TagMap"] == {"trainyard:stage": "dev", "trainyard:pool": DL1}
    assert policy["ResourceSelection"]["TagMap"].items() <= image["Properties"]["Tags"].items()
    assert policy["ResourceSelection"]["TagMap"].items() <= (
        only(stack, "AWS::ImageBuilder::ImagePipeline")["ImageTags"].items()
    )
    (rule,) = policy["PolicyDetails"]
    assert rule["Action"] == {"Type": "DELETE", "IncludeResources": {"Amis": True, "Snapshots": True}}
    assert rule["Filter"] == {"Type": "COUNT", "Value": 3}
    assert rule["ExclusionRules"]["Amis"]["LastLaunched"] == {"Unit": "WEEKS", "Value": 4}


def test_an_edited_document_is_a_new_version_of_it_and_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN what is deployed, and an edit of one document
    stage = Stage(name="test", teams=(Team(name="research"),))
    before = synthesise([stage], tmp_path / "before")["test/machine-image"]
    edited = tmp_path / "documents"
    shutil.copytree(DOCUMENTS, edited)
    (edited / "scratch.yaml").write_text((edited / "scratch.yaml").read_text().replace("noatime", "noatime,nodiratime"))
    monkeypatch.setattr(build_module, "DOCUMENTS", edited)
    # WHEN it is synthesised again
    after = synthesise([stage], tmp_path / "after")["test/machine-image"]
    # THEN the names stay, and the versions of what the edit is in are new ones: no version is ever made twice
    versions = [
        {item["Name"]: item["Version"] for kind in ("Component", "ImageRecipe") for item in found(template, kind)}
        for template in (before, after)
    ]
    assert versions[0].keys() == versions[1].keys()
    assert {name for name in versions[0] if versions[0][name] != versions[1][name]} == {
        "trainyard-test-machine-image-scratch",
        f"trainyard-test-machine-image-{DL1}",
    }


@pytest.mark.parametrize(
    "settings",
    # Another encryption makes another repository.
    [{"fsx_gib": 1_200}, {"image_tag": "1.21.0-fix1"}, {"own_kms_key": True}],
    ids=["file system", "tag", "key"],
)
def test_another_parameter_is_a_new_version_of_the_recipe(synthesised: Synthesised, settings: dict[str, Any]) -> None:
    (before,), (after,) = (recipes(synthesised(**more)["machine-image"]).values() for more in ({}, settings))
    assert (before["Name"], before["Version"] != after["Version"]) == (after["Name"], True)


def found(template: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return list(resources(template, f"AWS::ImageBuilder::{kind}").values())
