"""Programs that try to leave the sandbox, one test for each wall."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from peers.sandbox import PYTHON, Limits, Outcome, Program, run, why_none
from peers.sandbox.execute import Group

SHORT = Limits(seconds=1.0, cpu_seconds=1.0, memory_bytes=256 << 20, files_bytes=1 << 20)
PATIENT = Limits(seconds=30.0, cpu_seconds=5.0, memory_bytes=256 << 20, files_bytes=1 << 20)

CLONE = 56 if os.uname().machine == "x86_64" else 220


pytestmark = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")


def lines(outcome: Outcome) -> list[str]:
    assert outcome.status == "exited" and outcome.code == 0, outcome
    return outcome.stdout.decode().splitlines()


def tried(*attempts: str) -> str:
    """A program that prints the name of the error of each attempt, or `done`."""
    return (
        "import ctypes, os, socket, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(function, *arguments):\n"
        "    if function(*arguments) == -1:\n"
        "        raise OSError(ctypes.get_errno(), '')\n"
        f"for attempt in {list(attempts)!r}:\n"
        "    try:\n"
        "        exec(attempt)\n"
        "        print('done')\n"
        "    except OSError as error:\n"
        "        print(type(error).__name__)\n"
    )


def errors(*attempts: str) -> set[str]:
    found = lines(run(Program(source=tried(*attempts)), PATIENT))
    assert len(found) == len(attempts)
    return set(found)


def running_with(marker: str) -> list[str]:
    """The processes of this machine with `marker` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if marker.encode() in command:
            found.append(path.parent.name)
    return found


def run_marked(code: str, marker: str, limits: Limits) -> Outcome:
    # The marker is the program's own argument, so it names the program and its children only.
    return run(Program(argv=(PYTHON, "-c", code, marker)), limits)


def test_no_socket_reaches_a_network():
    assert errors(
        "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
        "socket.socketpair(socket.AF_TIPC)",
    ) == {"PermissionError"}


def test_a_pair_of_local_sockets_works():
    assert errors("a, b = socket.socketpair(); a.send(b'x')") == {"done"}


def test_the_users_files_and_keys_are_absent(tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_text("secret")
    monkeypatch.setenv("SECRET_KEY", "secret")
    own, home = Path(__file__).resolve(), Path.home() / ".bashrc"
    paths = [key, own, own.parent, home, Path("/etc/passwd"), Path("/etc/shadow"), Path("/sys")]
    assert errors(*(f"os.stat({str(path)!r})" for path in paths)) == {"FileNotFoundError"}
    shown = lines(run(Program(source="import os; print(sorted(os.environ))"), PATIENT))
    assert "SECRET_KEY" not in shown[0]


def test_only_the_working_folder_is_writable():
    writes = [
        "open('/x', 'w')",
        "open('/usr/lib/x', 'w')",
        "open(os.path.dirname(os.__file__) + '/x', 'w')",
        "open('/dev/x', 'w')",
        "os.chmod(os.__file__, 0o777)",
    ]
    assert errors(*writes) <= {"OSError", "PermissionError"}
    assert errors("open('/tmp/x', 'w').write('x')") == {"done"}


def test_a_symbolic_link_leads_to_no_hidden_file():
    own = str(Path(__file__).resolve())
    followed = [f"os.symlink({path!r}, 'l'); os.stat('l')" for path in (own, "/etc/passwd")]
    followed.insert(1, "os.unlink('l'); os.stat('l')")
    found = errors(*followed, "os.stat('../../../../etc/passwd')")
    assert found == {"FileNotFoundError"}


def test_a_fork_bomb_stops_at_the_limit():
    code = (
        "import os, signal\n"
        "n = 0\n"
        "try:\n"
        "    while n < 100:\n"
        "        if os.fork() == 0: signal.pause()\n"
        "        n += 1\n"
        "except BlockingIOError:\n"
        "    print(n, flush=True)\n"
    )
    (count,) = lines(run_marked(code, "fork-count-7d1", PATIENT))
    assert 1 <= int(count) <= PATIENT.processes + 2
    assert running_with("fork-count-7d1") == []


def test_an_endless_fork_bomb_ends_with_its_sandbox():
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: os.wait()\n"
    outcome = run_marked(code, "fork-bomb-7d1", Limits(seconds=0.3, processes=8))
    assert outcome.status == "timeout"
    assert running_with("fork-bomb-7d1") == []


def test_a_memory_bomb_stops_at_the_limit():
    outcome = run(Program(source="x = bytearray(1 << 30)"), SHORT)
    assert outcome.status == "memory" and outcome.code == 1


def test_memory_outside_the_address_space_is_bounded():
    assert errors("os.memfd_create('x')", "call(libc.shmget, 0, 1 << 28, 0o1600)") == {
        "PermissionError"
    }
    write = "f = open('x', 'wb', 0); [f.write(bytes(1 << 18)) for _ in range(8)]"
    many = "[open(str(n), 'wb', 0).write(bytes(1 << 18)) for n in range(8)]"
    inodes = "[open(str(n) + 'i', 'wb') for n in range(10000)]"
    program = Program(
        source=f"import signal; signal.signal(25, signal.SIG_IGN)\n{tried(write, many, inodes)}"
    )
    assert set(lines(run(program, PATIENT))) == {"OSError"}


def test_processes_together_stop_at_the_limit_of_memory():
    limits = replace(PATIENT, memory_bytes=96 << 20)
    with ExitStack() as stack:
        group = Group(limits)
        stack.callback(group.close)
        names = ("memory.max", "memory.limit_in_bytes")
        if not any((folder / name).exists() for folder in group._folders for name in names):
            pytest.skip("this user may make no control group for memory")
    code = (
        "import os, signal\n"
        "for n in range(6):\n"
        "    if os.fork() == 0: x = b'x' * (60 << 20); signal.pause()\n"
        "os.wait()\n"  # for the one that is killed
    )
    assert run_marked(code, "memory-7d1", limits).status == "memory"
    assert running_with("memory-7d1") == []


def test_a_flood_of_output_is_cut():
    limits = Limits(seconds=30.0, output_bytes=1000)
    for stream in (1, 2):
        program = Program(source=f"import os\nwhile True: os.write({stream}, bytes(5000))")
        outcome = run(program, limits)
        assert outcome.status == "output"
        assert {len(outcome.stdout), len(outcome.stderr)} == {0, 1000}


def test_processor_time_is_bounded():
    limits = Limits(seconds=30.0, cpu_seconds=0.3)
    outcome = run(Program(source="while True: pass"), limits)
    assert outcome.status == "timeout" and outcome.cpu_seconds < 2.5


def test_signals_reach_no_process_outside():
    program = (
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP):\n"
        "    os.kill(1, number)\n"
        "print(os.getppid())\n"
        f"for pid in (-1, {os.getpid()}, {os.getppid()}):\n"
        "    try: os.kill(pid, signal.SIGTERM)\n"
        "    except ProcessLookupError: pass\n"
        "os.killpg(0, signal.SIGTERM)\n"
        "print('alive')\n"
    )
    assert lines(run(Program(source=program), PATIENT)) == ["1", "alive"]


def test_orphans_and_zombies_end_with_the_program():
    code = (
        "import os, signal\n"
        "for n in range(8):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() or n % 2: os._exit(0)\n"
        "        signal.pause()\n"
        "print('end')\n"
    )
    begun = time.monotonic()
    assert lines(run_marked(code, "orphan-7d1", PATIENT)) == ["end"]
    assert time.monotonic() - begun < PATIENT.seconds / 2
    assert running_with("orphan-7d1") == []


def test_no_process_of_others_is_visible():
    assert errors("os.listdir('/proc')", "os.stat('/proc/self')") == {"FileNotFoundError"}
    program = "import os; print(os.getpid() < 10, os.getuid(), os.getgid())"
    assert lines(run(Program(source=program), PATIENT)) == ["True 65534 65534"]


def test_tracing_mounting_and_new_namespaces_are_denied():
    assert errors(
        "call(libc.ptrace, 0, 0, 0, 0)",
        "call(libc.ptrace, 16, 1, 0, 0)",
        "call(libc.process_vm_readv, 1, 0, 0, 0, 0, 0)",
        "call(libc.unshare, 0x10000000)",
        "call(libc.mount, b'tmpfs', b'/tmp', b'tmpfs', 0, None)",
        "call(libc.umount, b'/tmp')",
        f"call(libc.syscall, {CLONE}, 0x10000000 | 17, 0, 0, 0, 0)",
        "call(libc.syscall, 425, 1, 0)",
        "os.chroot('/tmp')",
        "os.pidfd_open(1)",
    ) == {"PermissionError"}


def test_clone3_is_missing_so_that_its_flags_cannot_hide():
    program = tried("call(libc.syscall, 435, 0, 0)") + "print(ctypes.get_errno())"
    assert lines(run(Program(source=program), PATIENT)) == ["OSError", "38"]


def test_a_program_that_hangs_after_closing_its_streams_is_ended():
    code = "import os, signal\nos.close(0); os.close(1); os.close(2)\nsignal.pause()"
    outcome = run_marked(code, "hang-7d1", Limits(seconds=0.3))
    assert outcome.status == "timeout"
    assert running_with("hang-7d1") == []


def test_a_child_that_keeps_the_streams_open_delays_nothing():
    code = "import os, signal\nif os.fork() == 0: signal.pause()\nprint('end', flush=True)"
    begun = time.monotonic()
    assert lines(run_marked(code, "keeper-7d1", PATIENT)) == ["end"]
    assert time.monotonic() - begun < PATIENT.seconds / 2
    assert running_with("keeper-7d1") == []


def test_a_program_cannot_write_its_own_report():
    program = (
        "import os\n"
        "for n in range(3, 256):\n"
        "    try: os.write(n, b'{\"code\": 0, \"cpu_seconds\": 0}'); print('written', n)\n"
        "    except OSError: pass\n"
        "os._exit(3)\n"
    )
    outcome = run(Program(source=program), PATIENT)
    assert (outcome.status, outcome.code, outcome.stdout) == ("exited", 3, b"")


def test_a_program_that_changes_its_inputs_changes_no_later_run():
    program = Program(
        source="import os\nprint(open('tests').read())\nopen('tests', 'w').write('patched')\n"
        "try: os.truncate(0, 0)\nexcept OSError: print('sealed')",
        files={"tests": b"hidden"},
        stdin=b"input",
    )
    for _ in range(2):
        assert lines(run(program, PATIENT)) == ["hidden", "sealed"]


def test_programs_beyond_the_bound_wait_their_turn():
    outcomes: list[Outcome] = []
    program = Program(source="print(6 * 7)")
    threads = [
        threading.Thread(target=lambda: outcomes.append(run(program, PATIENT))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lines(each) for each in outcomes] == [["42"]] * 4
