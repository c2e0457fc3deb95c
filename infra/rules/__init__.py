"""The project's own rules for AWS Batch and EFA, which cdk-nag has none of: checked at every synthesis.

cdk synth                 fails where a template breaks a rule, and names the construct, the reason and what to do next
python -m infra.rules     lists the rules

Each rule is a pure function of one stage's templates, in the file of what it is about; its docstring is the reason.
"""

from infra.rules import compute_environments, job_definitions, job_queues, launch_templates, networks
from infra.rules.rule import Rule, rules_of

RULES: tuple[Rule, ...] = tuple(
    rule
    for module in (compute_environments, launch_templates, job_queues, job_definitions, networks)
    for rule in rules_of(module)
)
