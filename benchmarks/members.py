"""What the members of a large run cost one of its trusted peers: heartbeats, admissions, presence.

    python -m benchmarks.members 10000
    python -m benchmarks.members 10000 --trusted 16

Prints one JSON object. All trusted peers are real registrars that hear each other's digests over a
network in memory; the members are spread evenly over them and send a heartbeat every 10 s, which
one of the trusted peers (*here*) answers for its share. CPU times are of one thread, without the
check of a signature (0.1 ms) and the encryption of what is sent:

    heartbeats          answered here in a second; `heartbeat_ms` each
    admission_ms        answering one newcomer, while all the members are known
    digests, bytes      presence that all trusted peers publish in a second: everybody who follows
                        the topic `work` gets it at least once
    digest_ms           making one of them, with the search for members that have become silent
    oldest_seconds      oldest heartbeat of a live member, as another trusted peer knows it: from
                        30 s on it appears as suspected
    status_…            the answer to `swarm status`, and how many peers it lists
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from benchmarks.common import at_least
from swarm.ledger import wire
from swarm.ledger.serving import report
from swarm.run.lease import HEARTBEAT_SECONDS
from swarm.run.registrar import Registrar
from swarm.terminal.output import print_json
from swarm.wire.manifest import Admissions
from swarm.wire.messages import Admission, Heartbeat, Presence
from swarm.wire.messenger import first
from tests.growth.test_crowd import Reported
from tests.network.harness import (
    identity,
    in_virtual_time,
    manifest,
    running,
    sealed,
    sealed_manifest,
)

SECONDS = 40.0
NEWCOMERS = 20
BEAT = Heartbeat(roles=["inference"], policy=1000, step=1001, doing="generating 8 groups")


class Timer:
    """CPU seconds of the calls of one kind."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    async def run(self, call: Callable[[], Awaitable[Any]]) -> Any:
        began = time.thread_time()
        result = await call()
        self.seconds += time.thread_time() - began
        self.calls += 1
        return result

    def milliseconds(self) -> float:
        return round(1000 * self.seconds / max(1, self.calls), 2)


async def measure(count: int, trusted: int) -> dict[str, Any]:
    """Let `count` members of `trusted` trusted peers send heartbeats for a while."""
    keys = [identity(number) for number in range(2, 2 + trusted)]
    admissions = Admissions(unproven_max=2 * count, range_max=2 * count)
    run_manifest = manifest(keys[:1], keys[1:], admissions=admissions)
    async with running(sealed_manifest(identity(1), run_manifest)) as run:
        peers = [await run.add(key) for key in keys]
        registrars: list[Registrar] = []
        published: list[bytes] = []
        for peer in peers:
            peer.roles = ["trusted"]
            peer.transport.keep_many()
            registrars.append(peer.registrar())
        peers[-1].gossip.listen(Presence, lambda envelope: published.append(envelope.raw))
        for peer in peers[:-1]:
            await peer.reach(peers[-1].id)
        here, there = registrars[0], registrars[1]
        members = [identity(10_000 + number).peer_id for number in range(count)]
        for number, member in enumerate(members):
            registrars[number % trusted]._renew(member, BEAT, None, "", 0)
        beating, admitting, digesting = Timer(), Timer(), Timer()
        for registrar in registrars[1:]:
            run.nursery.start_soon(registrar.run)

        async def digests() -> None:
            while True:
                await trio.sleep(here._members.digest_seconds)
                list(here._members.forget(here.me.describe()))
                await digesting.run(here.publish_presence)

        async def others_beat() -> None:
            """The others' members are heard evenly, too."""
            while True:
                await trio.sleep(HEARTBEAT_SECONDS / 20)
                now = trio.current_time()
                for registrar in registrars[1:]:
                    own = registrar._members.own
                    for number, member in enumerate(own.values()):
                        if number % 20 == round(now * 20 / HEARTBEAT_SECONDS) % 20:
                            member.heard = now

        run.nursery.start_soon(digests)
        run.nursery.start_soon(others_beat)
        own = [identity(10_000 + number) for number in range(0, count, trusted)]
        beats = [sealed(key, BEAT, run.manifest.body.run) for key in own]
        oldest = 0.0
        began = trio.current_time()
        while trio.current_time() < began + SECONDS:
            for beat in beats:
                answers = await beating.run(partial(here._on_heartbeat, beat, []))
                assert first(answers, Admission) is not None
                await trio.sleep(HEARTBEAT_SECONDS / len(beats))
            if trio.current_time() > began + 0.6 * SECONDS:
                known = {entry.peer: entry.age_seconds for entry in there.present()}
                oldest = max([oldest, *(known.get(key.peer_id, 1e3) for key in own)])
        for number in range(NEWCOMERS):
            key = identity(10_000 + count + number)
            beat = sealed(key, BEAT, run.manifest.body.run)
            answers = await admitting.run(partial(here._on_heartbeat, beat, []))
            await trio.sleep(0.05)
        answer = report(Reported(here, run.manifest))
        made = len(published) / (trio.current_time() - began)
        result = {
            "members": count,
            "trusted": trusted,
            "heartbeats": round(len(own) / HEARTBEAT_SECONDS, 1),
            "heartbeat_ms": beating.milliseconds(),
            "admission_ms": admitting.milliseconds(),
            "digests": round(made, 2),
            "bytes": round(sum(map(len, published)) / len(published) * made),
            "digest_ms": digesting.milliseconds(),
            "oldest_seconds": round(oldest, 1),
            "known_elsewhere": len({entry.peer for entry in there.present()}),
            "status_bytes": len(wire.encoder.encode(answer)),
            "status_lists": len(answer.present),
        }
        run.nursery.cancel_scope.cancel()
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("members", type=at_least(1))
    parser.add_argument("--trusted", type=at_least(2), default=4)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []

    async def run() -> None:
        results.append(await measure(options.members, options.trusted))

    in_virtual_time(run)
    print_json(results[0])


if __name__ == "__main__":
    main()
