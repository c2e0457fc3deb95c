"""What a node's launcher does for a script of one's own: its code, packages and inputs, and what it leaves.

`job` puts them together; the ranks themselves are jobs.container.kinds.script.
"""
