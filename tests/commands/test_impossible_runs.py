"""A run that cannot work is refused before it is signed, with one sentence."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from peers.engines.demo import make_tokenizer
from peers.environments import Generated, Renderer, Task, Tasks
from peers.environments.run_probe import check_prompts_fit
from peers.environments.sort_digits import SortDigits
from swarm.errors import UserError
from tests.commands.harness import complaint, swarm
from tests.commands.test_commands import RUN, TRAINER, VALIDATOR, create

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}


MEASURED = RUN.replace("[schedule]", "[thresholds]\nmeasured_tokens = 10000\n[schedule]")


def describe(folder: Path, text: str = RUN, **config: Any) -> list[str | Path]:
    """Write a model with this config to `folder`; return the arguments of `swarm run create`."""
    arguments = create(folder, text)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return arguments


def test_a_possible_run_is_signed_without_a_warning(tmp_path: Path) -> None:
    outcome = swarm(*describe(tmp_path, MEASURED))
    assert outcome.status == 0 and outcome.errors == ""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("stop_ids = [2]", "stop_ids = [2, 64]", "sampling.stop_ids has 64, but the model's vocab"),
        ("stop_ids = [2]", "stop_ids = []", "sampling: stop_ids is []"),
        ("max_new_tokens = 8", "max_new_tokens = 57", "tokens that makes 65, but the model has 64"),
        ("temperature = 1.0", "temperature = 0", "sampling: temperature is 0"),
        ("temperature = 1.0", "temperature = nan", "temperature is nan"),
        ("temperature = 1.0", "top_p = 0", "sampling: unknown key 'top_p'; there are: group_size"),
        ("[sampling]", "temperature = 0\n[sampling]", "[0]: temperature is 0: Expected `float` >"),
        ("[sampling]", "temperature = 11\n[sampling]", "temperature is 11: Expected `float` <= 10"),
        ("learning_rate = 6e-4", "learning_rate = -6e-4", "rate is -0.0006: Expected `float` > 0"),
        (
            "learning_rate = 6e-4",
            "learning_rate = nan",
            "learning_rate is nan; it must be a finite",
        ),
        ("learning_rate = 6e-4", "beta2 = 1.0", "optimiser: beta2 is 1.0: Expected `float` < 1"),
        ("[optimiser]", "[objective]\nreserved = true\n[optimiser]", "objective.reserved is true"),
        ("[optimiser]", '[objective]\nname = "grop"\n[optimiser]', "near it are grpo"),
        (
            "[optimiser]",
            "[objective]\nadvantage_options = {x = 1}\n[optimiser]",
            "advantage_options has 'x'; the advantage 'group' takes: none",
        ),
        (
            "[optimiser]",
            "[objective]\noverlong_tokens = 9\n[optimiser]",
            "overlong_tokens is 9; it must be at most sampling.max_new_tokens (8)",
        ),
        (
            "[optimiser]",
            "[objective]\nkl_coefficient = -1.0\n[optimiser]",
            "objective: kl_coefficient is -1.0: Expected `float` >= 0",
        ),
        (
            "[optimiser]",
            '[outer]\nrounds = 9\nadmission = "scored"\nshards = 2\n[optimiser]',
            'outer.shards is 2 and outer.admission "scored", but strangers\' contributions are',
        ),
        ("learning_rate = 6e-4", "warmup_steps = 101", "but the whole run has 100 optimiser steps"),
        ("learning_rate = 6e-4", "gradient_norm_max = 0.0", "norm_max is 0.0: Expected `float` >"),
        (f'["{TRAINER}"]', "[]", "trainers names nobody in version 3; list the id"),
        (f'trainers = ["{TRAINER}"]', "", "trainers names nobody in version 3; list the id"),
        (f'["{VALIDATOR}"]', "[]", "validators names nobody in version 3; list the id"),
        (f'["{TRAINER}"]', '"all"', "trainers must be a list, not str"),
        (f'["{TRAINER}"]', f'["{TRAINER}", "{TRAINER}"]', f"trainers names {TRAINER} twice"),
        (f'["{TRAINER}"]', f'[{{peer = "{"x" * 50}"}}]', "trainers: "),
        (
            f'["{TRAINER}"]',
            f'[{{peer = "{TRAINER}", from_version = 4}}]',
            "names nobody in version",
        ),
        ("[schedule]", "[thresholds]\nrecompute_safety = 0.5\n[schedule]", "`float` >= 1"),
        ("[schedule]", "[thresholds]\nmargin_max = inf\n[schedule]", "margin_max is inf; it must"),
        (
            "[sampling]",
            "accuracy_max = 8.0\n[sampling]",
            "accuracy_min is 0 and accuracy_max 8, so",
        ),
        ("[schedule]", "[limits]\nverdict_seconds = 0.0\n[schedule]", "verdict_seconds is 0.0: Ex"),
        ("[schedule]", "[limits]\nsubmission_bytes_max = 9\n[schedule]", "32 completions of 8 tok"),
        ("[schedule]", "[admissions]\nunproven_max = 0\n[schedule]", "nobody new could ever take"),
        (
            "[schedule]",
            '[admissions]\npolicy = "allow-list"\n[schedule]',
            "admissions.allowed is em",
        ),
        (
            "[sampling]",
            "options.lengths = [0]\n[sampling]",
            "options: lengths is [0]: Expected `int`",
        ),
        ("[sampling]", "options.depth = 3\n[sampling]", "unknown key 'depth'; there are: alpha, "),
    ],
)
def test_what_contradicts_itself_or_the_model(
    old: str, new: str, sentence: str, tmp_path: Path
) -> None:
    assert old in RUN
    assert sentence in complaint(*describe(tmp_path, RUN.replace(old, new)))
    assert not (tmp_path / "run.manifest").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "newer"}, "cannot be loaded by transformers"),
        ({"vocab_size": 10}, "has the token 63, but the model's vocabulary has 10 tokens"),
    ],
)
def test_models(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in complaint(*describe(tmp_path, **config))
    assert not (tmp_path / "run.manifest").exists()


def test_a_run_is_warned_that_it_observes_until_thresholds_are_measured(tmp_path: Path) -> None:
    """Whatever its model: nobody knows by its depth how far its engines differ."""
    for config in ({}, {"num_hidden_layers": 12}, {"dtype": "float32"}):
        warned = swarm(*describe(tmp_path, **config))
        assert warned.status == 0
        assert "validators of this run observe" in warned.errors
        (tmp_path / "run.manifest").unlink()  # a version cannot be signed twice
    assert swarm(*describe(tmp_path, MEASURED, num_hidden_layers=12)).errors == ""


def test_without_a_model_it_says_what_was_not_checked(tmp_path: Path) -> None:
    assert "has no config.json, so stop ids, lengths" in swarm(*create(tmp_path)).errors


ENVIRONMENT = """
import random
from peers.environments import Episodes, NotGradable, Task
from peers.environments.sort_digits import SortDigits

class Broken(SortDigits, Episodes):
    name = "broken"
    start = lambda self, task: None
    step = lambda self, state, text: None
"""


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("def grade(self, *_): return 1 / 0", "cannot grade the completion .*ZeroDivisionError"),
        ("def grade(self, *_): return float('nan')", "the reward nan; it must be a number in"),
        ("def grade(self, *_): return 'good'", "the reward 'good'; it must be a number in"),
        ("def grade(self, *_): return random.random()", "equal texts must get equal rewards"),
        (
            "def step(self, *_): return str(random.random())",
            "gives the turn '.*' first the answer '.*; equal turns must get equal answers",
        ),
        ("def step(self, *_): return 1 / 0", "cannot answer the turn '.*' .ZeroDivisionError"),
        ("def tasks(self): raise OSError('gone')", "cannot draw a task .OSError: gone.; repair"),
        (
            "def tasks(self): self.draw = lambda *_: 'sort'; return self",
            "draws 'sort'; it must be a Task",
        ),
        (
            "def tasks(self): self.draw = lambda *_: Task(str(random.random()), ''); return self",
            "different tasks from one",
        ),
        ("def __init__(self): import nowhere", "cannot be loaded .ModuleNotFoundError"),
    ],
)
def test_environments(
    code: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "broken-1.dist-info").mkdir(parents=True)
    (package / "broken-1.dist-info/METADATA").write_text("Name: broken\nVersion: 1\n")
    (package / "broken-1.dist-info/entry_points.txt").write_text(
        "[swarm.environments]\nbroken = broken_environment:Broken\n"
    )
    (package / "broken_environment.py").write_text(f"{ENVIRONMENT}    {code}\n")
    monkeypatch.syspath_prepend(package)
    monkeypatch.delitem(sys.modules, "broken_environment", raising=False)
    said = complaint(*describe(tmp_path, RUN.replace("sort-digits", "broken")))
    assert "environment 'broken' " in said and re.search(sentence, said), said
    assert not (tmp_path / "run.manifest").exists()


def test_a_tool_that_no_replay_repeats_needs_a_served_run(tmp_path: Path) -> None:
    tools = RUN.replace("sort-digits", "tools").replace(
        'version = "1"', 'version = "1"\noptions = {tools = ["python"]}', 1
    )
    assert 'set where = "served" for it' in complaint(*describe(tmp_path, tools))


class LongPrompts(SortDigits):
    """Draws a prompt of 20,002 tokens for one seed in thirty-two."""

    def tasks(self) -> Tasks:
        return Generated(lambda seed: Task("1" * (20_001 if seed[0] < 8 else 3), "1"))


def test_a_served_environment_with_prompts_that_fit_no_message_is_refused(tmp_path: Path) -> None:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    renderer = Renderer(tmp_path)
    check_prompts_fit(SortDigits(), renderer)
    with pytest.raises(UserError, match=r"a prompt of 20002 tokens, .* at most 20000; leave"):
        check_prompts_fit(LongPrompts(), renderer)
