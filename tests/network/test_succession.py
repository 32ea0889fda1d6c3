"""Who may sign a version of a run in its owner's place, and which version counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.errors import UserError
from swarm.run.manifest import check_manifest, manifest_in
from swarm.run.records import record_validators, run_key
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.manifest import RunManifest, TrustedKey
from swarm.wire.succession import DELEGATIONS_MAX, inherited, ownership_of, taken_over
from tests.network.harness import identity, manifest, sealed
from tests.worlds import WALL

OWNER, TRAINER, VALIDATOR, STANDBY, SECOND, HEIR, NEXT, STRANGER = map(identity, range(60, 68))
RUN = f"{OWNER.peer_id}/test"


def signed(by: Identity, message: RunManifest) -> Envelope:
    return sealed(by, message, RUN, sequence=message.version, lifetime_seconds=1e6)


FIRST = signed(
    OWNER,
    replace(
        manifest([TRAINER], [VALIDATOR]),
        standbys=[TrustedKey(peer=STANDBY.peer_id), TrustedKey(peer=SECOND.peer_id)],
        successors=[HEIR.peer_id, NEXT.peer_id],
    ),
)


def takes_over(standby: Identity, delegation: Envelope, trainer: Identity = TRAINER) -> Envelope:
    return signed(standby, taken_over(delegation, standby.peer_id, trainer.peer_id))


def succeeds(successor_rank: Identity, held: Envelope, **fields: object) -> Envelope:
    before = manifest_in(held)
    new = replace(before, **{"version": before.version + 1, **fields})
    return signed(successor_rank, inherited(held, successor_rank.peer_id, new))


def updated(held: Envelope, version: int, **fields: object) -> RunManifest:
    return replace(manifest_in(held), version=version, delegation=b"", **fields)


TAKEN = takes_over(STANDBY, FIRST)
BACK = takes_over(TRAINER, TAKEN, STANDBY)
BY_SECOND = takes_over(SECOND, FIRST)
OWNERS_NEXT = signed(OWNER, updated(FIRST, 2, checkpoints_kept=7))
AFTER = takes_over(STANDBY, OWNERS_NEXT)
INHERITED = succeeds(HEIR, FIRST)
OF_NEXT = succeeds(NEXT, FIRST)
AGAIN = succeeds(NEXT, INHERITED, successors=[])
HIGH = signed(OWNER, updated(FIRST, 2**40))


def test_a_standby_and_the_trainer_change_places() -> None:
    run = Run(FIRST)
    assert run.update(TAKEN)
    assert run.manifest.trainer_ids() == [STANDBY.peer_id]
    assert run.manifest.standby_ids() == [TRAINER.peer_id, SECOND.peer_id]
    assert (run.id, run.owner) == (RUN, OWNER.peer_id)
    assert run.update(BACK) and run.manifest.trainer_ids() == [TRAINER.peer_id]
    assert check_manifest(BACK.raw, "it").raw == BACK.raw


@given(
    st.permutations(
        [FIRST, TAKEN, BACK, BY_SECOND, OWNERS_NEXT, AFTER, INHERITED, OF_NEXT, AGAIN, HIGH]
    ),
    st.integers(1, 10),
)
def test_all_peers_end_with_the_same_version_in_whatever_order_they_hear(
    offered: list[Envelope], count: int
) -> None:
    """Also if some versions reach only some of them."""
    first, second = Run(FIRST), Run(FIRST)
    heard = offered[:count]
    for each in heard:
        first.update(each)
    for each in sorted(heard, key=lambda each: ownership_of(each).precedence):
        second.update(each)
    assert first.manifest_envelope.raw == second.manifest_envelope.raw


def test_the_owners_next_version_beats_a_takeover_of_any_number() -> None:
    run = Run(FIRST)
    assert run.update(BACK) and run.manifest.version == 3
    assert run.update(OWNERS_NEXT) and run.manifest.version == 2
    assert not run.update(TAKEN), "its delegation is older"
    assert run.update(AFTER)


def test_of_two_standbys_the_one_named_first_prevails() -> None:
    run = Run(FIRST)
    assert run.update(BY_SECOND) and run.update(TAKEN) and not run.update(BY_SECOND)


@pytest.mark.parametrize(
    "changed",
    [
        {"checkpoints_kept": 99},
        {"standbys": []},
        {"trainers": [TrustedKey(peer=STANDBY.peer_id), TrustedKey(peer=STRANGER.peer_id)]},
        {"version": 9},
        {"successors": [STANDBY.peer_id]},
        {"name": "other"},
    ],
)
def test_a_standby_changes_nothing_else(changed: dict[str, object]) -> None:
    forged = signed(STANDBY, replace(manifest_in(TAKEN), **changed))
    assert not Run(FIRST).update(forged)
    with pytest.raises(UserError, match="not a valid run manifest"):
        check_manifest(forged.raw, "it")


def test_nobody_else_signs_one() -> None:
    run = Run(FIRST)
    for forged in (
        signed(STRANGER, manifest_in(TAKEN)),
        signed(STRANGER, replace(manifest_in(FIRST), version=2, delegation=FIRST.raw)),
        signed(STANDBY, replace(manifest_in(TAKEN), delegation=b"no envelope")),
        signed(STRANGER, updated(FIRST, 2)),
    ):
        assert not run.update(forged)
        assert run.permits(forged.sender, manifest_in(forged)) == "not_permitted"
    own = replace(manifest_in(FIRST), standbys=[TrustedKey(peer=STRANGER.peer_id)])
    elsewhere = sealed(STRANGER, own, f"{STRANGER.peer_id}/test", lifetime_seconds=1e6)
    forged = signed(STRANGER, taken_over(elsewhere, STRANGER.peer_id, TRAINER.peer_id))
    assert not run.update(forged), "a delegation of another run"


def test_chains_are_bounded() -> None:
    last, signers = FIRST, [(STANDBY, TRAINER), (TRAINER, STANDBY)]
    for number in range(DELEGATIONS_MAX):
        standby, trainer = signers[number % 2]
        last = takes_over(standby, last, trainer)
    assert Run(FIRST).update(last)
    standby, trainer = signers[DELEGATIONS_MAX % 2]
    too_long = takes_over(standby, last, trainer)
    assert not Run(last).update(too_long)


def test_a_successor_owns_the_run_and_the_old_key_changes_nothing_more() -> None:
    run = Run(FIRST)
    assert run.update(INHERITED)
    assert (run.id, run.owner, run.owners) == (RUN, HEIR.peer_id, (OWNER.peer_id, HEIR.peer_id))
    assert not run.update(HIGH)
    assert run.permits(OWNER.peer_id, manifest_in(HIGH)) == "version_refused"
    reason = run.refusal(OWNER.peer_id, manifest_in(HIGH))
    assert reason is not None and f"whom {HEIR.peer_id} has succeeded" in reason
    later = succeeds(HEIR, INHERITED, checkpoints_kept=9)
    assert run.update(later), "the successor signs later versions as the owner"
    assert run.update(takes_over(STANDBY, later)) and run.owner == HEIR.peer_id


def test_a_stolen_owners_key_cannot_keep_the_successor_out() -> None:
    run = Run(FIRST)
    dropped = signed(OWNER, updated(FIRST, 2, successors=[]))
    assert not run.update(dropped)
    reason = run.refusal(OWNER.peer_id, manifest_in(dropped))
    assert reason is not None and "version 2 changes successors" in reason
    usurped = signed(OWNER, updated(FIRST, 5, successors=[STRANGER.peer_id]))
    assert not run.update(succeeds(STRANGER, usurped)), "the run never heard of this successor"
    assert run.update(HIGH) and run.update(succeeds(HEIR, HIGH))


def test_successors_may_be_named_later() -> None:
    alone = signed(OWNER, updated(FIRST, 1, successors=[]))
    run = Run(alone)
    assert run.update(signed(OWNER, updated(alone, 2, successors=[HEIR.peer_id])))


def test_a_key_that_is_no_successor_cannot_inherit() -> None:
    with pytest.raises(UserError, match=r"neither the owner of run .* nor named in its successors"):
        succeeds(STRANGER, FIRST)


def test_the_dht_keeps_the_version_that_counts() -> None:
    validator = record_validators(lambda: WALL)["swarm-run"]
    ascending = [FIRST, BY_SECOND, TAKEN, BACK, OWNERS_NEXT, AFTER, HIGH, OF_NEXT, INHERITED, AGAIN]
    found = [validator.validate(run_key(RUN), each.raw).version for each in ascending]
    assert found == sorted(found) and len(set(found)) == len(found)
