"""A trainer uploads its policies; training never waits for it, and no failure ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.trainer.pushing import Pusher
from swarm.events import Event, Events
from swarm.run.run import Run
from swarm.world.machine import Machine
from tests.models.hub_server import Hub
from tests.network.harness import identity, manifest, sealed_manifest

pytestmark = pytest.mark.wall_clock

RUN = Run(sealed_manifest(identity(1), manifest([identity(2)], [identity(3)])))


@pytest.fixture
def said() -> list[Event]:
    return []


@pytest.fixture
def pusher(tmp_path: Path, said: list[Event]) -> Pusher:
    events = Events(Machine(), "trainer")
    events.add_sink(said.append)
    return Pusher("me/new", tmp_path / "aside", events)


def policy(folder: Path, step: int) -> Path:
    made = folder / str(step)
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes([step]))
    return made


async def test_policies_are_pushed_once_and_in_order(
    hub: Hub, pusher: Pusher, said: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    for step in (5, 5, 3, 10):  # a restarted trainer may come by an older one again
        folder = tmp_path / str(step)
        await pusher.push(step, folder if folder.exists() else policy(tmp_path, step), RUN)
    files = hub.repositories["me/new"].files
    assert files["model.safetensors"] == bytes([10])
    assert f"| Run | `{RUN.id}` |" in files["README.md"].decode()
    assert "| Policy | after 10 steps |" in files["README.md"].decode()
    assert [(each.name, each.fields["step"]) for each in said] == [
        ("trainer.pushed", 5),
        ("trainer.pushed", 10),
    ]
    assert not pusher.aside.exists()


async def test_a_failure_is_told_and_the_next_policy_is_tried(
    hub: Hub, pusher: Pusher, said: list[Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pusher.push(5, policy(tmp_path, 5), RUN)
    assert "HF_TOKEN" in said[-1].fields["reason"]
    await pusher.push(6, tmp_path / "deleted", RUN)
    assert "is no policy" in said[-1].fields["reason"]
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    await pusher.push(7, policy(tmp_path, 7), RUN)
    assert [each.name for each in said] == [
        "trainer.push_failed",
        "trainer.push_failed",
        "trainer.pushed",
    ]
