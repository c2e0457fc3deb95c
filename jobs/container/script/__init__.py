"""A custom script on a node: its code, packages and inputs, and the files that it leaves.

`job` combines them for the launcher. The ranks run jobs.container.kinds.script.
"""
