"""What CloudFormation tells EventBridge: each change of a stack's status.

Source: AWS CloudFormation user guide, "Stack Status Change event detail". Of single resources it tells nothing here.
"""

from infra.emulator import events
from infra.emulator.cloudformation.models import Place


def status_changed(stack: Place, status: str, reason: str | None, client_request_token: str | None) -> None:
    """Put it on the default bus."""
    if not events.has_rules(stack.account_id, stack.region):
        return
    events.emit(
        account_id=stack.account_id,
        region=stack.region,
        source="aws.cloudformation",
        detail_type="CloudFormation Stack Status Change",
        detail={
            "stack-id": stack.stack_id,
            "status-details": {"status": status, "status-reason": reason or ""},
            "client-request-token": client_request_token or "",
        },
        resources=(stack.stack_id,),
    )
