"""A person joins with the command line that the demo prints, in a home folder of its own."""

from __future__ import annotations

import re
import signal
import stat
from pathlib import Path

import pytest
import trio

from tests.end_to_end.harness import START_SECONDS, STEP_SECONDS, swarm

ACCEPTED_SECONDS = START_SECONDS + STEP_SECONDS
LEAVE_SECONDS = 5.0


@pytest.mark.slow
def test_a_guest_contributes_and_leaves_cleanly(
    tmp_path: Path, base: Path, fork_server: Path
) -> None:
    async def main() -> None:
        names = ["bootstrap", "trainer", "validator"]
        async with swarm(tmp_path / "swarm", base, fork_server, names=names, steps=1000) as peers:
            await peers.start()
            await peers["trainer"].says("trainer.step_opened", seconds=START_SECONDS)
            home = tmp_path / "home"
            home.mkdir()
            guest = peers.person(
                "guest",
                *("--role", "inference", "--bootstrap", peers["bootstrap"].multiaddr),
                home=home,
            )
            await guest.complains("accepted", ACCEPTED_SECONDS)
            assert stat.S_IMODE((home / ".swarm").stat().st_mode) == 0o700
            guest.send(signal.SIGINT)
            assert await guest.ended(LEAVE_SECONDS) == 0
            assert not guest.left_behind
            print("\n".join(guest.complaints))
            said = "\n".join(guest.complaints)
            assert "Traceback" not in said
            assert re.search(r"earned: [\d,]+ completions in [\d,]+ groups are credited", said)
            assert not guest.output

    trio.run(main)
