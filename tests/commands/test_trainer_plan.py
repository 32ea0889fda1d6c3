"""`swarm trainer plan`: from a config.json alone, for a person and for a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands.harness import complaint, swarm
from tests.trainer.test_plan import QWEN_32B

EIGHT_H100 = ("--gpus", "8", "--memory-gb", "80", "--set", "activation_checkpointing=true")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "config.json"
    path.write_text(json.dumps(QWEN_32B))
    return path


def test_a_plan_that_does_not_fit_names_settings_that_need_less(config: Path) -> None:
    outcome = swarm("trainer", "plan", "--model", config, *EIGHT_H100)
    assert outcome.status == 1
    lines = outcome.output.splitlines()
    assert lines[0].startswith("32,763,876,352 parameters on 8 ranks, passes of 16,384 tokens")
    parts = {line.strip().split("  ")[0]: line.split()[-2:] for line in lines if "GB" in line}
    assert "weights, fp32" in parts and "past policies and reference" in parts
    assert lines[-1].startswith("it does not fit: each of the ranks needs 101 GB of device memory")
    assert 'less is needed with trainer.optimiser = "adamw8bit", ' in lines[-1]


def test_a_plan_that_fits_says_what_is_left(config: Path) -> None:
    outcome = swarm(
        "trainer", "plan", "--model", config.parent, *EIGHT_H100,
        "--set", "optimiser=adamw8bit", "--host-memory-gb", "1000",
    )  # fmt: skip
    assert outcome.status == 0
    assert outcome.output.splitlines()[-1].startswith("it fits, and leaves 3.4 GB of each device")


def test_a_program_reads_the_plan_as_json(config: Path) -> None:
    outcome = swarm(
        "trainer",
        "plan",
        "--model",
        config,
        "--json",
        "--context",
        "2048",
        "--set",
        "pass_tokens=6144",
    )
    found = json.loads(outcome.output)
    assert (found["fits"], found["tokens"], found["device_limit"]) == (True, 6144, 0)
    assert {part["memory"] for part in found["parts"]} == {"device", "host"}


def test_a_teacher_of_another_size_is_planned(config: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B | {"num_hidden_layers": 2}))
    plan = ("trainer", "plan", "--model", tmp_path, "--context", "1024", "--json")
    outcome = swarm(*plan, "--set", f"teacher={config.parent}")
    parts = {part["name"]: part["bytes"] for part in json.loads(outcome.output)["parts"]}
    assert parts["teacher's weights"] == 2 * 32_763_876_352
    assert "teacher none is no folder" in complaint(*plan, "--set", "teacher=none")


@pytest.mark.slow
def test_settings_of_the_layout_are_planned(config: Path) -> None:
    layout = ("--set", "tensor_parallel=4", "--context", "1024")
    outcome = swarm("trainer", "plan", "--model", config, *EIGHT_H100, *layout, "--json")
    parts = {part["name"]: part["bytes"] for part in json.loads(outcome.output)["parts"]}
    assert 18.4e9 < parts["weights, fp32"] < 19.2e9
    adapters = swarm("trainer", "plan", "--model", config, "--adapter-rank", "16", "--json")
    assert "adapters, fp32" in {each["name"] for each in json.loads(adapters.output)["parts"]}


def test_a_plan_reads_no_more_than_the_model_does(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_32B | {"max_position_embeddings": 64}))
    plan = ("trainer", "plan", "--model", tmp_path)
    assert json.loads(swarm(*plan, "--json").output)["tokens"] == 64
    said = complaint(*plan, "--context", "65")
    assert said == (
        "--context is 65; the model reads at most 64 tokens (max_position_embeddings in its "
        "config.json)"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "nowhere"), "--model nowhere is no folder; give a Hugging Face folder"),
        (("--model", ".", "--set", "optimiser"), "--set is 'optimiser'; write it as NAME=VALUE"),
        (("--model", ".", "--set", "optimiser=sgd"), "optimiser is 'sgd'"),
        (("--model", "m", "--device", "tpu"), "--device is 'tpu'; it must be one of cuda"),
        (("--model", "m", "--memory-gb", "inf"), "--memory-gb is inf; it must be at most"),
        (("--model", "m", "--host-memory-gb", "1e300"), "it must be at most 1e+06"),
        (("--model", __file__), "is a file; give a Hugging Face folder"),
    ],
)
def test_wrong_options_are_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in complaint("trainer", "plan", *arguments)


INTELLECT_1 = QWEN_32B | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def test_one_of_several_trainers_is_planned_at_intellect_1s_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(INTELLECT_1))
    of_one = ("--model", tmp_path, *EIGHT_H100[:4], "--set", "sequence_tokens=8192")
    plan = ("trainer", "plan", "--outer", *of_one)
    outcome = swarm(*plan)
    assert outcome.status == 1
    assert "less is needed with replica.activation_checkpointing = true" in outcome.output
    outcome = swarm(*plan, "--set", "activation_checkpointing=true")
    assert outcome.status == 0
    assert "past policies" not in outcome.output and "it fits, and leaves" in outcome.output
    assert "[replica]: unknown key 'save_steps'" in complaint(*plan, "--set", "save_steps=3")
