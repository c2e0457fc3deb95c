"""Act as the init process of a container that is a local process, like `docker run --init`.

    python -I -S container_init.py STATUS_FD WORKING_DIRECTORY COMMAND [ARGUMENT ...]

It starts the command in a new session, forwards SIGTERM to it, and exits with its exit code. Before that, it kills all
processes that the command left, however nested or detached, and deletes the working directory. It does the same when
its standard input closes. The server has the other end, so no container outlives the server, even after kill -9.

It writes one line to STATUS_FD: `started PID`, or `failed ERRNO` if the command cannot be executed. It runs without
site-packages and imports little, because every container waits for it.
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
    """Run the command and return its exit code: 128 plus the number of the signal if a signal ended it.

    `execute` replaces the exec that turns the child into the command.
    """
    status_fd, working_directory, command = int(arguments[0]), arguments[1], arguments[2:]
    os.set_inheritable(status_fd, False)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, _note)
    libc = ctypes.CDLL(None, use_errno=True)
    # Orphaned descendants become children of this process, not of the machine's init, so none can escape.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # If the job has stopped this process when the server dies, it resumes and finds its standard input closed.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    error_read, error_write = os.pipe()
    child = os.fork()
    if child == 0:
        (execute or _execute)(command, error_write, libc)
    os.close(error_write)
    with os.fdopen(error_read) as errors:
        failure = errors.read()  # empty if the exec succeeded, which closes the pipe
    os.write(status_fd, (f"failed {failure}\n" if failure else f"started {child}\n").encode())
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)

    code = _supervise(child, wake_read)
    _kill_all()
    import shutil  # noqa: PLC0415 - needed only at the end, and every start would wait for it

    shutil.rmtree(working_directory, ignore_errors=True)
    return code


def _execute(command: list[str], error_fd: int, libc: ctypes.CDLL) -> None:
    """Replace the child with the command."""
    try:
        leave_init(libc)
        os.execvp(command[0], command)  # noqa: S606 - the command of the job definition, without a shell
    except OSError as error:
        os.write(error_fd, str(error.errno).encode())
    finally:
        os._exit(127)


def leave_init(libc: ctypes.CDLL) -> None:
    """Reset what this child inherited from the init process, except for files that exec closes."""
    os.setsid()
    # If the parent of this process is killed, at least the command dies with it.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.set_wakeup_fd(-1)
    # Signals that Python ignores would stay ignored in the command.
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
    """Kill descendants until none is left. New ones become children of this process when their parent dies."""
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
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib would add 10 ms to every start
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123 - likewise
                # "pid (name) state parent …"; the name may have spaces and parentheses.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # already gone
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        direct = children.get(pending.pop(), [])
        found.extend(direct)
        pending.extend(direct)
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
    try:  # noqa: SIM105 - contextlib would add milliseconds to every start
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # already gone, or run as another user by a set-user-id program


def _note(_number: int, _frame: object) -> None:
    """Do nothing: the wake-up descriptor wakes the loop, but only if the signal has a handler."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
