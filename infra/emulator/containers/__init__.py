"""Containers of jobs and functions, as processes of this machine or in a Docker engine, and what they write."""
