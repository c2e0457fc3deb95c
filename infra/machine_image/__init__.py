"""The stack that builds the AMIs of Gaudi instances from the shell scripts in documents/."""
