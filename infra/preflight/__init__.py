"""Check before a deployment whether a stage of infra/settings.py can work in the account. Changes nothing.

python -m infra.preflight [--stage dev] [--profile NAME] [--region NAME] [-o json]

    account.py         credentials and region, findings, and errors of AWS
    capacity.py        EC2's offer of the instance types, their zones, vCPU and Batch quotas, reserved capacity
    network.py         services of endpoints; an existing VPC: its subnets, routes and endpoints
    prerequisites.py   bootstrap, service-linked roles, EBS key, AMI, permissions boundary, OIDC provider
    billing.py         the tags by which budgets count

Every result is a finding: ok, a problem and what to do about it, or unknown and why.
"""
