"""The emulator: the API of the services that the stacks need, on loopback, with jobs that really run.

python -m infra.emulator serve      the server
python -m infra.emulator deploy     the real CDK CLI against it
"""

ACCOUNT_ID = "123456789012"
REGION = "us-east-1"
HOST = "localhost"
"""Clients use the name, since templates in the emulated S3 are found by it; the server binds to 127.0.0.1 only."""
