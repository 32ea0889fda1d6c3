"""Judges: a language model behind our own endpoint, and a reward model in a folder."""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from peers.environments import NotGradable, Task, Transcript, grade, load, task_of
from peers.environments.interface import Environment
from peers.environments.judges import JudgedEnvironment, judge
from swarm.errors import UserError
from swarm.ledger.ruling import contradictions
from swarm.world import progress
from tests.endpoint.harness import serving

RUNNER = trio.run

KEY = "the key of a judge"

REMOTE = """
kind = "openai"
model = "tiny"
prompt = "{completion}"
pattern = '^\\D*([0-9])'
high = 9
max_tokens = 16
temperature = 1.0
"""

TASK = Task("428190>", "012489")
TEXTS = [str(number) for number in range(4)]


def judged(**options: Any) -> Environment:
    return load("sort-digits", "1", {"judge": "tiny", **options})


@dataclass
class Machine:
    """The folder of a validator's judges."""

    folder: Path

    def write(self, text: str, **access: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        lines = [f"{name} = {value!r}" for name, value in access.items()]
        whole = "\n".join([text, "[access]", *lines])
        (self.folder / "tiny.toml").write_text(whole)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("SWARM_JUDGES", str(tmp_path / "judges"))
    return Machine(tmp_path / "judges")


async def graded(environment: Environment, texts: list[str]) -> list[float | str]:
    """Rewards, or the sentences of what is not gradable."""

    def work() -> list[float | str]:
        found: list[float | str] = []
        for text in texts:
            try:
                found.append(grade(environment, TASK, Transcript.of(text)).reward)
            except NotGradable as error:
                found.append(str(error))
        return found

    return await trio.to_thread.run_sync(work)


@dataclass
class _Opinion:
    outcome: str = "accepted"
    proven_fault: bool = False
    recomputed: int = 4


async def test_validators_agree_by_the_seed_or_by_a_shared_cache_and_may_differ(
    policy_folder: Path, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The endpoint's own randomness decides what a judge without a seed says.
    monkeypatch.setattr("secrets.token_bytes", random.Random(1).randbytes)
    caches = [str(tmp_path / name) for name in ("one", "two", "three", "four")]
    async with serving(policy_folder) as client:
        url = f"{client.http.base_url}/v1"
        found = []
        for cache, seed in zip([*caches, caches[3]], ("0", "0", "-1", "-1", "-1"), strict=True):
            machine.write(f"{REMOTE}seed = {seed}", url=url, cache=cache)
            found.append(await graded(judged(), TEXTS))
        one, two, three, four, again = found
        assert one == two and any(isinstance(value, float) for value in one)
        known = [index for index, value in enumerate(four) if isinstance(value, float)]
        assert known, four
        assert all(four[index] == again[index] for index in known)
        assert three != four  # no seed, and no common cache
        # What may evict a validator or a worker does not look at rewards.
        assert contradictions({"three": _Opinion(), "four": _Opinion()}) == []
        client.endpoint.limits.__dict__["deadline_seconds"] = 0.0
        machine.write(f"{REMOTE}seed = 0", url=url, cache=caches[0], retries=0)
        first = next(index for index, value in enumerate(one) if isinstance(value, float))
        assert await graded(judged(), TEXTS[first : first + 1]) == one[first : first + 1]
        (sentence,) = await graded(judged(), ["new"])
        assert "answers with status 504" in str(sentence)


async def test_a_weight_mixes_both_rewards(policy_folder: Path, machine: Machine) -> None:
    async with serving(policy_folder) as client:
        url = f"{client.http.base_url}/v1"
        machine.write(f"{REMOTE}seed = 0", url=url)
        (full,) = await graded(judged(), ["2"])
        assert isinstance(full, float)
        (half,) = await graded(judged(judge_weight=0.5), ["2"])
        assert half == pytest.approx(full / 2)  # the environment's own reward is 0


async def test_what_a_judge_may_do_wrong_is_a_sentence_and_never_a_reward(
    policy_folder: Path, machine: Machine
) -> None:
    key = machine.folder.with_name("key")
    key.write_text(KEY)
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            REMOTE.replace("high = 9", "high = 0.5\nlow = 0.1"),
            {},
            "it must lie between 0.1 and 0.5",
        ),
        (REMOTE.replace("^\\D*([0-9])", "(x)yz"), {}, "finds no score"),
        (REMOTE.replace("^\\D*([0-9])", "(.)"), {}, "different scores"),
        (REMOTE.replace("^\\D*([0-9])", "^(.)"), {}, "which is no number"),
        (REMOTE.replace('"tiny"', '"gpt"'), {}, "answers with status 404"),
        (REMOTE, {"url": "http://127.0.0.1:1/v1", "retries": 1}, "cannot be reached"),
        (REMOTE, {"key_file": "/nowhere"}, "key_file /nowhere"),
        (REMOTE, {"url": "http://judge.example/v1", "key_file": str(key)}, "unencrypted"),
        (REMOTE, {"url": "ftp://x"}, "write it as http://"),
        (REMOTE.replace("high = 9", "high = 0"), {}, "high must be above"),
        (REMOTE.replace("{completion}", "x"), {}, "would not see the answer"),
        (REMOTE.replace("([0-9])", "[0-9]"), {}, "has no group"),
        (REMOTE + "colour = 1", {}, "unknown key 'colour'"),
        ("kind = 'classifier'\nprompt = '{completion}'", {}, "kind is 'classifier'"),
    ]
    async with serving(policy_folder) as client:
        url = f"{client.http.base_url}/v1"
        for text, access, words in cases:
            machine.write(text, **({"url": url, "deadline_seconds": 5} | access))
            (found,) = await graded(judged(), ["5"])
            assert words in str(found), (words, found)
        machine.write(REMOTE, url=url)
        (found,) = await graded(judged(judge_hash="0" * 64), ["5"])
        assert "is another one than the run's" in str(found)
        known = str(judged().pins()["judge_hash"])
        assert judged(judge_hash="0" * 64).pins() == {}
        (found,) = await graded(judged(judge_hash=known), ["2"])
        assert isinstance(found, float)


async def test_a_judge_that_never_answers_is_waited_for_with_reports_of_progress(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (judge, progress):
        monkeypatch.setattr(module, "REPORT_SECONDS", 0.02)
    reports: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        machine.write(REMOTE, url=url, deadline_seconds=0.2)
        progress.current.set(progress.Reporter(lambda: reports.append(1)))
        (found,) = await graded(judged(), ["1"])
        assert "no answer within 0.2 s (deadline_seconds)" in str(found)
    assert len(reports) >= 2


def test_a_worker_needs_no_judge(machine: Machine) -> None:
    environment = judged(lengths=[8])  # the folder of judges does not exist
    assert task_of(environment, b"1").target_length == 8
    inner = environment.inner  # type: ignore[attr-defined]
    assert isinstance(inner, JudgedEnvironment)
    with pytest.raises(NotGradable, match="is not known on this machine"):
        grade(environment, TASK, Transcript.of("1"))
    for options, words in (
        ({"judge": "No Name"}, "judge"),
        ({"judge_weight": 0.5}, "judge is missing"),
        ({"judge": "a", "judge_weight": 2}, "judge_weight"),
    ):
        with pytest.raises(UserError, match=words):
            load("sort-digits", "1", options)  # type: ignore[arg-type]
