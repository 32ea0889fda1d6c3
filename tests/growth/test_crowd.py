"""A thousand members of one run: presence digests, heartbeats, and what `swarm status` shows.

`-s` prints the figures of `docs/benchmarks.md`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence

import pytest
import trio
from rich.console import Console

from swarm.commands.status import status_lines
from swarm.ledger import wire
from swarm.ledger.serving import Reporting, report
from swarm.ledger.wire import ForkEvidence
from swarm.look.onlooker import RunStatus
from swarm.run.lease import HEARTBEAT_SECONDS
from swarm.run.members import PRESENCE_BYTES_MAX, SUSPECTED_SECONDS
from swarm.run.registrar import Registrar
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import Admissions
from swarm.wire.messages import Admission, Heartbeat, Presence, Present
from swarm.wire.messenger import first
from tests.network.harness import Member, running
from tests.network.test_membership import run_with, stranger, trusted_and_worker

PROVEN, UNPROVEN, HELPERS = 650, 100, 250
"""Members by kind: as many of the others as the default bounds admit."""

LONGEST = "\N{GRINNING FACE}" * 80
"""The longest description of its activity that a stranger may send."""


class Reported:
    """A trusted peer's report, with the members of a registrar."""

    def __init__(self, registrar: Registrar, manifest: Envelope) -> None:
        self._registrar, self._manifest = registrar, manifest

    def status(self) -> tuple[list[bytes], Sequence[Present]]:
        return [self._manifest.raw], self._registrar.present()

    def evaluation(self) -> bytes:
        return b""

    def forks(self) -> Sequence[ForkEvidence]:
        return []


@pytest.mark.slow
async def test_a_thousand_members_stay_known_to_all_trusted_peers() -> None:
    # Slots are shared between two trusted peers, and all these strangers ask one of them.
    envelope = run_with(Admissions(unproven_max=4 * UNPROVEN, helpers_max=4 * HELPERS))
    async with running(envelope) as run, trio.open_nursery() as nursery:
        trainer, validator, _ = await trusted_and_worker(run)
        home, other = validator.granted, trainer.granted
        assert isinstance(home, Registrar) and isinstance(other, Registrar)
        digests: list[Envelope] = []
        trainer.gossip.listen(Presence, digests.append)
        crowd = [await run.add(stranger(number), speaks=False) for number in range(1000)]
        beats = [beat(number) for number in range(1000)]
        for member in crowd[:PROVEN]:
            validator.stakes[member.id] = 5000
        spent: list[float] = []

        async def say(member: Member, heartbeat: Heartbeat) -> None:
            envelope = await member.seal(heartbeat, 120.0)
            began = time.process_time()
            answers = await home._on_heartbeat(envelope, [])
            spent.append(time.process_time() - began)
            assert first(answers, Admission) is not None, answers

        worst = 0.0
        for _ in range(6):
            for member, heartbeat in zip(crowd, beats, strict=True):
                await say(member, heartbeat)
                await trio.sleep(HEARTBEAT_SECONDS / len(crowd))
            present = {entry.peer: entry for entry in other.present()}
            worst = max(present[m.id].age_seconds for m in crowd if m.id in present)
        sizes = [len(each.raw) for each in digests if each.sender == validator.id]
        pages = [len(each.message.peers) for each in digests if each.sender == validator.id]  # type: ignore[attr-defined]
        print(f"digests of {min(sizes[6:])} to {max(sizes)} bytes, {pages[6:]} peers")
        print(f"a heartbeat takes {1000 * sum(spent[1000:]) / len(spent[1000:]):.2f} ms")
        print(f"the other trusted peer knows {len(present)}, the oldest from {worst:.1f} s ago")
        assert max(sizes) <= PRESENCE_BYTES_MAX + 1024
        assert {member.id for member in crowd} <= present.keys()
        assert {present[member.id].standing for member in crowd} == {"live"}
        assert worst < SUSPECTED_SECONDS
        check_status(Reported(other, run.manifest), run.manifest)
        nursery.cancel_scope.cancel()


def beat(number: int) -> Heartbeat:
    """The heartbeat of a member: an honest worker's, or the longest that a stranger may send."""
    if number < PROVEN:
        return Heartbeat(roles=["inference"], policy=1000, step=1001, doing="generating 8 groups")
    role = "inference" if number < PROVEN + UNPROVEN else "observer"
    return Heartbeat(roles=[role, "relay"], policy=2**53, step=2**53, doing=LONGEST)


def check_status(reporting: Reporting, manifest: Envelope) -> None:
    """A trusted peer's answer fits its bound; the command shows a page, or every peer."""
    began = time.process_time()
    answer = report(reporting)
    making = time.process_time() - began
    raw = wire.encoder.encode(answer)
    status = RunStatus(Run(manifest))
    status.learn(answer)
    began = time.process_time()
    summary = status_lines(status)
    lines = status_lines(status, listed_max=len(status.present))
    page = io.StringIO()
    console = Console(file=page, width=80)
    for line in lines:
        console.print(line, soft_wrap=True)
    text = page.getvalue()
    seconds = time.process_time() - began
    print(f"the status has {len(raw)} bytes, is made in {1000 * making:.0f} ms, and")
    print(f"printed in {1000 * seconds:.0f} ms: {len(lines)} lines, {len(text)} characters")
    print("\n".join(line.plain for line in summary))
    assert len(raw) <= 512 * 1024
    assert len(answer.present) == len(reporting.status()[1])
    assert len(lines) >= 2 * 1000
    assert len(summary) <= 40
