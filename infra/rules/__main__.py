"""Print every rule with its reason, source and next step: python -m infra.rules."""

from infra.rules import RULES
from jobs.core.output import run_program


def main() -> None:
    for rule in RULES:
        print(f"{rule.id}\n    {rule.reason}\n    Source: {rule.source}\n    Next: {rule.next_step}\n")


if __name__ == "__main__":
    run_program(main)
