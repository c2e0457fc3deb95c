"""Asks the account, before anything is deployed, whether a stage of infra/settings.py can work there. Changes nothing.

python -m infra.preflight [--stage dev] [--profile NAME] [--region NAME] [-o json]

    account.py         whose account, which region, and what an answer that was refused means
    capacity.py        whether EC2 offers the instance types, in which zones, and how many vCPUs the quotas allow
    network.py         whether an existing VPC is as the settings say, with a way out
    prerequisites.py   what has to be there before: bootstrap, roles, AMI, secrets, policies

Every answer is a finding: ok, a problem with what to do about it, or unknown with what kept it from being known.
"""
