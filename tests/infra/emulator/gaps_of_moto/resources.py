"""What stock moto gets wrong about types of resources, each a function that raises where `clients` has it."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.support.emulator.stack_requests import Clients, outputs_of, parameter, resources_of, template

BATCH: dict[str, Any] = {
    "Role": {
        "Type": "AWS::IAM::Role",
        "Properties": {"AssumeRolePolicyDocument": {"Version": "2012-10-17", "Statement": []}},
    },
    "Environment": {
        "Type": "AWS::Batch::ComputeEnvironment",
        "Properties": {"Type": "UNMANAGED", "State": "ENABLED", "ServiceRole": {"Fn::GetAtt": ["Role", "Arn"]}},
    },
    "Queue": {
        "Type": "AWS::Batch::JobQueue",
        "Properties": {
            "Priority": 1,
            "ComputeEnvironmentOrder": [
                {"Order": 1, "ComputeEnvironment": {"Fn::GetAtt": ["Environment", "ComputeEnvironmentArn"]}}
            ],
        },
    },
    "Definition": {
        "Type": "AWS::Batch::JobDefinition",
        "Properties": {
            "Type": "container",
            "RetryStrategy": {"Attempts": 2},
            "ContainerProperties": {
                "Image": "any",
                "ResourceRequirements": [{"Type": "VCPU", "Value": "1"}, {"Type": "MEMORY", "Value": "64"}],
            },
        },
    },
}


def attributes_of_batch_resources(clients: Clients) -> None:
    body = template(
        BATCH,
        Outputs={
            "Environment": {"Value": {"Fn::GetAtt": ["Environment", "ComputeEnvironmentArn"]}},
            "Queue": {"Value": {"Fn::GetAtt": ["Queue", "JobQueueArn"]}},
            "Definition": {"Value": {"Fn::GetAtt": "Definition.JobDefinitionArn"}},
        },
    )
    clients("cloudformation").create_stack(StackName="gap-batch", TemplateBody=body)

    outputs, batch = outputs_of(clients, "gap-batch"), clients("batch")
    queue = batch.describe_job_queues(jobQueues=[outputs["Queue"]])["jobQueues"][0]
    assert queue["computeEnvironmentOrder"][0]["computeEnvironment"] == outputs["Environment"]
    assert batch.describe_job_definitions(jobDefinitions=[outputs["Definition"]])["jobDefinitions"]


def job_definition_with_everything(clients: Clients) -> None:
    definition = {
        "Type": "AWS::Batch::JobDefinition",
        "Properties": {
            "JobDefinitionName": "gap-multinode",
            "Type": "multinode",
            "Timeout": {"AttemptDurationSeconds": 120},
            "PlatformCapabilities": ["EC2"],
            "NodeProperties": {
                "MainNode": 0,
                "NumNodes": 2,
                "NodeRangeProperties": [
                    {
                        "TargetNodes": "0:",
                        "Container": {
                            "Image": "any",
                            "ResourceRequirements": [
                                {"Type": "VCPU", "Value": "1"},
                                {"Type": "MEMORY", "Value": "64"},
                            ],
                        },
                    }
                ],
            },
        },
    }
    clients("cloudformation").create_stack(StackName="gap-multinode", TemplateBody=template({"Jobs": definition}))

    answer = clients("batch").describe_job_definitions(jobDefinitionName="gap-multinode", status="ACTIVE")
    found = answer["jobDefinitions"][0]
    assert found["timeout"] == {"attemptDurationSeconds": 120}
    assert found["platformCapabilities"] == ["EC2"]
    assert found["nodeProperties"]["numNodes"] == 2
    group = found["nodeProperties"]["nodeRangeProperties"][0]
    assert group["targetNodes"] == "0:"
    assert group["container"]["image"] == "any"


def job_definition_of_ecs_tasks(clients: Clients) -> None:
    definition = {
        "Type": "AWS::Batch::JobDefinition",
        "Properties": {
            "JobDefinitionName": "gap-ecs",
            "Type": "container",
            "EcsProperties": {
                "TaskProperties": [
                    {
                        "IpcMode": "host",
                        "Containers": [
                            {
                                "Name": "main",
                                "Image": "any",
                                "ResourceRequirements": [
                                    {"Type": "VCPU", "Value": "1"},
                                    {"Type": "MEMORY", "Value": "64"},
                                ],
                            }
                        ],
                    }
                ]
            },
        },
    }
    clients("cloudformation").create_stack(StackName="gap-ecs", TemplateBody=template({"Jobs": definition}))

    answer = clients("batch").describe_job_definitions(jobDefinitionName="gap-ecs", status="ACTIVE")
    task = answer["jobDefinitions"][0]["ecsProperties"]["taskProperties"][0]
    assert task["ipcMode"] == "host"
    assert [container["name"] for container in task["containers"]] == ["main"]


NETWORK: dict[str, Any] = {
    "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
    "Subnet": {
        "Type": "AWS::EC2::Subnet",
        "Properties": {
            "VpcId": {"Ref": "Vpc"},
            "CidrBlock": "10.9.1.0/24",
            "AvailabilityZone": {"Fn::Select": [0, {"Fn::GetAZs": {"Ref": "AWS::Region"}}]},
        },
    },
    "Gateway": {"Type": "AWS::EC2::InternetGateway"},
    "Attachment": {
        "Type": "AWS::EC2::VPCGatewayAttachment",
        "Properties": {"VpcId": {"Ref": "Vpc"}, "InternetGatewayId": {"Ref": "Gateway"}},
    },
    "Routes": {"Type": "AWS::EC2::RouteTable", "Properties": {"VpcId": {"Ref": "Vpc"}}},
    "Association": {
        "Type": "AWS::EC2::SubnetRouteTableAssociation",
        "Properties": {"RouteTableId": {"Ref": "Routes"}, "SubnetId": {"Ref": "Subnet"}},
    },
    "Route": {
        "Type": "AWS::EC2::Route",
        "DependsOn": "Attachment",
        "Properties": {
            "RouteTableId": {"Ref": "Routes"},
            "DestinationCidrBlock": "0.0.0.0/0",
            "GatewayId": {"Ref": "Gateway"},
        },
    },
    "Address": {"Type": "AWS::EC2::EIP", "Properties": {"Domain": "vpc"}},
    "Nat": {
        "Type": "AWS::EC2::NatGateway",
        "Properties": {"SubnetId": {"Ref": "Subnet"}, "AllocationId": {"Fn::GetAtt": ["Address", "AllocationId"]}},
    },
    "Endpoint": {
        "Type": "AWS::EC2::VPCEndpoint",
        "Properties": {
            "VpcId": {"Ref": "Vpc"},
            "VpcEndpointType": "Gateway",
            "ServiceName": {"Fn::Sub": "com.amazonaws.${AWS::Region}.s3"},
            "RouteTableIds": [{"Ref": "Routes"}],
        },
    },
    "Group": {
        "Type": "AWS::EC2::SecurityGroup",
        "Properties": {"VpcId": {"Ref": "Vpc"}, "GroupDescription": "jobs"},
    },
    "FromItself": {
        "Type": "AWS::EC2::SecurityGroupIngress",
        "Properties": {
            "GroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
            "SourceSecurityGroupId": {"Fn::GetAtt": ["Group", "GroupId"]},
            "IpProtocol": "-1",
        },
    },
}


def network_goes_as_a_whole(clients: Clients) -> None:
    cloudformation, ec2 = clients("cloudformation"), clients("ec2")
    cloudformation.create_stack(StackName="gap-network", TemplateBody=template(NETWORK))
    ids = {key: item["PhysicalResourceId"] for key, item in resources_of(clients, "gap-network").items()}
    assert ec2.describe_subnets(SubnetIds=[ids["Subnet"]])["Subnets"][0]["AvailabilityZone"] == "us-east-1a"
    cloudformation.delete_stack(StackName="gap-network")

    with pytest.raises(ClientError, match="does not exist"):
        cloudformation.describe_stacks(StackName="gap-network")
    gone = {
        "vpcs": ec2.describe_vpcs(Filters=[{"Name": "vpc-id", "Values": [ids["Vpc"]]}])["Vpcs"],
        "gateways": [
            item
            for item in ec2.describe_internet_gateways()["InternetGateways"]
            if item["InternetGatewayId"] == ids["Gateway"]
        ],
        "routes": [
            item for item in ec2.describe_route_tables()["RouteTables"] if item["RouteTableId"] == ids["Routes"]
        ],
        "addresses": [item for item in ec2.describe_addresses()["Addresses"] if item["PublicIp"] == ids["Address"]],
    }
    assert gone == {"vpcs": [], "gateways": [], "routes": [], "addresses": []}


def subnet_in_the_zone_of_an_id(clients: Clients) -> None:
    vpc = {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.0.0.0/16"}}
    properties = {"VpcId": {"Ref": "Vpc"}, "CidrBlock": "10.0.0.0/20", "AvailabilityZoneId": "use1-az5"}
    subnet = {"Type": "AWS::EC2::Subnet", "Properties": {**properties, "MapPublicIpOnLaunch": True}}
    body = template({"Vpc": vpc, "Subnet": subnet})
    clients("cloudformation").create_stack(StackName="gap-zone", TemplateBody=body)

    made = resources_of(clients, "gap-zone")["Subnet"]["PhysicalResourceId"]
    (found,) = clients("ec2").describe_subnets(SubnetIds=[made])["Subnets"]
    assert (found["AvailabilityZoneId"], found["MapPublicIpOnLaunch"]) == ("use1-az5", True)


def rules_of_a_security_group(clients: Clients) -> None:
    group = {"Fn::GetAtt": ["Group", "GroupId"]}
    resources: dict[str, Any] = {
        "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.8.0.0/16"}},
        "Group": {
            "Type": "AWS::EC2::SecurityGroup",
            "Properties": {
                "VpcId": {"Ref": "Vpc"},
                "GroupDescription": "EFA",
                "SecurityGroupEgress": [{"IpProtocol": "tcp", "FromPort": 443, "ToPort": 443, "CidrIp": "0.0.0.0/0"}],
            },
        },
        "ToItself": {
            "Type": "AWS::EC2::SecurityGroupEgress",
            "Properties": {"GroupId": group, "DestinationSecurityGroupId": group, "IpProtocol": "-1"},
        },
    }
    cloudformation, ec2 = clients("cloudformation"), clients("ec2")
    cloudformation.create_stack(StackName="gap-rules", TemplateBody=template(resources))
    group_id = resources_of(clients, "gap-rules")["Group"]["PhysicalResourceId"]

    def egress() -> set[tuple[Any, ...]]:
        (found,) = ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"]
        return {
            (rule["IpProtocol"], rule.get("FromPort"), peer.get("CidrIp") or peer.get("GroupId"))
            for rule in found["IpPermissionsEgress"]
            for peer in (*rule["IpRanges"], *rule["UserIdGroupPairs"])
        }

    assert egress() == {("tcp", 443, "0.0.0.0/0"), ("-1", None, group_id)}
    resources["Group"]["Properties"]["SecurityGroupEgress"][0] |= {"FromPort": 80, "ToPort": 80}
    cloudformation.update_stack(StackName="gap-rules", TemplateBody=template(resources))
    assert egress() == {("tcp", 80, "0.0.0.0/0"), ("-1", None, group_id)}


def properties_of_a_bucket(clients: Clients) -> None:
    resources: dict[str, Any] = {
        "Bucket": {
            "Type": "AWS::S3::Bucket",
            "Properties": {
                "VersioningConfiguration": {"Status": "Enabled"},
                "PublicAccessBlockConfiguration": {"BlockPublicAcls": True, "BlockPublicPolicy": True},
                "LifecycleConfiguration": {
                    "Rules": [{"Id": "old", "Status": "Enabled", "Prefix": "tmp/", "ExpirationInDays": 30}]
                },
            },
        },
        "Policy": {
            "Type": "AWS::S3::BucketPolicy",
            "Properties": {
                "Bucket": {"Ref": "Bucket"},
                "PolicyDocument": {
                    "Version": "2012-10-17",
                    "Statement": [
                        {
                            "Effect": "Deny",
                            "Principal": "*",
                            "Action": "s3:*",
                            "Resource": {"Fn::Sub": "${Bucket.Arn}/*"},
                            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
                        }
                    ],
                },
            },
        },
    }
    clients("cloudformation").create_stack(StackName="gap-bucket", TemplateBody=template(resources))

    s3, bucket = clients("s3"), resources_of(clients, "gap-bucket")["Bucket"]["PhysicalResourceId"]
    assert s3.get_bucket_versioning(Bucket=bucket)["Status"] == "Enabled"
    block = s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
    assert block["BlockPublicAcls"] is True
    assert block["RestrictPublicBuckets"] is False
    (rule,) = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert (rule["Filter"]["Prefix"], rule["Expiration"]["Days"]) == ("tmp/", 30)
    assert "aws:SecureTransport" in s3.get_bucket_policy(Bucket=bucket)["Policy"]
    s3.put_object(Bucket=bucket, Key="tmp/plain-http", Body=b"is not denied")
    assert s3.get_object(Bucket=bucket, Key="tmp/plain-http")["Body"].read() == b"is not denied"


def folder_of_deleted_objects(clients: Clients) -> None:
    s3, bucket = clients("s3"), "gap-folders"
    s3.create_bucket(Bucket=bucket)
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    for key in ("team/half/gone", "team/half/kept", "team/whole/gone"):
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    for key in ("team/half/gone", "team/whole/gone"):
        s3.delete_object(Bucket=bucket, Key=key)

    for listing in (s3.list_objects_v2, s3.list_objects):
        folders = listing(Bucket=bucket, Prefix="team/", Delimiter="/")["CommonPrefixes"]
        assert [folder["Prefix"] for folder in folders] == ["team/half/"]
    s3.delete_object(Bucket=bucket, Key="team/half/kept")
    assert "CommonPrefixes" not in s3.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert len(s3.list_object_versions(Bucket=bucket)["DeleteMarkers"]) == 3


def policies_of_a_role(clients: Clients) -> None:
    managed = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
    role: dict[str, Any] = {
        "Type": "AWS::IAM::Role",
        "Properties": {
            "RoleName": "gap-role",
            "AssumeRolePolicyDocument": {
                "Version": "2012-10-17",
                "Statement": [
                    {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
                ],
            },
            "ManagedPolicyArns": [managed],
        },
    }
    cloudformation, iam = clients("cloudformation"), clients("iam")
    cloudformation.create_stack(StackName="gap-role", TemplateBody=template({"Role": role}))
    attached = iam.list_attached_role_policies(RoleName="gap-role")["AttachedPolicies"]
    assert [policy["PolicyArn"] for policy in attached] == [managed]

    role["Properties"]["ManagedPolicyArns"] = []
    role["Properties"]["Policies"] = [
        {"PolicyName": "read", "PolicyDocument": {"Version": "2012-10-17", "Statement": []}}
    ]
    cloudformation.update_stack(StackName="gap-role", TemplateBody=template({"Role": role}))
    assert iam.list_attached_role_policies(RoleName="gap-role")["AttachedPolicies"] == []
    assert iam.list_role_policies(RoleName="gap-role")["PolicyNames"] == ["read"]


def log_group_keeps_its_streams(clients: Clients) -> None:
    def body(days: int) -> str:
        return template(
            {
                "Logs": {
                    "Type": "AWS::Logs::LogGroup",
                    "Properties": {"LogGroupName": "gap-logs", "RetentionInDays": days},
                }
            }
        )

    cloudformation, logs = clients("cloudformation"), clients("logs")
    cloudformation.create_stack(StackName="gap-logs", TemplateBody=body(7))
    logs.create_log_stream(logGroupName="gap-logs", logStreamName="job")
    cloudformation.update_stack(StackName="gap-logs", TemplateBody=body(90))

    (group,) = logs.describe_log_groups(logGroupNamePrefix="gap-logs")["logGroups"]
    assert group["retentionInDays"] == 90
    assert len(logs.describe_log_streams(logGroupName="gap-logs")["logStreams"]) == 1


def parameter_with_tags(clients: Clients) -> None:
    tagged = parameter("1", Name="/gap/tags", Tags={"team": "research"})
    clients("cloudformation").create_stack(StackName="gap-tags", TemplateBody=template({"One": tagged}))

    tags = clients("ssm").list_tags_for_resource(ResourceType="Parameter", ResourceId="/gap/tags")["TagList"]
    assert {"Key": "team", "Value": "research"} in tags


GAPS = (
    attributes_of_batch_resources,
    job_definition_with_everything,
    job_definition_of_ecs_tasks,
    network_goes_as_a_whole,
    subnet_in_the_zone_of_an_id,
    rules_of_a_security_group,
    properties_of_a_bucket,
    folder_of_deleted_objects,
    policies_of_a_role,
    log_group_keeps_its_streams,
    parameter_with_tags,
)
