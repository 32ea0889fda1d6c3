"""Messages between an engine and a stage in another process: typed, bounded, each with a deadline.

A frame is the length of the message (4 bytes, little endian), the length of the data (4 bytes),
the message (MessagePack), and the data: the bytes of one tensor. Both sides prove that they know
the same secret before anything else is read. The channel is not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from peers.engines.pipeline.stage import Count, Work
from swarm.errors import UserError

MESSAGE_BYTES_MAX = 1 << 20
"""Longest message: 4,096 rows, or a config.json."""

DATA_BYTES_MAX = 1 << 31
"""Largest tensor in one frame."""

HANDSHAKE_SECONDS = 10.0
ANSWER_SECONDS = 120.0
"""Longest wait for a stage's answer to a batch."""
LOAD_SECONDS = 900.0
"""Longest wait for a stage's answer to new weights."""

SECRET_BYTES_MIN = 16
VERSION = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTHS = struct.Struct("<II")


class Challenge(msgspec.Struct, frozen=True, tag=True):
    version: int
    nonce: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Load(msgspec.Struct, frozen=True, tag=True):
    """Hold these layers; their tensors follow, one per frame."""

    config: bytes
    first: Count
    stop: Count
    dtype: str
    tensors: Count


class TensorData(msgspec.Struct, frozen=True, tag=True):
    name: str
    shape: list[Count]
    dtype: str


class Run(msgspec.Struct, frozen=True, tag=True):
    """Advance rows; the data is their stream, in the dtype of the load."""

    work: Work


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer to a load, and to a run: then the data is the stream."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    sentence: str


Message = Challenge | Answer | Welcome | Load | TensorData | Run | Done | Failed
_DECODER = msgspec.msgpack.Decoder(Message)


class Channel:
    """Frames over a connected socket. Raises `ConnectionError` for whatever breaks it."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self._connection = connection
        self._part = memoryview(bytearray(1 << 20))
        self.name = name

    def send(self, message: Message, data: bytes | memoryview = b"") -> None:
        encoded = msgspec.msgpack.encode(message)
        if len(encoded) > MESSAGE_BYTES_MAX or len(data) > DATA_BYTES_MAX:
            raise ValueError(f"a message of {len(encoded)} and {len(data)} bytes is too long")
        try:
            self._connection.sendall(_LENGTHS.pack(len(encoded), len(data)) + encoded)
            if data:
                self._connection.sendall(data)
        except OSError as error:
            raise ConnectionError(f"{self.name} cannot be reached ({error})") from error

    def receive(self, seconds: float, data_bytes_max: int = 0) -> tuple[Message, bytearray]:
        """The next message and its data, of at most `data_bytes_max`, before the deadline.

        Raises `MemoryError` if there is no room for it; the frame has been read then.
        """
        self._connection.settimeout(seconds)
        message_bytes, data_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if message_bytes > MESSAGE_BYTES_MAX or data_bytes > data_bytes_max:
            raise ConnectionError(f"{self.name} sent {message_bytes} and {data_bytes} bytes")
        try:
            message = _DECODER.decode(self._read(message_bytes))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConnectionError(f"{self.name} sent an unknown message ({error})") from error
        return message, self._read(data_bytes)

    def close(self) -> None:
        self._connection.close()

    def _read(self, count: int) -> bytearray:
        found, room = bytearray(), True
        left = count
        try:
            while left:
                size = self._connection.recv_into(self._part, min(left, len(self._part)))
                if not size:
                    raise ConnectionError(f"{self.name} has closed the connection")
                left -= size
                try:
                    if room:  # grows with what arrives, not with what was announced
                        found += self._part[:size]
                except MemoryError:
                    found, room = bytearray(), False
        except TimeoutError as error:
            raise ConnectionError(f"{self.name} has not answered in time") from error
        except OSError as error:
            raise ConnectionError(f"{self.name} cannot be reached ({error})") from error
        if not room:
            raise MemoryError(f"{count} bytes")
        return found


def read_secret(path: Path) -> bytes:
    """The secret that an engine and its stages share; raises `UserError`."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(f"stage secret {path} cannot be read ({error.strerror})") from error
    if len(secret) < SECRET_BYTES_MIN:
        raise UserError(
            f"stage secret {path} has {len(secret)} bytes; it must have at least {SECRET_BYTES_MIN}"
        )
    return secret


def greet_engine(channel: Channel, secret: bytes) -> None:
    """The stage's half of the handshake; raises `ConnectionError` for a peer without the secret."""
    own = secrets.token_bytes(32)
    channel.send(Challenge(VERSION, own))
    answer, _ = channel.receive(HANDSHAKE_SECONDS)
    if not isinstance(answer, Answer) or len(answer.nonce) != 32:
        raise ConnectionError(f"{channel.name} did not answer the challenge")
    if not hmac.compare_digest(answer.proof, _proof(secret, b"engine", own, answer.nonce)):
        raise ConnectionError(f"{channel.name} does not know the stage's secret")
    channel.send(Welcome(_proof(secret, b"stage", own, answer.nonce)))


def greet_stage(channel: Channel, secret: bytes) -> None:
    """The engine's half of the handshake; raises `ConnectionError`."""
    challenge, _ = channel.receive(HANDSHAKE_SECONDS)
    if not isinstance(challenge, Challenge):
        raise ConnectionError(f"{channel.name} is no stage")
    if challenge.version != VERSION:
        raise ConnectionError(
            f"{channel.name} speaks version {challenge.version}, this engine {VERSION}"
        )
    own = secrets.token_bytes(32)
    channel.send(Answer(own, _proof(secret, b"engine", challenge.nonce, own)))
    welcome, _ = channel.receive(HANDSHAKE_SECONDS)
    wanted = _proof(secret, b"stage", challenge.nonce, own)
    if not isinstance(welcome, Welcome) or not hmac.compare_digest(welcome.proof, wanted):
        raise ConnectionError(f"{channel.name} does not know the engine's secret")


def _proof(secret: bytes, side: bytes, stage_nonce: bytes, engine_nonce: bytes) -> bytes:
    return hmac.new(secret, side + stage_nonce + engine_nonce, hashlib.sha256).digest()


def to_bytes(tensor: Tensor) -> memoryview:
    """The tensor's numbers, row by row."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def from_bytes(data: bytearray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor of these numbers; raises `ConnectionError` if there are more or fewer."""
    if len(data) != torch.Size(shape).numel() * dtype.itemsize:
        raise ConnectionError(f"{len(data)} bytes are no tensor of {list(shape)} {name_of(dtype)}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def name_of(dtype: torch.dtype) -> str:
    return _NAMES[dtype]
