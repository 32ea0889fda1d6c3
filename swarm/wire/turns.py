"""Messages of served environments: signed turns, requests for them, and grades.

An environment peer renders a run's prompts and answers the model. It signs every turn, so that a
submission shows which tokens came from it. An episode is named by the seed of its submission
(`swarm.rollouts.seeds.submission_seed`), which no other worker, step or number has, its group and
its sample. docs/protocol.md explains every field."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated

import blake3
import msgspec
from msgspec import Meta

from swarm.wire.messages import REWARD_PARTS_MAX, Count, Digest, Entry, Finite, Line, Message, Name

TOKEN_BYTES = 3
"""Bytes of a packed token id, big endian: enough for a vocabulary of 16.7 million."""

_WIDE_BYTES = array("I").itemsize
"""Bytes of an id while it is converted: a machine's word, so that all are converted at once."""

PACKED_BYTES_MAX = 60_000
"""Bytes of packed tokens in one message: 20,000 tokens. An envelope has at most 64 KiB."""

PARTS_MAX = 5
"""Envelopes beside the request among which a longer episode is divided: 120,000 tokens in all. A
request has at most eight, and others are an admission and the last turn."""

SEGMENTS_MAX = 128
"""Segments of an episode (`swarm.rollouts.rollout.TURNS_MAX` turns of the model, each after a
prompt or a turn of the environment)."""

Packed = Annotated[bytes, Meta(max_length=PACKED_BYTES_MAX)]
Group = Annotated[int, Meta(ge=0, le=4095)]
Sample = Annotated[int, Meta(ge=0, le=4095)]
TurnIndex = Annotated[int, Meta(ge=0, le=SEGMENTS_MAX // 2)]
SegmentLengths = Annotated[
    list[Annotated[int, Meta(ge=1, le=1 << 20)]], Meta(max_length=SEGMENTS_MAX)
]


class Turn(Message, frozen=True, kw_only=True):
    """An environment's turn in an episode, signed by an environment peer of the run.

    Turn 0 is the prompt of a whole group (`sample` 0); turn i answers the model's i-th segment."""

    seed: Digest
    group: Group
    sample: Sample
    index: TurnIndex
    before: Digest
    tokens: Packed = b""
    last: bool = False
    failed: Line = ""

    @property
    def over(self) -> bool:
        return not self.tokens


class EpisodeTokens(Message, frozen=True, kw_only=True):
    """Further tokens of the request that it stands beside."""

    tokens: Packed


class EpisodeRequest(Message, frozen=True, kw_only=True):
    """Base of requests about an episode. The tokens are those of all segments, one after another.

    Those that do not fit follow in `EpisodeTokens`, in order."""

    lineage: Count
    step: Count
    number: Count
    entry: Entry
    """`Submission.entry`."""
    group: Group
    sample: Sample
    lengths: SegmentLengths
    """Tokens of each segment, the prompt first; none to ask for the prompt."""
    tokens: Packed


class TurnRequest(EpisodeRequest, frozen=True, kw_only=True):
    """A worker asks for the prompt of a group, or for the turn after a segment of its model.

    The environment's last signed turn, if it is not the prompt, stands beside the request."""

    omitted: Count = 0


class TurnRefused(Message, frozen=True, kw_only=True):
    """An environment peer gives no turn, or no grade."""

    reason: Line
    later: bool = False
    incomplete: bool = False


class GradeRequest(EpisodeRequest, frozen=True, kw_only=True):
    """A validator asks for the reward of a finished episode."""

    worker: Annotated[str, Meta(max_length=64)]


class EpisodeGrade(Message, frozen=True, kw_only=True):
    """The grade of a finished episode, for a validator alone."""

    reward: Annotated[float, Meta(ge=0, le=1)]
    penalty: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    has_target: bool = False
    not_gradable: Line = ""
    parts: Annotated[dict[Name, Finite], Meta(max_length=REWARD_PARTS_MAX)] = msgspec.field(
        default_factory=dict
    )


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as bytes. Raises `OverflowError` for an id that is negative or too large."""
    wide = bytearray(_big_endian(array("I", tokens)).tobytes())
    if any(wide[::_WIDE_BYTES]):
        raise OverflowError(f"a token id does not fit {TOKEN_BYTES} bytes")
    del wide[::_WIDE_BYTES]
    return bytes(wide)


def unpack(packed: bytes) -> list[int]:
    """The token ids of packed bytes; raises `ValueError` for a cut id."""
    if len(packed) % TOKEN_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of token ids")
    wide = bytearray(len(packed) // TOKEN_BYTES * _WIDE_BYTES)
    for place in range(TOKEN_BYTES):
        wide[1 + place :: _WIDE_BYTES] = packed[place::TOKEN_BYTES]
    return _big_endian(array("I", wide)).tolist()


def _big_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "little":
        ids.byteswap()
    return ids


def tokens_digest(tokens: Iterable[int]) -> bytes:
    """BLAKE3-256 of tokens, packed."""
    return packed_digest(pack(tokens))


def packed_digest(packed: bytes) -> bytes:
    """BLAKE3-256 of packed tokens."""
    return blake3.blake3(packed).digest()


def divided(packed: bytes) -> list[bytes]:
    """Packed tokens in parts that fit a message each, the first of which may be empty.

    Raises `ValueError` for more than a request can carry."""
    parts = [
        packed[at : at + PACKED_BYTES_MAX] for at in range(0, max(1, len(packed)), PACKED_BYTES_MAX)
    ]
    check_length(len(packed) // TOKEN_BYTES)
    return parts


def check_length(tokens: int) -> None:
    """Raise `ValueError` for an episode that is too long for a request that omits nothing."""
    most = (1 + PARTS_MAX) * PACKED_BYTES_MAX // TOKEN_BYTES
    if tokens > most:
        raise ValueError(
            f"an episode of {tokens} tokens is too long for a served environment, which takes "
            f"{most}"
        )


def segments_of(
    request: EpisodeRequest, further: Sequence[EpisodeTokens], omitted: bytes = b""
) -> list[list[int]]:
    """The token ids of each segment of a request, whose packed beginning `omitted` was left out;
    raises `ValueError` unless they add up."""
    tokens = unpack(omitted + request.tokens + b"".join(each.tokens for each in further))
    if sum(request.lengths) != len(tokens) or len(further) > PARTS_MAX:
        raise ValueError("the lengths of the segments do not add up to the tokens")
    check_length(len(tokens))
    segments, start = [], 0
    for length in request.lengths:
        segments.append(tokens[start : start + length])
        start += length
    return segments
