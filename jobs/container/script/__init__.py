"""The launcher's side of a custom script: its code, packages, inputs and saved files (`job` combines them)."""
