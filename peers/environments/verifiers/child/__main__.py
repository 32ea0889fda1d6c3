"""`python -m peers.environments.verifiers.child SOCKET LIFELINE MEMORY_BYTES`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, packages_distributions, version

from peers.environments.verifiers.child.episode import Episode, Spoken, Tasks, Unplayable
from peers.environments.verifiers.messages import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    Draw,
    Drawn,
    Failed,
    Grade,
    Observed,
    Open,
    Opened,
    Reply,
    Request,
    Said,
    Step,
    Ungradable,
    decode_request,
    encode,
)
from swarm.world.child import limit_memory

EPISODES_MAX = 256
"""Episodes kept open for their next step. One that was closed is played again from its start."""

PROMPTS_MAX = 4096

REASON_CHARACTERS_MAX = 500


class Child:
    """Answers the requests of one owner."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._tasks: Tasks | None = None
        self._prompts: dict[int, list[Said]] = {}
        self._episodes: dict[tuple[int, tuple[str, ...]], Episode] = {}
        """Episodes that wait for a text, by task and the texts so far; oldest first."""

    async def answer(self, request: Request) -> Reply:
        """Carry out a request; an environment's error is a reply, too."""
        try:
            return await self._answer(request)
        except (Exception, SystemExit) as error:  # the code is a lab's, and may raise anything
            return Failed(_reason(error))

    async def _answer(self, request: Request) -> Reply:
        if isinstance(request, Open):
            return await self._open(request)
        if self._tasks is None or not 0 <= request.task < self._tasks.count:
            raise Unplayable(f"it has no task {request.task}")
        if isinstance(request, Draw):
            if request.task not in self._prompts:
                episode = self._start(request.task)
                prompt = await episode.asked()
                if not prompt:
                    ended = await episode.graded()
                    reason = ended.reason if isinstance(ended, Ungradable) else "no error"
                    raise Unplayable(f"task {request.task} ends before its prompt ({reason})")
                self._prompts[request.task] = prompt
                await self._keep(request.task, (), episode)
            return Drawn(self._prompts[request.task], self._tasks.answer(request.task))
        if isinstance(request, Step):
            return Observed(await self._step(request.task, request.texts))
        episode = self._start(request.task)
        try:
            return await self._grade(request, episode)
        finally:
            await episode.close()

    async def _open(self, request: Open) -> Opened:
        library = version("verifiers")
        if library.startswith("0.3."):
            from peers.environments.verifiers.child.legacy import Legacy

            self._tasks = Legacy.load(request.package, request.arguments, request.tasks_max)
        else:
            from peers.environments.verifiers.child.tasksets import Tasksets

            self._tasks = await Tasksets.load(
                request.package, request.arguments, request.tasks_max, self._stack
            )
        self._stack.push_async_callback(self._close)  # before what the environment serves
        if not self._tasks.count:
            raise Unplayable("it has no tasks")
        return Opened(self._tasks.count, _version_of(request.package), library)

    async def _step(self, task: int, texts: Sequence[str]) -> list[Said]:
        """What the environment says after the last of `texts`."""
        episode = self._episodes.pop((task, tuple(texts[:-1])), None)
        if episode is None:
            episode = self._start(task)
            for text in texts[:-1]:
                if not await episode.asked():
                    raise Unplayable("it ends an episode earlier than it did before")
                episode.say(Spoken(text, finished=True))
            if not await episode.asked():
                raise Unplayable("it ends an episode earlier than it did before")
        episode.say(Spoken(texts[-1], finished=True))
        messages = await episode.asked()
        if messages:
            await self._keep(task, tuple(texts), episode)
        else:
            await episode.close()
        return messages

    async def _grade(self, request: Grade, episode: Episode) -> Reply:
        last = len(request.texts) - 1
        for number, text in enumerate(request.texts):
            if not await episode.asked():
                break
            episode.say(Spoken(text, finished=request.finished or number < last))
        if await episode.asked():
            episode.say(None)
        return await episode.graded()

    async def _close(self) -> None:
        """End the episodes that wait for a text."""
        while self._episodes:
            await self._episodes.popitem()[1].close()

    def _start(self, task: int) -> Episode:
        tasks = self._tasks
        assert tasks is not None
        return Episode(lambda episode: tasks.play(task, episode))

    async def _keep(self, task: int, texts: tuple[str, ...], episode: Episode) -> None:
        replaced = self._episodes.pop((task, texts), None)
        self._episodes[task, texts] = episode  # before waiting: another may be kept meanwhile
        if replaced is not None:
            await replaced.close()
        if len(self._episodes) > EPISODES_MAX:
            await self._episodes.pop(next(iter(self._episodes))).close()
        if len(self._prompts) > PROMPTS_MAX:
            del self._prompts[next(iter(self._prompts))]


def _reason(error: BaseException) -> str:
    if isinstance(error, Unplayable):
        return str(error)
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:REASON_CHARACTERS_MAX]


def _version_of(package: str) -> str:
    """The version of the distribution that has a package's module."""
    module = package.rsplit("/", 1)[-1].replace("-", "_").split(".", 1)[0]
    found = packages_distributions().get(module, [])
    try:
        return version(found[0]) if found else ""
    except PackageNotFoundError:
        return ""


def _watch(lifeline: int) -> None:
    """End this process when its owner has ended: the other end of the pipe is closed."""

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    async with AsyncExitStack() as stack:
        child = Child(stack)
        while True:
            try:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                if length > FRAME_BYTES_MAX:
                    return
                request = decode_request(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            reply = await child.answer(request)
            try:
                frame = encode(reply)
            except ValueError as error:
                frame = encode(Failed(str(error)))
            writer.write(frame)
            await writer.drain()


def main() -> None:
    """Serve the owner at the other end of the socket until it closes it."""
    descriptor, lifeline, memory_bytes = map(int, sys.argv[1:4])
    _watch(lifeline)
    limit_memory(memory_bytes)
    asyncio.run(_serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
