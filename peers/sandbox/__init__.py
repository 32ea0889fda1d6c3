"""Running untrusted programs behind walls: namespaces, a filter of system calls, and limits.

A program sees no network, no other process, no file of the user and no `/proc`; it writes only to
a private folder of bounded size. `run` is synchronous and may be called from several threads.

For other rooms, by the names in docs/rooms.md: `__init__`, `frames`, `launcher`, `program`, `run`,
`seccomp`
"""

from peers.sandbox.execute import SandboxError
from peers.sandbox.program import PYTHON, Limits, Outcome, Program
from peers.sandbox.run import run, why_none

__all__ = ["PYTHON", "Limits", "Outcome", "Program", "SandboxError", "run", "why_none"]
