"""The Parquet schema of rollouts, and files that pretend to follow it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.identity import Identity
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.show import show
from swarm.rollouts.submission_file import (
    HEADER_KEY,
    SCHEMA,
    BadSubmission,
    Header,
    ReadLimits,
    decode,
    encode,
    read,
    write,
)

LIMITS = ReadLimits(bytes_max=1 << 20, rows_max=64, prompt_tokens_max=16, completion_tokens_max=64)
HEADER = Header(
    run="owner/run",
    lineage=0,
    step=3,
    policy=1,
    worker=Identity(bytes(32)).peer_id,
    number=2,
    environments=[("sort-digits", "1")],
    temperature=1.0,
    max_new_tokens=8,
    stop_ids=[2],
    engine="native",
)


def make_rollouts(rows: int = 4) -> Rollouts:
    return Rollouts.from_lists(
        group=[row // 2 for row in range(rows)],
        sample=[row % 2 for row in range(rows)],
        target_length=[0] * rows,
        prompts=[[1, 5, 6 + row // 2] for row in range(rows)],
        completions=[[9] * (row + 1) for row in range(rows)],
        log_probabilities=[[-0.5] * (row + 1) for row in range(rows)],
        proofs=[bytes([row]) * 258 for row in range(rows)],
    )


def rewritten(table: pa.Table, metadata: dict[bytes, bytes] | None = None, **options: Any) -> bytes:
    """The bytes of a table in a file of somebody else's making."""
    out = pa.BufferOutputStream()
    settings: dict[str, Any] = {
        "compression": "none",
        "use_dictionary": False,
        "write_statistics": False,
        "store_schema": False,
    }
    row_group_size = options.pop("row_group_size", None)
    with pq.ParquetWriter(out, table.schema, **(settings | options)) as writer:
        writer.write_table(table, row_group_size=row_group_size)
        header = {HEADER_KEY: msgspec.json.encode(HEADER)}
        writer.add_key_value_metadata(header if metadata is None else metadata)
    return bytes(out.getvalue())


def honest_table(rollouts: Rollouts | None = None) -> pa.Table:
    raw = encode(rollouts or make_rollouts(), HEADER)
    return pq.read_table(pa.BufferReader(raw)).replace_schema_metadata(None)


def same(a: Rollouts, b: Rollouts) -> bool:
    return a.to_bytes() == b.to_bytes()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rollouts = make_rollouts()
    digest, size_bytes = write(tmp_path / "file", rollouts, HEADER)
    raw = (tmp_path / "file").read_bytes()
    assert digest == blake3.blake3(raw).digest()
    assert size_bytes == len(raw)
    found = read(tmp_path / "file", LIMITS)
    assert found.header == HEADER
    assert same(found.rollouts, rollouts)
    assert found.rollouts.completion(2) == [9, 9, 9]
    assert found.rollouts.prompt(3) == [1, 5, 7]
    assert found.rollouts.proof(1) == bytes([1]) * 258
    assert found.rollouts.row_log_probabilities(1) == [-0.5, -0.5]


def test_equal_rollouts_give_equal_bytes() -> None:
    assert encode(make_rollouts(), HEADER) == encode(make_rollouts(), HEADER)


tokens = st.integers(0, 2**31 - 1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(tokens, min_size=1, max_size=16),
            st.lists(tokens, min_size=1, max_size=64),
            st.binary(max_size=600),
            st.integers(0, 2**31 - 1),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_any_rollouts_survive_both_forms(
    rows: list[tuple[list[int], list[int], bytes, int]],
) -> None:
    rollouts = Rollouts.from_lists(
        group=range(len(rows)),
        sample=[0] * len(rows),
        target_length=[row[3] for row in rows],
        prompts=[row[0] for row in rows],
        completions=[row[1] for row in rows],
        log_probabilities=[[-1.25] * len(row[1]) for row in rows],
        proofs=[row[2] for row in rows],
    )
    assert same(decode(encode(rollouts, HEADER), LIMITS).rollouts, rollouts)
    assert same(Rollouts.from_bytes(rollouts.to_bytes()), rollouts)


HONEST = encode(make_rollouts(), HEADER)


@settings(deadline=None)
@given(st.integers(0, len(HONEST) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(BadSubmission) as caught:
        decode(HONEST[:length], LIMITS)
    assert caught.value.check == "schema"


def _renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns(["cluster", *table.column_names[1:]])


def _wider(table: pa.Table) -> pa.Table:
    field = pa.field("group", pa.int64(), nullable=False)
    return table.set_column(0, field, table.column(0).cast(pa.int64()))


def _nullable(table: pa.Table) -> pa.Table:
    return table.set_column(
        1, pa.field("sample", pa.int32()), pa.array([0, None, 0, 1], pa.int32())
    )


def _extra(table: pa.Table) -> pa.Table:
    return table.append_column(
        pa.field("rewards", pa.float32(), nullable=False), pa.array([1.0] * 4, pa.float32())
    )


@pytest.mark.parametrize(
    "change",
    [
        _renamed,
        _wider,
        _nullable,
        _extra,
        lambda table: table.drop_columns(["proof"]),
        lambda table: table.select(list(reversed(table.column_names))),
    ],
)
def test_another_schema_is_refused(change: Any) -> None:
    with pytest.raises(BadSubmission, match="columns"):
        decode(rewritten(change(honest_table())), LIMITS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": "zstd"}, "compressed"),
        ({"use_dictionary": True}, "plainly"),
        ({"row_group_size": 2}, "one row group"),
        ({"store_schema": True}, "metadata"),
        ({"metadata": {}}, "metadata"),
        ({"metadata": {HEADER_KEY: b"{}", b"more": b""}}, "metadata"),
        ({"metadata": {HEADER_KEY: b"not json"}}, "header"),
        ({"metadata": {HEADER_KEY: b"x" * (1 << 17)}}, "no sound Parquet"),
        (
            {"metadata": {HEADER_KEY: msgspec.json.encode(HEADER)[:-1] + b',"reward":1}'}},
            "header",
        ),
    ],
)
def test_another_way_of_writing_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadSubmission, match=reason):
        decode(rewritten(honest_table(), **options), LIMITS)


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"use_dictionary": True}])
def test_a_bomb_is_refused_before_it_unfolds(options: dict[str, Any]) -> None:
    count = 2_000_000
    columns = honest_table(make_rollouts(2)).slice(0, 1)
    zeros = pa.ListArray.from_arrays(
        pa.array([0, count], pa.int32()),
        pa.array(np.zeros(count, np.int32)),
        type=SCHEMA.field(3).type,
    )
    raw = rewritten(columns.set_column(3, SCHEMA.field(3), zeros), **options)
    assert len(raw) < 200_000
    before = pa.total_allocated_bytes()
    with pytest.raises(BadSubmission):
        decode(raw, LIMITS)
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize(
    ("limits", "figure"),
    [
        (dataclasses.replace(LIMITS, bytes_max=len(HONEST) - 1), len(HONEST)),
        (dataclasses.replace(LIMITS, rows_max=3), 4),
        (dataclasses.replace(LIMITS, prompt_tokens_max=2), 3),
        (dataclasses.replace(LIMITS, completion_tokens_max=3), 4),
    ],
)
def test_more_than_the_limits_allow_is_refused(limits: ReadLimits, figure: int) -> None:
    with pytest.raises(BadSubmission) as caught:
        decode(HONEST, limits)
    assert caught.value.figure == figure


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    rollouts = make_rollouts()
    numbers = rollouts.log_probabilities.copy()
    numbers[3] = value
    changed = dataclasses.replace(rollouts, log_probabilities=numbers)
    with pytest.raises(BadSubmission, match="finite"):
        decode(encode(changed, HEADER), LIMITS)


def test_empty_completions_are_refused() -> None:
    rollouts = Rollouts.from_lists(
        group=[0],
        sample=[0],
        target_length=[0],
        prompts=[[1]],
        completions=[[]],
        log_probabilities=[[]],
        proofs=[b""],
    )
    with pytest.raises(BadSubmission, match="completion"):
        decode(encode(rollouts, HEADER), LIMITS)


def test_log_probabilities_must_match_the_tokens() -> None:
    table = honest_table()
    columns = table.set_column(5, SCHEMA.field(5), table.column(5).take(pa.array([3, 2, 1, 0])))
    with pytest.raises(BadSubmission, match="differ in number"):
        decode(rewritten(columns), LIMITS)


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_other_bytes_are_no_canonical_rollouts(raw: bytes) -> None:
    with pytest.raises(ValueError, match="rollouts"):
        Rollouts.from_bytes(raw)


def test_canonical_offsets_must_fit() -> None:
    rollouts = make_rollouts()
    offsets = rollouts.completion_offsets.copy()
    offsets[1] = 100
    with pytest.raises(ValueError, match="offsets"):
        Rollouts.from_bytes(dataclasses.replace(rollouts, completion_offsets=offsets).to_bytes())


def test_show_gives_rows_and_text(tmp_path: Path) -> None:
    from peers.policy.demo import save_tokenizer

    save_tokenizer(tmp_path)
    write(tmp_path / "file", make_rollouts(), HEADER)
    header, rows = show(tmp_path / "file", tmp_path)
    last = list(rows)[-1]
    assert header == HEADER
    assert (last.group, last.sample, last.completion_tokens) == (1, 1, [9, 9, 9, 9])
    assert last.completion == "5555"
    assert last.prompt == "<bos>13"
    assert next(show(tmp_path / "file")[1]).prompt is None


def test_show_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        show(tmp_path / "missing")
    (tmp_path / "file").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="is no submission"):
        show(tmp_path / "file")
    write(tmp_path / "file", make_rollouts(), HEADER)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        show(tmp_path / "file", tmp_path)
