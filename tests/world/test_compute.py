"""Child processes: every promise of `swarm.world.Compute`, for both ways of starting one."""

from __future__ import annotations

import os
import signal
import site
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import NoneType

import pytest
import trio
import trio.testing

from swarm.errors import UserError
from swarm.events import Event, Events
from swarm.world import Child, ChildDied, ChildError, Setup, frames, landlock, process
from swarm.world.compute import LAST_LINES, LINES_PER_SECOND_MAX, LocalCompute
from swarm.world.frames import Answer, encode, raw
from swarm.world.machine import Machine
from swarm.world.process import (
    FORK_SERVER_VARIABLE,
    HOME_VARIABLE,
    INSTALLED_VARIABLE,
    KEPT_VARIABLE,
)
from tests.world.service_for_tests import (
    Greeting,
    Impatient,
    Named,
    Nothing,
    Raw,
    Rounds,
    Sized,
    Surroundings,
)

pytestmark = pytest.mark.wall_clock


class Other(Setup, frozen=True, kw_only=True):
    """A setup of another service."""

    count: int


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
        [*FORK_SERVER, "--socket", str(path), "--preload", preload], stdout=subprocess.PIPE
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


@pytest.fixture(scope="module")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a fork server that all tests share: its start takes half a second."""
    path = tmp_path_factory.mktemp("fork") / "fork.sock"
    with fork_server(path):
        yield str(path)


@pytest.fixture(params=["subprocess", "fork server"])
def compute(request: pytest.FixtureRequest, heard: Heard) -> Iterator[LocalCompute]:
    if request.param == "subprocess":
        yield LocalCompute(events=heard.events)
        return
    yield LocalCompute(events=heard.events, fork_server=request.getfixturevalue("forking"))
    assert not heard.named("compute.fork_server_missing")


async def test_a_child_answers_with_the_setup_it_was_made_with(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, Greeting(greeting="good day"), name="c") as child:
        answer = await child.request("greet", Named(name="Ada"), str)
        assert answer == "good day Ada"
    with pytest.raises(ChildError, match="unknown field `count`"):
        async with compute.child(SERVICE, Other(count=1), name="c"):
            raise AssertionError("the block must not be entered")


async def test_an_exception_in_the_child_is_told_and_the_child_lives_on(
    compute: LocalCompute,
) -> None:
    async with compute.child(SERVICE, name="c") as child:
        with pytest.raises(ChildError, match="on purpose") as caught:
            await child.request("fail", Nothing(), NoneType)
        assert caught.value.kind == "ValueError"
        assert await child.request("greet", Named(name="x"), str)


async def test_a_persons_mistake_stays_one(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="c") as child:
        with pytest.raises(UserError, match=r"^c: the person can put it right$") as raised:
            await child.request("mistake", Nothing(), NoneType)
        assert isinstance(raised.value, ChildError) and raised.value.kind == "DiskFullError"


async def test_a_child_that_cannot_be_made_says_why(compute: LocalCompute) -> None:
    with pytest.raises(ChildError, match="no such engine"):
        async with compute.child("tests.world.service_for_tests:Unmakeable", name="c"):
            raise AssertionError("the block must not be entered")


async def test_a_service_runs_beside_its_calls(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="c") as child:
        await child.request("wait_for_run", Nothing(), NoneType)
        assert await child.request("greet", Named(name="x"), str) == "hello x"


async def test_a_dead_child_is_reported_with_its_last_words(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="engine") as child:
        with pytest.raises(ChildDied, match=r"SIGKILL.*these are my last words") as caught:
            await child.request("die", Nothing(), NoneType)
        assert "engine" in str(caught.value)
        assert caught.value.hung == ""
        with pytest.raises(ChildDied):
            await child.request("greet", Named(name="x"), str)


async def test_a_child_that_ends_over_a_hung_call_says_so(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="c") as child:
        with pytest.raises(ChildDied, match="status 75") as caught:
            await child.request("give_up", Nothing(), NoneType)
        assert caught.value.hung == "the call does not return"


async def test_a_missed_deadline_kills_the_child(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="c") as child:
        pid = await child.request("pid", Nothing(), int)
        with pytest.raises(ChildDied, match=r"no progress on 'stall' within 0\.05 s") as caught:
            await child.request("stall", Impatient(), NoneType)
        assert caught.value.hung.startswith("child c made no progress on 'stall' within")
    with pytest.raises(ProcessLookupError):  # killed and reaped
        os.kill(pid, 0)


async def test_a_child_ends_with_its_block_and_leaves_no_zombie(
    compute: LocalCompute, heard: Heard
) -> None:
    async with compute.child(SERVICE, name="c") as child:
        pid = await child.request("pid", Nothing(), int)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="the owner's own"):
        async with compute.child(SERVICE, name="c") as child:
            pid = await child.request("pid", Nothing(), int)
            raise RuntimeError("the owner's own")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not heard.named("compute.child_died")


async def test_a_child_that_outstays_its_block_is_killed(
    compute: LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.2)
    async with compute.child(SERVICE, name="c") as child:
        pid = await child.request("pid", Nothing(), int)
        await child.request("outstay", Nothing(), NoneType)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_death_of_an_idle_child_is_told_at_once(
    compute: LocalCompute, heard: Heard
) -> None:
    async with compute.child(SERVICE, name="engine") as child:
        os.kill(await child.request("pid", Nothing(), int), signal.SIGKILL)
        died = await heard.wait_for("compute.child_died")
        assert died.fields == {"name": "engine", "how": "was killed by SIGKILL", "last": []}
        with pytest.raises(ChildDied, match="engine was killed by SIGKILL"):
            await child.request("pid", Nothing(), int)
    assert len(heard.named("compute.child_died")) == 1


async def test_every_last_word_is_kept_and_none_can_steer_a_terminal(
    compute: LocalCompute, heard: Heard
) -> None:
    async with compute.child(SERVICE, name="c") as child:
        with pytest.raises(ChildDied) as caught:
            await child.request("mutter_and_die", Nothing(), NoneType)
    assert "said on stdout |  [2Jan unfinished line" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    said = [event.fields["line"] for event in heard.named("compute.child_said")]
    assert said == ["said on stdout", " [2Jan unfinished line"]


async def test_a_talkative_child_cannot_flood_the_events(
    compute: LocalCompute, heard: Heard
) -> None:
    seconds: list[float] = []
    began = trio.current_time()
    async with compute.child(SERVICE, name="c") as child:
        await child.request("say", Sized(count=100_000), NoneType)
        with pytest.raises(ChildDied, match=r"line 99999 \| these are my last words"):
            await child.request("die", Nothing(), NoneType)
    seconds.append(trio.current_time() - began)
    told = len(heard.named("compute.child_said"))
    assert 0 < told <= (seconds[0] + 2) * LINES_PER_SECOND_MAX
    assert len(heard.named("compute.child_died")[0].fields["last"]) == LAST_LINES


@pytest.mark.parametrize(
    "said",
    [
        b"\x00\x00\x00\x03\xc1\xc1\xc1",  # no msgpack
        b"\x00\x00\x00\x01\x01",  # no response
        encode(Answer(1, raw("a reply of another type"))),
        encode(Answer(2, raw(None))),  # to a call that was never made
        b"\x00\x00\x00\x0b\x93\xa6failed\x01\xa1\xff",  # text that is no UTF-8
        b"\xff\xff\xff\xff",  # 4 GB announced
        b"\x00\x00\x27\x10" + b"\x91" * 10_000,  # nested beyond reason
    ],
)
async def test_an_answer_that_is_none_kills_the_child_and_harms_nobody_else(
    compute: LocalCompute, said: bytes
) -> None:
    async with compute.child(SERVICE, name="parser") as child:
        with pytest.raises(ChildDied, match="parser sent an invalid answer to 'answer_with'"):
            await child.request("answer_with", Raw(raw=said), NoneType)


async def test_an_answer_that_is_too_large_fails_its_call_alone(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="c") as child:
        await child.request("small_frames", Sized(count=1000), NoneType)
        with pytest.raises(ChildError, match="at most 1000 are allowed"):
            await child.request("grow", Sized(count=2000), str)
        assert await child.request("greet", Named(name="x"), str) == "hello x"


async def test_only_public_methods_are_called_and_only_with_what_fits(
    compute: LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with compute.child(SERVICE, name="c") as child:
        for method in ("__init__", "_private", "greeting", "no_such"):
            with pytest.raises(ChildError):
                await child.request(method, Nothing(), NoneType)
        monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 1000)
        with pytest.raises(ValueError, match="at most 1000"):
            await child.request("greet", Named(name="x" * 1000), str)
        assert await child.request("greet", Named(name="x"), str)


async def test_a_child_lives_where_its_owner_does_but_out_of_reach_of_signals_to_everybody(
    compute: LocalCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_FOR_TESTS", "yes")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    async with compute.child(SERVICE, name="c") as child:
        pid = await child.request("pid", Nothing(), int)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert await child.request("surroundings", Nothing(), Surroundings) == Surroundings(
            folder=str(tmp_path),
            for_tests="yes",
            openmp_threads="1",
            session_leader=True,
            threads=1,
        )


SECRETS = ["HF_TOKEN", "JUDGE_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"]
HARMLESS = ["TOKENIZERS_FOR_TESTS", "KEYBOARD", "MONKEYS", "SWARM_DATASETS", "LANGUAGE"]


async def test_a_child_gets_neither_its_owners_home_nor_secrets_that_nobody_named(
    compute: LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SECRETS, "OTHER_KEY", *HARMLESS):
        monkeypatch.setenv(name, "17")
    monkeypatch.setenv(HOME_VARIABLE, "/the/home")
    monkeypatch.setenv(KEPT_VARIABLE, "OTHER_KEY, NO_SUCH_TOKEN")
    async with compute.child(SERVICE, name="c") as child:

        async def seen(name: str) -> str:
            return await child.request("variable", Named(name=name), str)

        assert [await seen(each) for each in (*SECRETS, HOME_VARIABLE)] == [""] * 6
        assert [await seen(each) for each in ("OTHER_KEY", *HARMLESS)] == ["17"] * 6
        assert await seen(INSTALLED_VARIABLE) == "/the/home/environments"
        began_with = f"/proc/{await child.request('pid', Nothing(), int)}/environ"
        assert b"HF_" + b"TOKEN=" not in await trio.Path(began_with).read_bytes()


@pytest.mark.skipif(landlock.version() < landlock.OLDEST, reason="the kernel has no Landlock")
async def test_a_child_that_parses_what_strangers_wrote_cannot_read_the_keys(
    compute: LocalCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "checkpoints").mkdir(parents=True)
    for name in ("identity.key", "owner.key", "peer.sqlite", "checkpoints/weights"):
        (home / name).write_text("17")
    (home / "link").symlink_to("identity.key")
    (tmp_path / "data").write_text("17")
    monkeypatch.setenv(HOME_VARIABLE, str(home))
    async with compute.child("tests.world.service_for_tests:Closed", name="c") as child:

        async def read(name: str) -> str:
            return await child.request("read", Named(name=str(tmp_path / name)), str)

        (home / "incoming" / "later").write_text("17")
        keys = ["home/identity.key", "home/owner.key", "home/link"]
        assert [await read(each) for each in keys] == ["PermissionError"] * 3
        others = ["peer.sqlite", "checkpoints/weights", "incoming/later"]
        assert [await read(f"home/{each}") for each in others] == ["17"] * 3
        assert await read("data") == "17"
        assert await read(f"/proc/{os.getpid()}/mem") == "PermissionError"
        key = Named(name=str(home / "identity.key"))
        assert await child.request("move", key, str) in ("PermissionError", "OSError")
        assert (home / "identity.key").read_text() == "17"  # here it is as open as before


@pytest.mark.skipif(landlock.version() < landlock.OLDEST, reason="the kernel has no Landlock")
async def test_every_child_of_a_peer_is_without_its_keys_and_may_run_sandboxes(
    compute: LocalCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that says nothing of what it reads; its peer's home lies among temporary files."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "identity.key").write_text("17")
    monkeypatch.setenv(HOME_VARIABLE, str(home))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    async with compute.child("tests.world.service_for_tests:Walled", name="c") as child:
        key = Named(name=str(home / "identity.key"))
        assert await child.request("read", key, str) == "PermissionError"
        assert await child.request("temporary", Nothing(), str) == "17"
        for program, printed in (
            ("print(6 * 7)", "42\n"),
            (f"open({str(home / 'identity.key')!r})", "FileNotFoundError"),
        ):
            assert printed in await child.request("execute", Named(name=program), str)
        greedy = Named(name="memory_bytes")
        assert "at most" in await child.request("exceed", greedy, str)
        if compute._fork_server is not None:
            asked = await child.request("fork", Named(name=compute._fork_server), str)
            assert asked in ("", "ConnectionResetError", "BrokenPipeError")


async def test_where_keys_cannot_be_closed_the_child_says_so_and_works(
    compute: LocalCompute, heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file, in which no folder can be made")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    async with compute.child("tests.world.service_for_tests:Closed", name="c") as child:
        name = Named(name=str(tmp_path / "home"))
        assert (await child.request("read", name, str)).startswith("a file")
        said = await heard.wait_for("compute.child_said")
        assert said.fields["line"].startswith("the keys stay readable to this process: ")


def test_the_memory_of_a_process_that_closes_it_is_closed_to_its_user() -> None:
    code = """
import ctypes, os, sys
from swarm.world.process import close_memory
if os.geteuid() == 0:  # root reads everything
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # undoes what setuid has done
if sys.argv[1] == "closed":
    close_memory()
descriptor = os.open("/dev/null", os.O_RDONLY)
with open(f"/proc/self/fdinfo/{descriptor}") as file:  # its own stays open to itself
    assert file.read()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY))
except PermissionError:
    sys.exit(3)
"""
    for how, status in (("open", 0), ("closed", 3)):
        assert subprocess.run([sys.executable, "-c", code, how], timeout=60).returncode == status


async def test_siblings_draw_different_numbers(compute: LocalCompute) -> None:
    drawn = []
    for _ in range(2):
        async with compute.child(SERVICE, name="c") as child:
            drawn.append(await child.request("draw", Nothing(), tuple[float, float]))
    assert drawn[0][0] != drawn[1][0]
    assert drawn[0][1] != drawn[1][1]


@pytest.mark.slow
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


async def test_a_call_cancelled_in_a_thread_ends_at_its_next_report_and_the_child_lives_on(
    compute: LocalCompute, tmp_path: Path
) -> None:
    async with compute.child(SERVICE, name="c") as child:
        pid = await child.request("pid", Nothing(), int)
        with trio.move_on_after(0.1):
            await child.request("work", Rounds(folder=str(tmp_path), rounds=2), int)
            raise AssertionError("it waits for its file")
        with trio.move_on_after(0.1):
            await child.request("rest", Nothing(), NoneType)
        assert await child.request("pid", Nothing(), int) == pid
        await trio.sleep(process.GRACE_SECONDS)  # a child that went on would be killed
        (tmp_path / "0").touch()
        assert await child.request("pid", Nothing(), int) == pid
        assert not (tmp_path / "0.done").exists()


async def test_a_child_that_does_not_obey_a_cancellation_is_killed(
    compute: LocalCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.2)
    async with compute.child(SERVICE, name="c") as child:
        with trio.move_on_after(0.05):
            await child.request("stall", Nothing(), NoneType)
        with pytest.raises(ChildDied, match="given up during 'stall'"):
            while True:
                await child.request("greet", Named(name="x"), str)


async def test_several_calls_run_at_once(compute: LocalCompute, tmp_path: Path) -> None:
    finished = []
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()

    async def work(child: Child, folder: Path, ended: trio.Event) -> None:
        await child.request("work", Rounds(folder=str(folder), rounds=1), int)
        finished.append(folder.name)
        ended.set()

    async with compute.child(SERVICE, name="c") as child, trio.open_nursery() as nursery:
        first, second = trio.Event(), trio.Event()
        nursery.start_soon(work, child, folders[0], first)
        nursery.start_soon(work, child, folders[1], second)
        assert await child.request("greet", Named(name="x"), str) == "hello x"
        (tmp_path / "second" / "0").touch()
        await second.wait()
        (tmp_path / "first" / "0").touch()
    assert finished == ["second", "first"]


@pytest.mark.slow
async def test_work_that_reports_progress_may_take_longer_than_the_callers_patience(
    compute: LocalCompute, tmp_path: Path
) -> None:
    rounds = Rounds(folder=str(tmp_path), rounds=1)

    async def release() -> None:
        await trio.sleep(1.5 * Rounds.patience_seconds)
        (tmp_path / "0").touch()

    async with compute.child(SERVICE, name="c") as child, trio.open_nursery() as nursery:
        nursery.start_soon(release)
        assert await child.request("work", rounds, int) == 1


async def test_a_child_may_run_under_another_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment of its own, with a module that this one lacks. Its own children use it, too,
    and so not the fork server."""
    monkeypatch.setenv(FORK_SERVER_VARIABLE, "/nowhere")
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    interpreter = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    ours = [*site.getsitepackages(), str(Path(__file__).parents[2])]
    (packages / "ours.pth").write_text("".join(f"{path}\n" for path in ours))
    (packages / "swarm_marker_for_tests.py").write_text("TEXT = 'only here'")

    monkeypatch.delenv(HOME_VARIABLE, raising=False)  # a child of a peer gets no fork server
    async with LocalCompute().child(SERVICE, name="c", interpreter=str(interpreter)) as child:
        answer = await child.request("marker", Nothing(), str)
        assert answer == f"only here {interpreter}"
        job = Named(name=FORK_SERVER_VARIABLE)
        assert await child.request("variable", job, str) == ""
    async with LocalCompute().child(SERVICE, name="c") as child:
        assert await child.request("variable", job, str) == "/nowhere"
        with pytest.raises(ChildError, match="swarm_marker_for_tests"):
            await child.request("marker", Nothing(), str)
    with pytest.raises(UserError, match="c should run under the interpreter /nowhere/python"):
        async with LocalCompute().child(SERVICE, name="c", interpreter="/nowhere/python"):
            raise AssertionError("the block must not be entered")


async def test_memory_is_limited(compute: LocalCompute) -> None:
    async with compute.child(SERVICE, name="c", memory_limit_bytes=100 << 20) as child:
        small = await child.request("hog", Sized(count=10 << 20), int)
        assert small == 10 << 20
        with pytest.raises(ChildError) as caught:
            await child.request("hog", Sized(count=500 << 20), int)
        assert caught.value.kind == "MemoryError"


def test_children_die_with_an_owner_that_is_killed(compute: LocalCompute) -> None:
    owner_code = f"""
import trio
from swarm.events import Events
from swarm.world.compute import LAST_LINES, LINES_PER_SECOND_MAX, LocalCompute
from swarm.world.machine import Machine
from tests.world.service_for_tests import Nothing
events = Events(Machine(), "owner")
def say(event):
    print(event.fields["pid" if event.name == "compute.child_started" else "line"], flush=True)
events.add_sink(say)
async def main():
    compute = LocalCompute(events=events, fork_server={compute._fork_server!r})
    async with compute.child({SERVICE!r}, name="c") as c:
        await c.request("stall", Nothing(), type(None))
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


async def test_children_start_without_a_fork_server_that_is_gone(
    tmp_path: Path, heard: Heard
) -> None:
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(stale))
    for path in (tmp_path / "none.sock", stale):
        compute = LocalCompute(events=heard.events, fork_server=str(path))
        async with compute.child(SERVICE, name="c") as child:
            await child.request("pid", Nothing(), int)
    assert len(heard.named("compute.fork_server_missing")) == 2


async def test_a_fork_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        compute = LocalCompute(fork_server=str(path))
        with pytest.raises(ChildDied, match=r"fork server at .*fork\.sock did not answer"):
            async with compute.child(SERVICE, name="c", start_deadline_seconds=0.05):
                raise AssertionError("the block must not be entered")


def test_children_die_with_their_fork_server(tmp_path: Path) -> None:
    path = tmp_path / "fork.sock"

    async def main(server: subprocess.Popen[bytes]) -> None:
        async with LocalCompute(fork_server=str(path)).child(SERVICE, name="c") as child:
            server.kill()
            with pytest.raises(ChildDied, match="ended with its fork server"):
                await child.request("stall", Nothing(), NoneType)

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


def test_a_network_process_imports_only_what_it_uses() -> None:
    """A relay host runs a hundred of them: each package here costs every one megabytes."""
    code = """
import sys, swarm.commands.peer, swarm.commands.start, peers.relay, peers.inference.role
heavy = (
    "Crypto", "aioquic", "coincurve", "dns", "httpx", "numpy", "prometheus_client", "pyarrow",
    "requests", "rich", "torch", "zeroconf",
)
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded.intersection(heavy), loaded.intersection(heavy)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_of_libp2p_that_was_left_out_says_so() -> None:
    code = """
import swarm.transport.libp2p
import libp2p
from swarm.transport.libp2p.lean import PartLeftOut
try:
    libp2p.QUICTransport()
except PartLeftOut as error:
    assert "libp2p.transport.quic" in str(error)
else:
    raise AssertionError("QUIC was not left out")
from libp2p.transport.quic.config import QUICTransportConfig  # afterwards as usual
QUICTransportConfig()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
