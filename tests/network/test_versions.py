"""Versions of a run's manifest: what a peer takes, remembers, hands out and says of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.run.changes import AT_ONCE, NEVER, NEXT_STEP, changes
from swarm.run.manifest import content_digest, manifest_in
from swarm.run.run import VERSIONS_KEPT, Run
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.manifest import Admissions, EnvironmentReference, RunManifest, TrustedKey
from swarm.wire.messages import CheckpointReference, StepOrder
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, WORKER, Peer, Swarm
from tests.network.harness import identity, manifest, sealed, sealed_manifest

FIRST = manifest([TRAINER], [ALICE, BOB])
SORTING = EnvironmentReference(name="sort-digits", version="1")

OTHER: dict[str, Any] = {
    "model": "other",
    "tokenizer_hash": bytes([1]) * 32,
    "trainers": [TrustedKey(peer=BOB.peer_id)],
    "validators": [TrustedKey(peer=BOB.peer_id, from_version=2)],
    "checkpoints_kept": 9,
    "broadcast_mode": "relay-only",
    "name": "other",
    "environment_peers": [TrustedKey(peer=BOB.peer_id)],
    "needs": 2,
    "environments": [],
    "standbys": [TrustedKey(peer=BOB.peer_id)],
    "successors": [BOB.peer_id],
}
"""Another value of each field that is no table."""


def version(number: int, *, by: Identity = OWNER, sequence: int = 0, **tables: Any) -> Envelope:
    """A signed version; `tables` gives fields of tables, or whole fields."""
    changed = {
        name: replace(getattr(FIRST, name), **value) if isinstance(value, dict) else value
        for name, value in tables.items()
    }
    message = replace(FIRST, version=number, **changed)
    run = f"{by.peer_id}/{message.name}"
    return sealed(by, message, run, sequence=sequence or number, lifetime_seconds=1e6)


def order(step: int, follows: Envelope, **fields: Any) -> StepOrder:
    return StepOrder(
        **{
            "step": step,
            "revision": 0,
            "checkpoint": CheckpointReference(lineage=0, step=0, digest=bytes(32), size_bytes=1),
            "nonce": bytes(32),
            "groups_wanted": 8,
            "submissions_max": 2,
            "run_version": manifest_in(follows).version,
            "run_digest": content_digest(follows),
            **fields,
        }
    )


# --- differences -----------------------------------------------------------------------------


def each_changed(table: msgspec.Struct) -> Iterator[tuple[str, msgspec.Struct]]:
    """A table with one field changed, for each field, those of tables in it included."""
    for field in table.__struct_fields__:
        held = getattr(table, field)
        if isinstance(held, msgspec.Struct):
            for inner, changed in each_changed(held):
                yield f"{field}.{inner}", replace(table, **{field: changed})
        else:
            yield field, replace(table, **{field: "something else"})


def test_every_field_has_its_moment() -> None:
    """A field added to the manifest must be given one, or `changes` raises here."""
    for name in RunManifest.__struct_fields__:
        held = getattr(FIRST, name)
        if name in ("version", "delegation"):
            continue
        if not isinstance(held, msgspec.Struct):
            (change,) = changes(FIRST, replace(FIRST, **{name: OTHER[name]}))
            assert change.field == name and change.when in (AT_ONCE, NEXT_STEP, NEVER)
            continue
        for field, different in each_changed(held):
            (change,) = changes(FIRST, replace(FIRST, **{name: different}))
            assert change.field == f"{name}.{field}" and change.when


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"sampling": {"max_new_tokens": 9}}, "sampling.max_new_tokens 8 → 9 (from the next step)"),
        ({"schedule": {"steps": 5}}, "schedule.steps 10 → 5 (at once)"),
        ({"schedule": {"asynchrony": 3}}, "schedule.asynchrony 2 → 3 (from the next step)"),
        (
            {"admissions": Admissions(allowed=[identity(n).peer_id for n in range(9)])},
            "admissions.allowed none → 9 entries (at once)",
        ),
        (
            {"environments": [replace(SORTING, version="2")]},
            "environments[0].version 1 → 2 (not possible in a running run: start a new one)",
        ),
        (
            {"environments": [replace(SORTING, weight=2.0)]},
            "environments[0].weight 1.0 → 2.0 (from the next step)",
        ),
        (
            {"environments": [replace(SORTING, temperature=0.7)]},
            "environments[0].temperature none → 0.7 (from the next step)",
        ),
        (
            {"environments": [SORTING, replace(SORTING, name="chess")]},
            "environments sort-digits 1 → sort-digits 1, chess 1 (not possible in a running run: "
            "start a new one)",
        ),
        ({"trainers": [TrustedKey(peer=BOB.peer_id)]}, f"→ {BOB.peer_id} (at once)"),
    ],
)
def test_a_difference_says_what_and_when(tables: dict[str, Any], said: str) -> None:
    (change,) = changes(FIRST, manifest_in(version(2, **tables)))
    assert str(change).endswith(said)


# --- what a peer takes -----------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(8, 10), st.booleans()), min_size=1, max_size=12
    )
)
def test_the_first_of_the_highest_version_counts_in_whatever_order_they_come(
    offered: list[tuple[int, int, bool]],
) -> None:
    run = Run(version(1))
    first = {1: 8}
    for number, tokens, environment_changes in offered:
        tables: dict[str, Any] = {"sampling": {"max_new_tokens": tokens}}
        if environment_changes:
            tables["environments"] = [replace(SORTING, version="2")]
        new = version(number, **tables)
        newest = run.manifest.version
        expected = number > newest and not environment_changes
        assert run.update(new) == expected
        if expected:
            first[number] = tokens
        elif number == newest and (tokens != first[number] or environment_changes):
            reason = run.refusal(new.sender, manifest_in(new))
            assert reason is not None and "signed with other content before" in reason
    assert run.manifest.version == max(first)
    assert run.manifest.sampling.max_new_tokens == first[max(first)]
    for number, tokens in first.items():  # and each step is judged by the one that it names
        held = run.manifest_of(order(0, version(number, sampling={"max_new_tokens": tokens})))
        assert held is not None
        assert (held.version, held.sampling.max_new_tokens) == (number, tokens)


def test_a_version_that_would_end_the_trainer_is_not_taken() -> None:
    run = Run(version(1))
    uneven = version(2, optimiser={"optimiser_steps": 5})
    assert not run.update(uneven)
    assert "does not divide" in str(run.refusal(uneven.sender, manifest_in(uneven)))
    assert not run.update(version(2, objective={"delta": 1.0}))
    assert run.permits(OWNER.peer_id, manifest_in(uneven)) == "version_refused"
    assert run.update(version(2))


def test_what_is_remembered_is_bounded_and_the_newest_stays() -> None:
    run = Run(version(1))
    versions = [version(number) for number in range(2, 3 * VERSIONS_KEPT)]
    for each in versions:
        assert run.update(each)
    assert len(run.versions()) == VERSIONS_KEPT
    assert run.manifest_of(order(0, versions[0])) is None
    assert run.manifest_of(order(0, versions[-1])) == run.manifest
    run.keep(versions[0])  # fetched again: a step follows it
    assert run.manifest_of(order(0, versions[0])) is not None
    assert run.manifest == manifest_in(versions[-1]) and len(run.versions()) == VERSIONS_KEPT


def test_an_order_of_an_older_swarm_follows_the_newest() -> None:
    run = Run(version(1))
    run.update(version(2))
    assert run.manifest_of(order(0, version(1), run_version=0, run_digest=b"")) == run.manifest


# --- among peers -----------------------------------------------------------------------------


@asynccontextmanager
async def in_a_run(folder: Path) -> AsyncIterator[tuple[Swarm, Peer, AsyncExitStack]]:
    swarm = Swarm(folder)
    swarm.manifest = sealed_manifest(OWNER, FIRST)
    async with AsyncExitStack() as stack:
        yield swarm, await stack.enter_async_context(swarm.peer(TRAINER)), stack


async def announce(trainer: Peer, *orders: StepOrder) -> None:
    for each in orders:
        await trainer.run_node.announce(each, 600)
        await trio.sleep(3)


async def test_a_peer_that_lacks_the_version_of_a_step_gets_it_from_a_trusted_one(
    tmp_path: Path,
) -> None:
    async with in_a_run(tmp_path) as (swarm, trainer, stack):
        first, second = swarm.manifest, version(2, sampling={"max_new_tokens": 9})
        trainer.run_node.gossip.publish(second)
        await announce(trainer, order(6, first))
        swarm.manifest = second  # what a bootstrap peer hands out now
        late = await stack.enter_async_context(swarm.peer(WORKER))
        assert late.run_node.run.manifest_of(order(6, first)) is None
        with trio.fail_after(30):
            assert await late.run_node.versions.manifest_of(order(6, first)) == FIRST
        assert late.run_node.run.manifest.version == 2
        assert late.events("run.version_refused") == []

        unknown = version(3, sampling={"max_new_tokens": 11})  # waited for, not guessed at
        with trio.move_on_after(60) as waited:
            await late.run_node.versions.manifest_of(order(9, unknown))
        assert waited.cancelled_caught
        assert late.events("run.version_awaited") == [{"version": 3, "step": 9}] * 2
        trainer.run_node.gossip.publish(unknown)
        with trio.fail_after(30):
            held = await late.run_node.versions.manifest_of(order(9, unknown))
        assert held.sampling.max_new_tokens == 11 and late.run_node.run.manifest.version == 3


async def test_other_content_under_a_version_is_refused_aloud_by_everybody(tmp_path: Path) -> None:
    async with in_a_run(tmp_path) as (swarm, trainer, stack):
        worker = await stack.enter_async_context(swarm.peer(WORKER))
        honest = version(2, sampling={"max_new_tokens": 9})
        second_thoughts = version(2, sampling={"max_new_tokens": 10}, sequence=99)
        trainer.run_node.gossip.publish(honest)
        await trio.sleep(3)
        for _ in range(3):
            trainer.run_node.versions.hear(second_thoughts)
        swarm.manifest = second_thoughts  # a newcomer believes what its bootstrap peer has
        late = await stack.enter_async_context(swarm.peer(BOB))
        await trio.sleep(5)
        for peer in (trainer, worker):
            assert peer.run_node.run.manifest.sampling.max_new_tokens == 9
            (refused,) = peer.events("run.version_refused")
            assert refused["version"] == 2 and "max_new_tokens 9 → 10" in refused["reason"]
        assert len(late.events("run.version_refused")) == 1
        # It works all the same: an order names the content, not only the number.
        with trio.fail_after(30):
            followed = await late.run_node.versions.manifest_of(order(7, honest))
        assert followed.sampling.max_new_tokens == 9


async def test_versions_survive_a_restart(tmp_path: Path) -> None:
    async with in_a_run(tmp_path) as (swarm, trainer, _):
        second = version(2, sampling={"max_new_tokens": 9})
        async with swarm.peer(WORKER) as worker:
            trainer.run_node.gossip.publish(second)
            await trio.sleep(3)
        async with swarm.apart(WORKER) as worker:
            stored = worker.node.stored_versions(swarm.run)
        assert [manifest_in(each).version for each in stored] == [1, 2]
