"""The messages of rollouts, read out of their tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

from peers.engines.demo import make_policy
from peers.environments import Renderer
from peers.environments.interface import Message
from peers.learning.examples import read_examples
from peers.synthesis.sources import ChatReader
from swarm.errors import UserError
from swarm.jobs.offline import Reading
from swarm.look.rollouts.seen import Turn
from swarm.rollouts.rollout import Finish, Kind
from tests.environments.chat_families import FAMILIES

Chat = tuple[Message, ...]


def turn(kind: Kind, tokens: list[int], finish: Finish | None = None) -> Turn:
    return Turn(kind, tokens, None, finish, None, [], [], False)


def played(renderer: Renderer, prompt: Chat, *rest: str) -> list[Turn]:
    """A rollout: the model's turns, with the environment's between them."""
    end = renderer.turn_end(prompt)
    assert end is not None
    turns = [turn("prompt", renderer.encode_prompt(prompt))]
    for index, text in enumerate(rest):
        if index % 2:
            turns.append(turn("environment", renderer.encode_observation(prompt, text, end)))
        else:
            turns.append(turn("model", [*renderer.encode_completion(text), end], "stop"))
    return turns


def said(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_template_is_read_backwards(family: str, tmp_path: Path) -> None:
    renderer = Renderer(FAMILIES[family].write(tmp_path))
    reader = ChatReader(renderer)
    asked = (Message("user", "What is\n1 + 1?"),)
    found = reader.messages(played(renderer, asked, "3", "No. Again:", "2"))
    # A tokenizer may put a space before the first word of a turn.
    assert found is not None
    assert [(each["role"], each["content"].lstrip()) for each in found] == [
        ("user", "What is\n1 + 1?"),
        ("assistant", "3"),
        ("user", "No. Again:"),
        ("assistant", "2"),
    ]
    if FAMILIES[family].system:
        found = reader.messages(played(renderer, (Message("system", "Add."), *asked), "2"))
        assert found is not None
        again = tuple(Message(each["role"], each["content"]) for each in found[:-1])
        assert renderer.encode_prompt(again) == renderer.encode_prompt(
            (Message("system", "Add."), *asked)
        )


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(FAMILIES["chatml"].write(tmp_path_factory.mktemp("chatml")))


@settings(deadline=None, max_examples=50)
@given(strategies.lists(strategies.text("ab\n <|im_end|>é1", max_size=12), min_size=2, max_size=4))
def test_what_is_found_renders_to_the_same_tokens(chatml: Renderer, texts: list[str]) -> None:
    """Contents that look like the template's own words are read right, or not at all."""
    prompt = (Message("user", texts[0]),)
    turns = played(chatml, prompt, *texts[1:])
    found = ChatReader(chatml).messages(turns)
    if found is not None:
        again = (Message(found[0]["role"], found[0]["content"]),)
        assert chatml.encode_prompt(again) == turns[0].tokens
        assert len(found) == len(texts)


def test_what_is_no_chat_has_no_messages(chatml: Renderer, tmp_path: Path) -> None:
    model = turn("model", chatml.encode_completion("2"), "length")
    text = turn("prompt", chatml.encode_prompt("1 + 1 ="))
    assert ChatReader(chatml).messages([text, model]) is None
    several = tuple(Message(role, "x") for role in ("user", "assistant", "user"))
    assert ChatReader(chatml).messages(played(chatml, several, "2")) is None
    make_policy(tmp_path / "bare", 0)
    bare = Renderer(tmp_path / "bare")
    turns = [turn("prompt", bare.encode_prompt("21>")), turn("model", [5])]
    assert ChatReader(bare).messages(turns) is None


def test_a_student_with_another_tokenizer_learns_the_messages(tmp_path: Path) -> None:
    """Without messages the rollout is refused, as its tokens mean other texts."""
    make_policy(tmp_path / "student", 0)
    template = "{% for m in messages %}{{ m.content }}>{% endfor %}"
    (tmp_path / "student/chat_template.jinja").write_text(template)
    row = {
        "turns": [
            {"kind": "prompt", "text": "<u>21<a>", "tokens": [9, 9], "finish": None},
            {"kind": "model", "text": "12</s>", "tokens": [8, 8], "finish": "stop"},
        ],
        "submission": "ab",
        "group": 0,
        "reward": 1.0,
    }
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="another tokenizer than the model's"):
        read_examples(data, tmp_path / "student", 99, Reading())
    row["messages"] = said(("user", "21"), ("assistant", "12"))
    data.write_text(json.dumps(row) + "\n")
    ((example,),), *_ = read_examples(data, tmp_path / "student", 99, Reading())
    renderer = Renderer(tmp_path / "student")
    assert renderer.decode_completion(example.segments[0].tokens, ())[0].endswith("21>")
    assert renderer.decode_completion(example.model_tokens, ())[0].startswith("12")
