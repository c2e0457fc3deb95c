"""Rules for AWS Batch and EFA, which cdk-nag lacks. Every synthesis checks them.

cdk synth                 fails if a template breaks a rule, and reports the construct, the reason and the next step
python -m infra.rules     lists the rules

Each rule covers what settings, or a plausible edit of a stack, could break. It is a pure function of a stage's
templates, and its docstring is the reason.
"""

from infra.rules import instances, job_definitions
from infra.rules.templates import Rule, rules_of

RULES: tuple[Rule, ...] = tuple(rule for module in (instances, job_definitions) for rule in rules_of(module))
