"""Builds of neighbouring protocol versions: what they ignore, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.errors import UserError, leaf_errors
from swarm.gossip.topics import Push
from swarm.node.joining import is_outgrown
from swarm.run.admission import NotAdmitted
from swarm.run.manifest import Outgrown, check_manifest, with_needs
from swarm.run.update import sign_manifest
from swarm.wire.envelope import INVALID_MAX, Dropped, Envelope, NeedsNewer, open_envelope
from swarm.wire.identity import Identity
from swarm.wire.manifest import NEEDS_INDEX, RunManifest
from swarm.wire.messages import Heartbeat
from swarm.wire.protocol import PROTOCOL_OLDEST, PROTOCOL_VERSION, protocol_problem
from tests.fuzz.messages import MESSAGES
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, WORKER, Peer, Swarm
from tests.network.harness import identity, manifest, running, sealed, sealed_manifest
from tests.network.test_membership import TRAINER as MEMBERS_TRAINER
from tests.network.test_membership import VALIDATOR as MEMBERS_VALIDATOR
from tests.network.test_membership import trusted_and_worker
from tests.worlds import WALL

PLAIN = manifest([TRAINER], [ALICE, BOB])
RUN_ID = f"{OWNER.peer_id}/test"
NEWER = PROTOCOL_VERSION + 1


def resigned(key: Identity, like: Envelope, **changes: Any) -> bytes:
    """An envelope with other fields in its body, signed again."""
    body = msgspec.structs.replace(like.body, **changes)
    encoded = msgspec.msgpack.encode(body)
    return key.sign(f"swarm/1/{body.kind}\0".encode() + encoded) + encoded


def of_the_future(
    version: int = 2, *, by: Identity = OWNER, run: str = RUN_ID, readable: bool = True
) -> bytes:
    """A manifest of the next protocol version; with a value that this one does not know unless
    `readable`."""
    like = sealed_manifest(OWNER, replace(PLAIN, version=version, needs=NEWER))
    fields = msgspec.msgpack.decode(like.body.payload)
    if not readable:
        fields[RunManifest.__struct_fields__.index("broadcast_mode")] = "by pigeon"
    payload = msgspec.msgpack.encode([*fields, ["a table of the next version"]])
    return resigned(by, like, payload=payload, sender=by.peer_id, run=run, sequence=version)


# --- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@settings(max_examples=15)
@given(extra=st.lists(st.integers(0, 2**60) | st.text(max_size=20) | st.none(), max_size=5))
def test_fields_of_a_newer_build_are_ignored_and_passed_on(message: Any, extra: list[Any]) -> None:
    like = sealed(OWNER, message, RUN_ID)
    fields = msgspec.msgpack.decode(like.body.payload)
    raw = resigned(OWNER, like, payload=msgspec.msgpack.encode([*fields, *extra]))
    opened = open_envelope(raw)
    assert opened.message == message and opened.raw == raw


def test_fields_that_an_older_build_does_not_send_have_their_defaults() -> None:
    like = sealed(OWNER, Heartbeat(roles=["relay"], protocol=2, build="0.1.0"), RUN_ID)
    before = [["relay"], 3, 4, "generating", 0.5, 6, 7]  # all fields of version 1
    raw = resigned(OWNER, like, payload=msgspec.msgpack.encode(before))
    found = open_envelope(raw).expect(Heartbeat)
    assert (found.step, found.protocol, found.build) == (4, 1, "")


async def test_kinds_of_a_newer_build_do_no_harm_unless_they_are_a_flood() -> None:
    async with running(sealed_manifest(OWNER, PLAIN)) as run:
        victim = await run.add(TRAINER)
        newer = await run.add(identity(300))
        await newer.reach(victim.id)
        await trio.sleep(3)
        neighbour = next(iter(newer.gossip._slots.neighbours.values()))
        like = sealed(newer.key, Heartbeat(roles=["relay"]), run.manifest.body.run)

        def push(count: int) -> None:
            for _ in range(count):
                like_sequence = next(numbers)
                raw = resigned(newer.key, like, kind="weather", sequence=like_sequence)
                newer.gossip._post(neighbour, Push(raw))

        numbers = iter(range(10_000))
        push(4 * INVALID_MAX)
        await trio.sleep(3)
        assert victim.gate.dropped == {"unknown_kind": 4 * INVALID_MAX}
        assert "gossip.neighbour_banned" not in victim.names()
        for _ in range(5):
            push(50)
            await trio.sleep(0.1)
        assert "gossip.neighbour_banned" in victim.names()


def test_a_forged_message_of_an_unknown_kind_is_a_forgery() -> None:
    raw = bytearray(resigned(OWNER, sealed(OWNER, PLAIN, RUN_ID), kind="weather"))
    with pytest.raises(Dropped, match="unknown_kind"):
        open_envelope(bytes(raw))
    raw[0] ^= 1
    with pytest.raises(Dropped, match="bad_signature"):
        open_envelope(bytes(raw))


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("readable", [True, False])
def test_a_run_that_needs_a_newer_build_says_so_in_one_sentence(readable: bool) -> None:
    with pytest.raises(NeedsNewer):
        open_envelope(of_the_future(readable=readable))
    with pytest.raises(Outgrown) as refused:
        check_manifest(of_the_future(readable=readable), "a file")
    assert str(refused.value) == (
        f"run {RUN_ID} needs protocol version {NEWER}, and this build speaks {PROTOCOL_VERSION}: "
        "upgrade it with pip install -U swarm-rl"
    )


def test_nobody_says_that_about_another_owners_run() -> None:
    """A successor may, so the sentence names the version; but the run is not taken for outgrown."""
    with pytest.raises(
        UserError, match=f"a file cannot be read .*version {NEWER}.*upgrade"
    ) as said:
        check_manifest(of_the_future(by=WORKER), "a file")
    assert not isinstance(said.value, Outgrown)


def test_a_build_that_left_old_versions_behind_refuses_their_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert protocol_problem(RUN_ID, PROTOCOL_OLDEST) is None
    monkeypatch.setattr("swarm.wire.protocol.PROTOCOL_OLDEST", 2)
    with pytest.raises(UserError, match=r"admits peers of protocol version 1.* raise needs to 2"):
        check_manifest(sealed_manifest(OWNER, PLAIN).raw, "a file")


def test_a_signed_run_needs_the_version_of_the_build_that_signed_it() -> None:
    assert sign_manifest(OWNER, PLAIN, WALL).expect(RunManifest).needs == PROTOCOL_VERSION
    with pytest.raises(UserError, match=f"run.toml: needs is {NEWER}"):
        with_needs(replace(PLAIN, needs=NEWER), "run.toml")


def test_a_run_whose_records_rate_strangers_is_not_for_builds_that_do_not_weigh_them() -> None:
    """They would merge other bits: version 3 is the first that knows the field `rated`."""
    assert sign_manifest(OWNER, PLAIN, WALL).expect(RunManifest).needs >= 3


def test_no_old_version_and_no_stranger_keeps_a_peer_out_of_a_run() -> None:
    held = {RUN_ID: sealed_manifest(OWNER, replace(PLAIN, version=3))}
    name = RUN_ID.partition("/")[2]
    old, new = (Outgrown(RUN_ID, version, NEWER, OWNER.peer_id) for version in (3, 4))
    strangers = Outgrown(f"{WORKER.peer_id}/{name}", 9, NEWER, WORKER.peer_id)
    for wanted in (None, name, RUN_ID):
        assert not is_outgrown(old, held, wanted)
        assert not is_outgrown(strangers, held, wanted)
    assert is_outgrown(new, held, RUN_ID)
    assert is_outgrown(strangers, held, "another name")
    assert is_outgrown(strangers, {}, None)


def test_the_place_of_needs_on_the_wire_is_fixed() -> None:
    assert NEEDS_INDEX == 21


async def test_an_older_build_is_not_admitted_to_a_run_that_needs_a_newer_one() -> None:
    """Also one that announces no version, and ignores the manifest's."""
    wanted = replace(manifest([MEMBERS_TRAINER], [MEMBERS_VALIDATOR]), needs=2)
    async with running(sealed_manifest(OWNER, wanted)) as run:
        _, _, worker = await trusted_and_worker(run)
        with pytest.raises(NotAdmitted, match="needs protocol version 2, and the peer's build"):
            await worker.lease().keep()
        worker.describe = lambda: Heartbeat(roles=["inference"], protocol=2)  # type: ignore[method-assign]
        lease = worker.lease()
        await run.nursery.start(lease.keep)
        assert lease.admission is not None


def hears(peer: Peer, raw: bytes) -> None:
    """A neighbour sends a peer an announcement."""
    neighbour = next(iter(peer.run_node.gossip._slots.neighbours.values()))
    peer.run_node.gossip._receive(neighbour, raw)


@pytest.mark.parametrize("key", [TRAINER, WORKER], ids=["trainer", "worker"])
async def test_a_peer_leaves_a_run_that_outgrew_it(key: Identity, tmp_path: Path) -> None:
    """But not for a version of the manifest that is replayed, nor for another run's."""
    said: list[str] = []
    swarm = Swarm(tmp_path)
    swarm.manifest = sealed_manifest(OWNER, replace(PLAIN, version=3))
    others = [each for each in (TRAINER, ALICE, WORKER) if each is not key]
    async with swarm.peer(others[0]), swarm.peer(others[1]):
        with trio.fail_after(60):
            try:
                async with swarm.peer(key) as peer:
                    await trio.sleep(5)
                    hears(peer, of_the_future(2))
                    hears(peer, of_the_future(9, by=WORKER, run=f"{WORKER.peer_id}/test"))
                    hears(peer, of_the_future(9, by=WORKER))
                    await trio.sleep(5)
                    said.append("is still there")
                    hears(peer, of_the_future(4, readable=False))
                    await trio.sleep(5)
            except* Outgrown as group:
                said.extend(str(error) for error in leaf_errors(group))
    assert said[0] == "is still there"
    assert said[1].startswith(f"run {RUN_ID} needs protocol version {NEWER}")
