"""Boxes for environments of the older interface that ask Prime's hosted sandboxes."""

import asyncio
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prime_sandboxes  # type: ignore[import-not-found]

from peers.environments.verifiers.child.boxes import Box, check_image
from peers.environments.verifiers.child.episode import Unplayable

INSTALLS = re.compile(r"\b(?:pip3?|uv|apt|apt-get|apk) (?:install|add)\b[^\n;&|]*")
SECONDS, OUTPUT_CHARACTERS = 300.0, 20_000

_numbers = itertools.count(1)
_boxes: dict[str, Box] = {}


class Request(SimpleNamespace):
    """What a sandbox should be like; the client's own class refuses fields of its older versions.

    Raises `Unplayable` for what no box has."""

    docker_image, start_command, gpu_count, environment_vars = "", "", 0, None

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        check_image(self.docker_image or "")
        installs = INSTALLS.search(str(self.start_command or ""))
        if self.gpu_count or installs:
            what = f"begins with {installs[0].strip()!r:.100}" if installs else "needs a GPU"
            raise Unplayable(
                f"its sandbox {what}, and Swarm's has Python's standard library alone; leave that "
                'out, if its arguments allow it: {"pip_install_packages": ""}'
            )

    def model_copy(self, *, update: Mapping[str, Any] = {}, **_: Any) -> "Request":
        return Request(**{**vars(self), **update})


class Boxes:
    """Has the methods of the service's client that boxes can serve. The library makes several."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """There is nobody to connect to."""

    async def create(self, request: Any, **_: Any) -> SimpleNamespace:
        name = f"box-{next(_numbers)}"
        _boxes[name] = Box(variables=request.environment_vars)
        return SimpleNamespace(id=name, name=name, status="RUNNING")

    async def delete(self, sandbox_id: str, **_: Any) -> None:
        _boxes.pop(sandbox_id, None)

    async def execute_command(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> SimpleNamespace:
        """What it wrote to both streams is in `stdout`, in the order in which it did."""
        given = (command, timeout or SECONDS, env or {}, working_dir or "")
        said = await asyncio.to_thread(_boxes[sandbox_id].run, *given)
        if said.ended:
            raise prime_sandboxes.CommandTimeoutError(sandbox_id, command[:200], int(given[1]))
        output = said.output.decode("utf-8", "replace")
        return SimpleNamespace(stdout=output, stderr="", exit_code=said.code)

    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, *_: Any, **__: Any
    ) -> None:
        _boxes[sandbox_id].write(file_path, file_bytes)

    async def upload_file(
        self, sandbox_id: str, file_path: str, local_file_path: str, *_: Any, **__: Any
    ) -> None:
        content = await asyncio.to_thread(Path(local_file_path).read_bytes)
        _boxes[sandbox_id].write(file_path, content)

    async def wait_for_creation(self, *_: Any, **__: Any) -> None:
        """It is there at once."""


def take_the_place() -> None:
    """Let packages that are loaded from now on get boxes."""
    prime_sandboxes.AsyncSandboxClient, prime_sandboxes.CreateSandboxRequest = Boxes, Request
    from verifiers.envs.python_env import PythonEnv  # which takes the client as it finds it

    async def send(self: Any, sandbox_id: str, _: Any, payload: dict[str, Any]) -> dict[str, Any]:
        given = (payload["code"], self.timeout_per_command_seconds)
        said = await asyncio.to_thread(_boxes[sandbox_id].cell, *given)
        return {"status": "ok", "stdout": said.readable(OUTPUT_CHARACTERS)}

    PythonEnv._send_worker_request = send
    PythonEnv._wait_for_worker_ready = Boxes.wait_for_creation
