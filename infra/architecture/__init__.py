"""A picture of the architecture, drawn from what the app synthesises.

python -m infra.architecture                 draws infra/architecture.svg: everything a stage can have
python -m infra.architecture --stage dev     draws a stage of infra/settings.py to stdout

A new stack, resource, reference or event shows by itself; nothing here lists them.
"""
