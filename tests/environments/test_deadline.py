"""A call of an environment's code that is overdue leaves its thread as it was."""

from __future__ import annotations

import subprocess
import sys

TRACED_AFTER_AN_OVERDUE_CALL = """
import sys
from peers.environments.play import limited
from swarm.errors import UserError

def overdue(swallowed):
    try:
        with limited(0.01, lambda: "too slow"):
            try:
                while True:
                    pass
            except BaseException:
                if not swallowed:
                    raise
    except UserError:
        print("overdue")

for swallowed in (False, True):
    overdue(swallowed)
    sys.settrace(lambda *_: None)
    (lambda: None)()
    sys.settrace(None)
print("ended")
"""


def test_a_traced_thread_goes_on_after_an_overdue_call() -> None:
    """In a process of its own: where the signal of the exception stays, the thread never ends."""
    command = [sys.executable, "-c", TRACED_AFTER_AN_OVERDUE_CALL]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == ["overdue", "ended"], said.stderr
