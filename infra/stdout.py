"""How programs of infra end when nobody reads their stdout any more: python -m infra.rules | head"""

import signal


def end_with_reader() -> None:
    """Let a reader that has seen enough end this process, as it ends other programs: without a word.

    To be called before the output, once all else is done: the process is gone at once, by SIGPIPE.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
