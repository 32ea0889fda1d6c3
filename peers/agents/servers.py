"""The servers that this machine's environments may use, each in a file of its own: NAME.toml.

```toml
command = ["/opt/echo/bin/python", "-m", "echo_env.server.app", "--port", "{port}"]
seconds = 10
```

or `url = "wss://envs.example/echo"`. What a server sends was written by somebody else."""

import os
import re
import selectors
import signal
import socket
import subprocess
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Annotated, Any, Self
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from peers.environments.graders.pool import starter
from peers.environments.verifiers.installed import homes
from swarm.errors import DECODE_ERRORS, SwarmError, UserError
from swarm.terminal.tables import read_toml, struct_from_mapping
from swarm.world.child import die_with_parent, limit_memory
from swarm.world.process import describe_status

FOLDER_VARIABLE = "SWARM_SERVERS"
"""Variable with the folder of these files; default: `servers` in the peer's home, then in
`~/.swarm`."""

NAME = r"[A-Za-z0-9][A-Za-z0-9-]{0,63}"
ServerName = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]

PORT = "{port}"
"""Stands in a command for a free port of the loopback interface."""

LAST_WORDS_BYTES = 2048
END_SECONDS = 1.0
"""Time for a server to end once its input is closed."""
CONNECT_AGAIN_SECONDS = 0.05

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Control characters, which no answer needs."""


class ServerError(SwarmError):
    """A server cannot go on with an episode; a sentence without its subject says why."""


class Gone(ServerError):
    """The server closed, or sent what is no message: its session is of no use."""


class Overdue(Gone):
    """The server was too slow."""


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """How this machine reaches a server, and what it may cost (docs/agents.md)."""

    command: Annotated[list[Annotated[str, Meta(max_length=4000)]], Meta(max_length=64)] = []
    url: Annotated[str, Meta(max_length=2000)] = ""
    headers: dict[str, str] = {}
    folder: Annotated[str, Meta(max_length=4000)] = "/"
    variables: dict[str, str] = {}
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    start_seconds: Annotated[float, Meta(gt=0, le=600)] = 60.0
    answer_bytes: Annotated[int, Meta(ge=1024, le=1 << 26)] = 1 << 20
    memory_mb: Annotated[int, Meta(ge=64)] = 2048
    sessions: Annotated[int, Meta(ge=1, le=4096)] = 8
    is_stateless: bool = False


def read_definition(name: str) -> Definition:
    """The server NAME of this machine; raises `UserError`."""
    given = os.environ.get(FOLDER_VARIABLE)
    folders = [Path(given).expanduser()] if given else [home / "servers" for home in homes()]
    paths = [folder / f"{name}.toml" for folder in folders]
    path = next((each for each in paths if each.exists()), paths[0])
    where = f"server {name!r}: {path}"
    if not path.exists():
        raise UserError(
            f"server {name!r} is not known on this machine: {path} does not exist; write it there, "
            f"or set {FOLDER_VARIABLE} to the folder that has it"
        )
    found = struct_from_mapping(Definition, read_toml(path, where), where)
    if bool(found.command) == bool(found.url):
        raise UserError(f"{where}: give it either a command or a url")
    if found.url and urlsplit(found.url).scheme not in ("http", "https", "ws", "wss"):
        raise UserError(f"{where}: url is {found.url!r:.100}; it must be like wss://host:8000")
    return found


class Program:
    """A running command, killed with its processes at the end."""

    def __init__(self, definition: Definition, port: int = 0) -> None:
        """Start it; raises `Gone`. Without a port, its input and output are this side's."""
        command = [each.replace(PORT, str(port)) for each in definition.command]
        inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
        parent, memory = os.getpid(), definition.memory_mb << 20

        def bounded() -> None:
            die_with_parent(parent)
            limit_memory(memory)

        start = partial(
            subprocess.Popen,
            [str(Path(command[0]).expanduser()), *command[1:]],
            cwd=Path(definition.folder).expanduser(),
            env={**inherited, **definition.variables},
            stdin=subprocess.DEVNULL if port else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if port else subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=bounded,
        )
        try:
            process: Any = starter().submit(start).result()
        except (OSError, subprocess.SubprocessError) as error:
            why = f"cannot be started: {command[0]} ({error}); correct its command or folder"
            raise Gone(why) from error
        self.process: subprocess.Popen[bytes] = process
        self._words = bytearray()
        """The end of what it says: a process that writes without end fills nothing."""
        said = [process.stdout if port else process.stderr, self._words, process]
        self._listener = threading.Thread(target=_listen, args=said, name="words", daemon=True)
        self._listener.start()
        self.end = weakref.finalize(self, _end, self.process)
        """Kills what is left of it; may be called again."""

    @classmethod
    def listening(cls, definition: Definition) -> tuple[Self, str]:
        """Start a command, and give its address once it listens there; raises `Gone`."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        program = cls(definition, address[1])
        deadline = time.monotonic() + definition.start_seconds
        while True:
            with suppress(OSError):
                socket.create_connection(address, 1.0).close()
                return program, f"ws://127.0.0.1:{address[1]}"
            if words := program.words(0.0):
                raise Gone(words)
            if time.monotonic() > deadline:
                program.end()
                raise Overdue(
                    f"does not listen at 127.0.0.1:{PORT} after {definition.start_seconds:g} s; "
                    "correct its command, or raise start_seconds in its file"
                )
            time.sleep(CONNECT_AGAIN_SECONDS)

    def words(self, seconds: float = END_SECONDS) -> str:
        """How it ended, with its last line; empty if it still runs after some seconds."""
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(seconds)
            self._listener.join(END_SECONDS)
            lines = self._words.decode("utf-8", "replace").strip().splitlines()
            said = f": {_clean(lines[-1]):.200}" if lines else "; try its command by hand"
            return f"ended {describe_status(status)}{said}"
        return ""


def _listen(said: IO[bytes], words: bytearray, process: "subprocess.Popen[bytes]") -> None:
    with said, selectors.DefaultSelector() as selector:
        selector.register(said, selectors.EVENT_READ)
        while True:
            if selector.select(END_SECONDS):
                if not (chunk := os.read(said.fileno(), LAST_WORDS_BYTES)):
                    return
                words += chunk
                del words[:-LAST_WORDS_BYTES]
            elif process.poll() is not None:
                return  # what it started, and left its group, may hold the pipe for ever


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and process.stdout is not None:
        process.stdin.close()
        process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def left(deadline: float) -> float:
    """Seconds until a deadline of `time.monotonic`; raises `Overdue` at its end."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise Overdue("did not answer in time; raise seconds in its file if it is honest")
    return seconds


def decoded(raw: bytes | str) -> Any:
    """A message's JSON value, its texts without control characters; raises `Gone`."""
    try:
        return _clean(msgspec.json.decode(raw))
    except DECODE_ERRORS as error:
        raise Gone(f"sent what is no JSON ({error})") from None


def bounded(size: int, definition: Definition) -> None:
    """Raise `Gone` for an answer that is too large."""
    if size > definition.answer_bytes:
        raise Gone(
            f"sent an answer of more than {definition.answer_bytes} bytes; raise answer_bytes in "
            "its file if it is honest"
        )


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return CONTROL.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return value
