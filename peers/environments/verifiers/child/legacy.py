"""Environments of the older interface: a package with `load_environment` (verifiers 0.3).

The environment's own loop runs each episode and its rubric grades it; the client gives it the next
text instead of calling an endpoint."""

import functools
import inspect
import os
import time
from collections.abc import Callable
from typing import Any, Self

import verifiers as vf
from verifiers.types import ResponseMessage, ToolCall

from peers.environments.verifiers.child import hosted
from peers.environments.verifiers.child.episode import (
    Episode,
    EpisodeOver,
    Graded,
    Said,
    Ungradable,
    Unplayable,
    calls_json,
)

JUDGE_KEY = "OPENAI_API_KEY"
"""The variable that judges read; they cannot be made without it."""

NO_KEY = "none"

_JUDGE_ARGUMENTS = frozenset({"judge", "judge_client"})
"""Parameters by which a rubric gives its functions a judge."""


class Texts(vf.Client):  # type: ignore[misc]
    """Answers with the texts of one episode."""

    def __init__(self, episode: Episode) -> None:
        super().__init__(None)
        self._episode = episode
        self.error: Unplayable | None = None

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **kwargs: Any
    ) -> Any:
        try:
            offered = [{"type": "function", "function": _definition(tool)} for tool in tools or ()]
            spoken, calls = await self._episode.ask([_said(each) for each in prompt], offered)
        except EpisodeOver as error:
            # The one end of an episode that the loop does not take for a failure.
            raise vf.OverlongPromptError("the episode is over") from error
        except Unplayable as error:
            self.error = error
            raise vf.ModelError(str(error)) from error
        message = ResponseMessage(
            content=spoken.text,
            tool_calls=[ToolCall(**call._asdict()) for call in calls] or None,
            finish_reason="tool_calls" if calls else "stop" if spoken.finished else "length",
            is_truncated=not spoken.finished,
        )
        return vf.Response(id="swarm", created=int(time.time()), model=model, message=message)

    async def _unused(self, *arguments: Any, **options: Any) -> Any:
        """`get_response` answers."""

    to_native_tool = to_native_prompt = get_native_response = _unused
    raise_from_native_response = from_native_response = close = _unused

    def setup_client(self, config: Any) -> Any:
        """There is none."""


class Legacy:
    """A package with `load_environment`; implements `Tasks`."""

    def __init__(self, env: Any, rows: list[Any]) -> None:
        self._env = env
        self._rows = rows
        self.count = len(rows)
        self._failures: list[str] = []
        """What reward functions raised since the last grade began; the rubric would give 0."""
        self._dropped: set[str] = set()
        """Metrics without a weight that failed since the last grade began."""
        for rubric in (env.rubric, *getattr(env.rubric, "rubrics", ())):
            rubric.funcs = [
                self._watched(function, weight)
                for function, weight in zip(rubric.funcs, rubric.weights, strict=True)
            ]

    @classmethod
    def load(cls, package: str, arguments: dict[str, Any], tasks_max: int) -> Self:
        """Load a package; raises `Unplayable`."""
        os.environ.setdefault(JUDGE_KEY, NO_KEY)
        hosted.take_the_place()
        try:
            env = vf.load_environment(package, **arguments)
        except Exception as error:
            cause = error.__cause__ or error  # the library's own words say less
            kind = "" if isinstance(cause, Unplayable) else f"{type(cause).__name__}: "
            raise Unplayable(f"{kind}{cause}") from error
        if env.requires_group_rollouts:
            raise Unplayable("it grades rollouts by comparing them; Swarm grades each by itself")
        dataset = env.get_dataset()
        return cls(env, [dataset[index] for index in range(min(len(dataset), tasks_max))])

    def answer(self, task: int) -> str:
        answer = self._rows[task].get("answer", "")
        return answer if isinstance(answer, str) else ""

    async def play(self, task: int, episode: Episode) -> Graded | Ungradable:
        client = Texts(episode)
        failures, dropped = self._failures, self._dropped = list[str](), set[str]()
        played = await self._env.run_rollout(self._rows[task], client, "policy", {})
        if client.error is not None:
            raise client.error
        if played.get("error") is not None:
            return Ungradable(str(played["error"])[:500])
        if failures:
            return Ungradable(failures[0])
        if played.get("reward") is None:
            return Ungradable("the rubric gives no reward")
        metrics = {
            name: float(each)
            for name, each in (played.get("metrics") or {}).items()
            if name not in dropped
        }
        return Graded(float(played["reward"]), metrics)

    def _watched(self, function: Callable[..., Any], weight: float) -> Callable[..., Any]:
        """A reward function whose failures are noted."""
        name = getattr(function, "__name__", repr(function))
        needs_judge = _JUDGE_ARGUMENTS & set(inspect.signature(function).parameters)

        @functools.wraps(function)
        async def called(*arguments: Any, **options: Any) -> float:
            failures, dropped = self._failures, self._dropped
            try:
                if needs_judge and os.environ.get(JUDGE_KEY) == NO_KEY:
                    raise Unplayable(f"it asks a judge, and {JUDGE_KEY} is not set")
                result = function(*arguments, **options)
                return float(await result if inspect.isawaitable(result) else result)
            except Exception as error:
                kind = "" if isinstance(error, Unplayable) else f"{type(error).__name__}: "
                if weight:
                    failures.append(f"reward {name} failed ({kind}{error})"[:500])
                dropped.add(name)
                raise

        return called


def _said(message: Any) -> Said:
    """A message as text; raises `Unplayable` for anything else, such as an image."""
    content = "" if message.content is None else message.content
    if not isinstance(content, str):
        raise Unplayable("a message holds more than text")
    calls = calls_json(getattr(message, "tool_calls", None) or ())
    return Said(message.role, content, calls, getattr(message, "tool_call_id", ""))


def _definition(tool: Any) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
