"""Environments: tasks from seeds, splits by hash, grading, rendering."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.engines.demo import EOS_ID, make_tokenizer
from peers.environments import (
    Generated,
    Message,
    Renderer,
    Task,
    TaskList,
    Transcript,
    load,
    probe_hash,
    split_of,
    task_of,
)
from peers.environments.interface import Split
from peers.environments.sort_digits import SortDigits
from swarm.errors import UserError

SEEDS = st.binary(min_size=1, max_size=40)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return Renderer(folder)


@given(SEEDS, st.sampled_from(["train", "held_out"]))
def test_a_seed_gives_one_task_of_the_split_asked_for(seed: bytes, split: Split) -> None:
    task = task_of(SortDigits(), seed, split)
    assert task == task_of(SortDigits(), seed, split)
    assert split_of(task.prompt) == split and isinstance(task.prompt, str)
    digits, end = task.prompt[:-1], task.prompt[-1]
    assert end == ">" and len(digits) == 6 and digits.isdigit()
    assert task.answer == "".join(sorted(digits))


def test_about_one_prompt_in_sixteen_is_held_out() -> None:
    held_out = sum(split_of(f"{n:06d}>") == "held_out" for n in range(0, 1_000_000, 100))
    assert 520 < held_out < 730


def test_drawing_from_a_split_that_never_comes_ends() -> None:
    prompt = next(f"{n}" for n in range(1000) if split_of(f"{n}") == "train")
    with pytest.raises(ValueError, match="no held_out task"):
        Generated(lambda _: Task(prompt, "")).draw(b"seed", "held_out")


@given(st.binary(max_size=8), st.integers(40, 200))
def test_a_list_is_drawn_from_in_splits_that_share_no_prompt(seed: bytes, count: int) -> None:
    listed = TaskList([Task((Message("user", str(number)),), "") for number in range(count)])
    for split in ("train", "held_out"):
        if any(split_of(task.prompt) == split for task in listed.tasks):
            task = listed.draw(seed, split)
            assert split_of(task.prompt) == split and task == listed.draw(seed, split)


def test_a_list_without_a_task_of_a_split_says_so() -> None:
    prompts = [f"{n}" for n in range(100) if split_of(f"{n}") == "train"]
    with pytest.raises(ValueError, match=r"TaskList of 5 tasks has no held_out task .*: add tasks"):
        TaskList([Task(each, "") for each in prompts[:5]]).draw(b"seed", "held_out")
    with pytest.raises(ValueError, match="TaskList is empty; give it tasks"):
        TaskList([]).draw(b"seed", "train")


def test_a_single_message_is_no_prompt() -> None:
    with pytest.raises(UserError, match=r"the single Message\(role='user'.*write \(message,\)"):
        Task(Message("user", "1+1"), "2")  # type: ignore[arg-type]


@given(st.text(max_size=12), st.booleans())
def test_only_the_finished_exact_answer_is_rewarded(text: str, finished: bool) -> None:
    task = Task("321000>", "000123")
    for written in (text, "000123", "0001234"):
        reward = SortDigits().grade(task, Transcript.of(written, finished=finished))
        assert reward == float(finished and written == "000123")


def test_prompts_begin_with_bos_and_completions_keep_stray_special_tokens(
    renderer: Renderer,
) -> None:
    assert renderer.encode_prompt("09>") == [1, 4, 13, 14]
    assert renderer.encode_completion("09") == [4, 13]
    assert renderer.decode_completion([4, 13, EOS_ID], [EOS_ID]) == ("09", True)
    assert renderer.decode_completion([4, 13], [EOS_ID]) == ("09", False)
    assert renderer.decode_completion([4, 1, 13, EOS_ID], [EOS_ID]) == ("0<bos>9", True)
    assert renderer.decode_completion([EOS_ID], [EOS_ID]) == ("", True)
    assert renderer.decode_completion([], [EOS_ID]) == ("", False)
    for token in (-1, 1 << 31):
        with pytest.raises(ValueError, match="token id"):
            renderer.decode_completion([4, token], [EOS_ID])


def test_probe_hash_is_pinned_and_sees_every_change(renderer: Renderer) -> None:
    class Other(SortDigits):
        @staticmethod
        def _make(randomness: bytes) -> Task:
            task = SortDigits._make(randomness)
            return Task(task.prompt, task.answer[::-1])

    pinned = probe_hash(SortDigits(), renderer)
    assert pinned.hex() == "0f5d61368eea58d6a68f2813c1711299099c658c28b1652e1481efebfad6f32e"
    assert probe_hash(Other(), renderer) != pinned


def test_load_knows_the_built_in_and_refuses_others() -> None:
    assert load("sort-digits", "1").name == "sort-digits"
    with pytest.raises(
        UserError, match=r"'chess' is not installed here; known environments: calculator, code,"
    ):
        load("chess", "1")
    with pytest.raises(UserError, match="version '1', but the run wants '2'"):
        load("sort-digits", "2")


def test_a_missing_or_broken_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is no tokenizer file"):
        Renderer(tmp_path)


def test_environments_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, peers.environments.sort_digits\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout.strip() == "[]"
