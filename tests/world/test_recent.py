from __future__ import annotations

from swarm.world.recent import Recent


def test_those_set_last_are_kept() -> None:
    kept: Recent[str, list[str]] = Recent(2)
    alice = kept.of("alice", list)
    kept.of("bob", list)
    assert kept.of("alice", list) is alice
    kept["carol"] = []
    assert list(kept) == ["alice", "carol"]
    kept.setdefault("dave", [])
    assert list(kept) == ["carol", "dave"]
