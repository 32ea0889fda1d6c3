"""The sandbox as its users call it: any number of threads, a bounded number of programs."""

from __future__ import annotations

import os
import platform
import sys
import threading
from typing import TYPE_CHECKING

from peers.sandbox.execute import SandboxError
from peers.sandbox.launcher import execute_here_or_there
from peers.sandbox.program import PYTHON, Limits, Outcome, Program
from peers.sandbox.seccomp import supported

if TYPE_CHECKING:
    from swarm.run.findings import Finding

_free = threading.BoundedSemaphore(os.cpu_count() or 1)
"""Programs that run at a time in this process: one for each processor."""
_works = False


def run(program: Program, limits: Limits = Limits()) -> Outcome:  # noqa: B008
    """Run a program, after others if too many run; raises `SandboxError`."""
    check(why_none())
    with _free:
        return execute_here_or_there(program, limits)


def check(reason: str) -> None:
    """Raise `SandboxError` if there is a reason why no sandbox works."""
    if reason:
        raise SandboxError(
            reason,
            "allow user namespaces (sysctl user.max_user_namespaces=10000, "
            "kernel.unprivileged_userns_clone=1 on Debian, "
            "kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container, a seccomp "
            "profile that allows unshare and mount), on Linux 5.12 or later",
        )


def why_none() -> str:
    """Why no sandbox works on this machine; empty if one does. Runs an empty program until one has
    worked: the machine may have been too busy."""
    global _works
    reason = "" if _works else _tried()
    _works = not reason
    return reason


def _tried() -> str:
    if sys.platform != "linux" or not supported():
        return f"no filter of system calls for {sys.platform} on {platform.machine()}"
    try:
        outcome = execute_here_or_there(Program(argv=(PYTHON, "-c", "")), Limits())
    except SandboxError as error:
        return error.reason
    return "" if outcome.code == 0 else outcome.stderr.decode("utf-8", "replace")[-300:]


def findings() -> list[Finding]:
    """Whether untrusted programs can run here; runs an empty one."""
    from swarm.run.findings import Finding  # needs more than a killable process has

    reason = why_none()
    text = "programs of a model run in user namespaces"
    if reason:
        text = f"none, which only environments with programs need ({reason})"
    return [Finding("sandbox", text, {"works": not reason})]
