"""The emulator: the AWS APIs that the stacks need, on loopback, with Batch jobs that really run.

python -m infra.emulator serve      runs the server
python -m infra.emulator deploy     deploys a stage to it with the real CDK CLI
"""

ACCOUNT_ID = "123456789012"
REGION = "us-east-1"
HOST = "localhost"
"""Clients must use this name, because the CDK CLI finds templates in S3 by it. The server binds to 127.0.0.1 only."""
