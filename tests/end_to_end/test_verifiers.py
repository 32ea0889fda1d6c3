"""Packages of `verifiers` from the registry are trained on, by `make test-verifiers`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
import trio

from peers.environments import Renderer
from peers.environments.interface import Message
from peers.environments.verifiers.installed import interpreter_for
from swarm.jobs.training import TrainingTerms
from swarm.run.allowed import ALLOWED_VARIABLE
from swarm.wire.manifest import EnvironmentReference, Objective, Optimiser, Sampling, Schedule
from swarm.world.process import HOME_VARIABLE
from tests.end_to_end.harness import STEP_SECONDS, swarm
from tests.end_to_end.ledgers import check_accounts
from tests.end_to_end.pipeline import pipeline
from tests.environments import verifiers_packages
from tests.environments.chat_families import FAMILIES

pytestmark = pytest.mark.verifiers

torch.set_num_threads(1)  # two OpenMP threads on shared cores are many times slower

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "verifiers"
FAMILY = FAMILIES["chatml"]
GROUPS = 2
STEPS = 3

TASKS = 2
SOLVED = """
import json
from itertools import islice
from marble_v1 import MarbleTaskset
from marble_v1.taskset import MarbleConfig
tasks = islice(MarbleTaskset(MarbleConfig(id="marble-v1")), %d)
print(json.dumps([[task.data.prompt, task.data.solution] for task in tasks]))
"""
"""Prints the tasks of marble-v1, each with a layout that solves it."""


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's user trusts the run with packages."""
    monkeypatch.setenv(ALLOWED_VARIABLE, "verifiers")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(HOME))


def make_policy(folder: Path) -> int:
    """Write a tiny model with a chat template; the id of the token that ends a turn."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    FAMILY.write(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    stop = int(tokens[FAMILY.closes])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=stop,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return stop


def terms(stop: int, tokens: int) -> TrainingTerms:
    return TrainingTerms(
        objective=Objective(epsilon=0.2, delta=4.0, kl_coefficient=0.0, entropy_coefficient=0.0),
        optimiser=Optimiser(learning_rate=1e-3, warmup_steps=1, gradient_norm_max=0.5),
        schedule=Schedule(steps=100, groups_per_step=GROUPS),
        sampling=Sampling(
            temperature=1.0,
            max_new_tokens=tokens,
            stop_ids=[stop],
            group_size=8,
            groups_per_submission=GROUPS,
        ),
    )


def test_poems_of_the_older_interface(tmp_path: Path) -> None:
    stop = make_policy(tmp_path / "0")
    environment = EnvironmentReference(
        name="verifiers",
        version="1",
        options={"package": "stardata.envs.constraint_gym", "version": "0.1.1", "library": "0.3.1"},
    )
    with pipeline(tmp_path, environment, terms(stop, tokens=64)) as run:
        rewards = [run.take_step(step)[0] for step in range(STEPS)]
    assert all(0 < reward < 1 for reward in rewards), rewards
    assert run.learned_steps, rewards


def test_marbles_of_the_1_x_interface(tmp_path: Path) -> None:
    stop = make_policy(tmp_path / "0")
    teach(tmp_path / "0", stop)
    parts = {"scored": {"weight": 0.5}, "answered_legally": {"weight": 0.5}}
    environment = EnvironmentReference(
        name="verifiers",
        version="1",
        options={
            "package": "marble-v1",
            "version": "0.1.0",
            "arguments": json.dumps({"task": {"rewards": parts}}),
            "tasks": TASKS,
        },
    )
    with pipeline(tmp_path, environment, terms(stop, tokens=96)) as run:
        rewards = [run.take_step(step)[0] for step in range(STEPS)]
    assert run.learned_steps, rewards
    assert max(rewards) > 0, "the rewards of the package, computed by its own simulator"


def teach(folder: Path, stop: int) -> None:
    """Teach the policy the form of an answer, which no random policy would find."""
    from transformers import Qwen2ForCausalLM

    ended = subprocess.run(
        [str(interpreter_for("0.4.0")), "-c", SOLVED % TASKS],
        capture_output=True,
        check=True,
        text=True,
    )
    renderer, model = Renderer(folder), Qwen2ForCausalLM.from_pretrained(folder)
    examples = []
    for prompt, solution in json.loads(ended.stdout):
        question = renderer.encode_prompt((Message("user", prompt),))
        answer = renderer.encode_completion(f"```json\n{json.dumps(solution)}\n```")
        examples.append((question, [*answer, stop]))
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for number in range(60 * len(examples)):
        question, answer = examples[number % len(examples)]
        inputs = torch.tensor([[*question, *answer]])
        labels = torch.tensor([[-100] * len(question) + answer])
        loss = model(input_ids=inputs, labels=labels).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(folder)


def test_workers_lack_the_package_of_a_served_environment(
    tmp_path: Path, base: Path, fork_server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    verifiers_packages.write(site)
    environment = EnvironmentReference(
        name="verifiers",
        version="1",
        options={"package": "swarm-sorting", "library": "0.3.1"},
        where="served",
    )
    names = ["bootstrap", "trainer", "validator", "environment-1", "inference-1"]

    async def main() -> None:
        async with swarm(
            tmp_path, base, fork_server, names=names, steps=2, environment=environment, site=site
        ) as peers:
            owner.undo()  # the owner has signed
            home = peers["environment-1"].home
            (home / "environments").symlink_to(HOME / "environments")
            await peers.start()
            await peers.complete(4 * STEP_SECONDS)
            worker = check_accounts(peers).state.totals[peers["inference-1"].identity.peer_id]
            assert worker.accepted > 0
            assert worker.refused == worker.quarantined == 0

    monkeypatch.delenv(HOME_VARIABLE)
    with pytest.MonkeyPatch.context() as owner:
        owner.setenv(HOME_VARIABLE, str(HOME))
        owner.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(site)]))
        trio.run(main)
