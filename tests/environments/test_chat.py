"""Chat options: any environment's prompts as messages, its grades, and runs that cannot work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peers.environments import Renderer, Task, Transcript, grade, load, probe_hash, task_of
from peers.environments.episodes import EpisodeLimits, Replies
from peers.environments.interface import Conversation, Message, Prompt
from peers.environments.probe import probe_seed
from peers.environments.run_probe import check_history, check_stop_ids
from swarm.errors import UserError
from swarm.rollouts.rollout import Segment, Span
from tests.commands.harness import complaint, swarm
from tests.commands.test_commands import RUN
from tests.commands.test_impossible_runs import describe
from tests.environments.chat_families import CHATML, FAMILIES

HI = (Message("user", "hi"),)


def renderer_of(folder: Path, name: str = "chatml") -> Renderer:
    return Renderer(FAMILIES[name].write(folder))


def text_of(renderer: Renderer, prompt: Prompt) -> str:
    return renderer.decode_completion(renderer.encode_prompt(prompt), ())[0]


def first_prompt(**options: Any) -> Prompt:
    return task_of(load("sort-digits", "1", options), probe_seed(0)).prompt


# --- options --------------------------------------------------------------------------------------


def test_a_text_prompt_becomes_a_message_of_the_user(tmp_path: Path) -> None:
    plain = first_prompt()
    assert isinstance(plain, str)
    prompt = first_prompt(system_prompt="Sort.", enable_thinking=False)
    assert text_of(renderer_of(tmp_path), prompt) == (
        f"<|im_start|>system\nSort.<|im_end|>\n<|im_start|>user\n{plain}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert first_prompt(chat=False) == plain


def test_length_targets_and_other_variables_go_together(tmp_path: Path) -> None:
    prompt = first_prompt(lengths=[9], template_variables=['tone="dry "', "n=2"])
    assert isinstance(prompt, Conversation)
    FAMILIES["chatml"].write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ tone }}{{ messages[0].content }}{{ n + 1 }}")
    assert text_of(Renderer(tmp_path), prompt) == (
        f"dry {first_prompt()} Think for 9 tokens before giving a response.3"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"system_prompt": ""}, r"system_prompt is ''"),
        ({"chat_date": "today"}, r"chat_date is 'today'"),
        ({"chat_date": "2026-02-30"}, r"chat_date is '2026-02-30' \(day is out of range"),
        ({"history": "forget"}, r"history is 'forget'"),
        ({"template_variables": ["x"]}, r"template_variables is \['x'\]"),
        ({"template_variables": ["x=dry"]}, r".*whose value is no JSON .* name=\"text\""),
        (
            {"template_variables": ["x=[]"]},
            r"template_variables gives x the value \[\]; it must be a number, text, true",
        ),
        ({"template_variables": ["chat_date=5"]}, r"template_variables gives chat_date, which"),
        ({"template_variables": ['tools="["']}, r"template_variables gives tools, which"),
        ({"chat": False, "system_prompt": "x"}, r"chat is false, but system_prompt is given"),
        ({"chat": False, "thinking": True}, r"chat is false, but thinking is given"),
    ],
)
def test_wrong_options_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=r"environment 'sort-digits': options: " + sentence):
        load("sort-digits", "1", options)


def test_graders_see_the_answer_after_the_thoughts() -> None:
    environment = load("sort-digits", "1", {"answer_after": "</think>"})
    task = task_of(environment, probe_seed(0))
    for text, reward in (
        (f"perhaps 123</think>{task.answer}", 1),
        (f"{task.answer}</think>x", 0),
        (task.answer, 0),
    ):
        assert grade(environment, task, Transcript.of(text)).reward == reward


# --- rendering ------------------------------------------------------------------------------------


def test_prompts_of_text_need_no_template_and_no_jinja(tmp_path: Path) -> None:
    FAMILIES["chatml"].write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% broken")
    program = (
        "import sys; from pathlib import Path; from peers.environments import Renderer, load\n"
        "from peers.environments import probe_hash\n"
        "probe_hash(load('sort-digits', '1'), Renderer(Path(sys.argv[1])))\n"
        "print('jinja2' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False\n"


def test_the_probe_covers_the_template_of_a_chat_only(tmp_path: Path) -> None:
    chat, plain = load("sort-digits", "1", {"chat": True}), load("sort-digits", "1")
    first = renderer_of(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML + "{# equal but for this #}")
    second = Renderer.current(tmp_path, first)
    assert second is not first
    assert Renderer.current(tmp_path, second) is second
    assert probe_hash(chat, first) != probe_hash(chat, second)
    assert probe_hash(plain, first) == probe_hash(plain, second)


def model_turn(renderer: Renderer, text: str, stop: str) -> Segment:
    stop_id = control_id(renderer, stop)
    tokens = [*renderer.encode_completion(text), stop_id]
    return Segment("model", tokens, "stop", None, (Span(0, len(tokens)),))


def control_id(renderer: Renderer, control: str) -> int:
    tokens = renderer.encode_completion(control)
    assert len(tokens) == 1
    return tokens[0]


def test_an_observation_of_text_is_a_message_of_the_user(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path)
    environment = load("calculator", "1", {"chat": True})
    task = replace(task_of(environment, probe_seed(0)), inner=Task("42*9>", "378"))
    end = control_id(renderer, "<|im_end|>")
    limits = EpisodeLimits(stop_ids=[end], max_new_tokens=20, positions_max=999)
    replies = Replies(environment, task, renderer, limits)
    prompt = Segment("prompt", renderer.encode_prompt(task.prompt))
    answer = replies.next([prompt, model_turn(renderer, "42*9=", "<|im_end|>")])
    assert answer is not None
    assert renderer.decode_completion(answer, ())[0] == (
        "\n<|im_start|>user\n378><|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_after_a_prompt_of_text_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"answers a prompt of text with messages; .* chat = true"):
        renderer_of(tmp_path).encode_observation("42*9>", HI, 2)


# --- checks of a run ------------------------------------------------------------------------------

THINKS_FIRST = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
KEEPS = "keeps"
FORGETS = "removes the thoughts of earlier turns"
CHANGES = "writes earlier turns otherwise than they were"
SYSTEM = Message("system", "Answer briefly.")


@pytest.mark.parametrize(
    ("family", "system", "role", "variables", "outcome"),
    [
        ("chatml", True, "user", {}, CHANGES),  # it opens a thought only in the prompt
        ("qwen3", True, "user", {}, FORGETS),
        ("qwen3", True, "tool", {}, KEEPS),
        ("qwen3", True, "user", {"enable_thinking": False}, CHANGES),
        ("llama3", True, "user", {}, KEEPS),
        ("llama3", True, "tool", {}, KEEPS),
        ("mistral", False, "user", {}, KEEPS),
        ("mistral", True, "user", {}, CHANGES),  # it moves the system prompt
        ("mistral", False, "tool", {}, "fails on messages of the roles user, assistant, tool"),
        ("gemma", False, "user", {}, KEEPS),
    ],
)
def test_a_template_that_changes_earlier_turns_is_refused(
    family: str, system: bool, role: str, variables: dict[str, Any], outcome: str, tmp_path: Path
) -> None:
    renderer = renderer_of(tmp_path, family)
    if family == "chatml":
        (tmp_path / "chat_template.jinja").write_text(THINKS_FIRST)
        renderer = Renderer(tmp_path)
    messages = (SYSTEM, *HI) if system else HI
    prompt = Conversation(messages, tuple(variables.items()))
    observation = (Message(role, "8132"),)
    refuses = load("calculator", "1", {"chat": True})
    if outcome == KEEPS:
        check_history(refuses, renderer, prompt, observation)
        return
    with pytest.raises(UserError, match=outcome):
        check_history(refuses, renderer, prompt, observation)
    if "fails" not in outcome:
        keeps = load("calculator", "1", {"chat": True, "history": "keep"})
        check_history(keeps, renderer, prompt, observation)


def test_a_template_that_counts_turns_is_refused(tmp_path: Path) -> None:
    FAMILIES["chatml"].write(tmp_path)
    counting = CHATML.replace("message.content +", "message.content + (loop.index | string) +")
    (tmp_path / "chat_template.jinja").write_text(counting)
    with pytest.raises(UserError, match=r"ends a later turn otherwise than the first"):
        check_history(load("calculator", "1"), Renderer(tmp_path), HI, "8132")


def test_the_token_that_ends_a_turn_must_be_a_stop_id(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path)
    end = control_id(renderer, "<|im_end|>")
    assert check_stop_ids(renderer, HI, [0, end], "run.toml") == []
    with pytest.raises(UserError, match=rf"stop_ids lacks {end} \(<\|im_end\|>\), with which"):
        check_stop_ids(renderer, HI, [0], "run.toml")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    )
    (warning,) = check_stop_ids(Renderer(tmp_path), HI, [0], "run.toml")
    assert "ends a turn with text and no control token" in warning


def test_a_chat_is_checked_when_the_run_is_created(tmp_path: Path) -> None:
    chat = RUN.replace("[sampling]", 'options.system_prompt = "Sort."\n[sampling]')
    wide = {"vocab_size": 512, "max_position_embeddings": 256}
    arguments = describe(tmp_path, chat, **wide)
    assert "has no chat template (chat_template.jinja, or" in complaint(*arguments)
    FAMILIES["chatml"].write(tmp_path)
    (tmp_path / "run.toml").write_text(chat.replace("stop_ids = [2]", "stop_ids = [0]"))
    assert "sampling.stop_ids lacks 2 (<|im_end|>), with which the" in complaint(*arguments)
    (tmp_path / "run.toml").write_text(chat)
    outcome = swarm(*arguments)
    assert outcome.status == 0 and outcome.errors.count("warning: ") == 1, outcome.errors
    assert "has no weights to measure with" in outcome.errors
