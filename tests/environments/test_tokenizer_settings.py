"""Settings in a tokenizer's files that must, or must not, change what a model is given."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from peers.engines.demo import save_tokenizer
from peers.environments import Renderer
from peers.environments.interface import Message, Prompt

CHAT = (Message("user", "123456789"),)


def encoded(folder: Path) -> list[list[int]]:
    renderer = Renderer(folder)
    prompts: list[Prompt] = ["123456789>", CHAT]
    return [*map(renderer.encode_prompt, prompts), renderer.encode_completion("1")]


def test_truncation_and_padding_of_a_tokenizer_are_not_applied(tmp_path: Path) -> None:
    """Some models are published with what their training once cut its texts to."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}>")
    wanted = encoded(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert encoded(tmp_path) == wanted


def test_a_token_that_only_the_map_of_special_tokens_names_is_rendered(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}>")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for token in ("<bos>", {"content": "<bos>", "lstrip": False}):
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": token}))
        assert Renderer(tmp_path).encode_prompt(CHAT)[0] == Renderer(tmp_path).encode_prompt("1")[0]
