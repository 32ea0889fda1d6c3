"""Learning curves on servers of OpenEnv and MCP: does the demo's small policy learn on them?

    python -m benchmarks.agents --task mcp --seeds 3
    python -m benchmarks.agents --task openenv --seeds 3

Prints what `benchmarks.recipe` does. The MCP server is one of the `mcp` library in this Python
(stateless, over pipes); the OpenEnv server runs programs by `openenv`'s executor, in the Python
that `swarm environment install openenv --package smolagents==1.26.0` makes (`--home`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.recipe import run
from peers.agents.servers import FOLDER_VARIABLE
from peers.demo.recipes import RECIPES, Recipe, Warmup
from peers.environments.verifiers.installed import recipe_of
from swarm.terminal.output import print_json
from swarm.terminal.tables import option_texts
from swarm.wire.manifest import EnvironmentReference

TOOLS = '''
import socket
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")
calls = 0


@server.tool()
def multiply(a: int, b: int) -> str:
    """The product of two numbers."""
    return str(a * b)


@server.tool()
def count() -> str:
    """How often it was called."""
    global calls
    calls += 1
    return str(calls)


@server.tool()
def fail() -> str:
    """Fails."""
    raise KeyError("nothing is there")


if len(sys.argv) > 1:
    import uvicorn

    served = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning"))
    served.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
else:
    server.run()
'''
"""A server of the `mcp` library, over pipes, or over HTTP at a socket that it inherits."""

PROGRAMS = '''
import sys

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.tools import PyExecutor

WORDS = {"plus": "+", "minus": "-", "times": "*"}


class Code(Action):
    code: str


class Ran(Observation):
    task: str = ""
    answer: str = ""
    stdout: str = ""
    stderr: str = ""


class Programs(Environment):
    """Asks for a program with a value; any program that runs earns a fifth."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None):
        self.now, self.ran = State(episode_id=episode_id, step_count=0), PyExecutor()
        rest, left = divmod(seed or 0, 30)
        rest, right = divmod(rest, 30)
        word = list(WORDS)[rest % 3]
        program = f"{left}{WORDS[word]}{right}"
        self.value = str(eval(program))
        return Ran(task=f"{left} {word} {right}>", answer=program)

    def step(self, action):
        self.now.step_count += 1
        found = self.ran.run(action.code)
        right = found.stdout.strip() == self.value
        reward = 1.0 if right else 0.2 * (found.exit_code == 0)
        error = found.stderr.strip().rpartition("\\n")[2]
        return Ran(stdout=found.stdout, stderr=error, reward=reward, done=right)

    @property
    def state(self):
        return self.now


app = create_app(Programs, Code, Ran, env_name="programs", max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''
"""A server of the `openenv` library."""


def write_server(
    folder: Path, name: str, source: str, python: Path, *given: str, **file: Any
) -> None:
    """Write the program of a server, and its file NAME.toml."""
    (folder / f"{name}.py").write_text(source)
    entries = {"command": [str(python), str(folder / f"{name}.py"), *given], **file}
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in entries.items()]
    (folder / f"{name}.toml").write_text("".join(lines))


def mcp_options(folder: Path) -> dict[str, Any]:
    """Products of numbers below 40, whose prompts do not name the tool."""
    rows = []
    for number in range(40 * 40):
        left, right = divmod(number, 40)
        call = f'{{"name": "multiply", "parameters": {{"a": {left}, "b": {right}}}}}'
        answer = str(left * right)
        rows.append({"prompt": f"{left}*{right}>", "answer": answer, "turns": [call, answer]})
    (folder / "products.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "path": str(folder / "products.jsonl"),
        "columns": {"demonstration": "turns"},
        "server": "tools",
        "calls": "llama",
        "offer": "none",
        "must_call": True,
        "turns": 1,
    }


OPENENV_OPTIONS = {
    "server": "programs",
    "action": "code",
    "task": "{task}",
    "answer": "{answer}",
    "tasks": 2700,
}


def recipe(name: str, options: Mapping[str, Any], tokens: int) -> Recipe:
    """The demo's recipe on one of the two."""
    environment = EnvironmentReference(name=name, version="1", options=option_texts(options))
    begin = RECIPES["tools"]
    return replace(
        begin,
        title=name,
        environments=[environment],
        sampling=replace(begin.sampling, max_new_tokens=tokens),
        schedule=replace(begin.schedule, groups_per_step=16),
        optimiser=replace(begin.optimiser, learning_rate=1e-3),
        positions=160,
        warmup=Warmup(batch=32, steps_max=1500, accuracy=0.15),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--task", choices=["openenv", "mcp"], required=True)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=256, help="held-out")
    parser.add_argument("--home", type=Path, default=Path("build/openenv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[FOLDER_VARIABLE] = name
        os.environ["SWARM_ENVIRONMENTS"] = arguments.task  # also for the process that evaluates
        if arguments.task == "mcp":
            write_server(folder, "tools", TOOLS, Path(sys.executable), is_stateless=True)
            made = recipe("mcp", mcp_options(folder), tokens=64)
        else:
            home = arguments.home.absolute()
            python = recipe_of("", "openenv").folder(home) / "bin" / "python"
            write_server(folder, "programs", PROGRAMS, python, "{port}", sessions=32)
            made = recipe("openenv", OPENENV_OPTIONS, tokens=12)
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        found = [
            run(each, arguments.steps, recipe=made, prompts=arguments.prompts) for each in seeds
        ]
    print_json({"task": arguments.task, "steps": arguments.steps, "runs": found})


if __name__ == "__main__":
    main()
