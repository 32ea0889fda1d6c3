"""Environments of the 1.x interface (`verifiers.v1`): a taskset, tasks with rewards, a harness.

The package's own machinery runs each episode: its interception server, stop conditions, hooks and
scoring. Two parts are Swarm's. The harness runs in this process and sends the conversation to the
interception server, where the usual ones start a program. The client behind that server waits for
the next text instead of calling an endpoint."""

import importlib
import inspect
import json
import sys
import time
import types
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import islice
from statistics import fmean
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import resolve_env_config

from peers.environments.verifiers.child import runtime as boxed
from peers.environments.verifiers.child.episode import (
    Episode,
    EpisodeOver,
    Graded,
    Said,
    Ungradable,
    Unplayable,
    calls_json,
)

HARNESS = "swarm_in_process"
"""The name under which `verifiers` imports the harness of this module."""

ENDPOINT = vf.EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="SWARM_NO_KEY")
"""Names the client of this module; nothing is ever sent there."""

_episodes: dict[str, Episode] = {}
"""Episodes in progress, by the id of their trace."""


class InProcess(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Sends the conversation to the model until it calls no tool, without a program of its own."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages = [] if system is None else [vf.SystemMessage(content=system)]
        chat = [message_to_wire(each) for each in (*messages, *prompt)]
        headers = {"Authorization": f"Bearer {secret}"}
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        async with httpx.AsyncClient(timeout=None) as client, AsyncExitStack() as stack:
            tools, names, opened = await connect_mcp({"mcpServers": servers}, stack)
            shell = getattr(runtime, "shell", None) if boxed.BoxRuntime.has_shell else None
            tools = [*tools, {"type": "function", "function": boxed.SHELL}] if shell else tools
            body = {"model": ctx.model, "messages": chat, **({"tools": tools} if tools else {})}
            while True:
                url = f"{endpoint}/chat/completions"
                reply = await client.post(url, json=body, headers=headers)
                if reply.status_code != 200:
                    break
                chat.append(reply.json()["choices"][0]["message"])
                if not (calls := chat[-1].get("tool_calls")):
                    break
                for call in calls:
                    name, given = call["function"]["name"], call["function"]["arguments"]
                    content: Any = f"error: unknown tool {name!r}"
                    if name in names:
                        content = await call_mcp(opened, names, name, json.loads(given))
                    elif shell and name == boxed.SHELL["name"]:
                        said = await shell(str(json.loads(given).get("command", "")))
                        content = said.readable(boxed.OUTPUT_CHARACTERS) or "(no output)"
                    result = {"role": "tool", "tool_call_id": call["id"], "name": name}
                    chat.append({**result, "content": content})
        if _episodes[trace.id].cut:
            trace.stop("max_output_tokens")
        elif reply.status_code != 200 and trace.stop_condition is None:
            return ProgramResult(exit_code=1, stdout="", stderr=reply.text[:1000])
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Texts(vf.Client):  # type: ignore[misc]
    """Answers with the texts of the episode."""

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> vf.Response:
        try:
            said = [_said(each) for each in turn.prompt]
            episode, trace = _episodes[turn.trace.id], turn.trace
            tools = body.get("tools") or ()
            spoken, calls = await episode.ask(said, tools, trace.id, trace.agent.name)
        except EpisodeOver as error:
            raise vf.ProviderError("the episode is over") from error
        finish = "tool_calls" if calls else "stop" if spoken.finished else "length"
        message: dict[str, Any] = {"role": "assistant", "content": spoken.text}
        if calls:
            message["tool_calls"] = [call.wire() for call in calls]
        return vf.Response(
            id="swarm",
            created=int(time.time()),
            model="policy",
            message=vf.AssistantMessage(
                content=spoken.text,
                tool_calls=[vf.ToolCall(**call._asdict()) for call in calls] or None,
            ),
            finish_reason=finish,
            raw={
                "id": "swarm",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": "policy",
                "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            },
        )


class Tasksets:
    """A package with the 1.x interface; implements `Tasks`."""

    def __init__(self, env: Any, tasks: list[Any]) -> None:
        self._env = env
        self._tasks = tasks
        self.count = len(tasks)

    @classmethod
    async def load(
        cls,
        package: str,
        arguments: dict[str, Any],
        tasks_max: int,
        player: str,
        stack: AsyncExitStack,
    ) -> "Tasksets":
        """Load a package; what it serves closes with `stack`. Raises `Unplayable`."""
        module = types.ModuleType(HARNESS)
        module.InProcess, module.__all__ = InProcess, ["InProcess"]  # type: ignore[attr-defined]
        sys.modules[HARNESS] = module
        if "." in package:  # which the library takes for a module of its own
            sys.modules[package.replace(".", "_")] = importlib.import_module(package)
        given = {"taskset": {**arguments, "id": package.replace(".", "_")}, "id": player}
        seats = agent_config_fields(resolve_env_config(given))

        def loaded(runtime: str) -> tuple[Any, list[Any]]:
            seat = {"harness": {"id": HARNESS}, "runtime": {"type": runtime}}
            seated = {**given, **dict.fromkeys(seats, seat), "interception": {"type": "server"}}
            env = vf.load_environment(resolve_env_config(seated))
            return env, list(islice(env.taskset, tasks_max))

        env, tasks = loaded("subprocess")
        contained = any(type(each).NEEDS_CONTAINER or each.data.image for each in tasks)
        if contained or any(map(_needs_runtime, {type(each): each for each in tasks}.values())):
            boxed.take_the_place(tasks, has_shell=contained)
            env, tasks = loaded(boxed.KIND)
        await stack.enter_async_context(env.serving())
        env._interception.clients[ENDPOINT.model_dump_json()] = Texts()
        return cls(env, tasks)

    def answer(self, task: int) -> str:
        answer = getattr(self._tasks[task].data, "answer", "")
        return answer if isinstance(answer, str) else ""

    async def play(self, task: int, episode: Episode) -> Graded | Ungradable:
        traces: list[str] = []

        def begun(trace: Any) -> None:
            traces.append(trace.id)
            _episodes[trace.id] = episode

        chosen = self._tasks[task]
        try:
            context = vf.ModelContext(model="policy", client=ENDPOINT)
            played = await self._env.run_episode(chosen, context, on_trace=begun)
        finally:
            for each in traces:
                _episodes.pop(each, None)
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if errors:
            return Ungradable(f"{errors[0].type}: {errors[0].message}")
        return _graded([trace for trace in played.traces if trace.agent.trainable])


def _graded(traces: list[Any]) -> Graded | Ungradable:
    """The mean over the runs of agents that are trained, of the reward and of each part."""
    parts: dict[str, list[float]] = {}
    for trace in traces:
        if unknown := [name for name, reward in trace.rewards.items() if reward is None]:
            return Ungradable(f"the reward {unknown[0]} was not computed")
        scores = {name: reward.score for name, reward in trace.rewards.items()}
        metrics = {name: each for name, each in trace.metrics.items() if each is not None}
        for name, part in {**metrics, **scores}.items():
            parts.setdefault(name, []).append(float(part))
    rewards = [float(trace.reward) for trace in traces if trace.rewards]
    if not rewards:
        return Ungradable("the task has no rewards")
    return Graded(fmean(rewards), {name: fmean(each) for name, each in parts.items()})


def _needs_runtime(task: Any) -> bool:
    """Whether a reward that counts looks into the runtime in which an agent worked."""
    for reward in task.hooks("reward"):
        parameter = inspect.signature(reward).parameters.get("runtime")
        counts = getattr(reward, "_vf_weight", 1.0) != 0
        if counts and parameter is not None and parameter.default is inspect.Parameter.empty:
            return True
    return False


def _said(message: Any) -> Said:
    """A message as text; raises `Unplayable` for anything else, such as an image."""
    content = "" if message.content is None else message.content
    if not isinstance(content, str):
        kinds = {getattr(part, "type", "?") for part in content}
        if kinds - {"text"}:
            raise Unplayable(f"a message holds more than text ({', '.join(sorted(kinds))})")
        content = "".join(part.text for part in content)
    calls = calls_json(getattr(message, "tool_calls", None) or ())
    result = (getattr(message, "tool_call_id", ""), getattr(message, "name", None) or "")
    return Said(message.role, content, calls, *result)
