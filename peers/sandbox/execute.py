"""One program behind the walls: start it, watch its streams and its time, report how it ended."""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from peers.sandbox.cgroup import Group
from peers.sandbox.isolation import ENVIRONMENT, NOBODY, launcher, root
from peers.sandbox.program import PYTHON, Limits, Outcome, Program
from peers.sandbox.seccomp import filter_program
from swarm.errors import SwarmError

SETUP_SECONDS = 20.0
"""Wall time to build the walls: two starts of an interpreter, on a machine that may be busy."""

KILL_SECONDS = 10.0
"""Wall time for the kernel to end all processes of a killed sandbox."""

MESSAGE_BYTES = 4096
CHUNK_BYTES = 1 << 16

Cut = Literal["timeout", "output"]


class SandboxError(SwarmError):
    """The walls could not be built, or the program could not be started."""


def execute(program: Program, limits: Limits) -> Outcome:
    """Run one program; raises `SandboxError` when it cannot be started behind the walls."""
    with ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        spec = _sealed(json.dumps(_spec(program, limits)).encode())
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
        watch = _Watch(process, ours, limits, group)
        try:
            watch.until_ended()
        finally:
            watch.close()
        return watch.outcome()


def _spec(program: Program, limits: Limits) -> dict[str, Any]:
    """What `peers.sandbox.inside` reads."""
    found = root()
    argv = [
        found.interpreter if n == 0 and a == PYTHON else a for n, a in enumerate(program.command)
    ]
    contents = program.all_files.items()
    return {
        "shown": found.shown,
        "links": found.links,
        "hidden": found.hidden,
        "argv": argv,
        "environment": ENVIRONMENT,
        "files": {name: base64.b64encode(content).decode() for name, content in contents},
        "filter": base64.b64encode(filter_program()).decode(),
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
    output: dict[str, bytearray] = field(
        default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()}
    )
    init: int | None = None
    """A descriptor of the init, known once the walls stand. It ends after all other processes."""
    report: dict[str, Any] | None = None
    failure: str | None = None
    cut: Cut | None = None
    deadline: float = 0.0

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
            raise SandboxError(f"the sandbox cannot start a program ({self.failure})")
        if self.init is None:
            words = stderr.decode("utf-8", "replace").strip()[-300:] or "it gave no reason"
            raise SandboxError(f"the sandbox ended before its program started ({words})")
        if self.cut is not None:
            return Outcome(self.cut, signal.SIGKILL, stdout, stderr, 0.0)
        if self.group.ran_out_of_memory():
            return Outcome("memory", signal.SIGKILL, stdout, stderr, 0.0)
        if self.report is None:
            return Outcome("signalled", signal.SIGKILL, stdout, stderr, 0.0)
        code, cpu_seconds = int(self.report["code"]), float(self.report["cpu_seconds"])
        if code == -signal.SIGXCPU or cpu_seconds > self.limits.cpu_seconds:
            return Outcome("timeout", abs(code), stdout, stderr, cpu_seconds)
        if code < 0:
            return Outcome("signalled", -code, stdout, stderr, cpu_seconds)
        last_line = stderr.strip().rpartition(b"\n")[2]
        out_of_memory = code != 0 and last_line.startswith(b"MemoryError")
        status: Literal["memory", "exited"] = "memory" if out_of_memory else "exited"
        return Outcome(status, code, stdout, stderr, cpu_seconds)

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
        message = json.loads(raw)
        if "unshared" in message:
            self._answer(_map_users(self.process.pid))
        elif "ready" in message:
            (self.init,) = descriptors
            self.group.add(_pid_of(self.init))
            self.deadline = time.monotonic() + self.limits.seconds
            self._answer(b"start")
        elif "failed" in message:
            self.failure = message["failed"]
        else:
            self.report = message
        return True

    def _answer(self, message: bytes) -> None:
        with suppress(BrokenPipeError):  # it died; its streams end next
            self.control.send(message)


def _pid_of(descriptor: int) -> int:
    """The process number, outside the sandbox, of a process descriptor."""
    information = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return int(information.partition("Pid:")[2].split()[0])
