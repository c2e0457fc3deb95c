"""The first process of a job's container where containers are local processes: what `docker run --init` puts there.

    python -I -S container_init.py STATUS_FD WORKING_DIRECTORY COMMAND [ARGUMENT ...]

It runs the command in a session of its own, hands SIGTERM on to it, and ends as it ended; then it kills whatever the
command left behind, however deep and however detached, and removes the working directory. It does the same at once when
its standard input ends: the server holds the other end, so a server that is gone, by kill -9 too, leaves nothing.

STATUS_FD gets one line: `started PID`, or `failed ERRNO` where the command cannot be executed. It runs without
site-packages and imports little, since every container waits for it.
"""

import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str], execute: Callable[[list[str], int, ctypes.CDLL], None] | None = None) -> int:
    """Run the command; its exit code, 128 and the signal's number where a signal ended it.

    `execute` becomes the command in the child; None: by an exec.
    """
    status_fd, working_directory, command = int(arguments[0]), arguments[1], arguments[2:]
    os.set_inheritable(status_fd, False)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, _note)
    libc = ctypes.CDLL(None, use_errno=True)
    # Descendants whose parents end become children of this process, not of the machine's init: none can get away.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Should the job have stopped this process when the server dies, it resumes and sees its standard input end.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    error_read, error_write = os.pipe()
    child = os.fork()
    if child == 0:
        (execute or _execute)(command, error_write, libc)
    os.close(error_write)
    with os.fdopen(error_read) as errors:
        failure = errors.read()  # ends, empty, when the command takes over
    os.write(status_fd, (f"failed {failure}\n" if failure else f"started {child}\n").encode())
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)

    code = _supervise(child, wake_read)
    _kill_all()
    _remove(working_directory)
    return code


def _execute(command: list[str], error_fd: int, libc: ctypes.CDLL) -> None:
    """Become the command, in the child."""
    try:
        leave_init(libc)
        os.execvp(command[0], command)  # noqa: S606 - the job definition names it, no shell is meant
    except OSError as error:
        os.write(error_fd, str(error.errno).encode())
    finally:
        os._exit(127)


def leave_init(libc: ctypes.CDLL) -> None:
    """Take away from this child what it has of the init process, but for files that an exec closes."""
    os.setsid()
    # Should this process's parent be killed, at least the command goes with it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.set_wakeup_fd(-1)
    # What Python ignores would stay ignored in the command.
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)


def _supervise(child: int, wake_fd: int) -> int:
    while True:
        readable, _, _ = select.select([0, wake_fd], [], [])
        if 0 in readable and not os.read(0, 1024):
            return 128 + signal.SIGKILL
        if wake_fd not in readable:
            continue
        if signal.SIGTERM in os.read(wake_fd, 1024):
            _send(child, signal.SIGTERM)
        for pid, status in _reap():
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code


def _kill_all() -> None:
    """Kill until nothing is left: what is born meanwhile becomes a child of this process as its parent dies."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        for pid in _descendants():
            _send(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        for _ in _reap():
            pass


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would cost every start 10 ms
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123 - likewise
                # "pid (name) state parent …", and a name may hold spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # gone by now
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        own = children.get(pending.pop(), [])
        found.extend(own)
        pending.extend(own)
    return found


def _reap() -> Iterator[tuple[int, int]]:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def _send(pid: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib would cost every start some milliseconds
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # gone already, or become another user's by a set-user-id program


def _remove(directory: str) -> None:
    import shutil  # noqa: PLC0415 - not needed before the end, and every start would wait for it

    shutil.rmtree(directory, ignore_errors=True)


def _note(_number: int, _frame: object) -> None:
    """The wake-up descriptor tells the loop; a handler must be there for that."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
