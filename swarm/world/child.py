"""The program of a child process: one service, whose methods are called over a socket.

Methods are async and take one job, or nothing. Several may run at once; a service that does not
support that uses a lock. Heavy work belongs in a worker thread (`trio.to_thread`), which calls
`swarm.world.progress` regularly. The child ends when the socket is closed.

A child of a peer cannot read keys, nor can one whose class has `reads_in_home`: the folders of the
home that it reads, though they may not exist yet (`swarm.world.landlock`). A class may have
`before_keys_close`, a function without parameters: it starts what that would hinder, such as
sandboxes, which need mounts.

A service may have a method `run` without parameters, in the background; if it raises, the child
dies."""

import ctypes
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from swarm.errors import UserError
from swarm.world import frames as framing
from swarm.world import job_type, kind_of, landlock, setup_type
from swarm.world.process import FORK_SERVER_VARIABLE, INSTALLED_VARIABLE
from swarm.world.progress import Reporter, current

_PR_SET_PDEATHSIG = 1

MESSAGE_CHARACTERS_MAX = 10_000
"""Longest text of an exception sent to the owner."""

CHILD_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow starts one as it is imported
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # its own reserves 1 GiB, which a memory limit counts
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # or a look for a GPU starts CUDA, which no fork survives
}
"""Environment variables of a child, unless its owner's environment sets them. Peers share cores,
and two OpenMP threads on contended cores are ten times slower than one."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends; exit if it has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(limit_bytes: int) -> None:
    """Limit private writable memory to the present amount plus `limit_bytes`.

    RLIMIT_DATA, not RLIMIT_AS: libraries reserve address space and map files far beyond what they
    ever write (torch and transformers: 660 MB of address space, 230 MB of it writable, 250 MB
    resident). Since Linux 4.7, RLIMIT_DATA counts private mappings too: all of torch's."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        pages = int(file.read().split()[5])
    bound = pages * resource.getpagesize() + limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # of the owner, if it has a limit itself
    if hard != resource.RLIM_INFINITY:
        bound = min(bound, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _fresh_randomness() -> None:
    """Seed random generators: a forked child must not draw the same numbers as its siblings.
    (Python's `random` does this itself.)"""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int.from_bytes(os.urandom(7), "big"))


def serve(connection: socket.socket) -> None:
    """Run the service that the owner assigns, until the owner closes the socket."""
    # The owner handles Ctrl-C, and a SIGTERM to all processes of a service or machine: it needs
    # this one to end its work. (Programs that this one starts do not inherit a handler.)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    _fresh_randomness()
    connection.setblocking(False)
    trio.run(_serve, connection)


async def _serve(connection: socket.socket) -> None:
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
    frames = framing.FrameReader(stream.receive_some)
    owner = _Owner(stream)
    try:
        assignment = msgspec.msgpack.decode(await frames.next(), type=framing.Assignment)
        try:
            service = _make(assignment)
        except BaseException as error:
            await owner.send(_failure(0, error))
            return
        await owner.send(framing.Answer(0, framing.raw({})))
        async with trio.open_nursery() as nursery:
            if hasattr(service, "run"):  # what goes on beside the calls
                nursery.start_soon(service.run)
            calls = _Calls(service, owner, nursery)
            while True:
                calls.take(framing.decode_request(await frames.next()))
    except* (EOFError, trio.BrokenResourceError):
        pass  # the owner has ended; the running calls were cancelled


class _Owner:
    """The other end of the socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._turn = trio.Lock()

    async def send(self, message: framing.Response) -> None:
        """Send a frame; an answer that is too large becomes the failure of its call."""
        try:
            frame = framing.encode(message)
        except ValueError as error:
            frame = framing.encode(_failure(message.number, error))
        with trio.CancelScope(shield=True):  # half a frame would garble all later ones
            async with self._turn:
                await self._stream.send_all(frame)


class _Calls:
    def __init__(self, service: Any, owner: _Owner, nursery: trio.Nursery) -> None:
        self._service = service
        self._owner = owner
        self._nursery = nursery
        self._scopes: dict[int, trio.CancelScope] = {}

    def take(self, request: framing.Call | framing.Cancel) -> None:
        """Start a call, or cancel a running one, which may have ended meanwhile."""
        if isinstance(request, framing.Call):
            self._scopes[request.number] = trio.CancelScope()
            self._nursery.start_soon(self._run, request)
        elif request.number in self._scopes:
            self._scopes[request.number].cancel()

    async def _run(self, call: framing.Call) -> None:
        current.set(Reporter(lambda: self._nursery.start_soon(self._report, call.number)))
        answer: framing.Response = framing.Failed(call.number, "Cancelled", "cancelled")
        with self._scopes[call.number]:
            try:
                answer = framing.Answer(call.number, framing.raw(await self._reply(call)))
            except Exception as error:
                answer = _failure(call.number, error)
        del self._scopes[call.number]
        await self._owner.send(answer)

    async def _report(self, number: int) -> None:
        """Send progress, unless the call's answer is on its way."""
        if number in self._scopes:
            await self._owner.send(framing.Progress(number))

    async def _reply(self, call: framing.Call) -> Any:
        if call.method.startswith("_"):
            raise AttributeError(f"{call.method} is no public method")
        function = getattr(self._service, call.method)
        kind = job_type(function)
        if kind is None:
            return await function()
        return await function(msgspec.msgpack.decode(call.job, type=kind))


def _make(assignment: framing.Assignment) -> Any:
    if assignment.path is not None:
        sys.path[:] = assignment.path
    os.chdir(assignment.folder)
    os.environb.clear()
    os.environb.update(assignment.environment)
    for variable, value in CHILD_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    module_name, _, class_name = assignment.service.partition(":")
    service_class = getattr(importlib.import_module(module_name), class_name)
    folders = getattr(service_class, "reads_in_home", None)
    if folders is not None or INSTALLED_VARIABLE in os.environ:
        _close_keys(service_class, folders or ())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if assignment.memory_limit_bytes is not None:
        limit_memory(assignment.memory_limit_bytes)
    kind = setup_type(service_class)
    if kind is None:
        return service_class()
    return service_class(msgspec.msgpack.decode(assignment.setup, type=kind))


def _close_keys(service: type, folders: Sequence[str]) -> None:
    """Close the keys to a service, if Linux can; `folders` are those of the home that it reads."""
    try:
        if landlock.version() >= landlock.OLDEST:
            getattr(service, "before_keys_close", lambda: None)()
        landlock.close_keys(folders)
        os.environ.pop(FORK_SERVER_VARIABLE, None)  # what it forks could read the keys
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        print(f"the keys stay readable to this process: {error}", file=sys.stderr)


def _failure(number: int, error: BaseException) -> framing.Failed:
    is_users = isinstance(error, UserError)
    if not is_users:  # the message of a UserError is sufficient
        traceback.print_exception(error)
    return framing.Failed(number, kind_of(error), str(error)[:MESSAGE_CHARACTERS_MAX], is_users)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    serve(socket.socket(fileno=int(sys.argv[1])))
