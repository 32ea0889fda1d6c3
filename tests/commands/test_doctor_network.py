"""The checks of `swarm doctor`, and of a starting peer, that ask a run's other peers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from peers.inference.doctor import tolerated
from swarm.look.doctor import Place, network_findings
from swarm.run.findings import Finding
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.wire.manifest import Admissions, RunManifest, Thresholds, TrustedKey
from tests.ledger.harness import OWNER, TRAINER, WORKER, Peer, Swarm, in_virtual_time
from tests.network.harness import sealed_manifest


def by_topic(found: list[Finding]) -> dict[str, Finding]:
    return {each.topic: each for each in found}


def place_of(peer: Peer, settings: PeerSettings | None = None, run: Run | None = None) -> Place:
    run = run or Run(peer.run_node.run.manifest_envelope)
    return Place(peer.node, settings or PeerSettings(role=["inference"]), peer.node.peer_id, run)


async def test_what_a_worker_finds_beside_a_trainer(tmp_path: Path) -> None:
    found: list[Finding] = []
    swarm = Swarm(tmp_path)
    async with swarm.peer(TRAINER), swarm.peer(WORKER) as worker:
        found.extend(await network_findings(place_of(worker)))
    assert [each.topic for each in found] == ["reach", "versions", "admission"]
    assert not any(each.problem or each.advice for each in found)


def admission(
    tmp_path: Path,
    role: str,
    admissions: Admissions,
    standbys: Sequence[TrustedKey] = (),
    **flags: str,
) -> Finding:
    """The line about admission for a worker's key in a run with these admissions."""
    found: list[Finding] = []

    async def main() -> None:
        swarm = Swarm(tmp_path)
        async with swarm.apart(WORKER) as worker:
            message = swarm.manifest.message
            assert isinstance(message, RunManifest)
            changed = msgspec.structs.replace(
                message, admissions=admissions, standbys=list(standbys)
            )
            run = Run(sealed_manifest(OWNER, changed))
            settings = PeerSettings(role=[role], **flags)  # type: ignore[arg-type]
            found.extend(await network_findings(place_of(worker, settings, run)))

    in_virtual_time(main)
    return by_topic(found)["admission"]


@pytest.mark.parametrize(
    ("role", "admissions", "words"),
    [
        ("inference", Admissions(), ""),
        ("inference", Admissions(policy="allow-list", allowed=[WORKER.peer_id]), ""),
        ("inference", Admissions(policy="allow-list", allowed=[]), "is not on it; send its owner"),
        ("validator", Admissions(), f"does not name peer {WORKER.peer_id} as a validator"),
        ("juggler", Admissions(), "admissions.further_roles"),
        ("juggler", Admissions(further_roles=["juggler"]), ""),
    ],
)
def test_what_the_run_wants(tmp_path: Path, role: str, admissions: Admissions, words: str) -> None:
    found = admission(tmp_path, role, admissions)
    assert found.problem == bool(words) and words in found.text


def test_a_standby_is_named_as_one(tmp_path: Path) -> None:
    """A trainer's settings, and its key: the run's trainers do not list it, and need not."""
    standby = TrustedKey(peer=WORKER.peer_id)
    found = admission(tmp_path / "a", "trainer", Admissions(), standbys=[standby])
    assert not found.problem
    assert found.text.endswith(f"names this peer, {WORKER.peer_id}, as a standby of the trainer")
    found = admission(tmp_path / "b", "trainer", Admissions())
    assert found.problem and f"does not name peer {WORKER.peer_id} as a trainer" in found.text
    found = admission(tmp_path / "c", "replica", Admissions(), standbys=[standby])
    assert found.problem and f"does not name peer {WORKER.peer_id} as a replica" in found.text


def test_an_invite_for_another_run_is_a_problem(tmp_path: Path) -> None:
    needs = Admissions(policy="invite")
    assert "only with an invite" in admission(tmp_path / "a", "relay", needs).text
    found = admission(tmp_path / "b", "relay", needs, invite="nonsense")
    assert found.problem and "is not a whole invite" in found.text


def test_a_visitor_reads_what_the_run_tolerates() -> None:
    assert "only observes" in tolerated(Thresholds())
    measured = Thresholds(measured_tokens=16_384, measured_dtypes=["bfloat16", "float32"])
    assert tolerated(measured) == (
        "it tolerates what bfloat16 and float32 differ by (measured on 16,384 tokens)"
    )
