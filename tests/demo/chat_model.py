"""A small model for the demo with `--model`: the demo's own policy with a chat template."""

from __future__ import annotations

from pathlib import Path

from peers.engines.demo import make_policy

TEMPLATE = (
    "<bos>{% for message in messages if message.role != 'system' %}{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""A chat of one question has the tokens of the question as text."""


def make_chat_model(folder: Path, seed: int = 0) -> Path:
    """Make one with random weights; returns its folder."""
    make_policy(folder, seed)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder
