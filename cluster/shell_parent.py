"""A command given through a shell (`sh -c "bash cluster/run_all.sh …"`) hears of a SIGTERM that only the shell gets.

A shell does not pass signals on: it dies of SIGTERM and leaves its command behind. So the command asks the kernel to be
told of the death of the shell. As process 1 of a container a shell does not even die: then one can only say so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

SHELLS = ("sh", "bash", "dash", "ash")
PR_SET_PDEATHSIG = 1


def follow_shell() -> None:
    """Has SIGTERM sent to this process when the shell around it dies, if it is there for this command alone."""
    parent = os.getppid()
    if not is_command_shell(command_of(parent)) or is_detached():
        return
    if parent == 1:
        print(
            "warning: process 1 is a shell, which keeps SIGTERM to itself, so a preemption comes without notice: start "
            "this command with exec in front, or the container with an init such as tini.",
            file=sys.stderr,
        )
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))


def is_command_shell(command: list[str]) -> bool:
    """Says whether a command line is that of a shell with a command of its own, not one that a person types into."""
    return len(command) > 2 and Path(command[0]).name in SHELLS and command[1].startswith("-") and "c" in command[1]


def is_detached() -> bool:
    """Says whether this process was made to outlive its shell, by nohup or setsid."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or os.getsid(0) == os.getpid()


def command_of(pid: int) -> list[str]:
    """Returns the command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[:-1]
    except OSError:
        return []
