"""Forks processes that have the heavy imports done already (decision 6).

`python -m swarm.world.fork_server --socket PATH --preload torch,transformers` imports once, then
forks a process per connection. An owner connects and asks for one of two kinds:

- a child that serves its owner (`swarm.world.child`); the owner passes its ends of the child's
  socket and stderr (SCM_RIGHTS);
- a `Program`, as `python -m MODULE` would run it; the owner passes its stdout and stderr.

The owner gets a pidfd of the process and, when the process has ended, its wait status. When the
owner goes, the process is killed."""

import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec

from swarm.world.child import CHILD_ENVIRONMENT, die_with_parent, serve

CHILD_REQUEST = b"child"
"""Asks for a child that serves its owner; any other request is an encoded `Program`."""

REQUEST_BYTES_MAX = 128 * 1024
"""A program's arguments and environment; the kernel allows a message of about 200 KB."""


_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end of a socket."""


class Program(msgspec.Struct, frozen=True):
    """A Python program to run in a forked process, as `python -m module` would."""

    module: str
    arguments: list[str]
    folder: str
    environment: dict[bytes, bytes]


def _may_ask(owner: socket.socket) -> bool:
    """Whether a process may have others forked: not one that gave up rights which these would have.

    Under Landlock, or in a sandbox, a process can gain no privileges; its owner still can."""
    raw = owner.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    asking, _, _ = _CREDENTIALS.unpack(raw)
    return _gains_privileges(asking) or not _gains_privileges(os.getpid())


def _gains_privileges(pid: int) -> bool:
    try:
        return "NoNewPrivs:\t0" in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return False


class ForkServer:
    """Forks children on request. Single-threaded: a fork copies the locks that threads hold."""

    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, socket.socket] = {}
        self._pid = os.getpid()
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)

    def run(self) -> None:
        """Fork on request until the process that started this one ends."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup_read, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    owner, _ = self._listener.accept()
                    if _may_ask(owner):
                        self._selector.register(owner, selectors.EVENT_READ)
                    else:
                        owner.close()
                elif key.fileobj == self._wakeup_read:
                    os.read(self._wakeup_read, 4096)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj)

    def _hear(self, owner: socket.socket) -> None:
        try:
            request, descriptors, _, _ = socket.recv_fds(owner, REQUEST_BYTES_MAX, 2)
        except OSError:
            descriptors = []
        if len(descriptors) != 2:
            self._forget(owner)
            return
        pid = os.fork()
        if pid == 0:
            self._become_child(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children[pid] = owner
        pidfd = os.pidfd_open(pid)  # before reaping, so that no other process can have this pid
        with suppress(OSError):
            socket.send_fds(owner, [b"forked"], [pidfd])
        os.close(pidfd)

    def _become_child(self, request: bytes, first: int, stderr: int) -> None:
        """Be the requested process; never returns."""
        status = 1
        try:
            die_with_parent(self._pid)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()
            os.close(self._wakeup_read)
            os.close(self._wakeup_write)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(stderr if request == CHILD_REQUEST else first, 1)
            os.dup2(stderr, 2)
            os.close(stderr)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            if request == CHILD_REQUEST:
                serve(socket.socket(fileno=first))
            else:
                os.close(first)
                _run(msgspec.msgpack.decode(request, type=Program))
            status = 0
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _forget(self, owner: socket.socket) -> None:
        self._selector.unregister(owner)
        owner.close()
        for pid, held in list(self._children.items()):
            if held is owner:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            owner = self._children.pop(pid, None)
            if owner is not None and owner.fileno() >= 0:
                with suppress(OSError):
                    owner.send(str(status).encode())


def _run(program: Program) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(program.folder)
    os.environb.clear()
    os.environb.update(program.environment)
    sys.path[0] = program.folder
    sys.argv = [program.module, *program.arguments]
    runpy.run_module(program.module, run_name="__main__", alter_sys=True)


def main() -> None:
    import argparse  # here: every peer imports this module

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--preload", default="", help="modules to import, separated by commas")
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for variable, value in CHILD_ENVIRONMENT.items():  # before the imports that read it
        os.environ.setdefault(variable, value)
    arguments.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = ForkServer(arguments.socket)  # now, so that owners can connect during the imports
    for name in filter(None, arguments.preload.split(",")):
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:  # noqa: PTH208 (native threads too)
        raise SystemExit(
            f"preloading {arguments.preload} started a thread, whose locks a fork would copy "
            "as they stand; preload something else"
        )
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and so copying, the shared pages
    print("ready", flush=True)
    server.run()


if __name__ == "__main__":
    main()
