"""`swarm run list`: the table of a network's runs, and lists that are long or hostile."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import trio

from swarm.commands.runs import run_object, table
from swarm.errors import DeadlineError, PeerError, UserError
from swarm.look.networks import Listed
from swarm.look.onlooker import RunStatus
from swarm.node.joining import runs_of
from swarm.run.choice import choose_run
from swarm.run.manifest import Outgrown, run_id
from swarm.run.manifest_exchange import MANIFESTS_MAX, PROTOCOL, ask_for_manifests, serve_manifests
from swarm.run.run import Run
from swarm.run.update import sign_manifest
from swarm.transport import Stream
from swarm.transport.rates import HourlyBytes
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.manifest import Admissions
from swarm.wire.messages import Checkpoint, CheckpointReference, Heartbeat, Present, StepOrder
from tests.commands.harness import bootstrap_peer, signed_manifest, swarm
from tests.ledger.harness import InlineDisk
from tests.memory_network import MemoryNetwork
from tests.network.harness import in_virtual_time, manifest, sealed_manifest
from tests.worlds import VirtualWorld

OWNER, OTHER = Identity(bytes(32)), Identity(bytes([9]) * 32)
STANDINGS: list[tuple[str, Literal["live", "gone"]]] = [
    (OWNER.peer_id, "live"),
    (OTHER.peer_id, "gone"),
]
SERVER, CLIENT = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)


def test_the_runs_of_a_network_are_listed(tmp_path: Path) -> None:
    files = []
    for owner, name in ((OWNER, "first"), (OTHER, "first"), (OWNER, "second")):
        files.append(tmp_path / f"{owner.peer_id}-{name}")
        files[-1].write_bytes(signed_manifest(tmp_path / "model", owner, name).raw)
    with bootstrap_peer(tmp_path / "home", *files) as address:
        told = json.loads(swarm("run", "list", "--bootstrap", address, "--json").output)
        assert [each["name"] for each in told] == ["first", "first", "second"]
        assert {each["run"] for each in told} == {each.name.replace("-", "/", 1) for each in files}
        assert [each["answers"] for each in told] == [False] * 3, "no trainer runs"


def test_a_run_of_that_name_by_another_owner_is_not_taken_for_it() -> None:
    (here,) = named(1)
    with pytest.raises(UserError, match=f"'run-0' is another owner's here .{OWNER.peer_id}/run-0"):
        choose_run([here], f"{OTHER.peer_id}/run-0")
    assert choose_run([here], run_id(here)) is here


def test_a_row_has_progress_peers_and_what_a_policy_weighs() -> None:
    trainer = Identity(bytes([3]) * 32)
    message = msgspec.structs.replace(
        manifest([trainer], [trainer]),
        model="a\x1b[31m" + "x" * 99,
        admissions=Admissions(policy="invite"),
    )
    run = Run(sign_manifest(OWNER, message, time.time()))
    beat = Heartbeat(roles=["inference"])
    reference = CheckpointReference(lineage=0, step=3, digest=bytes(32), size_bytes=10_000)
    status = RunStatus(
        run,
        checkpoint=Checkpoint(reference=reference, total_bytes=62 * 10**9),
        order=StepOrder(
            step=5,
            revision=0,
            checkpoint=reference,
            nonce=bytes(32),
            groups_wanted=8,
            submissions_max=1,
        ),
        present={
            key: Present(peer=key, heartbeat=beat, age_seconds=1, standing=standing)
            for key, standing in STANDINGS
        },
    )
    head, first, ident, second, _ = table([Listed(run, status), Listed(run)])
    assert head.plain.split()[0] == "NAME"
    assert first.plain.split()[-6:] == ["of", "10", "1", "invite", "62.0", "GB"]
    assert "\\x1b[31mxxx" in first.plain and "\x1b" not in first.plain
    assert ident.plain.strip() == run.id
    assert "no answer" in second.plain
    name, facts, ident, *_ = table([Listed(run, status), Listed(run)], width=40)
    assert " step 5 of 10 · peers 1 · admission invite · policy 62.0 GB" in facts.plain
    assert ident.plain.strip() == run.id and name.plain == first.plain.split("  ")[0]
    assert run_object(Listed(run, status))["policy_bytes"] == 62 * 10**9


@asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Any, Any]]:
    """The transports of two peers that are not connected yet."""
    network, world = MemoryNetwork(), VirtualWorld()
    async with (
        network.transport(SERVER, world=world, disk=InlineDisk(tmp_path / "s")) as server,
        network.transport(CLIENT, world=world, disk=InlineDisk(tmp_path / "c")) as client,
    ):
        yield server, client


def listed(
    manifests: Sequence[Envelope], tmp_path: Path, wanted: str | None = None, times: int = 1
) -> list[Envelope]:
    """Ask a peer that knows these manifests for its runs."""
    found: list[Envelope] = []
    problems: list[Exception] = []

    async def main() -> None:
        async with pair(tmp_path) as (server, client):
            serve_manifests(
                server, newest=lambda: manifests, version=lambda _: None, hear=lambda _: None
            )
            await client.connect(SERVER.peer_id, server.addresses())
            for _ in range(times):
                try:
                    found[:] = await ask_for_manifests(client, SERVER.peer_id, wanted=wanted)
                except (PeerError, Outgrown) as error:  # not inside a group
                    problems.append(error)

    in_virtual_time(main)
    for problem in problems:
        raise problem
    return found


def named(count: int) -> list[Envelope]:
    message = manifest([SERVER], [SERVER])
    return [
        sign_manifest(OWNER, msgspec.structs.replace(message, name=f"run-{number}"), 1.0)
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 65])
def test_a_long_list_is_read_whole(count: int, tmp_path: Path) -> None:
    manifests = named(count)
    assert {run_id(each) for each in listed(manifests, tmp_path)} == {
        run_id(each) for each in manifests
    }


async def test_a_peer_that_is_busy_at_first_is_asked_again(tmp_path: Path) -> None:
    """Where many peers start at once, their bootstrap peer answers some of them late."""
    streams = 0

    async def answer(stream: Stream) -> None:
        nonlocal streams
        streams += 1
        if streams <= 2:
            await trio.sleep_forever()
        await stream.send(named(1)[0].raw)
        await stream.end()

    async with pair(tmp_path) as (server, client):
        server.serve(PROTOCOL, answer)
        await client.connect(SERVER.peer_id, server.addresses())
        with pytest.raises(DeadlineError, match="did not list its runs in time"):
            await runs_of(client, SERVER.peer_id, (), None, 0.0)
        assert streams == 1
        assert await runs_of(client, SERVER.peer_id, (), None, 60.0) == named(1)
        assert streams == 3


async def test_a_peer_that_closes_connection_after_connection_is_too_busy(tmp_path: Path) -> None:
    """That is nobody's mistake, so a service starts the newcomer again."""
    async with pair(tmp_path) as (server, client):

        async def answer(stream: Stream) -> None:
            await server.disconnect(stream.peer)

        server.serve(PROTOCOL, answer)
        addresses = server.addresses()
        await client.connect(SERVER.peer_id, addresses)
        with pytest.raises(DeadlineError, match="did not list its runs in time"):
            await runs_of(client, SERVER.peer_id, addresses, None, 60.0)
        assert trio.current_time() >= 60


async def test_a_list_without_end_is_cut_off(tmp_path: Path) -> None:
    one = named(1)[0].raw
    sent = 0

    async def answer(stream: Stream) -> None:
        nonlocal sent
        while True:
            await stream.send(one)
            sent += 1

    async with pair(tmp_path) as (server, client):
        server.serve(PROTOCOL, answer)
        await client.connect(SERVER.peer_id, server.addresses())
        assert len(await ask_for_manifests(client, SERVER.peer_id)) == 1
        assert MANIFESTS_MAX <= sent < 2 * MANIFESTS_MAX


def test_a_strangers_runs_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    message = manifest([SERVER], [SERVER])
    first, last = sorted((OWNER, OTHER), key=lambda each: each.peer_id)
    newer = [
        sealed_manifest(first, msgspec.structs.replace(message, name=f"run-{number}", needs=99))
        for number in range(33)
    ]
    readable = sealed_manifest(last, msgspec.structs.replace(message, name="run-0"))
    assert listed([*newer, readable], tmp_path) == [readable]
    assert listed([*newer, readable], tmp_path, "run-0") == [readable]
    with pytest.raises(Outgrown):
        listed([*newer, readable], tmp_path, run_id(newer[-1]))
    with pytest.raises(Outgrown):
        listed(newer, tmp_path)


def test_one_damaged_manifest_hides_no_others(tmp_path: Path) -> None:
    manifests = sorted(named(3), key=run_id)
    manifests[1] = dataclasses.replace(manifests[1], raw=manifests[1].raw[:-1])
    assert listed(manifests, tmp_path) == [manifests[0], manifests[2]]
    with pytest.raises(PeerError, match="is damaged"):
        listed(manifests[1:2], tmp_path)


def test_lists_have_an_hourly_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    manifests = named(3)
    size = sum(len(each.raw) for each in manifests)
    monkeypatch.setattr(
        "swarm.run.manifest_exchange.HOURLY_LISTS", HourlyBytes(3 * size, 9 * size, 9 * size)
    )
    assert len(listed(manifests, tmp_path, times=3)) == 3
    with pytest.raises(PeerError):
        listed(manifests, tmp_path, times=4)


def test_an_error_names_some_of_many_runs() -> None:
    with pytest.raises(UserError, match=r"and 40 more \(see swarm run list\)$") as error:
        choose_run(named(50), None)
    assert str(error.value).count(OWNER.peer_id) == 10
