"""The channel between an engine and a stage: strangers, and engines that break the rules."""

from __future__ import annotations

import contextlib
import json
import socket
import struct

import msgspec
import torch

from peers.engines.architecture import describe
from peers.engines.pipeline.channel import (
    Answer,
    Channel,
    Load,
    Message,
    Run,
    TensorData,
    greet_engine,
)
from peers.engines.pipeline.remote import serve_next
from peers.engines.pipeline.stage import LocalStage, Work
from tests.fuzz.target import Target

SECRET = b"sixteen bytes or more"
SENT_BYTES_MAX = 1 << 16
CONFIG = {
    "model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _frame(message: Message, data: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return struct.pack("<II", len(encoded), len(data)) + encoded + data


def check_stage(raw: bytes) -> None:
    """A stranger before the handshake, then an engine after it."""
    for trusted in (False, True):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(raw[:SENT_BYTES_MAX])
            far.shutdown(socket.SHUT_WR)
            channel, stage = Channel(near, "engine"), LocalStage(torch.device("cpu"))
            with contextlib.suppress(ConnectionError):
                if not trusted:
                    greet_engine(channel, SECRET)
                    raise AssertionError("a stranger was let in")
                while True:
                    serve_next(channel, stage)


def _seeds() -> list[bytes]:
    answer = _frame(Answer(bytes(32), bytes(32)))
    shapes = {
        "input_layernorm": [4], "post_attention_layernorm": [4], "self_attn.q_proj": [4, 4],
        "self_attn.k_proj": [2, 4], "self_attn.v_proj": [2, 4], "self_attn.o_proj": [4, 4],
        "mlp.gate_proj": [4, 4], "mlp.up_proj": [4, 4], "mlp.down_proj": [4, 4],
    }  # fmt: skip
    assert describe(CONFIG).head_size == 2
    load = _frame(Load(json.dumps(CONFIG).encode(), 0, 1, "float32", len(shapes)))
    for name, shape in shapes.items():
        data = bytes(4 * torch.Size(shape).numel())
        load += _frame(TensorData(f"model.layers.0.{name}.weight", shape, "float32"), data)
    prompt = _frame(Run(Work([3, 1], [0, 0], [0, 1])), bytes(2 * 3 * 4 * 4))
    step = _frame(Run(Work([1, 1], [3, 1], [0, 1])), bytes(2 * 1 * 4 * 4))
    return [answer, load, load + prompt + step, load + load, step]


TARGETS = [Target("stage", check_stage, _seeds)]
