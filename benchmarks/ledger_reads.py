"""Processor time that a trusted peer spends on strangers' reads of its ledger.

    python -m benchmarks.ledger_reads
    python -m benchmarks.ledger_reads --members 1000,4000 --asked 750 --seconds 60

Prints one JSON object. Strangers ask for the status `--asked` times a second, each from a network
of its own; the clock is virtual, the processor's is not. For each number of members:

    made_each_time   processor seconds for each second of reads, were each answer made by itself and
                     none refused
    served           the same as the ledger is served: the status is encoded once a second, and
                     what is over the bytes that strangers share is refused
    answered         status answers a second that remain, and `megabytes` of them, after the burst

Only the answers are counted, not what the transport does with their bytes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import trio
import trio.testing

from benchmarks.common import at_least, several
from swarm.ledger import wire
from swarm.ledger.serving import STRANGERS_READS_BURST, Answers, Rations, report
from swarm.terminal.output import print_json, write_json
from swarm.wire.identity import PeerId
from swarm.wire.messages import Heartbeat, Present

STATUS_SECONDS = 1.0


class Ledger:
    """The status of a run with many members, made anew each second."""

    def __init__(self, members: int) -> None:
        beat = Heartbeat(roles=["inference"], policy=7, step=8, doing="generating", build="1.0")
        self._present = [
            Present(peer=f"{n:052d}", heartbeat=beat, age_seconds=float(n % 60), standing="live")
            for n in range(members)
        ]
        self._made, self._status = -STATUS_SECONDS, ([bytes(2000)] * 3, self._present)

    def status(self) -> Any:
        now = trio.current_time()
        if now >= self._made + STATUS_SECONDS:
            self._made, self._status = now, ([bytes(2000)] * 3, list(self._present))
        return self._status

    def evaluation(self) -> bytes:
        return b""

    def forks(self) -> Any:
        return ()


def measure(members: int, asked: int, seconds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"members": members}

    async def main() -> None:
        ledger: Any = Ledger(members)
        answers = Answers(ledger)
        found["answer_bytes"] = len(answers.status())
        began = time.process_time()
        for _ in range(asked):
            wire.encoder.encode(report(ledger))
        found["made_each_time"] = round(time.process_time() - began, 3)
        rations = Rations(lambda peer: False, lambda peer: f"network of {peer}")
        given = 0

        async def ask(number: int) -> None:
            nonlocal given
            try:
                charged = await rations.admit(PeerId(f"stranger {number}"), 1)
            except ValueError:
                return
            answer = answers.status()
            rations.charge(charged, len(answer))
            given += 1

        spend = await rations.admit(PeerId("burst"), STRANGERS_READS_BURST)
        rations.charge(spend, 0)
        began = time.process_time()
        for _ in range(seconds):
            async with trio.open_nursery() as nursery:
                for number in range(asked):
                    nursery.start_soon(ask, number)
            await trio.sleep(1)
        found["served"] = round((time.process_time() - began) / seconds, 3)
        found["answered"] = round(given / seconds, 1)
        found["megabytes"] = round(given * found["answer_bytes"] / seconds / 1e6, 2)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--members", type=several(at_least(1)), default=[1000, 4000])
    parser.add_argument("--asked", type=at_least(1), default=750, help="reads a second")
    parser.add_argument("--seconds", type=at_least(1), default=30)
    parser.add_argument("--json", type=Path, help="file to write the report to as well")
    options = parser.parse_args()
    found = [measure(members, options.asked, options.seconds) for members in options.members]
    if options.json is not None:
        write_json("--json", {"runs": found}, options.json)
    print_json({"runs": found})


if __name__ == "__main__":
    main()
