"""Rows of which no rollout can be made cost themselves: the seed draws another, at every peer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.engines import demo
from peers.environments import Renderer, load, probe_hash, task_of
from peers.environments.interface import Conversation, Message, UnusableTask, messages_of
from peers.environments.prompt_room import PromptRoom
from peers.environments.tasks import indexed
from swarm.errors import UserError
from swarm.run.allowed import allowed_environments
from tests.commands.harness import complaint, swarm
from tests.commands.test_commands import RUN
from tests.commands.test_impossible_runs import describe

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.content }}{% endfor %}>"
)

BAD: list[dict[str, Any]] = [
    {"prompt": "", "answer": "0"},
    {"prompt": "   ", "answer": "0"},
    {"prompt": [{"role": "user", "content": ""}], "answer": "0"},
    {"prompt": "1 2 3 " * 1000, "answer": "0"},
    {"prompt": "1\ud800", "answer": "0"},
    {"prompt": "2>", "answer": "\udfff"},
    {"prompt": [{"role": "tool", "content": "7"}], "answer": "0"},
    {"prompt": None, "answer": "0"},
    {"prompt": "3>", "answer": float("nan")},
    {"prompt": "4>"},
]
"""One of each kind."""

GOOD = [{"prompt": f"{n}>", "answer": str(n)} for n in range(30)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    demo.make_policy(folder, seed=1)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [*GOOD, *BAD])))
    return path


def prompt_of(environment: Any, seed: bytes, policy: Path) -> str:
    room = PromptRoom.of_policy(Renderer(policy), positions=64, max_new_tokens=8)
    return messages_of(task_of(environment, seed, room=room).prompt)[-1].content


def test_the_probe_tasks_are_those_of_usable_rows(policy: Path, data: Path) -> None:
    environment = load("dataset", "1", {"path": str(data)})
    usable = {row["prompt"] for row in GOOD}
    seeds = [number.to_bytes(4, "big") for number in range(300)]
    assert {prompt_of(environment, each, policy) for each in seeds} <= usable
    assert probe_hash(environment, Renderer(policy))  # 64 tasks, of which some are bad ones


@given(seed=st.binary(min_size=1, max_size=8))
def test_two_machines_draw_the_same_task(seed: bytes, policy: Path, data: Path) -> None:
    first, second = (load("dataset", "1", {"path": str(data)}) for _ in range(2))
    assert prompt_of(first, seed, policy) == prompt_of(second, seed, policy)


def test_a_model_with_less_room_draws_shorter_prompts(policy: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1" * n, "answer": ""} for n in range(1, 60)]
    path.write_text("\n".join(map(json.dumps, rows)))
    environment, renderer = load("dataset", "1", {"path": str(path)}), Renderer(policy)
    for room in (PromptRoom(renderer, 20), PromptRoom(renderer, 40)):
        assert room.tokens_max is not None
        drawn = [task_of(environment, bytes([n]), room=room).prompt for n in range(60)]
        lengths = {len(room.encode(each)) for each in drawn}
        assert max(lengths) <= room.tokens_max < 2 * max(lengths)
    with pytest.raises(
        UnusableTask,
        match=r"in 64 draws; of the last: .*jsonl: row \d+: the prompt '1+' has \d+ char",
    ):
        task_of(environment, b"x", room=PromptRoom(renderer, 0))


def test_variables_that_python_takes_for_equal_are_other_prompts(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)
    (tmp_path / "chat_template.jinja").write_text("{{ flag }}")
    renderer = Renderer(tmp_path)
    room, said = PromptRoom(renderer), (Message("user", "1"),)
    for flag in (1, True, 1.0, 0.0, -0.0, False):
        prompt = Conversation(said, (("flag", flag),))
        assert room.encode(prompt) == renderer.encode_prompt(prompt), flag


def test_a_template_that_calls_itself_is_refused_at_the_same_depth_everywhere(
    policy: Path, tmp_path: Path
) -> None:
    """Else a worker whose stack is deeper would find another task than its validator."""
    shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{% macro deep(left) %}{% if left %}{{ deep(left - 1) }}{% endif %}{% endmacro %}"
        "{{ deep(messages[0].content | length) }}{{ messages[0].content }}>"
    )
    room = PromptRoom.of_policy(Renderer(tmp_path), 4096, 16)
    assert room.encode((Message("user", "12"),))
    with pytest.raises(UnusableTask, match="RecursionError"):
        room.encode((Message("user", "1" * 3000),))


def test_a_list_of_bad_rows_alone_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, [BAD[0]] * 3)))
    environment = load("dataset", "1", {"path": str(path)})
    with pytest.raises(UserError, match=r"rows.jsonl: row [0-2]: the prompt is empty"):
        task_of(environment, b"x")


def test_the_wrappers_of_options_keep_the_rows(data: Path) -> None:
    options: dict[str, Any] = {"path": str(data), "lengths": [5, 7], "system_prompt": "Count."}
    tasks = indexed(load("dataset", "1", options).cached_tasks)
    assert tasks is not None and tasks.count == len(GOOD) + len(BAD)
    assert messages_of(tasks.at(3).prompt)[0] == Message("system", "Count.")
    assert tasks.at(3).target_length in (5, 7)
    assert tasks.named(3).endswith("rows.jsonl: row 3")


# --- run create -----------------------------------------------------------------------------------


def described(folder: Path, rows: list[dict[str, Any]]) -> list[str | Path]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    text = RUN.replace('"sort-digits"', '"dataset"').replace(
        "[sampling]", f'options = {{path = "{path}"}}\n[sampling]'
    )
    arguments = describe(folder, text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return arguments


def test_run_create_names_every_bad_row_and_signs(tmp_path: Path) -> None:
    outcome = swarm(*described(tmp_path, [*GOOD * 20, *BAD]))
    assert outcome.status == 0, outcome.errors
    assert not allowed_environments()  # the data set was the owner's own, for this run only
    assert "dataset: 610 rows rendered" in outcome.output
    assert "10 of 610 rows of dataset cannot be used" in outcome.errors
    for index, kind in enumerate(
        (
            "the prompt is empty",
            "the prompt is empty",
            "the prompt is empty",
            "tokens; 56 are the most that leave room for an answer",
            "the prompt '1\\ud800' is no text",
            "the answer '\\udfff' is no text",
            "cannot be rendered: .*no tools here",
            "the prompt in 'prompt' is None",
            "'answer' is nan",
            "lacks 'answer'",
        )
    ):
        (line,) = (each for each in outcome.errors.splitlines() if f"row {600 + index}" in each)
        assert re.search(kind.replace("\\u", r"\\u"), line), line


def test_run_create_refuses_data_of_which_too_many_rows_are_bad(tmp_path: Path) -> None:
    arguments = described(tmp_path, [*GOOD, BAD[0], BAD[0]])
    sentence = complaint(*arguments)
    assert sentence.startswith("2 of 32 rows of dataset cannot be used, more than the share --ungr")
    assert "row 30: the prompt is empty. Repair" in sentence
    assert not (tmp_path / "run.manifest").exists()
    assert swarm(*arguments, "--ungradable-max", "0.1").status == 0
