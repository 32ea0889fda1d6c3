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

from swarm.rollouts.rollout import TURNS_MAX, Rollout, Segment, Span
from swarm.rollouts.rollouts import Rollouts, Row
from swarm.rollouts.submission_file import (
    HEADER_KEY,
    SCHEMA,
    BadSubmission,
    Header,
    ReadLimits,
    decode,
    encode,
    read,
    read_header,
    write,
)
from swarm.wire.identity import Identity
from swarm.wire.messages import ENVIRONMENTS_MAX

LIMITS = ReadLimits(
    bytes_max=1 << 20,
    rows_max=64,
    prompt_tokens_max=16,
    model_tokens_max=64,
    environment_tokens_max=64,
)
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
    """The last row has two turns."""
    return Rollouts.from_rows(
        [
            Row(
                group=row // 2,
                sample=row % 2,
                environment=0,
                rollout=make_rollout(row, turns=1 + (row == rows - 1)),
                proof=bytes([row]) * 258,
            )
            for row in range(rows)
        ]
    )


def make_rollout(row: int, turns: int) -> Rollout:
    count = row + 1
    model = Segment("model", [9] * count, "stop", [-0.5] * count, (Span(1, count),))
    further = [Segment("environment", [7, 8]), model] * (turns - 1)
    return Rollout((Segment("prompt", [1, 5, 6 + row // 2]), model, *further))


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
    assert found.rollouts.rollout(2).model_tokens == [9, 9, 9]
    assert found.rollouts.prompt(3) == [1, 5, 7]
    assert found.rollouts.proof(1) == bytes([1]) * 258
    last = found.rollouts.row(3)
    assert last.rollout.tokens == [1, 5, 7, 9, 9, 9, 9, 7, 8, 9, 9, 9, 9]
    assert [each.kind for each in last.rollout.segments] == [
        "prompt",
        "model",
        "environment",
        "model",
    ]
    assert last.rollout.log_probabilities == [-0.5] * 8


def test_equal_rollouts_give_equal_bytes() -> None:
    assert encode(make_rollouts(), HEADER) == encode(make_rollouts(), HEADER)


numbers = st.integers(0, 2**31 - 1)


@st.composite
def rollouts_of_any_shape(draw: st.DrawFn) -> Rollouts:
    rows = []
    for number in range(draw(st.integers(1, 6))):
        turns = draw(st.integers(1, 4))
        segments = [Segment("prompt", draw(st.lists(numbers, min_size=1, max_size=16)))]
        for turn in range(turns):
            spans = draw(
                st.lists(st.builds(Span, numbers, st.integers(1, 5)), min_size=1, max_size=3)
            )
            count = sum(span.tokens for span in spans)
            sampled = draw(st.lists(numbers, min_size=count, max_size=count))
            values = draw(st.lists(st.floats(-100, 0, width=32), min_size=count, max_size=count))
            last = turn == turns - 1
            finish = draw(st.sampled_from(["stop", "length"])) if last else "stop"
            segments.append(Segment("model", sampled, finish, values, tuple(spans)))  # type: ignore[arg-type]
            if not last:
                answer = draw(st.lists(numbers, min_size=1, max_size=16))
                segments.append(Segment("environment", answer))
        proof = draw(st.binary(max_size=600))
        rows.append(Row(number, draw(numbers), draw(numbers), Rollout(tuple(segments)), proof))
    return Rollouts.from_rows(rows)


@settings(deadline=None)
@given(rollouts_of_any_shape())
def test_any_rollouts_survive_both_forms(rollouts: Rollouts) -> None:
    found = decode(encode(rollouts, HEADER), LIMITS).rollouts
    assert same(found, rollouts)
    assert same(Rollouts.from_bytes(rollouts.to_bytes()), rollouts)
    again = Rollouts.from_rows([rollouts.row(index) for index in range(len(rollouts))])
    assert same(again, rollouts)
    tokens = [rollouts.rollout(index).model_tokens for index in range(len(rollouts))]
    assert rollouts.model_lengths().tolist() == list(map(len, tokens))


LISTS = [field.name for field in SCHEMA if pa.types.is_list(field.type)]


@settings(deadline=None)
@given(rollouts_of_any_shape(), st.sampled_from(LISTS), st.data())
def test_a_changed_list_is_refused_or_still_a_rollout(
    rollouts: Rollouts, name: str, data: st.DataObject
) -> None:
    """Whatever a hostile worker writes into a column, what is read is well-formed."""
    table = honest_table(rollouts)
    lists = table.column(name).to_pylist()
    row = data.draw(st.integers(0, len(lists) - 1))
    place = data.draw(st.integers(0, len(lists[row]) - 1))
    value: Any = data.draw(st.integers(-3, 70))
    change = data.draw(st.sampled_from(["set", "insert", "drop"]))
    if change == "set":
        lists[row][place] = value
    elif change == "insert":
        lists[row].insert(place, value)
    else:
        lists[row].pop(place)
    field = SCHEMA.field(name)
    changed = table.set_column(SCHEMA.get_field_index(name), field, pa.array(lists, field.type))
    try:
        found = decode(rewritten(changed), LIMITS).rollouts
    except BadSubmission as error:
        assert error.check == "schema"
    else:
        again = Rollouts.from_rows([found.row(index) for index in range(len(found))])
        assert same(again, found)


def test_the_longest_header_of_a_valid_run_is_read() -> None:
    header = msgspec.structs.replace(
        HEADER,
        run=name_of_bytes(200),
        environments=[(name_of_bytes(200), name_of_bytes(200))] * ENVIRONMENTS_MAX,
        stop_ids=[2**31] * 16,
        engine=name_of_bytes(500),
    )
    assert decode(encode(make_rollouts(), header), LIMITS).header == header


def name_of_bytes(characters: int) -> str:
    """Characters of which each takes the most bytes in JSON."""
    return "\x01" * characters


def test_format_1_is_refused_by_naming_both_versions() -> None:
    columns = ["group", "sample", "prompt_tokens", "completion_tokens", "target_length"]
    table = pa.table({name: pa.array([0], pa.int32()) for name in columns})
    header = msgspec.json.encode({"format": 1, "environment": "sort-digits"})
    with pytest.raises(BadSubmission) as caught:
        decode(rewritten(table, {HEADER_KEY: header}), LIMITS)
    assert caught.value.detail == "the file has format 1; this version reads 2 and 3"
    assert not caught.value.proven, "another version of Swarm finds no fault"
    assert (caught.value.check, caught.value.figure, caught.value.threshold) == ("header", 1, 2)


def _with(name: str, *values: list[int]) -> Any:
    """The honest table's first rows with other lists in one column."""
    field = SCHEMA.field(name)

    def change(table: pa.Table) -> pa.Table:
        lists = [*values, *table.column(name).to_pylist()[len(values) :]]
        return table.set_column(SCHEMA.get_field_index(name), field, pa.array(lists, field.type))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_with("segment_kinds", [1, 1]), "prompt, then model and environment in turn"),
        (_with("segment_kinds", [0, 3]), "prompt, then model and environment in turn"),
        (_with("segment_lengths", [4, 0]), "has no token"),
        (_with("segment_lengths", [2, 2]), "model tokens differ in number"),
        (_with("segment_lengths", [3, 2]), "do not add up"),
        (_with("segment_lengths", [2**31 - 1, 1]), "do not add up"),
        (_with("segment_lengths", [4]), "other lengths than its neighbours"),
        (_with("segment_finishes", [0, 0]), "no finish reason"),
        (_with("segment_finishes", [1, 1]), "another segment has one"),
        (_with("segment_finishes", [0, 3]), "no finish reason"),
        (_with("segment_finishes", [0, 1], [0, 1], [0, 1], [0, 2, 0, 1]), "is not the last"),
        (_with("span_policies", [-1]), "of no policy"),
        (_with("span_lengths", [2]), "spans of policies do not add up"),
        (_with("span_lengths", [0]), "missing, empty"),
        (_with("log_probabilities", [-1, -1]), "differ in number"),
        (_with("tokens", [1, 5, 6]), "do not add up"),
    ],
)
def test_malformed_segments_are_refused(change: Any, reason: str) -> None:
    with pytest.raises(BadSubmission, match=reason) as caught:
        decode(rewritten(change(honest_table())), LIMITS)
    assert caught.value.check == "schema"


def test_the_number_of_segments_is_bounded() -> None:
    most = 2 * TURNS_MAX
    for count in (1, 3, most + 2):
        table = honest_table(Rollouts.from_rows([make_rollouts(1).row(0)]))
        kinds = [0, *([1, 2] * count)][:count]
        lists = {
            "segment_kinds": kinds,
            "segment_lengths": [1] * count,
            "segment_finishes": [int(kind == 1) for kind in kinds],
            "tokens": [5] * count,
            "log_probabilities": [-1.0] * kinds.count(1),
            "span_lengths": [max(1, kinds.count(1))],
        }
        for name, values in lists.items():
            table = _with(name, values)(table)  # type: ignore[arg-type]
        with pytest.raises(BadSubmission, match="an even number from 2 to 128"):
            decode(rewritten(table), dataclasses.replace(LIMITS, model_tokens_max=1000))


HONEST = encode(make_rollouts(), HEADER)


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
        ({"metadata": {HEADER_KEY: b"x" * (1 << 17)}}, "is not valid Parquet"),
        ({"metadata": {HEADER_KEY: msgspec.json.encode(HEADER)[:-1] + b',"reward":1}'}}, "header"),
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
        type=SCHEMA.field("tokens").type,
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
        (dataclasses.replace(LIMITS, model_tokens_max=7), 8),
        (dataclasses.replace(LIMITS, environment_tokens_max=1), 2),
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


def test_canonical_offsets_must_fit() -> None:
    rollouts = make_rollouts()
    offsets = rollouts.token_offsets.copy()
    offsets[1] = 100
    with pytest.raises(ValueError, match="offsets"):
        Rollouts.from_bytes(dataclasses.replace(rollouts, token_offsets=offsets).to_bytes())


def test_a_header_is_read_alone(tmp_path: Path) -> None:
    write(tmp_path / "file", make_rollouts(), HEADER)
    assert read_header(tmp_path / "file") == HEADER
    (tmp_path / "file").write_bytes(b"no parquet")
    with pytest.raises(BadSubmission, match="not valid Parquet"):
        read_header(tmp_path / "file")


ARRAYS = [field.name for field in dataclasses.fields(Rollouts)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([name for name in ARRAYS if name != "log_probabilities"]),
            st.integers(0, 50),
            st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 9, 2**31 - 1]),
        ),
        max_size=3,
    )
)
def test_rows_of_arrays_that_pass_the_check_are_episodes(
    changes: list[tuple[str, int, int]],
) -> None:
    """A reader of canonical rollouts never meets a row that is not an episode."""
    arrays = {name: getattr(make_rollouts(), name).copy() for name in ARRAYS}
    for name, index, value in changes:
        flat = arrays[name]
        flat[index % len(flat)] = np.array(value, np.int64).astype(flat.dtype)
    changed = Rollouts(**arrays)
    try:
        changed.check()
    except ValueError:
        return
    rows = [changed.row(index) for index in range(len(changed))]
    assert sum(len(row.rollout.tokens) for row in rows) == len(changed.tokens)
    assert Rollouts.from_bytes(changed.to_bytes()).to_bytes() == changed.to_bytes()
    assert [span for row in rows for part in row.rollout.model_segments for span in part.spans]


def test_thousands_of_segments_and_spans_are_refused_at_once() -> None:
    tokens = np.full(100_000, 9, np.int32)
    many = dataclasses.replace(
        make_rollouts(1),
        tokens=tokens,
        token_offsets=np.array([0, len(tokens)]),
        segment_kinds=np.array([0, 1] + [2, 1] * 49_999, np.int32),
        segment_lengths=np.ones(len(tokens), np.int32),
        segment_finishes=np.array([0, 1] * 50_000, np.int32),
        segment_offsets=np.array([0, len(tokens)]),
    )
    with pytest.raises(ValueError, match=f"even number from 2 to {2 * TURNS_MAX}"):
        many.check()
