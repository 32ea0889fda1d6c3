"""Child processes: every promise of `swarm.world.Compute`, for both ways of starting one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from swarm import defaults
from swarm.errors import UserError
from swarm.events import Event, Events
from swarm.world import ChildDied, ChildError
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine

SERVICE = "tests.world.service_for_tests:Service"
FORK_SERVER = [sys.executable, "-m", "swarm.world.fork_server"]
SECONDS = 30.0


class Heard:
    """Events, and a way to wait for one."""

    def __init__(self) -> None:
        self.events = Events(Machine(), "me")
        self.events.add_sink(self._hear)
        self.all: list[Event] = []
        self._waiting: dict[str, trio.Event] = {}

    def _hear(self, event: Event) -> None:
        self.all.append(event)
        if event.name in self._waiting:
            self._waiting[event.name].set()

    def named(self, name: str) -> list[Event]:
        return [event for event in self.all if event.name == name]

    async def wait_for(self, name: str) -> Event:
        self._waiting[name] = trio.Event()
        if not self.named(name):
            with trio.fail_after(SECONDS):
                await self._waiting[name].wait()
        return self.named(name)[0]


@contextmanager
def fork_server(path: Path, preload: str = "numpy.random") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [*FORK_SERVER, "--socket", str(path), "--preload", preload],
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(params=["subprocess", "fork server"])
def compute(request: pytest.FixtureRequest, tmp_path: Path, heard: Heard) -> Iterator[LocalCompute]:
    if request.param == "subprocess":
        yield LocalCompute(events=heard.events)
        return
    with fork_server(tmp_path / "fork.sock"):
        yield LocalCompute(events=heard.events, fork_server=str(tmp_path / "fork.sock"))
        assert not heard.named("compute.fork_server_missing")


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


def test_a_persons_mistake_stays_one(compute: LocalCompute) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            with pytest.raises(UserError, match=r"^c: the person can put it right$"):
                await child.call("mistake", deadline_seconds=SECONDS)

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
            with pytest.raises(ChildDied, match=r"SIGKILL.*these are my last words") as caught:
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
        with pytest.raises(ProcessLookupError):  # killed and reaped
            os.kill(pid, 0)

    trio.run(main)


def test_a_child_ends_with_its_block_and_leaves_no_zombie(
    compute: LocalCompute, heard: Heard
) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            pid = (await child.call("pid", deadline_seconds=SECONDS))["pid"]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(RuntimeError, match="the owner's own"):
            async with compute.child(SERVICE, name="c") as child:
                pid = (await child.call("pid", deadline_seconds=SECONDS))["pid"]
                raise RuntimeError("the owner's own")
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    trio.run(main)
    assert not heard.named("compute.child_died")


def test_a_child_that_outstays_its_block_is_killed(
    compute: LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "CHILD_GRACE_SECONDS", 0.2)

    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            pid = (await child.call("pid", deadline_seconds=SECONDS))["pid"]
            await child.call("outstay", deadline_seconds=SECONDS)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    trio.run(main)


def test_the_death_of_an_idle_child_is_told_at_once(compute: LocalCompute, heard: Heard) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="engine") as child:
            os.kill((await child.call("pid", deadline_seconds=SECONDS))["pid"], signal.SIGKILL)
            died = await heard.wait_for("compute.child_died")
            assert died.fields == {"name": "engine", "how": "was killed by SIGKILL", "last": []}
            with pytest.raises(ChildDied, match="engine was killed by SIGKILL"):
                await child.call("pid", deadline_seconds=SECONDS)

    trio.run(main)
    assert len(heard.named("compute.child_died")) == 1


def test_every_last_word_is_kept_and_none_can_steer_a_terminal(
    compute: LocalCompute, heard: Heard
) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            with pytest.raises(ChildDied) as caught:
                await child.call("mutter_and_die", deadline_seconds=SECONDS)
        assert "said on stdout |  [2Jan unfinished line" in str(caught.value)
        assert "\x1b" not in str(caught.value)

    trio.run(main)
    said = [event.fields["line"] for event in heard.named("compute.child_said")]
    assert said == ["said on stdout", " [2Jan unfinished line"]


def test_a_talkative_child_cannot_flood_the_events(compute: LocalCompute, heard: Heard) -> None:
    seconds: list[float] = []

    async def main() -> None:
        began = trio.current_time()
        async with compute.child(SERVICE, name="c") as child:
            await child.call("say", {"lines": 100_000}, deadline_seconds=SECONDS)
            with pytest.raises(ChildDied, match=r"line 99999 \| these are my last words"):
                await child.call("die", deadline_seconds=SECONDS)
        seconds.append(trio.current_time() - began)

    trio.run(main)
    told = len(heard.named("compute.child_said"))
    assert 0 < told <= (seconds[0] + 2) * defaults.CHILD_LINES_PER_SECOND_MAX
    assert len(heard.named("compute.child_died")[0].fields["last"]) == defaults.CHILD_LAST_LINES


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x00\x00\x03\xc1\xc1\xc1",  # no msgpack
        b"\x00\x00\x00\x01\x01",  # no answer
        b"\x00\x00\x00\x03\x92\xc3\x07",  # a result that is no map
        b"\x00\x00\x00\x05\x92\xc3\x81\xa1\xff",  # text that is no UTF-8
        b"\xff\xff\xff\xff",  # 4 GB announced
        b"\x00\x00\x27\x10" + b"\x91" * 10_000,  # nested beyond reason
    ],
)
def test_an_answer_that_is_none_kills_the_child_and_harms_nobody_else(
    compute: LocalCompute, raw: bytes
) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="parser") as child:
            with pytest.raises(ChildDied, match="parser answered 'answer_with' with what is no"):
                await child.call("answer_with", {"raw": raw}, deadline_seconds=SECONDS)

    trio.run(main)


def test_only_public_methods_are_called_and_only_with_what_fits(
    compute: LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            for method in ("__init__", "_private", "greeting", "no_such"):
                with pytest.raises(ChildError):
                    await child.call(method, deadline_seconds=SECONDS)
            monkeypatch.setattr(defaults, "CHILD_FRAME_BYTES_MAX", 1000)
            with pytest.raises(ValueError, match="at most 1000"):
                await child.call("greet", {"name": "x" * 1000}, deadline_seconds=SECONDS)
            assert await child.call("greet", {"name": "x"}, deadline_seconds=SECONDS)

    trio.run(main)


def test_a_child_lives_where_its_owner_does_but_out_of_reach_of_ctrl_c(
    compute: LocalCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_FOR_TESTS", "yes")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with compute.child(SERVICE, name="c") as child:
            pid = (await child.call("pid", deadline_seconds=SECONDS))["pid"]
            os.kill(pid, signal.SIGINT)
            assert await child.call("surroundings", deadline_seconds=SECONDS) == {
                "folder": str(tmp_path),
                "for_tests": "yes",
                "openmp_threads": "1",
                "session_leader": True,
                "threads": 1,
            }

    trio.run(main)


def test_siblings_draw_different_numbers(compute: LocalCompute) -> None:
    async def main() -> None:
        drawn = []
        for _ in range(2):
            async with compute.child(SERVICE, name="c") as child:
                drawn.append(await child.call("draw", deadline_seconds=SECONDS))
        assert drawn[0]["random"] != drawn[1]["random"]
        assert drawn[0]["numpy"] != drawn[1]["numpy"]

    trio.run(main)


def test_torch_draws_afresh_in_every_child() -> None:
    code = """
import sys, torch
from swarm.world.child import _fresh_randomness
state = torch.get_rng_state()
_fresh_randomness()
first = torch.rand(4)
torch.set_rng_state(state)
_fresh_randomness()
assert not torch.equal(first, torch.rand(4))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


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
from swarm.events import Events
from swarm.world.compute import LocalCompute
from swarm.world.machine import Machine
events = Events(Machine(), "owner")
def say(event):
    print(event.fields["pid" if event.name == "compute.child_started" else "line"], flush=True)
events.add_sink(say)
async def main():
    compute = LocalCompute(events=events, fork_server={compute._fork_server!r})
    async with compute.child({SERVICE!r}, name="c") as c:
        await c.call("stall", deadline_seconds=300)
trio.run(main)
"""
    owner = subprocess.Popen([sys.executable, "-c", owner_code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert owner.stdout.readline() == b"stalling\n", "it would not see its socket close"
    pidfd = os.pidfd_open(pid)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()

    async def gone() -> None:
        with trio.fail_after(SECONDS):
            await trio.lowlevel.wait_readable(pidfd)

    trio.run(gone)
    os.close(pidfd)


# --- the fork server ---


def test_children_start_without_a_fork_server_that_is_gone(tmp_path: Path, heard: Heard) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(stale))

    async def main() -> None:
        for path in (tmp_path / "none.sock", stale):
            compute = LocalCompute(events=heard.events, fork_server=str(path))
            async with compute.child(SERVICE, name="c") as child:
                await child.call("pid", deadline_seconds=SECONDS)

    trio.run(main)
    assert len(heard.named("compute.fork_server_missing")) == 2


def test_a_fork_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"

    async def main() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            listener.listen()
            compute = LocalCompute(fork_server=str(path))
            with pytest.raises(ChildDied, match=r"fork server at .*fork\.sock did not answer"):
                async with compute.child(SERVICE, name="c", start_deadline_seconds=0.05):
                    raise AssertionError("the block must not be entered")

    trio.run(main)


def test_children_die_with_their_fork_server(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"

    async def main(server: subprocess.Popen[bytes]) -> None:
        async with LocalCompute(fork_server=str(path)).child(SERVICE, name="c") as child:
            server.kill()
            with pytest.raises(ChildDied, match="ended with its fork server"):
                await child.call("stall", deadline_seconds=SECONDS)

    with fork_server(path) as server:
        trio.run(main, server)


def test_a_fork_server_refuses_to_fork_beside_a_thread(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
    )
    done = subprocess.run(
        [*FORK_SERVER, "--socket", str(tmp_path / "fork.sock"), "--preload", "threaded"],
        env={**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "preloading threaded started a thread" in done.stderr


def test_no_swarm_module_imports_torch() -> None:
    code = """
import importlib, pkgutil, sys, swarm
for module in pkgutil.walk_packages(swarm.__path__, "swarm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "torch" not in sys.modules, "torch is imported by a module of swarm"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
