"""Which means of isolation work on this machine."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from peers.sandbox.execute import SandboxError
from peers.sandbox.isolation import Isolation, bubblewrap_path
from peers.sandbox.launcher import execute_here_or_there
from peers.sandbox.program import PYTHON, Limits, Program
from peers.sandbox.seccomp import supported
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.run.findings import Finding

ORDER: tuple[Isolation, ...] = ("bubblewrap", "namespaces")


@dataclass(frozen=True)
class Report:
    """The means that work, best first, and why the others do not."""

    works: tuple[Isolation, ...]
    reasons: dict[Isolation, str]

    def best(self) -> Isolation:
        """The means to use; raises `UserError` where none works."""
        if self.works:
            return self.works[0]
        why = "; ".join(f"{means}: {reason}" for means, reason in self.reasons.items())
        raise UserError(
            f"no sandbox works on this machine ({why}); install bubblewrap (apt install "
            "bubblewrap), or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1 "
            "user.max_user_namespaces=10000; in a container, a seccomp profile that allows "
            "unshare and mount), on Linux 5.12 or later"
        )


@cache
def probe() -> Report:
    """Run an empty program by each means, once per process."""
    works: list[Isolation] = []
    reasons: dict[Isolation, str] = {}
    for means in ORDER:
        reason = _reason_against(means)
        if reason is None:
            works.append(means)
        else:
            reasons[means] = reason
    return Report(tuple(works), reasons)


def _reason_against(means: Isolation) -> str | None:
    if sys.platform != "linux" or not supported():
        return f"no filter of system calls for {sys.platform} on {platform.machine()}"
    if means == "bubblewrap" and bubblewrap_path() is None:
        return "bwrap is not installed"
    if means == "bubblewrap" and os.geteuid() == 0:
        return "started by root, bwrap keeps that user, whose processes the kernel does not bound"
    try:
        outcome = execute_here_or_there(means, Program(argv=(PYTHON, "-c", "")), Limits())
    except (SandboxError, OSError) as error:
        return str(error)
    return None if outcome.code == 0 else outcome.stderr.decode("utf-8", "replace")[-300:]


def findings() -> list[Finding]:
    """Which isolation of untrusted programs works; runs an empty one."""
    from swarm.run.findings import Finding  # needs more than a killable process has

    report = probe()
    if report.works:
        text = f"programs of a model run by {report.works[0]}"
    else:
        why = "; ".join(f"{means}: {reason}" for means, reason in report.reasons.items())
        text = f"none, which only environments with programs need ({why})"
    return [Finding("sandbox", text, {"works": list(report.works)})]
