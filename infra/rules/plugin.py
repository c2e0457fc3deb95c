"""The rules as a plugin for CDK's validation: `cdk synth` and `cdk deploy` stop if a template breaks a rule."""

import json
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import aws_cdk as cdk
import jsii

from infra.rules import RULES
from infra.rules.templates import Finding, Rule, StageTemplates, Template


@jsii.implements(cdk.IPolicyValidationPlugin)
class TrainyardRules:
    """A plugin with all rules, for `cdk.Validations.of(app).add_plugins(TrainyardRules())`.

    If a rule does not apply to a construct, acknowledge `trainyard::<id>` there, with a reason.
    """

    # Properties, because jsii does not pass plain attributes.

    @property
    def name(self) -> str:
        """Return the prefix of the rules' ids."""
        return "trainyard"

    @property
    def version(self) -> str:
        return version("trainyard")

    @property
    def rule_ids(self) -> list[str]:
        return [rule.id for rule in RULES]

    def validate(self, context: cdk.IPolicyValidationContext) -> cdk.PolicyValidationPluginReport:
        """Check the templates. The CDK calls this after writing them."""
        stages: dict[str, dict[str, Template]] = defaultdict(dict)
        files: dict[str, str] = {}
        for stack in context.stack_templates:
            path = stack.stack_construct_path
            files[path] = stack.template_path
            stages[path.rpartition("/")[0]][path] = json.loads(Path(stack.template_path).read_text())
        violations = [
            cdk.PolicyViolation(
                rule_name=rule.id,
                description=f"{rule.reason} ({rule.source})",
                fix=rule.next_step,
                severity="error",
                violating_resources=[
                    cdk.PolicyViolatingResource(
                        resource_logical_id=finding.resource.logical_id,
                        template_path=files[finding.resource.stack],
                        locations=[finding.location],
                    )
                    for finding in findings
                ],
            )
            for templates in stages.values()
            for rule, findings in _broken(StageTemplates(templates))
        ]
        return cdk.PolicyValidationPluginReport(success=not violations, violations=violations)


def _broken(stage: StageTemplates) -> Iterator[tuple[Rule, list[Finding]]]:
    for rule in RULES:
        findings = list(rule.find(stage))
        if findings:
            yield rule, findings
