"""A stage in another process: the engine's end of the channel, and the process itself."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from peers.engines.architecture import Unsupported, describe
from peers.engines.model import StoredTensors
from peers.engines.pipeline.channel import (
    ANSWER_SECONDS,
    DATA_BYTES_MAX,
    DTYPES,
    LOAD_SECONDS,
    Channel,
    Done,
    Failed,
    Load,
    Run,
    TensorData,
    from_bytes,
    greet_engine,
    greet_stage,
    name_of,
    to_bytes,
)
from peers.engines.pipeline.stage import LocalStage, Work
from swarm.errors import UserError
from swarm.world.child import limit_memory

IDLE_SECONDS = 24 * 3600.0
"""A stage drops an engine from which it has heard nothing for so long."""

TENSORS_MAX = 1 << 20
"""Most tensors of one load; experts are sent one by one."""

ROWS_MAX = 4096
TOKENS_MAX = 1 << 20
"""Most padded tokens of one batch."""


class RemoteStage:
    """A stage in another process; raises `UserError` for what goes wrong there."""

    def __init__(self, address: str, secret: bytes) -> None:
        """Connect to `host:port`."""
        self.name = f"stage {address}"
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=10.0)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{self.name} cannot be reached ({error}); start it with: swarm engine stage"
            ) from error
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channel = Channel(connection, self.name)
        try:
            greet_stage(self._channel, secret)
        except ConnectionError as error:
            self._channel.close()
            raise UserError(f"{error}; give both sides the same secret") from error

    def load(
        self, config: Mapping[str, Any], span: range, dtype: torch.dtype, weights: StoredTensors
    ) -> None:
        self._dtype = dtype
        encoded = json.dumps(dict(config)).encode()
        self._ask(Load(encoded, span.start, span.stop, name_of(dtype), len(weights)))
        for name, tensor in weights:
            stored = tensor.to(dtype)
            self._ask(TensorData(name, list(stored.shape), name_of(dtype)), to_bytes(stored))
        self._answer(LOAD_SECONDS, 0)

    def run(self, work: Work, stream: Tensor) -> Tensor:
        self._ask(Run(work), to_bytes(stream))
        size = stream.numel() * stream.element_size()
        return from_bytes(self._answer(ANSWER_SECONDS, size), tuple(stream.shape), self._dtype)

    def close(self) -> None:
        self._channel.close()

    def _ask(self, message: Load | TensorData | Run, data: memoryview | bytes = b"") -> None:
        try:
            self._channel.send(message, data)
        except ConnectionError as error:
            raise UserError(str(error)) from error

    def _answer(self, seconds: float, data_bytes: int) -> bytearray:
        try:
            answer, data = self._channel.receive(seconds, data_bytes)
        except ConnectionError as error:
            raise UserError(str(error)) from error
        if isinstance(answer, Failed):
            raise UserError(f"{self.name}: {answer.sentence}")
        if not isinstance(answer, Done):
            raise UserError(f"{self.name} sent an answer out of order")
        return data


def run_stage(
    listen: str,
    secret: bytes,
    device: torch.device,
    memory_mb: int,
    tell: Callable[[str], None],
) -> None:
    """Serve one engine after another at `host:port`, for ever. Raises `UserError`.

    `memory_mb`: most memory for layers and caches on a CPU, in MiB; 0: no limit.
    """
    host, _, port = listen.rpartition(":")
    try:
        listener = socket.create_server((host.strip("[]"), int(port)))
    except (OSError, ValueError) as error:
        raise UserError(f"stage cannot listen at {listen} ({error})") from error
    if memory_mb:
        limit_memory(memory_mb << 20)
    stage = LocalStage(device)
    with listener:
        tell(f"stage listens at {host}:{listener.getsockname()[1]}")
        while True:
            serve(listener, stage, secret, tell)


def serve(
    listener: socket.socket, stage: LocalStage, secret: bytes, tell: Callable[[str], None]
) -> None:
    """Serve the next engine until it goes. `tell` gets a line when it comes and when it goes."""
    connection, address = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = Channel(connection, f"engine {address[0]}:{address[1]}")
    try:
        greet_engine(channel, secret)
        tell(f"{channel.name} has connected")
        while True:
            serve_next(channel, stage)
    except ConnectionError as error:
        tell(str(error))
    finally:
        channel.close()
        stage.close()


def serve_next(channel: Channel, stage: LocalStage) -> None:
    """Answer one request; raises `ConnectionError` when the engine is gone or breaks the rules."""
    message, data = channel.receive(IDLE_SECONDS, DATA_BYTES_MAX)
    try:
        if isinstance(message, Load):
            _load(channel, stage, message)
            channel.send(Done())
        elif isinstance(message, Run):
            channel.send(Done(), to_bytes(_run(stage, message.work, data)))
        else:
            raise ConnectionError(f"{channel.name} sent a message out of order")
    except UserError as error:
        channel.send(Failed(str(error)))
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError without memory
        stage.close()
        channel.send(Failed(_why(error, message)))


def _why(error: Exception, message: object) -> str:
    """What to tell the engine about a failure."""
    text = str(error).partition("\n")[0][:300]
    if not isinstance(error, MemoryError) and "memory" not in text:
        return f"it failed ({text})"
    what = "this batch"
    if isinstance(message, Load):
        what = f"layers {message.first} to {message.stop - 1}"
    return f"it has no memory for {what} ({text}); give it fewer with stage_layers"


def _load(channel: Channel, stage: LocalStage, message: Load) -> None:
    try:
        config = json.loads(message.config)
        described = describe(config)
    except Unsupported as error:
        raise ConnectionError(f"{channel.name} sent a config: {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConnectionError(f"{channel.name} sent no config") from error
    dtype = DTYPES.get(message.dtype)
    if dtype is None or not message.first < message.stop <= len(described.layers):
        raise ConnectionError(f"{channel.name} asked for layers that do not exist")
    if message.tensors > TENSORS_MAX:
        raise ConnectionError(f"{channel.name} announced {message.tensors} tensors")
    left = message.tensors

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal left
        while left:
            left -= 1  # a frame without room in memory counts, too
            each, data = channel.receive(LOAD_SECONDS, DATA_BYTES_MAX)
            if not isinstance(each, TensorData) or each.dtype not in DTYPES:
                raise ConnectionError(f"{channel.name} sent a message out of order")
            yield each.name, from_bytes(data, tuple(each.shape), DTYPES[each.dtype])

    try:
        stage.load(config, range(message.first, message.stop), dtype, tensors())
    except (UserError, MemoryError, RuntimeError):
        stage.close()
        while left:  # read on, so that the answer is not taken for one to a tensor
            left -= 1
            with contextlib.suppress(MemoryError):
                channel.receive(LOAD_SECONDS, DATA_BYTES_MAX)
        raise


def _run(stage: LocalStage, work: Work, data: bytearray) -> Tensor:
    rows = len(work.lengths)
    slots = work.slots or [0] * rows
    whole = len(work.starts) == len(slots) == rows and 1 <= rows <= ROWS_MAX
    if not whole or min(work.lengths) < 1 or rows * max(work.lengths) > TOKENS_MAX:
        raise ConnectionError("a batch whose rows contradict each other, or too many")
    if max(slots) >= ROWS_MAX:
        raise ConnectionError("a batch with a row outside the caches")
    if not work.slots and any(work.starts):
        raise ConnectionError("a batch without caches that does not begin at 0")
    try:
        shape = stage.shape(work)
    except ValueError as error:
        raise ConnectionError(str(error)) from error
    return stage.run(work, from_bytes(data, shape, stage.dtype))
