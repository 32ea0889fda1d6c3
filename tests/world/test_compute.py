"""Child processes: every promise of `swarm.world.Compute`, for both ways of starting one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from swarm.world import ChildDied, ChildError
from swarm.world.compute import LocalCompute

SERVICE = "tests.world.service_for_tests:Service"
SECONDS = 30.0


@pytest.fixture(params=["subprocess", "fork server"])
def compute(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalCompute]:
    if request.param == "subprocess":
        yield LocalCompute()
        return
    path = tmp_path / "fork.sock"
    server = subprocess.Popen(
        [sys.executable, "-m", "swarm.world.fork_server", "--socket", str(path)],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    yield LocalCompute(fork_server=str(path))
    server.kill()
    server.wait()
    server.stdout.close()


def test_a_child_answers_with_the_arguments_it_was_made_with(compute: LocalCompute) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c", arguments={"greeting": "good day"}) as child:
            answer = await child.call("greet", {"name": "Ada"}, deadline_seconds=SECONDS)
            assert answer == {"text": "good day Ada"}

    trio.run(main)


def test_an_exception_in_the_child_is_told_and_the_child_lives_on(compute: LocalCompute) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            with pytest.raises(ChildError, match="on purpose") as caught:
                await child.call("fail", deadline_seconds=SECONDS)
            assert caught.value.kind == "ValueError"
            assert await child.call("greet", {"name": "x"}, deadline_seconds=SECONDS)

    trio.run(main)


def test_a_child_that_cannot_be_made_says_why(compute: LocalCompute) -> None:
    async def main() -> None:
        with pytest.raises(ChildError, match="no such engine"):
            async with compute.child("tests.world.service_for_tests:Unmakeable", name="c"):
                raise AssertionError("the block must not be entered")

    trio.run(main)


def test_a_dead_child_is_reported_with_its_last_words(compute: LocalCompute) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="engine") as child:
            with pytest.raises(ChildDied, match="SIGKILL.*these are my last words") as caught:
                await child.call("die", deadline_seconds=SECONDS)
            assert "engine" in str(caught.value)
            with pytest.raises(ChildDied):
                await child.call("greet", {"name": "x"}, deadline_seconds=SECONDS)

    trio.run(main)


def test_a_missed_deadline_kills_the_child(compute: LocalCompute) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            pid = (await child.call("pid", deadline_seconds=SECONDS))["pid"]
            with pytest.raises(ChildDied, match=r"'stall' within 0\.05 s"):
                await child.call("stall", deadline_seconds=0.05)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    trio.run(main)


def test_a_cancelled_call_ends_the_child_so_that_no_answer_comes_out_of_step(
    compute: LocalCompute,
) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            with trio.move_on_after(0.05):
                await child.call("stall", deadline_seconds=SECONDS)
            with pytest.raises(ChildDied, match="given up"):
                await child.call("greet", {"name": "x"}, deadline_seconds=SECONDS)

    trio.run(main)


def test_memory_is_limited(compute: LocalCompute) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c", memory_limit_bytes=100 << 20) as child:
            small = await child.call("hog", {"size_bytes": 10 << 20}, deadline_seconds=SECONDS)
            assert small == {"size": 10 << 20}
            with pytest.raises(ChildError) as caught:
                await child.call("hog", {"size_bytes": 500 << 20}, deadline_seconds=SECONDS)
            assert caught.value.kind == "MemoryError"

    trio.run(main)


def test_children_die_with_an_owner_that_is_killed(compute: LocalCompute) -> None:
    owner_code = f"""
import trio
from swarm.world.compute import LocalCompute
async def main():
    async with LocalCompute(fork_server={compute._fork_server!r}).child({SERVICE!r}, name="c") as c:
        print((await c.call("pid", deadline_seconds=30))["pid"], flush=True)
        await c.call("stall", deadline_seconds=300)
trio.run(main)
"""
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    pidfd = os.pidfd_open(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()

    async def gone() -> None:
        with trio.fail_after(SECONDS):
            await trio.lowlevel.wait_readable(pidfd)

    trio.run(gone)
    os.close(pidfd)


def test_no_swarm_module_imports_torch() -> None:
    code = """
import importlib, pkgutil, sys, swarm
for module in pkgutil.walk_packages(swarm.__path__, "swarm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "torch" not in sys.modules, "torch is imported by a module of swarm"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
