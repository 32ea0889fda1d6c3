"""Agents of ten libraries against a real endpoint: what they did is rollouts that hold.

`make test-agents` installs the libraries under a Python of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peers.engines.registry import make_engine
from swarm.rollouts.submission_file import ReadLimits, read
from tests.agents.policy import POSITIONS, make_caller
from tests.endpoint.harness import serving
from tests.endpoint.test_endpoint import check_row

pytestmark = pytest.mark.agents
RUNNER = trio.run

PYTHON = Path("build/agents/bin/python")
CLIENTS = Path(__file__).with_name("clients.py")
SECONDS = 120.0
"""For one agent; importing its library takes up to ten of them."""

CONTINUES = {
    "openai": True,
    "openai_agents": True,
    "langgraph": True,
    "smolagents": False,
    "pydantic_ai": True,
    "autogen": True,
    "llama_index": True,
    "haystack": True,
    "agno": False,
    "strands": True,
}
"""Whether its two turns must be one episode: not where an agent writes the conversation anew, or
where the policy answers its prompt without the tool."""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "tiny"
    make_caller(folder)
    return folder


async def play(name: str, url: str, task: Path, **environment: str) -> str:
    """What an agent printed."""
    variables = os.environ | {
        "OPENAI_BASE_URL": f"{url}/sessions/{name}/v1",
        "OPENAI_API_KEY": "none",
        "SWARM_MODEL": "tiny",
        "SWARM_TASK": str(task),
        **environment,
    }
    done = await trio.run_process(
        [str(PYTHON), str(CLIENTS), name],
        env=variables,
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode().strip()


@pytest.mark.parametrize("name", CONTINUES)
async def test_an_agent_plays_a_task_whose_rollouts_hold(
    name: str, caller: Path, tmp_path: Path
) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"question": "1 + 2?", "answer": "3."}))
    async with serving(caller, record=tmp_path / "sessions") as client:
        with trio.fail_after(SECONDS):
            said = await play(name, str(client.http.base_url), task)
        if CONTINUES[name]:
            assert said.splitlines()[-1] == "3."
    (file,) = tmp_path.rglob("*.parquet")  # noqa: ASYNC240
    note: dict[str, Any] = msgspec.json.decode(file.with_suffix(".json").read_bytes())
    assert (note["session"], note["reward"]) == (name, float(said.splitlines()[-1] == "3."))
    submission = read(file, ReadLimits(1 << 24, 64, 4096, POSITIONS, POSITIONS))
    engine = make_engine("native", caller)
    turns = []
    for row, draws in enumerate(note["episodes"]):
        check_row(submission.rollouts, row, draws, engine)
        turns.append(len(draws))
    assert max(turns) == 2 or not CONTINUES[name], turns
