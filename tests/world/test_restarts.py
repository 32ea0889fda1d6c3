"""A child that dies is started again, a bounded number of times, with real processes."""

from __future__ import annotations

from types import NoneType

import pytest
import trio
import trio.testing

from swarm.events import Event, Events
from swarm.world import ChildDied, ChildError, restarts
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine
from swarm.world.restarts import Restarts
from tests.world.service_for_tests import Named, Nothing

SERVICE = "tests.world.service_for_tests:Service"


class Owner:
    """Calls a child of its own, life after life."""

    def __init__(self) -> None:
        self.events = Events(Machine(), "me")
        self.said: list[Event] = []
        self.events.add_sink(self.said.append)
        self.compute = LocalCompute(events=self.events)
        self.restarts = Restarts(self.events, "c")
        self.lives = 0

    def run(self, *calls: str, name: str = "c") -> None:
        """One call a life, the last one to its end."""

        async def live() -> None:
            call = calls[min(self.lives, len(calls) - 1)]
            self.lives += 1
            async with self.compute.child(SERVICE, name=name) as child:
                if call == "greet, die":
                    await child.request("greet", Named(name="x"), str)
                    self.restarts.succeeded()
                    call = "die"
                job = Named(name="x") if call == "greet" else Nothing()
                await child.request(call, job, str)

        trio.run(self.restarts.run, live)

    def deaths(self) -> list[int]:
        return [e.fields["deaths"] for e in self.said if e.name == "compute.child_restarted"]


def test_a_killed_child_is_started_again_and_said_to_be() -> None:
    owner = Owner()
    owner.run("die", "die", "greet")
    assert owner.lives == 3
    assert owner.deaths() == [1, 2]


@pytest.mark.slow
def test_after_so_many_deaths_in_a_row_the_last_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "DEATHS_MAX", 3)
    owner = Owner()
    with pytest.raises(ChildDied, match="these are my last words"):
        owner.run("die")
    assert owner.lives == 3
    assert owner.deaths() == [1, 2]


@pytest.mark.slow
def test_work_done_in_between_forgives_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "DEATHS_MAX", 2)
    owner = Owner()
    owner.run("greet, die", "greet, die", "greet, die", "greet")
    assert owner.deaths() == [1, 1, 1]


def test_a_child_that_was_dead_already_does_not_blame_what_it_is_asked() -> None:
    async def main() -> None:
        owner = Owner()
        async with owner.compute.child(SERVICE, name="c") as child:
            with pytest.raises(ChildDied) as over_it:
                await child.request("die", Nothing(), NoneType)
            with pytest.raises(ChildDied) as before_it:
                await child.request("greet", Named(name="x"), str)
            assert not over_it.value.blameless
            assert before_it.value.blameless

    trio.run(main)


def test_another_childs_death_and_an_error_are_not_its_own() -> None:
    owner = Owner()
    with pytest.raises(ChildDied):
        owner.run("die", name="another")
    with pytest.raises(ChildError):
        Owner().run("fail")
    assert owner.deaths() == []
