"""Chats of several turns on an engine, and chats as examples of supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peers.environments import Episodes, Message, Renderer, Task, TaskList, Tasks, Transcript
from peers.environments.chat import Chat, ChatOptions
from peers.environments.episodes import EpisodeLimits, Replies
from peers.environments.probe import probe_seed
from peers.learning.examples import Encoder, encode_examples
from swarm.wire.manifest import Sampling
from tests.environments.chat_families import FAMILIES

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "dtype": "float32",
}


class Refuses(Episodes):
    """Answers every turn with a message of a tool."""

    name, version = "refuses", "1"

    def tasks(self) -> Tasks:
        return TaskList([Task(f"What is {n} + 2?", "9") for n in range(50)])

    def grade(self, task: Task, transcript: Transcript) -> float:
        return float(len(transcript.turns) > 2)

    def start(self, task: Task) -> list[str]:
        return []

    def step(self, state: list[str], text: str) -> tuple[Message, ...] | None:
        state.append(text)
        return (Message("tool", f"no, {len(state)} times <|eot_id|>"),) if len(state) < 5 else None


@pytest.mark.slow
def test_what_an_engine_plays_a_validator_replays(tmp_path: Path) -> None:
    """Whichever stop token ends a turn, the template's own ends it in the next request."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from peers.engines.episodes import play
    from peers.engines.native import NativeEngine

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG)).save_pretrained(tmp_path)
    renderer = Renderer(FAMILIES["llama3"].write(tmp_path))
    environment = Chat(Refuses(), ChatOptions(system_prompt="Add."))
    task = environment.cached_tasks.draw(probe_seed(0), "train")
    ends = renderer.turn_end(task.prompt)
    assert ends is not None
    stops = [ends, *range(100, 114)]
    sampling = Sampling(stop_ids=stops, max_new_tokens=120, group_size=8)
    engine = NativeEngine(tmp_path)
    played = play(engine, renderer, [(environment, task)] * 8, range(8), (1, 2), sampling)
    limits = EpisodeLimits(stops, sampling.max_new_tokens, engine.capabilities.length_max)
    endings = set()
    for rollout in played.rollouts:
        segments = rollout.segments
        assert segments[0].tokens == renderer.encode_prompt(task.prompt)
        replies = Replies(environment, task, renderer, limits)
        for count in range(2, len(segments) + 1, 2):
            given = None if count == len(segments) else list(segments[count].tokens)
            assert replies.next(segments[:count]) == given
            if given is not None:
                last = segments[count - 1].tokens[-1]
                endings.add(last)
                assert (given[0] == ends) == (last != ends)
                assert given.count(ends) == 1 + (last != ends)
    assert len(endings) > 3


def test_an_example_of_a_chat_ends_as_the_template_ends_a_turn(tmp_path: Path) -> None:
    FAMILIES["chatml"].write(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 0}))
    tasks = [Task((Message("user", "1+1"),), "2"), Task("1+1", "2")]
    examples, left_out = encode_examples([[each] for each in tasks], Encoder(tmp_path, 100))
    assert left_out == 0
    assert [each.tokens[-1] for (each,) in examples] == [2, 0]  # <|im_end|>, <|endoftext|>
