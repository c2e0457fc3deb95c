"""Every trap that Gaudi, Batch, EFA and the CDK set, and what holds it: a rule that is seen to break, or a test."""

import ast
import copy
from dataclasses import dataclass
from functools import cache

import pytest

from infra.rules import RULES
from infra.rules.stage_templates import StageTemplates
from tests.support.infra.breaking import BREAKS
from tests.support.infra.synthesis import ROOT, Templates


@dataclass(frozen=True)
class Trap:
    """One trap."""

    what: str
    """What goes wrong where nobody thinks of it."""
    rules: tuple[str, ...] = ()
    """Rules of infra.rules that find it, without `TY-`."""
    tests: tuple[str, ...] = ()
    """Tests elsewhere that hold it, by name."""


TRAPS = (
    # Gaudi and its software
    Trap(
        "letters of zones differ between accounts, and one zone of a region had DL1",
        tests=(
            "test_zones_are_named_by_id_since_letters_differ_between_accounts",
            "test_dl1_is_looked_for_in_the_one_zone_of_a_region_that_had_it",
            "test_accelerators_start_in_the_zones_that_offer_them",
        ),
    ),
    Trap(
        "EC2 may no longer offer the type, and the quota is 0 at first",
        tests=("test_ec2_is_asked_for_its_offer_and_the_quota", "test_a_stage_can_move_to_another_instance_type"),
    ),
    Trap(
        "driver and image of different releases",
        tests=(
            "test_gaudi_instances_boot_what_the_stage_built_for_their_release",
            "test_the_row_is_installed_and_the_base_keeps_what_is_its_own",
            "test_retiring_pools_stand_beside_the_new_one_and_share_nothing_with_it",
        ),
    ),
    Trap(
        "a release that dropped the first generation of Gaudi",
        tests=("test_dl1_is_refused_what_dropped_its_generation", "test_dl1_runs_every_release_up_to_1_21"),
    ),
    Trap(
        "the image's transformers is not the laptop's",
        tests=("test_the_laptop_trains_with_the_default_releases_transformers_and_accelerate",),
    ),
    Trap(
        "optimum-habana cannot be imported off Gaudi, and refuses arguments of transformers",
        tests=("test_every_training_argument_is_known_and_kept", "test_gaudi_trainer_trains_checkpoints_and_resumes"),
    ),
    Trap("keys that a Gaudi configuration does not know", tests=("test_every_key_of_the_gaudi_config_is_known",)),
    Trap(
        "a CPU run at the price of eight HPUs",
        tests=(
            "test_cards_without_habanas_pytorch_are_no_accelerator",
            "test_the_launcher_refuses_what_is_not_here_before_anything_starts",
        ),
    ),
    Trap(
        "each new shape compiles a graph",
        tests=(
            "test_there_are_no_more_widths_than_lengths_need",
            "test_all_ranks_have_the_same_width_at_the_same_time_and_together_the_global_batch",
        ),
    ),
    Trap("HCCL without the host's IPC namespace", rules=("JobDefinition-HostIpc",)),
    Trap("containerProperties, which know no IPC namespace", rules=("JobDefinition-HostIpc",)),
    Trap("memory that may not be pinned", rules=("JobDefinition-Memlock",)),
    Trap(
        "no huge pages for the driver",
        tests=("test_gaudi_instances_set_huge_pages_aside_and_others_do_not",),
    ),
    Trap("HCCL told not to look for EFA", rules=("JobDefinition-HcclAutoDetection",)),
    # EFA
    Trap("a public address beside several interfaces", rules=("LaunchTemplate-NoPublicAddress", "Subnet-Private")),
    Trap("EFA interfaces on the wrong cards", rules=("LaunchTemplate-EfaCards",)),
    Trap("EFA devices that the runtime does not add", rules=("JobDefinition-EfaDevices",)),
    Trap("a group that does not name itself, both ways", rules=("SecurityGroup-EfaAmongItself",)),
    Trap("nodes scattered over subnets or racks", rules=("ComputeEnvironment-EfaPlacement",)),
    # Batch: launch templates
    Trap("what Batch ignores in a launch template", rules=("LaunchTemplate-NothingIgnored",)),
    Trap("user data that is no MIME archive", rules=("LaunchTemplate-MimeUserData",)),
    Trap("interfaces and security groups at once", rules=("LaunchTemplate-OnePlaceForSecurityGroups",)),
    Trap("a template version that is read once", rules=("LaunchTemplate-NumberedVersion",)),
    # Batch: capacity
    Trap("jobs of several nodes on Spot", rules=("JobQueue-MultinodeOnDemand", "ComputeEnvironment-EfaPlacement")),
    Trap("a bid", rules=("ComputeEnvironment-NoBidPercentage",)),
    Trap("a Spot Fleet role without BEST_FIT", rules=("ComputeEnvironment-NoSpotFleetRole",)),
    Trap("an edit that replaces the compute environment", rules=("ComputeEnvironment-InPlaceUpdates",)),
    Trap("Amazon Linux 2", rules=("ComputeEnvironment-ImageType",)),
    Trap("instances with GPUs but no driver", rules=("ComputeEnvironment-GpuImage",)),
    Trap("instances that run while no job does", rules=("ComputeEnvironment-NothingIdle",)),
    Trap("instances that nobody's tag is on", rules=("ComputeEnvironment-TaggedInstances",)),
    Trap("a limit below one instance", rules=("ComputeEnvironment-RoomForAJob",)),
    Trap("more compute environments than a queue takes", rules=("JobQueue-AtMostThreeEnvironments",)),
    Trap("EC2 and Fargate in one queue", rules=("JobQueue-OneKindOfCapacity",)),
    Trap("On-Demand before Spot", rules=("JobQueue-SpotFirst",)),
    Trap(
        "a stuck head of a queue, or a limit that Batch does not take",
        rules=("JobQueue-TimeLimits",),
        tests=(
            "test_a_job_that_can_never_start_makes_way",
            "test_a_job_waits_for_spot_capacity_as_long_as_the_stage_says",
            "test_jobs_that_wait_for_spot_are_moved_and_do_not_overflow",
        ),
    ),
    Trap("fair share that cannot be added later", rules=("JobQueue-FairShare", "JobDefinition-FairShare")),
    Trap("weights and names of shares that Batch refuses", rules=("SchedulingPolicy-Shares",)),
    # Batch: jobs
    Trap("more vCPUs or memory than a node has for jobs", rules=("JobDefinition-Fits",)),
    Trap("a closed range of nodes", rules=("JobDefinition-OpenNodeRange",)),
    Trap("a definition for one node only", rules=("JobDefinition-BothWays",)),
    Trap("failures that no rule matches are retried", rules=("JobDefinition-RetryRules",)),
    Trap("a hanging job", rules=("JobDefinition-Timeout",)),
    Trap(
        "30 seconds between SIGTERM and SIGKILL, and no draining on a Spot notice",
        rules=("LaunchTemplate-SpotDraining",),
        tests=("test_the_ecs_agent_gives_jobs_the_notices_time_to_stop",),
    ),
    Trap(
        "draining, which stops tasks of services and none of Batch's",
        rules=("LaunchTemplate-SpotDraining",),
        tests=("test_a_spot_notice_stops_jobs_and_nothing_else_once_and_in_time",),
    ),
    Trap(
        "an agent that starts however user data ended",
        tests=(
            "test_an_instance_without_the_shared_file_system_takes_no_jobs",
            "test_an_instance_without_the_drivers_huge_pages_takes_no_jobs",
        ),
    ),
    Trap("definitions of more than 24 KiB", rules=("JobDefinition-Size",)),
    Trap("submissions of more than 30 KiB", tests=("test_the_ready_specs_can_be_planned_and_fit_batchs_limit",)),
    Trap("the account's log group, which never expires", rules=("JobDefinition-Logs",)),
    Trap("secrets in definitions, which many may read", rules=("JobDefinition-NoSecret",)),
    Trap("one role for all teams", rules=("JobDefinition-RoleOfItsTeam",)),
    Trap(
        "the main node is not told its own address, and a child's death ends nothing",
        tests=(
            "test_every_node_knows_its_place",
            "test_the_death_of_a_child_does_nothing",
            "test_two_nodes_meet_train_and_resume_as_one",
        ),
    ),
    Trap("attempts count from 1", tests=("test_a_failed_job_is_started_again_with_the_next_attempt_number",)),
    # Security
    Trap("the instance's credentials in reach of a fetched URL", rules=("LaunchTemplate-Imdsv2",)),
    Trap("volumes as the AMI has them", rules=("LaunchTemplate-EncryptedVolumes",)),
    Trap(
        "a folder of the host with Docker's images in it, in every container",
        tests=("test_jobs_write_to_their_instances_own_disks_and_see_nothing_else_of_them",),
    ),
    Trap("SSH from the world", rules=("SecurityGroup-NothingFromOutside", "LaunchTemplate-NoKeyPair")),
    # CDK
    Trap(
        "CPU instances by default, beside the ones that were named", rules=("ComputeEnvironment-ExplicitInstanceTypes",)
    ),
    Trap("an update that deregisters what runs", rules=("JobDefinition-OldRevisionsStay",)),
    Trap(
        "look-ups at synthesis",
        tests=("test_synthesis_looks_nothing_up", "test_a_stage_of_a_fixed_account_looks_nothing_up_either"),
    ),
    Trap("rules that are added the way of cdk-nag 2", tests=("test_what_the_rules_forbid_is_not_synthesised",)),
    Trap(
        "another logical id for what holds data",
        tests=("test_buckets_keep_their_logical_ids", "test_compute_environments_and_queues_keep_their_logical_ids"),
    ),
    Trap("functions whose logs never expire", tests=("test_every_log_expires",)),
    Trap(
        "a parameter's value is the template's again when CloudFormation updates it, for a tag too",
        tests=(
            "test_tags_of_the_whole_stage_change_nothing_that_pushes_write",
            "test_a_parameter_that_is_updated_has_the_templates_value_again",
        ),
    ),
)


@pytest.mark.parametrize(
    ("trap", "rule"),
    [(trap, rule) for trap in TRAPS for rule in trap.rules],
    ids=lambda item: getattr(item, "what", item),
)
def test_the_rule_springs_before_the_trap_does(trap: Trap, rule: str, variants: Templates) -> None:
    (found_by,) = (known for known in RULES if known.id == f"TY-{rule}")
    breaks = [item for item in BREAKS if item.rule == found_by.id]
    assert breaks
    for item in breaks:
        whole = {path: value for path, value in variants.items() if path.startswith(f"{item.variant}/")}
        broken = copy.deepcopy(whole)
        item.apply(broken)
        assert list(found_by.find(StageTemplates(whole))) == []
        assert list(found_by.find(StageTemplates(broken))) != [], item.what


@pytest.mark.parametrize(
    ("trap", "test"),
    [(trap, test) for trap in TRAPS for test in trap.tests],
    ids=lambda item: getattr(item, "what", item),
)
def test_the_test_that_holds_the_trap_is_there(trap: Trap, test: str) -> None:
    assert test in _tests()


def test_every_rule_is_there_for_a_trap() -> None:
    assert {f"TY-{rule}" for trap in TRAPS for rule in trap.rules} == {rule.id for rule in RULES}
    assert all(trap.rules or trap.tests for trap in TRAPS)


@cache
def _tests() -> set[str]:
    """Names of all tests of the project."""
    return {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
