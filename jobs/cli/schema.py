"""`trainyard schema`: the JSON Schema of a spec."""


def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    import json

    from jobs.cli.terminal import print_text
    from jobs.spec.spec import spec_json_schema

    print_text(json.dumps(spec_json_schema(), indent=2))
