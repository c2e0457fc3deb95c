"""The environment variables of a script of one's own (kind `script`), beside those of any job and of torchrun."""

SCRIPT_VARIABLE = "TRAINYARD_SCRIPT"
"""What decides the script's result, as JSON: its checkpoints are resumed with the same only."""

OUTPUT_VARIABLE = "TRAINYARD_OUTPUT"
"""The folder whose files are kept on S3, below the run's output/."""

CHECKPOINTS_VARIABLE = "TRAINYARD_CHECKPOINTS"
"""The folder whose complete checkpoints are kept on S3, and are there again in the next attempt."""

INPUT_PREFIX = "TRAINYARD_INPUT_"
"""Begins the variable that says where an input lies, followed by its name in capitals."""

PARAMETER_PREFIX = "TRAINYARD_PARAMETER_"
"""Begins the variable that holds a parameter, followed by its name in capitals."""

NODE_VARIABLE = "TRAINYARD_NODE"
NNODES_VARIABLE = "TRAINYARD_NNODES"
MAIN_ADDRESS_VARIABLE = "TRAINYARD_MAIN_ADDRESS"


def input_variable(name: str) -> str:
    """Return the variable that says where the input `name` lies."""
    return INPUT_PREFIX + name.upper().replace("-", "_")


def parameter_variable(name: str) -> str:
    """Return the variable that holds the parameter `name`."""
    return PARAMETER_PREFIX + name.upper()
