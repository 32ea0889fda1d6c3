"""Boxes as the runtime of agents of the 1.x interface, in place of a container."""

import asyncio
import shlex
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError

from peers.environments.terminal.problem import Said
from peers.environments.verifiers.child.boxes import Box, check_image

KIND = "podman"
"""The runtime of the library whose place boxes take: its settings name an image."""
SECONDS, OUTPUT_CHARACTERS = 60.0, 4000

COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SAYS = "Run a command of bash in the task's folder. Files last, processes do not."
SHELL = {"name": "bash", "description": SAYS, "parameters": COMMAND}


class BoxRuntime(vf.Runtime):  # type: ignore[misc]
    """The box of one run of an agent."""

    has_shell = False
    """Whether the model gets the tool `SHELL`: its tasks ask for a container."""

    def __init__(self, config: Any, name: str | None = None) -> None:
        super().__init__(name)
        self.config, self.info = config, runtimes.PodmanRuntimeInfo(**config.model_dump())

    async def start(self) -> None:
        self.info.id = self.name
        self.box = Box(self.config.workdir or "/app")

    async def shell(self, command: str, env: Mapping[str, str] = {}) -> Said:
        given = (command, SECONDS, self.process_env(dict(env)))
        return await asyncio.to_thread(self.box.run, *given)

    async def run(self, argv: list[str], env: dict[str, str]) -> Any:
        said = await self.shell(shlex.join(argv), env)
        output = said.output.decode("utf-8", "replace")
        return runtimes.ProgramResult(124 if said.ended else said.code, output, said.ended)

    async def write(self, path: str, data: bytes) -> None:
        self.box.write(path, data)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        if (found := self.box.read(path)) is None:
            raise SandboxError(f"the sandbox has no file {path!r:.200}")
        return found[:max_bytes]


def take_the_place(tasks: list[Any], has_shell: bool) -> None:
    """Let agents that are loaded from now on work in boxes; raises `Unplayable`."""
    for image in {each.data.image or "" for each in tasks}:
        check_image(image)
    BoxRuntime.has_shell = has_shell
    runtimes.PodmanRuntime = BoxRuntime
