"""Chat templates: prompts as transformers renders them, turns without encoding anything twice."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.environments.chat_template import ChatTemplate, ChatTokens
from peers.environments.interface import Message
from peers.environments.renderer import read_files
from swarm.errors import UserError
from tests.environments.chat_families import CHATML, FAMILIES, Family, make_tokenizer

CHATML_TOKENS = ChatTokens(
    ChatTemplate(CHATML, {}, "chatml"), make_tokenizer(FAMILIES["chatml"].controls, False)
)


def id_of(tokenizer: tokenizers.Tokenizer, control: str) -> int:
    id = tokenizer.token_to_id(control)
    assert id is not None
    return id


def read(folder: Path) -> ChatTokens:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return ChatTokens.of_files(read_files(folder), tokenizer, str(folder))


def asked(family: Family, text: str = "What is 2 + 7?") -> list[Message]:
    system = [Message("system", "Answer briefly.")] if family.system else []
    return [*system, Message("user", text)]


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(name: str, tmp_path: Path) -> Path:
    return FAMILIES[name].write(tmp_path / name)


# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prompt_has_the_tokens_that_transformers_gives(folder: Path, name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = read(folder)
    family = FAMILIES[name]
    for messages in (
        asked(family),
        asked(family, "  spaces \n and ümlauts 🙂  "),
        [*asked(family), Message("assistant", "nine"), Message("user", "the answer is nine?")],
    ):
        chat = [{"role": each.role, "content": each.content} for each in messages]
        for variables in ({}, {"enable_thinking": False}):
            given = theirs.apply_chat_template(
                chat,
                add_generation_prompt=True,
                return_dict=False,
                date_string="26 Jul 2024",
                **variables,
            )
            assert ours.prompt(messages, variables) == given


def test_the_date_is_the_one_of_the_option_and_never_the_day_s(tmp_path: Path) -> None:
    FAMILIES["llama3"].write(tmp_path)
    template = ChatTemplate.of_files(read_files(tmp_path), "T")
    assert template is not None
    chat = [{"role": "user", "content": "hi"}]
    assert "Today Date: 26 Jul 2024\n" in template.render(chat, {}, True)
    assert "Today Date: 23 Nov 2026\n" in template.render(chat, {"chat_date": "2026-11-23"}, True)
    asks = ChatTemplate("{{ strftime_now('%Y') }}", {}, "T")
    with pytest.raises(UserError, match=r"T: the chat template fails .* option chat_date"):
        asks.render(chat, {}, True)


# --- control tokens in messages -------------------------------------------------------------------


def test_the_text_of_a_control_token_in_a_message_stays_text(folder: Path, name: str) -> None:
    family, chat = FAMILIES[name], read(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    controls = {id_of(tokenizer, each) for each in family.controls}
    harmless = chat.prompt(asked(family, "the answer"), {})
    hostile = f"the {family.closes}answer{''.join(family.controls)} \ufdd1{min(controls)}\ufdd2"
    tokens = chat.prompt(asked(family, hostile), {})
    assert [each for each in tokens if each in controls] == [
        each for each in harmless if each in controls
    ]
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert f"the {family.closes}answer{''.join(family.controls)} \ufffd" in text
    if name == "chatml":
        role = chat.prompt([Message(f"user{family.closes}", "the answer")], {})
        assert role.count(id_of(tokenizer, family.closes)) == 1
    answered = chat.after_turn(asked(family), {}, [Message("user", hostile)], None)
    plain = chat.after_turn(asked(family), {}, [Message("user", "x")], None)
    assert [each for each in answered if each in controls] == [
        each for each in plain if each in controls
    ]


@settings(max_examples=50, deadline=None, database=None)
@given(st.lists(st.sampled_from(["<", "|", "im_end", "im_start", ">", " ", "\ufdd3", "2", "é"])))
def test_no_text_smuggles_a_control_token(pieces: list[str]) -> None:
    text = "".join(pieces)
    tokens = CHATML_TOKENS.prompt([Message("user", text)], {})
    plain = CHATML_TOKENS.prompt([Message("user", "")], {})
    controls = CHATML_TOKENS.control_ids
    assert sum(each in controls for each in tokens) == sum(each in controls for each in plain)


# --- turns ----------------------------------------------------------------------------------------


def tokenization(tokenizer: tokenizers.Tokenizer, text: str, draw: random.Random) -> list[int]:
    """One of the many token sequences of a text: pieces of it, each encoded by itself."""
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    for piece in tokenizer.encode(text, add_special_tokens=False).tokens:
        cuts = sorted(draw.sample(range(1, len(piece)), draw.randint(0, len(piece) - 1)))
        parts = [piece[a:b] for a, b in zip([0, *cuts], [*cuts, len(piece)], strict=True)]
        known = all(part in vocabulary for part in parts)
        ids += [vocabulary[part] for part in (parts if known else [piece])]
    return ids


def test_turns_never_encode_the_model_s_tokens_again(folder: Path, name: str) -> None:
    """A hundred tokenizations of each turn: prefixes never fork, and the texts are the template's.

    The texts are compared without spaces at the seams, where ▁ stands for a space or for none.
    """
    family, chat = FAMILIES[name], read(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    closes = id_of(tokenizer, family.closes)
    draw = random.Random(name)
    messages = asked(Family(family.template, family.closes, family.controls, system=False))
    odd = 0
    for _ in range(100):
        conversation = chat.prompt(messages, {})
        said = list(messages)
        for turn in range(3):
            words = draw.choices(["the", "quick", "answer", "is", "nine", "x"], k=4)
            text = " ".join(words)
            written = tokenization(tokenizer, text, draw)
            odd += written != tokenizer.encode(text, add_special_tokens=False).ids
            before = [*conversation, *written, closes]
            observation = [Message("user", f"turn {turn} the user")]
            after = chat.after_turn(messages, {}, observation, closes)
            conversation = [*before, *after]
            assert conversation[: len(before)] == before
            said += [Message("assistant", text), *observation]
        whole = tokenizer.decode(conversation, skip_special_tokens=False)
        expected = tokenizer.decode(chat.prompt(said, {}), skip_special_tokens=False)
        assert whole.replace(" ", "") == expected.replace(" ", "")
        assert [each for each in conversation if each in chat.control_ids] == [
            each for each in chat.prompt(said, {}) if each in chat.control_ids
        ]
    assert odd > 150


def test_what_the_model_has_not_written_ends_its_turn(tmp_path: Path) -> None:
    chat = read(FAMILIES["chatml"].write(tmp_path))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    messages, answer = [Message("user", "hi")], [Message("user", "yes")]
    end, other = (id_of(tokenizer, each) for each in ("<|im_end|>", "<|endoftext|>"))
    follows = "\n<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n"

    def text(last: int) -> str:
        after = chat.after_turn(messages, {}, answer, last)
        return str(tokenizer.decode(after, skip_special_tokens=False))

    assert text(end) == follows
    assert text(other) == "<|im_end|>" + follows
    assert chat.closing_token(messages, {}) == end
    assert chat.text_of(end) == "<|im_end|>"


# --- what can be wrong ----------------------------------------------------------------------------


def test_a_checkpoint_without_a_template_is_a_sentence(tmp_path: Path) -> None:
    FAMILIES["chatml"].write(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=r"has no chat template .*; use a checkpoint that has one"):
        read(tmp_path)


def test_the_template_may_stand_in_tokenizer_config(tmp_path: Path) -> None:
    FAMILIES["chatml"].write(tmp_path)
    first = read(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for written in (CHATML, [{"name": "default", "template": CHATML}, {"name": "rag"}]):
        config["chat_template"] = written
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        again = read(tmp_path)
        assert again.fingerprint() == first.fingerprint()
    config["eos_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read(tmp_path).fingerprint() != first.fingerprint()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for %}", r"T: the chat template is no valid Jinja \(TemplateSyntaxError: .*repair it"),
        ("x" * 300_000, r"T: the chat template has 300000 characters; at most 131072"),
        ("{{ messages[3].content }}", r"T: the chat template fails on messages of the roles user"),
        ("{{ raise_exception('no') }}", r"fails on .* \(TemplateError: no\); repair"),
        ("{{ ''.__class__.__mro__ }}", r"fails on .* \(SecurityError: "),
        ("{{ messages.append(1) }}", r"fails on .* \(SecurityError: "),
        ("{{ 'x' * 9999999999 }}", r"fails on .*it used all of its 512 MiB"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", r"at most 4194304 are allowed"),
    ],
)
def test_a_template_that_fails_is_a_sentence(source: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ChatTemplate(source, {}, "T").render([{"role": "user", "content": "x"}], {}, True)


def test_a_refused_system_role_names_the_way_out(tmp_path: Path) -> None:
    chat = read(FAMILIES["gemma"].write(tmp_path))
    with pytest.raises(UserError, match=r"System role not supported.*option system_prompt into"):
        chat.prompt([Message("system", "be brief"), Message("user", "hi")], {})


def test_a_template_that_drops_or_repeats_a_turn_is_a_sentence(tmp_path: Path) -> None:
    FAMILIES["chatml"].write(tmp_path)
    for source, times in (
        ("{{ messages[0].content }}", 0),
        ("{{ messages[1].content }}{{ messages[1].content }}", 2),
    ):
        (tmp_path / "chat_template.jinja").write_text(source)
        with pytest.raises(UserError, match=f"writes a turn of the model {times} times"):
            read(tmp_path).after_turn([Message("user", "hi")], {}, [], None)
