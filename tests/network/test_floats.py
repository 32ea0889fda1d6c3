"""No float of a message is NaN or infinite, since peers compare, sum and print figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.wire.envelope import Dropped, open_envelope
from swarm.wire.kinds import KINDS, kind_of
from tests.fuzz.messages import MESSAGES, signed

Path = tuple[int | str, ...]


def floats_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every float in a decoded payload."""
    if isinstance(value, float):
        yield path
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from floats_of(part, (*path, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from floats_of(part, (*path, index))


FLOATS = [
    (kind_of(message), payload, path)
    for message in MESSAGES
    for payload in [msgspec.msgpack.encode(message)]
    for path in floats_of(msgspec.msgpack.decode(payload))
]
"""Every float of the fuzzer's examples: kind, payload and path."""


@given(st.sampled_from(FLOATS), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_no_float_of_an_opened_message_is_nan_or_infinite(
    float_: tuple[str, bytes, Path], value: float
) -> None:
    kind, payload, (*path, last) = float_
    content = inner = msgspec.msgpack.decode(payload)
    for key in path:
        inner = inner[key]
    open_envelope(signed(kind, payload))
    inner[last] = value
    with pytest.raises(Dropped, match="malformed") as dropped:
        open_envelope(signed(kind, msgspec.msgpack.encode(content)))
    assert dropped.value.cause == "malformed"


def unbounded(info: msgspec.inspect.Type, name: str) -> Iterator[str]:
    """Yield the names of the floats below a type that could be NaN or infinite."""
    inspect = msgspec.inspect
    if isinstance(info, inspect.FloatType):
        if (info.ge, info.gt) == (None, None) or (info.le, info.lt) == (None, None):
            yield name
    elif isinstance(info, inspect.StructType):
        for field in info.fields:
            yield from unbounded(field.type, f"{name}.{field.name}")
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from unbounded(each, name)
    elif isinstance(info, inspect.ListType):
        yield from unbounded(info.item_type, f"{name}[]")
    elif isinstance(info, inspect.DictType):
        yield from unbounded(info.value_type, f"{name}[]")
    else:
        leaf = inspect.IntType, inspect.StrType, inspect.BytesType, inspect.BoolType
        assert isinstance(info, (*leaf, inspect.LiteralType, inspect.NoneType)), info


@pytest.mark.parametrize("kind", KINDS)
def test_every_float_of_every_kind_has_two_bounds(kind: str) -> None:
    """NaN fails every comparison, so bounds on both sides refuse NaN and the infinities."""
    assert list(unbounded(msgspec.inspect.type_info(KINDS[kind]), kind)) == []
