"""Ranks agree with each other, and with one process alone."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from peers.demo.setup import free_ports
from peers.learning import ranks as ranks_module
from peers.learning import rendezvous as meeting_module
from peers.learning import watch as watch_module
from peers.learning.durable import whole_folder
from peers.learning.lead import follow, lead
from peers.learning.ranks import Launch, RankError, Ranks, dist
from swarm.world import Job
from tests.trainer.ranks_harness import run_ranks


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 6), st.integers(0, 99))
def test_every_sequence_has_one_rank_and_loads_are_even(
    lengths: list[int], world: int, first: int
) -> None:
    shares = [Ranks(Launch(rank, world, rank)).share(lengths, first) for rank in range(world)]
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_sums_and_errors_cross_ranks(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[list[float], list[float], str, bool, bool]:
        sums = ranks.sum([1.5, 10.0 * ranks.rank])
        largest = ranks.max([ranks.rank, -ranks.rank])
        ranks.agree()
        said = ""
        try:
            with whole_folder(tmp_path / "state", ranks) as aside:
                (aside / str(ranks.rank)).write_text("x")
                if ranks.rank == 1:
                    raise OSError("No space left on device")
        except (RankError, OSError) as error:
            said = str(error)
        gone = not (tmp_path / "state").exists()
        with whole_folder(tmp_path / "state", ranks) as aside:
            (aside / str(ranks.rank)).write_text("x")
        there = sorted(path.name for path in (tmp_path / "state").iterdir()) == ["0", "1"]
        return sums, largest, said, gone, there

    for result in run_ranks(2, tmp_path, work):
        assert result == (
            [3.0, 10.0],
            [1.0, 0.0],
            "rank 1 of 2: OSError: No space left on device",
            True,
            True,
        )


# --- a lead and a follower -----------------------------------------------------------------------


class Add(Job, frozen=True, kw_only=True):
    patience_seconds: ClassVar[float] = 60.0
    numbers: tuple[float, float] = (0.0, 0.0)


class Die(Job, frozen=True, kw_only=True):
    patience_seconds: ClassVar[float] = 60.0
    rank: int
    how: str


class Adder:
    """A service whose every call is a collective."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    async def add(self, job: Add) -> float:
        return self._ranks.sum([job.numbers[self._ranks.rank]])[0]

    async def refuse(self, job: Add) -> float:
        raise ValueError("on every rank alike")

    async def die(self, job: Die) -> float:
        if self._ranks.rank == job.rank:
            if job.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("out of memory")
        return await self.add(Add())


def two_processes(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[Any], Awaitable[Any]]
) -> tuple[Any, int | None]:
    """`work(lead)` in rank 0 and its result, with a follower beside it; the follower's status."""
    (port,) = free_ports(1)
    port = int(os.environ.get("MASTER_PORT", port))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def rank(number: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        try:
            if number:
                follow(Adder)
            else:
                try:
                    theirs.send(trio.run(work, lead(Adder)))
                except Exception as error:
                    theirs.send(error)
        finally:
            os._exit(0)

    processes = [context.Process(target=rank, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    assert ours.poll(60), "rank 0 said nothing for 60 s"
    result = ours.recv()
    for process in processes:
        process.join(20)
        process.kill()
    processes[1].join()
    return result, processes[1].exitcode


def test_the_lead_and_its_follower_do_the_same_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(service: Any) -> list[Any]:
        said = [await service.add(Add(numbers=(1.0, 2.0)))]
        with pytest.raises(ValueError, match="on every rank alike"):
            await service.refuse(Add())
        said.append(await service.add(Add(numbers=(3.0, 4.0))))
        said.append(await service.end())
        return said

    result, status = two_processes(monkeypatch, work)
    assert result == [3.0, 7.0, None]
    assert status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed", r"rank 1 of 2 \(.*, \d+\) has not been heard of for 3 s"),
        ("error", r"rank 1 of 2 \(.*, \d+\) ended: die: MemoryError: out of memory"),
    ],
)
def test_who_died_is_named(monkeypatch: pytest.MonkeyPatch, how: str, words: str) -> None:
    monkeypatch.setattr(watch_module, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(ranks_module, "COLLECTIVE_SECONDS", 30.0)
    result, _ = two_processes(monkeypatch, lambda service: service.die(Die(rank=1, how=how)))
    assert isinstance(result, RankError), result
    assert re.fullmatch(words, str(result)), result


@pytest.mark.slow
def test_ranks_that_start_again_meet_in_the_store_of_those_that_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's agents outlive the ranks, and need not count their starts alike."""
    monkeypatch.setattr(watch_module, "SILENT_SECONDS", 3.0)
    monkeypatch.setattr(ranks_module, "COLLECTIVE_SECONDS", 30.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    result, _ = two_processes(monkeypatch, lambda service: service.die(Die(rank=1, how="killed")))
    assert isinstance(result, RankError)

    async def work(service: Any) -> float:
        said = await service.add(Add(numbers=(1.0, 2.0)))
        await service.end()
        return float(said)

    assert two_processes(monkeypatch, work) == (3.0, 0)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "JOIN_SECONDS", 0.5)
    (port,) = free_ports(1)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RuntimeError, match="no answer of rank 1, 2"):
        meeting_module.meet(Launch(0, 3, 0))
