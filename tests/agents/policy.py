"""A tiny policy that calls the tool `add`, and ends with what the tool said, in any chat."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from peers.engines.demo import make_policy
from peers.engines.model import save
from peers.environments.interface import Message
from peers.environments.renderer import Renderer
from tests.endpoint.test_tools import HERMES

POSITIONS = 1 << 15
"""The frameworks' own prompts have thousands of characters, each a token here."""

CALLS = "llama"
"""The form of a call: the tokenizer knows no underscore, which the other forms have."""

TEMPLATE = (
    HERMES.replace("\\n<call>\\n", "")
    .replace("\\n</call>", "")
    .replace('"arguments"', '"parameters"')
)

CALL = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
ANSWER, DOUBT = "3.", "4."
STEPS = 400
END = "</tool_response>"


def make_caller(folder: Path, doubt: float = 0.0) -> None:
    """Make the policy in `folder`, in about a minute. `doubt`: the share of its answers that are
    wrong, so that there is something to learn."""
    model = make_policy(folder, positions=POSITIONS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    renderer, draws = Renderer(folder), random.Random(0)
    texts = " ".join(path.read_text() for path in sorted(Path("docs").glob("*.md"))).lower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(STEPS):
            length = int(2 ** draws.uniform(5, 11))
            rows = [
                _row(renderer, draws, texts, length, doubt) for _ in range(max(1, 2048 // length))
            ]
            _learn(model, rows)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    save(model, folder, tokenizer_from=folder)


def _row(
    renderer: Renderer, draws: random.Random, texts: str, length: int, doubt: float
) -> list[list[int]]:
    """Segments of an episode, every second one the model's."""
    encoded, opening = renderer.encode_completion, [2, 1, *renderer.encode_completion("assistant:")]
    at = draws.randrange(len(texts) - length)
    text, other = texts[at : at + length], texts[at : at + 7]
    prompt = [1, *encoded(text), *opening]
    if draws.random() < 0.5:  # as clients ask
        sums = f"{draws.randrange(100)} + {draws.randrange(100)}?"
        asked = draws.choice([sums, f"{other} {sums}", text[-20:]])
        half = draws.randrange(length)
        chat = (Message("system", text[half:]), Message("user", asked))
        told = {"tools": [{"function": {"name": "add", "description": text[:half]}}]}
        prompt = renderer.chat.prompt(chat, told)
    said = str(draws.choice([3, draws.randrange(1000), other]))
    answer = DOUBT if draws.random() < doubt else ANSWER
    return [
        prompt,
        [*encoded(CALL), 2],
        [1, *encoded(f"user:<tool_response>\n{said}\n{END}"), *opening],
        [*encoded(answer), 2],
    ]


def _learn(model: Any, rows: list[list[list[int]]]) -> None:
    """Add the gradient of the model's segments."""
    sequences = [[token for segment in row for token in segment] for row in rows]
    longest = max(map(len, sequences))
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), -100)
    for index, row in enumerate(rows):
        start = 0
        for number, segment in enumerate(row):
            end = start + len(segment)
            tokens[index, start:end] = torch.tensor(segment)
            if number % 2:
                labels[index, start:end] = tokens[index, start:end]
            start = end
    model(input_ids=tokens, labels=labels).loss.backward()
