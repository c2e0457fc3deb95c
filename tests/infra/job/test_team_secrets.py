"""What a team's secrets hold, from there into its own jobs: its Hugging Face token, and variables of any name."""

from typing import Any

from infra.stages import Team
from tests.support.infra.job_definitions import container_of
from tests.support.infra.synthesis import only, resources


def test_a_teams_token_reaches_its_own_jobs_and_stands_nowhere(synthesised: Any) -> None:
    # GIVEN two teams, one of which has a token
    teams = (Team(name="research", huggingface_token=True), Team(name="product"))
    stacks = synthesised(teams=teams)
    # THEN its jobs get what the secret holds, by reference, and the other team's jobs do not
    definitions = resources(stacks["jobs"], "AWS::Batch::JobDefinition")
    (secret,) = container_of(definitions["Jobresearchfinetuneclassification"])["Secrets"]
    assert secret["Name"] == "HF_TOKEN"
    parameter = stacks["jobs"]["Parameters"][secret["ValueFrom"]["Ref"]]
    assert parameter["Type"] == "AWS::SSM::Parameter::Value<String>"
    assert parameter["Default"] == "/trainyard/test/huggingface-secret/research"
    assert "Secrets" not in container_of(definitions["Jobproductfinetuneclassification"])
    # AND the template makes the secret without a value, and keeps it whatever happens to the stack
    ((_, made),) = (
        (name, item)
        for name, item in stacks["storage"]["Resources"].items()
        if item["Type"] == "AWS::SecretsManager::Secret"
    )
    assert not {"SecretString", "GenerateSecretString", "Name"} & made["Properties"].keys()
    assert (made["DeletionPolicy"], made["UpdateReplacePolicy"]) == ("Retain", "Retain")
    # AND its description says how to put one in, so that it shows neither in a process list nor in a history
    description = made["Properties"]["Description"]
    assert "aws secretsmanager put-secret-value --secret-string file:///dev/stdin" in description
    assert parameter["Default"] in description
    assert {"Key": "trainyard:team", "Value": "research"} in made["Properties"]["Tags"]


def test_the_secret_has_the_stages_own_key_where_there_is_one(synthesised: Any) -> None:
    teams = (Team(name="research", huggingface_token=True),)
    assert "KmsKeyId" not in only(synthesised(teams=teams)["storage"], "AWS::SecretsManager::Secret")
    storage = synthesised(teams=teams, own_kms_key=True)["storage"]
    (key,) = resources(storage, "AWS::KMS::Key")
    assert only(storage, "AWS::SecretsManager::Secret")["KmsKeyId"] == {"Fn::GetAtt": [key, "Arn"]}


def test_a_team_that_gives_up_its_token_can_be_deployed(synthesised: Any) -> None:
    # An export that a definition imports could not be taken back: the secret's ARN goes by SSM.
    with_token = synthesised(teams=(Team(name="research", huggingface_token=True),))
    exported = with_token["storage"].get("Outputs", {})
    assert not any("Secret" in name or "HuggingFace" in name for name in exported)


def test_variables_of_one_secret_reach_the_teams_jobs_by_their_names(synthesised: Any) -> None:
    names = ("WANDB_API_KEY", "MLFLOW_TRACKING_URI")
    stacks = synthesised(teams=(Team(name="research", huggingface_token=True, secret_variables=names),))
    secrets = container_of(resources(stacks["jobs"], "AWS::Batch::JobDefinition")["Jobresearchscript"])["Secrets"]
    assert [secret["Name"] for secret in secrets] == ["HF_TOKEN", *names]
    for secret in secrets[1:]:
        # ECS takes the one key out of the object: `ARN:json-key:version-stage:version-id`.
        [_, [arn, rest]] = secret["ValueFrom"]["Fn::Join"]
        assert rest == f":{secret['Name']}::"
        assert stacks["jobs"]["Parameters"][arn["Ref"]]["Default"] == "/trainyard/test/variables-secret/research"
    # THEN both are made without a value, and the agent of this team's jobs alone may read them
    made = resources(stacks["storage"], "AWS::SecretsManager::Secret")
    assert len(made) == 2
    assert not any({"SecretString", "GenerateSecretString"} & secret.keys() for secret in made.values())
    told = [
        item for item in resources(stacks["storage"], "AWS::SSM::Parameter").values() if "secret-var" in item["Name"]
    ]
    assert [(item["Name"], item["Value"]) for item in told] == [
        ("/trainyard/test/secret-variables/research", "WANDB_API_KEY MLFLOW_TRACKING_URI")
    ]
