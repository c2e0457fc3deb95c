"""The project's own rules for AWS Batch and EFA, which cdk-nag has none of: checked at every synthesis.

cdk synth                 fails if a template breaks a rule, and names the construct, the reason and what to do next
python -m infra.rules     lists the rules

A rule is there for what settings, or a plausible edit of a stack, could break. It is a pure function of one stage's
templates, and its docstring is the reason.
"""

from infra.rules import instances, job_definitions
from infra.rules.templates import Rule, rules_of

RULES: tuple[Rule, ...] = tuple(rule for module in (instances, job_definitions) for rule in rules_of(module))
