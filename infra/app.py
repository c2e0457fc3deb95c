"""The CDK app: settings -> stages -> stacks.

cdk synth                 write the templates of all stages to cdk.out; needs no account and no network
cdk deploy 'dev/*'        deploy one stage (`-c stage=dev` skips the synthesis of the others)
"""

import gc
from collections.abc import Iterable

import aws_cdk as cdk
from cdk_nag import AwsSolutionsChecks, NIST80053R5Checks, WriteNagSuppressionsToCloudFormationAspect

from infra.access.stack import AccessStack
from infra.compute.stack import ComputeStack
from infra.image.stack import ImageStack
from infra.job.stack import JobStack
from infra.machine_image.stack import MachineImageStack, built_pools
from infra.network.stack import NetworkStack
from infra.observability.stack import ObservabilityStack
from infra.rules.plugin import TrainyardRules
from infra.stages import Stage
from infra.stages.checks import selected_stages
from infra.storage.stack import StorageStack
from jobs.core.output import run_program


def build(app: cdk.App, rows: Iterable[Stage]) -> None:
    """Create the stacks of each stage in the order of their dependencies, and add the rules that check them."""
    for row in rows:
        stage = cdk.Stage(app, row.name, env=cdk.Environment(account=row.account, region=row.region))
        access = AccessStack(stage, stage=row)
        network = NetworkStack(stage, stage=row)
        storage = StorageStack(stage, stage=row, network=network)
        image = ImageStack(stage, stage=row, storage=storage)
        amis = MachineImageStack(stage, stage=row, network=network, image=image) if built_pools(row) else None
        compute = ComputeStack(stage, stage=row, network=network, storage=storage, machine_image=amis)
        jobs = JobStack(stage, stage=row, storage=storage, image=image)
        ObservabilityStack(stage, stage=row, storage=storage, compute=compute, jobs=jobs)
        access.limit(stage)
        # Write the reasons for acknowledged findings into the templates.
        cdk.Aspects.of(stage).add(WriteNagSuppressionsToCloudFormationAspect())
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(), NIST80053R5Checks(), TrainyardRules())


def main() -> None:
    app = cdk.App()
    build(app, selected_stages(app.node.try_get_context("stage")))
    app.synth()
    # Skip the last garbage collection, which would search all of the CDK and take a twelfth of the run.
    gc.freeze()


if __name__ == "__main__":
    run_program(main)
