"""The main node of a gang says that it lives, and looks for nodes that come late.

Without its signs of life those would begin something of their own, and the other nodes would no longer wait for its
word of how the run ended.
"""

import logging
import threading
from collections.abc import Callable

from jobs.contract.errors import TrainyardError
from jobs.train.launcher.gang import GangMember

log = logging.getLogger("trainyard")

LOOK_SECONDS = 15.0

_LAST_LOOK_SECONDS = 5.0


class Latecomers:
    """From `with` to its end. `ask_to_stop` is called once, from a thread, with the reason."""

    def __init__(
        self, member: GangMember, ask_to_stop: Callable[[str], None], *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._member = member
        self._ask_to_stop = ask_to_stop
        self._look_seconds = look_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="latecomers", daemon=True)

    def __enter__(self) -> "Latecomers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(_LAST_LOOK_SECONDS)

    def _watch(self) -> None:
        is_asked = False
        while not self._closed.wait(self._look_seconds):
            reason = self._reason()
            if reason is not None and not is_asked:
                is_asked = True
                self._ask_to_stop(reason)

    def _reason(self) -> str | None:
        try:
            late = self._member.latecomers()
        except TrainyardError as error:
            # Those that have come late must take it for lost soon: it may not go on.
            return f"the other nodes hear nothing of this one: {error.args[0]}"
        if not late:
            return None
        named = ", ".join(f"node {index}" for index in late)
        return f"{named} of {self._member.gang.size} came late, and the nodes meet again"
