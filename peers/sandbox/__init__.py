"""Running untrusted programs behind walls: namespaces, a filter of system calls, and limits.

A program sees no network, no other process, no file of the user and no `/proc`; it writes only to
a private folder of bounded size. `run` is synchronous and may be called from several threads.
"""

from peers.sandbox.execute import SandboxError
from peers.sandbox.isolation import Isolation
from peers.sandbox.probe import Report, probe
from peers.sandbox.program import PYTHON, Limits, Outcome, Program
from peers.sandbox.run import Sandbox, run

__all__ = [
    "PYTHON",
    "Isolation",
    "Limits",
    "Outcome",
    "Program",
    "Report",
    "Sandbox",
    "SandboxError",
    "probe",
    "run",
]
