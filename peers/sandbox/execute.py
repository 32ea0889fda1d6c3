"""One program behind the walls: build them, start it, watch its streams and its time."""

import fcntl
import importlib.util
import itertools
import marshal
import math
import os
import select
import selectors
import signal
import site
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import IO, Any, Literal

from peers.sandbox.program import PYTHON, Limits, Outcome, Program, Tree
from peers.sandbox.seccomp import filter_program
from swarm.errors import UserError

INSIDE = Path(__file__).with_name("inside.py")
LOAD = """import marshal, sys
with open(int(sys.argv[2]), "rb") as file: code, spec = marshal.load(file)
exec(code)
main(int(sys.argv[1]), spec)"""
"""What the interpreter of a sandbox runs: `INSIDE`, which this process has compiled."""

LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
"""Shared libraries, wherever the interpreter lives."""

NOBODY = 65534

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": "/tmp",
    # Equal programs give equal outputs on every machine.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8",
}


PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
"""Packages that tests with pytest need."""
PYTEST_FOLDER = "/opt/pytest"

PYTHON_NAMES = ("python3", "python")
TOOLS = ("/usr/bin", "/bin", "/usr/share", "/etc/alternatives")
OWN_PYTHON = "/opt/python"
"""Where programs with tools find the interpreter, whose own folder may lie in somebody's home."""
TOOLS_ENVIRONMENT = {
    "PATH": f"{OWN_PYTHON}/bin:/usr/bin:/bin",
    "LD_LIBRARY_PATH": f"{OWN_PYTHON}/lib",  # of an interpreter with a shared library
    "TERM": "dumb",
}
USERS = f"nobody:x:{NOBODY}:{NOBODY}:nobody:/tmp:/bin/bash\n".encode()


@dataclass(frozen=True)
class Root:
    """The files that a program may read."""

    interpreter: str
    shown: tuple[tuple[str, str], ...]
    """Folders and files, and the paths at which they are shown."""
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    """Folders of installed packages, shown empty, so that no verdict depends on them."""


@cache
def root(with_tools: bool = False) -> Root:
    """The libraries and the interpreter of this machine, perhaps with its tools."""
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefix = os.path.realpath(sys.base_prefix)
    paths = (*LIBRARIES, *TOOLS) if with_tools else LIBRARIES
    links = tuple((path, str(Path(path).readlink())) for path in paths if Path(path).is_symlink())
    wanted = [path for path in paths if not Path(path).is_symlink()]
    wanted += [] if with_tools else [f"{prefix}/lib", interpreter]
    shown: list[str] = []
    for path in wanted:
        inside = any(path == seen or path.startswith(f"{seen}/") for seen in shown)
        if Path(path).exists() and not inside:
            shown.append(path)
    packages = {*site.getsitepackages([prefix]), "/usr/lib/python3/dist-packages"}
    within = tuple(f"{folder}/" for folder in shown)
    hidden = sorted(path for path in packages if Path(path).is_dir() and path.startswith(within))
    pairs = [(path, path) for path in shown]
    if with_tools:
        moved = {f"{prefix}/lib": f"{OWN_PYTHON}/lib"}
        pairs += [*moved.items(), *((interpreter, f"{OWN_PYTHON}/bin/{n}") for n in PYTHON_NAMES)]
        hidden += [
            path.replace(f"{prefix}/lib", f"{OWN_PYTHON}/lib", 1)
            for path in sorted(packages)
            if path.startswith(f"{prefix}/lib/") and Path(path).is_dir()
        ]
        interpreter = f"{OWN_PYTHON}/bin/python3"
    return Root(interpreter, tuple(pairs), links, tuple(hidden))


def _pytest() -> list[tuple[str, str]]:
    """The packages of pytest, and where they are shown; raises `SandboxError`."""
    found = [importlib.util.find_spec(name) for name in PYTEST]
    if found[0] is None:
        raise SandboxError("its tests need pytest, which is not installed here: pip install pytest")
    files = [Path(str(each.origin)) for each in found if each is not None]
    paths = [each.parent if each.name == "__init__.py" else each for each in files]
    return [(str(path), f"{PYTEST_FOLDER}/{path.name}") for path in paths]


def launcher(control: int, spec: int) -> list[str]:
    """The command that builds the walls, given the two inherited file descriptors."""
    return [root().interpreter, "-I", "-S", "-c", LOAD, str(control), str(spec)]


@cache
def _code() -> CodeType:
    return compile(INSIDE.read_text(), str(INSIDE), "exec")


GROUPS = Path("/sys/fs/cgroup")

OVERHEAD_BYTES = 64 << 20
"""Memory of the sandbox's own processes and of its root folder."""
OWN_PROCESSES = 2

_numbers = itertools.count()


class Group:
    """A control group that bounds the memory and the processes of a sandbox together.

    Only root, or a user to whom a group was delegated, may make one; without it the limits of
    single processes remain. Version 2 has one folder, version 1 one for each controller."""

    def __init__(self, limits: Limits) -> None:
        """Make the group as far as it is allowed."""
        self._folders: list[Path] = []
        memory = str(limits.memory_bytes + limits.files_bytes + OVERHEAD_BYTES)
        processes = str(limits.processes + OWN_PROCESSES)
        parents = _own_groups()
        if "memory" in parents:
            self._make(parents["memory"], {"memory.limit_in_bytes": memory})
        if "pids" in parents:
            self._make(parents["pids"], {"pids.max": processes})
        if "" in parents and not self._folders:
            self._make(parents[""], {"memory.max": memory, "pids.max": processes})

    def add(self, pid: int) -> None:
        """Put a process, and all that it starts from now on, into the group."""
        for folder in self._folders:
            with suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group for its memory."""
        for folder in self._folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    words = (folder / name).read_text().split()
                    counts = dict(zip(words[::2], words[1::2], strict=False))
                    if counts.get("oom_kill", "0") != "0":
                        return True
        return False

    def close(self) -> None:
        """Remove the group; its processes have ended."""
        for folder in self._folders:
            with suppress(OSError):
                folder.rmdir()

    def _make(self, parent: Path, settings: dict[str, str]) -> None:
        folder = parent / f"swarm-sandbox-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
        except OSError:
            return
        try:
            # A missing file means that the controller is not delegated.
            for name, value in settings.items():
                with (folder / name).open("r+") as file:
                    file.write(value)
        except OSError:
            with suppress(OSError):
                folder.rmdir()
        else:
            self._folders.append(folder)


def _own_groups() -> dict[str, Path]:
    """The folder of this process's group for each controller; "" for version 2."""
    found: dict[str, Path] = {}
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                found[controller] = GROUPS / controller / path.lstrip("/")
    return found


SETUP_SECONDS = 20.0
"""Wall time to build the walls: two starts of an interpreter, on a machine that may be busy."""

KILL_SECONDS = 10.0
"""Wall time for the kernel to end all processes of a killed sandbox."""

MESSAGE_BYTES = 4096
CHUNK_BYTES = 1 << 16

Cut = Literal["timeout", "output", "files"]


class SandboxError(UserError):
    """This machine could not build the walls or start the program, which is not to blame."""

    def __init__(self, reason: str, remedy: str = "free memory and processes") -> None:
        self.reason = reason
        super().__init__(
            f"no sandbox works on this machine ({reason}), which is no fault of the task; {remedy}"
        )


def execute(program: Program, limits: Limits) -> Outcome:
    """Run one program; raises `SandboxError` when it cannot be started behind the walls."""
    try:
        return _execute(program, limits)
    except OSError as error:
        raise SandboxError(error.strerror or str(error)) from error


def _execute(program: Program, limits: Limits) -> Outcome:
    with ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        spec = _sealed(marshal.dumps((_code(), _spec(program, limits))))
        stack.callback(os.close, spec)
        group = Group(limits)
        stack.callback(group.close)
        stdin = _sealed(program.stdin)
        stack.callback(os.close, stdin)
        process = subprocess.Popen(
            launcher(theirs.fileno(), spec),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), spec),
            start_new_session=True,
            env={},
            cwd="/",
        )
        theirs.close()
        folders = program.tree.folders if program.tree is not None else ()
        watch = _Watch(process, ours, limits, group, folders)
        try:
            watch.until_ended()
        finally:
            watch.close()
        return watch.outcome()


def _spec(program: Program, limits: Limits) -> dict[str, Any]:
    """What `peers.sandbox.inside` reads."""
    found, tree = root(program.with_tools), program.tree or Tree()
    argv = [
        found.interpreter if n == 0 and a == PYTHON else a for n, a in enumerate(program.command)
    ]
    files = program.all_files | dict(tree.files)
    home = {"HOME": "/root"} if "/root" in tree.folders else {}
    sealed = {"/etc/passwd": USERS} if program.with_tools else {}
    return {
        "shown": [*found.shown, *(_pytest() if program.with_pytest else ())],
        "links": found.links,
        "hidden": found.hidden,
        "argv": argv,
        "environment": ENVIRONMENT | (TOOLS_ENVIRONMENT if program.with_tools else {}) | home,
        "files": files,
        "folders": tree.folders if program.tree is not None else (),
        "folder": program.folder,
        "modes": dict(tree.modes),
        "times": dict(tree.times),
        "symlinks": dict(tree.links),
        "made": tree.made,
        "sealed": sealed,
        "returns_tree": program.returns_tree,
        "filter": filter_program(),
        "cpu_seconds": math.ceil(limits.cpu_seconds),
        "memory_bytes": limits.memory_bytes,
        "processes": limits.processes,
        "files_bytes": limits.files_bytes,
    }


def _sealed(content: bytes) -> int:
    """A descriptor of a file in memory that nobody can change."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _map_users(pid: int) -> bytes:
    """Make the program's user `nobody`, and say whether it must switch to that user."""
    folder = Path("/proc") / str(pid)
    if os.geteuid() == 0:
        try:
            for kind in ("uid", "gid"):
                (folder / f"{kind}_map").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        except OSError:
            pass  # a container's root that may map only itself
        else:
            return b"switch"
    (folder / "setgroups").write_text("deny")
    (folder / "uid_map").write_text(f"{NOBODY} {os.geteuid()} 1\n")
    (folder / "gid_map").write_text(f"{NOBODY} {os.getegid()} 1\n")
    return b"keep"


@dataclass
class _Watch:
    """A started sandbox, until all its processes ended."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    limits: Limits
    group: Group
    folders: tuple[str, ...]
    """Those of the root that the program may write."""
    output: dict[str, bytearray] = field(
        default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()}
    )
    init: int | None = None
    """A descriptor of the init, known once the walls stand. It ends after all other processes."""
    report: tuple[int, float] | None = None
    """The program's exit code, and its CPU seconds."""
    failure: str | None = None
    cut: Cut | None = None
    deadline: float = 0.0

    files: bytes | None = None
    """What the program left, as the init read it."""

    def until_ended(self) -> None:
        """Read until every stream ended; raises `SandboxError` when the setup takes too long."""
        self.deadline = time.monotonic() + SETUP_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, "control")
            for name in self.output:
                selector.register(getattr(self.process, name), selectors.EVENT_READ, name)
            while selector.get_map():
                events = selector.select(max(0.0, self.deadline - time.monotonic()))
                if time.monotonic() >= self.deadline and not self._overdue():
                    return
                for key, _ in events:
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)

    def close(self) -> None:
        """End what is left, and reap it."""
        self._kill()
        if self.init is not None:
            select.select([self.init], [], [], KILL_SECONDS)
        try:
            # The outermost process ends by itself once it has reaped the init.
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for name in self.output:
            stream: IO[bytes] = getattr(self.process, name)
            stream.close()
        if self.init is not None:
            os.close(self.init)

    def outcome(self) -> Outcome:
        """How the program ended; raises `SandboxError` if it never started."""
        stdout, stderr = (bytes(each[: self.limits.output_bytes]) for each in self.output.values())
        if self.failure is not None:
            raise SandboxError(self.failure)
        if self.init is None and self.cut != "files":
            words = stderr.decode("utf-8", "replace").strip()[-300:] or "without a reason"
            raise SandboxError(f"it ended before its program started: {words}")
        if self.cut is not None:
            return Outcome(self.cut, signal.SIGKILL, stdout, stderr, 0.0)
        if self.group.ran_out_of_memory():
            return Outcome("memory", signal.SIGKILL, stdout, stderr, 0.0)
        if self.report is None:
            return Outcome("signalled", signal.SIGKILL, stdout, stderr, 0.0)
        code, cpu_seconds = self.report
        if code == -signal.SIGXCPU or cpu_seconds > self.limits.cpu_seconds:
            return Outcome("timeout", abs(code), stdout, stderr, cpu_seconds)
        if code < 0:
            return Outcome("signalled", -code, stdout, stderr, cpu_seconds)
        last_line = stderr.strip().rpartition(b"\n")[2]
        out_of_memory = code != 0 and last_line.startswith(b"MemoryError")
        status: Literal["memory", "exited"] = "memory" if out_of_memory else "exited"
        return Outcome(status, code, stdout, stderr, cpu_seconds, self._tree())

    def _tree(self) -> Tree | None:
        if self.files is None:
            return None
        found: dict[str, dict[str, bytes]] = {"file": {}, "link": {}, "folder": {}}
        modes: dict[str, int] = {}
        times: dict[str, int] = {}
        at = 0
        while at < len(self.files):
            end = self.files.index(b"\n", at)
            kind, size, mode, when, path = self.files[at:end].decode().split(" ", 4)
            at = end + 1 + int(size)
            found[kind][path], times[path] = self.files[end + 1 : at], int(when)
            if kind != "link":
                modes[path] = int(mode)
        links = {path: each.decode() for path, each in found["link"].items()}
        return Tree(found["file"], links, (*self.folders, *found["folder"]), modes, times)

    def _overdue(self) -> bool:
        """Kill an overdue sandbox; False when the kernel did not end it either."""
        if self.cut is not None:
            return False
        if self.init is None:
            self.failure = f"not ready after {SETUP_SECONDS:g} s"
        self._cut("timeout")
        return True

    def _cut(self, why: Cut) -> None:
        if self.cut is None:
            self.cut = why
            self.deadline = time.monotonic() + KILL_SECONDS
            self._kill()

    def _kill(self) -> None:
        if self.init is not None:
            with suppress(ProcessLookupError):  # it may have ended by itself
                signal.pidfd_send_signal(self.init, signal.SIGKILL)
        elif self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self, name: str) -> bool:
        """Handle what a stream has to read; False at its end."""
        if name == "control":
            return self._read_control()
        stream: IO[bytes] = getattr(self.process, name)
        chunk = os.read(stream.fileno(), CHUNK_BYTES)
        if self.cut is None:
            self.output[name] += chunk
            if len(self.output[name]) > self.limits.output_bytes:
                self._cut("output")
        return bool(chunk)

    def _read_control(self) -> bool:
        try:
            raw, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
        except ConnectionError:
            return False
        if not raw:
            return False
        word, _, rest = raw.decode("utf-8", "replace").partition(" ")
        if word == "unshared":
            self._answer(_map_users(self.process.pid))
        elif word == "ready":
            (self.init,) = descriptors
            self.group.add(_pid_of(self.init))
            self.deadline = time.monotonic() + self.limits.seconds
            self._answer(b"start")
        elif word == "unfit":
            self._cut("files")
        elif word == "failed":
            self.failure = rest
        elif word == "files":
            with os.fdopen(descriptors[0], "rb") as file:
                file.seek(0)
                self.files = file.read()
        else:
            code, seconds = rest.split()
            self.report = int(code), float(seconds)
        return True

    def _answer(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it died; its streams end next
            self.control.send(message)


def _pid_of(descriptor: int) -> int:
    """The process number, outside the sandbox, of a process descriptor."""
    information = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return int(information.partition("Pid:")[2].split()[0])
