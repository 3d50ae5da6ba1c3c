"""Child processes that never outlive their parent, and are stopped by pid."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """A ``preexec_fn`` after which the kernel sends ``signum`` to the child when its parent is
    gone, however it went. Linux only; elsewhere the child stays.

    The kernel counts the *thread* that forked as the parent: start children on the main thread.
    """
    parent_pid = os.getpid()

    def arm() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return arm


def stop_child(process: "subprocess.Popen[bytes]", grace_s: float) -> int:
    """SIGTERM, then SIGKILL after ``grace_s``. Returns the exit status. A stopped (SIGSTOP) child
    is continued first, or it would not see the SIGTERM."""
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
