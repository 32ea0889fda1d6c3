"""The service of the child process: plays the tasks of one package (`graders.worker` serves it)."""

import asyncio
from contextlib import AsyncExitStack
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

from peers.environments.verifiers.child import boxes
from peers.environments.verifiers.child.episode import (
    Episode,
    Graded,
    Said,
    Spoken,
    Tasks,
    Ungradable,
    Unplayable,
)

EPISODES_MAX, WITH_TOOLS_MAX = 256, 16
"""Episodes kept open for their next step, and of a package with tools, which may have a process for
each. One that was closed is played again from its start."""

PROMPTS_MAX = 4096

Text = tuple[str, tuple[tuple[str, str], ...]]
"""A turn of the model: its text, and its calls of tools by name and arguments."""


class Player:
    """Answers the requests of `peers.environments.verifiers.environment`."""

    def __init__(
        self, package: str, arguments: dict[str, Any], tasks_max: int, player: str
    ) -> None:
        """Load a package; raises `Unplayable`, and what its code raises."""
        self._loop = asyncio.Runner()
        self._serving = AsyncExitStack()
        """What the package serves, until this process ends."""
        self._prompts: dict[int, tuple[list[Said], str]] = {}
        """Of tasks: the first messages, and the tools."""
        self._episodes: dict[tuple[int, tuple[Text, ...]], Episode] = {}
        """Episodes that wait for a text, by task and the texts so far; oldest first."""
        self._version = _version_of(package)
        self._tasks = self._loop.run(self._load(package, arguments, tasks_max, player))
        if not self._tasks.count:
            raise Unplayable("it has no tasks")

    def __call__(self, request: dict[str, Any]) -> Any:
        boxes.failed = None
        try:
            return self._loop.run(self._answer(**request))
        finally:
            if boxes.failed is not None:
                raise boxes.failed

    async def _load(
        self, package: str, arguments: dict[str, Any], tasks_max: int, player: str
    ) -> Tasks:
        if version("verifiers").startswith("0.3."):
            from peers.environments.verifiers.child.legacy import Legacy

            return Legacy.load(package, arguments, tasks_max)
        from peers.environments.verifiers.child.tasksets import Tasksets

        return await Tasksets.load(package, arguments, tasks_max, player, self._serving)

    async def _answer(
        self, what: str, task: int = 0, texts: list[Any] | None = None, finished: bool = True
    ) -> Any:
        """Of `opened`: the number of tasks, and the version of the package, empty if none has it.
        Of `draw`: a task's prompt, answer, tools, and whether it needed a box. Of `step`: what is
        said after the texts, nothing at the end. Of `grade`: the reward of the whole episode, and
        its parts."""
        spoken = [(text, tuple(map(tuple, calls))) for text, calls in texts or ()]
        if what == "opened":
            return self._tasks.count, self._version
        if not 0 <= task < self._tasks.count:
            raise Unplayable(f"it has no task {task}")
        if what == "draw":
            prompt, tools = await self._draw(task)
            return prompt, self._tasks.answer(task), tools, boxes.made > 0
        if what == "step":
            return await self._step(task, tuple(spoken))
        return await self._grade(task, spoken, finished)

    async def _draw(self, task: int) -> tuple[list[Said], str]:
        if task not in self._prompts:
            episode = self._start(task)
            prompt = await episode.asked()
            if not prompt:
                ended = await episode.graded()
                reason = ended.reason if isinstance(ended, Ungradable) else "no error"
                raise Unplayable(f"task {task} ends before its prompt ({reason})")
            self._prompts[task] = prompt, episode.tools
            if len(self._prompts) > PROMPTS_MAX:
                del self._prompts[next(iter(self._prompts))]
            await self._keep(task, (), episode)
        return self._prompts[task]

    async def _step(self, task: int, texts: tuple[Text, ...]) -> list[Said]:
        if (episode := self._episodes.pop((task, texts[:-1]), None)) is None:
            episode = self._start(task)
            for text in (None, *texts[:-1]):
                if text is not None:
                    episode.say(_spoken(text))
                if not await episode.asked():
                    raise Unplayable("it ends an episode earlier than it did before")
        episode.say(_spoken(texts[-1]))
        if messages := await episode.asked():
            await self._keep(task, texts, episode)
        else:
            await episode.close()
        return messages

    async def _grade(
        self, task: int, texts: list[Text], finished: bool
    ) -> tuple[float, dict[str, float]]:
        episode = self._start(task)
        try:
            last = len(texts) - 1
            for number, text in enumerate(texts):
                if not await episode.asked():
                    break
                episode.say(_spoken(text, finished or number < last))
            if await episode.asked():
                episode.say(None)
            graded = await episode.graded()
        finally:
            await episode.close()
        if isinstance(graded, Graded):
            return graded.reward, graded.parts
        raise Unplayable(graded.reason)

    def _start(self, task: int) -> Episode:
        return Episode(lambda episode: self._tasks.play(task, episode))

    async def _keep(self, task: int, texts: tuple[Text, ...], episode: Episode) -> None:
        replaced = self._episodes.pop((task, texts), None)
        self._episodes[task, texts] = episode
        if replaced is not None:
            await replaced.close()
        if len(self._episodes) > (WITH_TOOLS_MAX if episode.tools else EPISODES_MAX):
            await self._episodes.pop(next(iter(self._episodes))).close()


def _spoken(text: Text, finished: bool = True) -> Spoken:
    return Spoken(text[0], finished, text[1])


def _version_of(package: str) -> str:
    """The version of the distribution that has a package's module; empty: none has it."""
    module = package.rsplit("/", 1)[-1].replace("-", "_").split(".", 1)[0]
    found = packages_distributions().get(module, [])
    try:
        return version(found[0]) if found else ""
    except PackageNotFoundError:
        return ""
