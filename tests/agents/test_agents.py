"""Agents of ten libraries: what they do is rollouts that a validator accepts.

`make test-agents` installs the libraries under a Python of their own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from swarm.wire.manifest import EnvironmentReference
from tests.agents.judging import judge_in_a_run, judge_session
from tests.agents.policy import CALLS, make_caller
from tests.endpoint.harness import serving

pytestmark = pytest.mark.agents
torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower
RUNNER = trio.run

PYTHON = Path("build/agents/bin/python").absolute()
CLIENTS = Path(__file__).with_name("clients.py")
SECONDS = 120.0
"""For one agent; importing its library takes up to ten of them."""

REWRITES = ("smolagents",)
"""Agents that write what the model said into their next request anew: two episodes."""

STOPS = ("smolagents",)
"""Agents that send words at which to stop, which a run refuses unless it is to ignore them."""

AGENTS = (
    *("openai", "openai_agents", "langgraph", "smolagents", "pydantic_ai"),
    *("autogen", "ag2", "agent_framework", "haystack", "agno"),
)


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "tiny"
    make_caller(folder)
    return folder


async def play(name: str, url: str, task: Path) -> str:
    """What an agent printed."""
    variables = os.environ | {
        "OPENAI_BASE_URL": f"{url}/sessions/{name}/v1",
        "OPENAI_API_KEY": "none",
        "SWARM_MODEL": "tiny",
        "SWARM_TASK": str(task),
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


@pytest.mark.parametrize("name", AGENTS)
async def test_a_validator_accepts_what_an_endpoint_records_of_an_agent(
    name: str, caller: Path, tmp_path: Path
) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"question": "1 + 2?", "answer": "3."}))
    async with serving(caller, record=tmp_path / "sessions") as client:
        with trio.fail_after(SECONDS):
            said = await play(name, str(client.http.base_url), task)
    (file,) = tmp_path.rglob("*.parquet")  # noqa: ASYNC240
    note: dict[str, Any] = msgspec.json.decode(file.with_suffix(".json").read_bytes())
    assert (note["session"], note["reward"]) == (name, float(said.splitlines()[-1] == "3."))
    turns = [len(draws) for draws in note["episodes"]]
    assert turns == ([1, 1] if name in REWRITES else [2])
    assert name in REWRITES or note["reward"] == 1.0
    outcome = await trio.to_thread.run_sync(judge_session, file, caller, tmp_path)
    assert (outcome.word, outcome.detail) == ("accepted", "")


def harness(folder: Path, name: str, rows: int = 8) -> EnvironmentReference:
    """The environment of an agent's program, which is written into `folder`."""
    asked = [{"question": f"task {n}: 1 + 2?", "answer": "3."} for n in range(rows)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    program = folder / "agent"
    program.write_text(f"#!{PYTHON}\n{CLIENTS.read_text()}")
    program.chmod(0o755)
    return EnvironmentReference(
        name="harness",
        version="1",
        where="served",
        options={
            "path": str(folder / "tasks.jsonl"),
            "program": str(program),
            "arguments": [name, "in-a-run"],
            "calls": CALLS,
            "sampling": "ignore" if name in STOPS else "refuse",
        },
    )


@pytest.mark.parametrize("name", AGENTS)
def test_a_validator_accepts_what_a_worker_samples_for_an_agent(
    name: str, caller: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is a run's environment: an environment peer starts it for each episode."""
    monkeypatch.setenv("SWARM_ENVIRONMENTS", "harness")
    outcome, rollouts = judge_in_a_run(harness(tmp_path, name), caller, tmp_path)
    assert (outcome.word, outcome.detail) == ("accepted", "")
    assert name in REWRITES or outcome.rewards == [[1.0, 1.0]]
    turns = 1 if name in REWRITES else 2
    assert rollouts.segment_counts().tolist() == [2 * turns] * 2
