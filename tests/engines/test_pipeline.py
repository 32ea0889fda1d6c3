"""A model split by layers generates what the whole one generates."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from peers.engines.engine import Engine
from peers.engines.native import NativeEngine
from peers.engines.pipeline.channel import Channel, Load, Run, greet_stage, read_secret
from peers.engines.pipeline.engine import PipelineEngine
from peers.engines.pipeline.remote import RemoteStage, serve
from peers.engines.pipeline.stage import LocalStage, Work, split_layers
from peers.engines.registry import make_engine
from peers.inference.settings import InferenceSettings
from peers.validator.role import ValidatorSettings
from swarm.errors import UserError
from tests.engines.conformance import Conformance
from tests.engines.families import SIZES, SUPPORTED, save_random
from tests.engines.harness import complete, prefill_completions

PROMPTS = [[1, 5, 9], [3], [7, 7, 2, 40, 41, 42, 8, 11, 12, 49], [1, 5, 9], [11, 12], [2] * 20]
SECRET = b"sixteen bytes or more"
CPU = torch.device("cpu")


@contextlib.contextmanager
def served(engines: int = 1, told: list[str] | None = None) -> Iterator[str]:
    """The address of a stage in a thread, for that many engines one after another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stage, lines = LocalStage(CPU), told if told is not None else []

        def run() -> None:
            for _ in range(engines):
                serve(listener, stage, SECRET, lines.append)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def pipeline(folder: Path, stages: list[Any], **options: Any) -> Iterator[PipelineEngine]:
    engine = PipelineEngine(folder, stages, CPU, torch.float32, **options)
    try:
        yield engine
    finally:
        engine.close()


def assert_same(split: Any, whole: Any) -> None:
    """Same tokens, log-probabilities and states, with other rows beside them."""
    rows, stops = [4, 0, 9, 5, 2, 7], [0, 3]
    ours, theirs = (
        complete(each, PROMPTS, rows, (1, 2), 0.8, stops, 14) for each in (split, whole)
    )
    assert ours.tokens == theirs.tokens
    for one, other in zip(ours, theirs, strict=True):
        assert (one.finish, one.spans) == (other.finish, other.spans)
        torch.testing.assert_close(
            one.log_probabilities, other.log_probabilities, atol=1e-5, rtol=0
        )
        for field in ("hidden", "prompt_hidden"):
            assert getattr(one, field).shape == getattr(other, field).shape
            torch.testing.assert_close(
                getattr(one, field), getattr(other, field), atol=1e-2, rtol=1e-2
            )
    again, expected = (prefill_completions(each, PROMPTS, ours.tokens) for each in (split, whole))
    for state, wanted in zip(again.states, expected.states, strict=True):
        torch.testing.assert_close(split.logits(state), whole.logits(wanted), atol=1e-4, rtol=0)


class TestPipeline(Conformance):
    def make(self, folder: Path, policy: int = 0) -> Engine:
        stages = [LocalStage(CPU), LocalStage(CPU)]
        return PipelineEngine(folder, stages, CPU, torch.float32, policy=policy)


@pytest.mark.parametrize("name", ["llama-yarn", "qwen2-window", "qwen3-moe", "gemma2", "gemma3"])
@pytest.mark.parametrize("slots", [2, 64])
def test_stages_on_devices_of_one_process(name: str, slots: int, tmp_path: Path) -> None:
    save_random(SUPPORTED[name], tmp_path, seed=1)
    with pipeline(
        tmp_path, [LocalStage(CPU), LocalStage(CPU)], slots=slots, layers=[3, 1]
    ) as split:
        assert_same(split, NativeEngine(tmp_path))


def test_stages_of_other_processes_speak_over_a_socket(tmp_path: Path) -> None:
    """Swaps weights, and refuses those that do not fit before any stage has changed."""
    for seed, name in ((1, "old"), (2, "new")):
        save_random(SUPPORTED["gemma2"], tmp_path / name, seed)
    save_random(SUPPORTED["gemma"], tmp_path / "other", 3)
    with contextlib.ExitStack() as stack:
        stages: list[Any] = [RemoteStage(stack.enter_context(served()), SECRET) for _ in range(4)]
        split = stack.enter_context(pipeline(tmp_path / "old", stages, slots=4))
        assert_same(split, NativeEngine(tmp_path / "old"))
        with pytest.raises(UserError, match="family differs"):
            split.load_weights(tmp_path / "other", 1)
        assert_same(split, NativeEngine(tmp_path / "old"))
        split.load_weights(tmp_path / "new", 1)
        assert_same(split, NativeEngine(tmp_path / "new", policy=1))


def test_layers_are_split_evenly_or_as_given(tmp_path: Path) -> None:
    assert split_layers(10, 3) == [range(4), range(4, 7), range(7, 10)]
    assert split_layers(10, 3, [1, 2, 7]) == [range(1), range(1, 3), range(3, 10)]
    save_random(SUPPORTED["llama"], tmp_path, seed=1)
    for layers in ([2, 1], [4], [4, 0], [2, 2, 0]):
        with pytest.raises(UserError, match="does not split 4 layers over 2 stages; change stage_"):
            PipelineEngine(tmp_path, [LocalStage(CPU)] * 2, CPU, torch.float32, layers=layers)


# --- strangers and broken rules ------------------------------------------------------------------


def test_a_side_without_the_secret_is_refused(tmp_path: Path) -> None:
    told: list[str] = []
    with served(told=told) as address, pytest.raises(UserError, match="give both sides the same"):
        RemoteStage(address, b"another secret, long enough")
    assert told[0].endswith("does not know the stage's secret")


def broken(send: Callable[[Channel, socket.socket], object]) -> str:
    """The stage's last line about an engine that breaks a rule after the handshake."""
    told: list[str] = []
    with served(told=told) as address:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        channel = Channel(connection, "stage")
        greet_stage(channel, SECRET)
        send(channel, connection)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        channel.close()
    return told[-1]


@pytest.mark.parametrize(
    ("send", "line"),
    [
        (lambda channel, _: channel.send(Run(Work([1], [0], [0]))), "it holds no layers"),
        (lambda channel, _: channel.send(Run(Work([], [], []))), "contradict each other"),
        (lambda channel, _: channel.send(Run(Work([1], [0], [9999]))), "outside the caches"),
        (lambda channel, _: channel.send(Run(Work([1], [9], []))), "does not begin at 0"),
        (lambda _, connection: connection.sendall(struct.pack("<II", 1 << 30, 0)), "1073741824"),
        (lambda _, connection: connection.sendall(struct.pack("<II", 3, 0) + b"abc"), "unknown"),
        (lambda channel, _: channel.send(Run(Work([1], [0], [-1]))), "unknown"),
        (lambda channel, _: channel.send(Load(b"{", 0, 1, "float32", 0)), "no config"),
        (lambda channel, _: channel.send(Load(b"{}", 0, 1, "float32", 0)), "model_type is None"),
    ],
)
def test_a_broken_rule_ends_the_connection(send: Any, line: str) -> None:
    assert line in broken(send)


def test_what_goes_wrong_before_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be reached .* swarm engine stage"):
        RemoteStage("127.0.0.1:1", SECRET)
    with pytest.raises(UserError, match="cannot be read"):
        read_secret(tmp_path / "none")
    (tmp_path / "short").write_bytes(b"abc\n")
    with pytest.raises(UserError, match="has 3 bytes; it must have at least 16"):
        read_secret(tmp_path / "short")


def test_the_settings_choose_the_split(tmp_path: Path) -> None:
    save_random(SUPPORTED["llama"], tmp_path, seed=1)
    (tmp_path / "secret").write_bytes(SECRET)
    given: dict[str, Any] = {"stage_secret": str(tmp_path / "secret"), "stage_layers": [1, 3]}
    settings = InferenceSettings(devices=["cpu", "cpu"], stage_layers=[1, 3])
    assert_same(make_engine("native", tmp_path, settings.hardware), NativeEngine(tmp_path))
    judging = ValidatorSettings(devices=["cpu", "cpu"], stage_layers=[1, 3])
    assert judging.hardware == msgspec.structs.replace(
        settings.hardware, memory_share=judging.hardware.memory_share
    )
    with served() as one, served() as two:
        settings = InferenceSettings(stages=[one, two], **given)
        split = make_engine("native", tmp_path, settings.hardware)
        assert isinstance(split, PipelineEngine)
        assert_same(split, NativeEngine(tmp_path))
        split.close()
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"stages": ["127.0.0.1:1"]}, "no stage_secret"),
        ({"stages": ["127.0.0.1:1"], "devices": ["cpu"]}, "both set"),
        ({"devices": ["cuda:7"]}, "is not on this machine"),
    ]
    for wrong, sentence in mistakes:
        with pytest.raises(UserError, match=sentence):
            make_engine("native", tmp_path, InferenceSettings(**wrong).hardware)


# --- processes -----------------------------------------------------------------------------------


@contextlib.contextmanager
def processes(count: int, folder: Path, memory_mb: int) -> Iterator[list[str]]:
    """Addresses of `swarm engine stage` processes with that much memory each."""
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    command = [
        sys.executable, "-c", "from swarm.commands.main import main; main()", "engine", "stage",
        "--secret", str(secret), "--memory-mb", str(memory_mb),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(count):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        addresses = []
        for process in started:
            assert process.stdout is not None
            addresses.append(process.stdout.readline().split()[-1])
        yield addresses


@pytest.mark.slow
def test_four_processes_generate_with_a_model_that_none_could_hold(tmp_path: Path) -> None:
    """134 MB of layers in fp32, and 90 MB for each process."""
    config = transformers.LlamaConfig(
        **{
            **SIZES,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        }
    )
    save_random(config, tmp_path, seed=1, scale=0.05)
    with processes(4, tmp_path, memory_mb=90) as addresses:
        alone = RemoteStage(addresses[0], SECRET)
        with pytest.raises(UserError, match=r"no memory for layers 0 to 7 .* fewer with stage_"):
            PipelineEngine(tmp_path, [alone], CPU, torch.float32)
        alone.close()
        stages: list[Any] = [RemoteStage(address, SECRET) for address in addresses]
        with pipeline(tmp_path, stages) as split:
            assert_same(split, NativeEngine(tmp_path))
