"""The network that jobs run in: a VPC created by the stage, or an existing one."""
