"""The submission file: Parquet, one row per rollout.

Rows are ordered by (group, sample). The file is written without compression, dictionaries or
statistics, for three reasons: proofs do not compress, equal content gives equal bytes, and the
size of an uncompressed file bounds the cost of reading it. Files may be hostile, so they are read
in a child process with a memory limit."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import blake3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Meta
from numpy.typing import NDArray

from swarm.errors import DECODE_ERRORS, PeerError
from swarm.rollouts.rollout import TURNS_MAX
from swarm.rollouts.rollouts import (
    ENVIRONMENT,
    KINDS,
    MODEL,
    PROMPT,
    Offsets,
    Rollouts,
    check_digest,
)
from swarm.wire.envelope import ENVELOPE_BYTES_MAX
from swarm.wire.messages import ENVIRONMENTS_MAX, Count, Key, Line, Name

HEADER_KEY = b"swarm"
"""Metadata key of the header, which is JSON."""

HEADER_BYTES_MAX = 64 * 1024
"""A header that names as many environments as a run may mix takes up to 43 KB in JSON."""

FORMAT = 2
"""Version of the schema and the header. Format 1 held one prompt and one completion per row."""

FORMAT_SERVED = 3
"""The same with the column `turns`, for runs with served environments."""

TURNS_PER_ROW_MAX = 1 + TURNS_MAX
"""The prompt's, which the first row of a group has, and one after each model segment."""


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False))


SCHEMA = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("environment", pa.int32(), nullable=False),
        pa.field("tokens", _list_of(pa.int32()), nullable=False),
        pa.field("segment_kinds", _list_of(pa.int32()), nullable=False),
        pa.field("segment_lengths", _list_of(pa.int32()), nullable=False),
        pa.field("segment_finishes", _list_of(pa.int32()), nullable=False),
        pa.field("log_probabilities", _list_of(pa.float32()), nullable=False),
        pa.field("span_policies", _list_of(pa.int32()), nullable=False),
        pa.field("span_lengths", _list_of(pa.int32()), nullable=False),
        pa.field("proof", pa.binary(), nullable=False),
    ]
)
"""The columns, named as in `swarm.rollouts.rollouts.Rollouts`. `log_probabilities`: one per model
token, as reported by the worker's engine; never used for training. `proof`: concatenated TOPLOC
proofs of 258 bytes, ⌈tokens / 32⌉ of them for each span. Where a policy follows another within a
row, its tokens are sampled from keys and values that it has computed itself for all tokens before
them: a cache of the policy before it is not used."""

SCHEMA_SERVED = SCHEMA.append(pa.field("turns", pa.binary(), nullable=False))
"""`turns`: the signed envelopes of an environment peer's turns, in order, as a msgpack list. The
first row of a group has the prompt's, too."""

_SCHEMAS = {FORMAT: SCHEMA, FORMAT_SERVED: SCHEMA_SERVED}

Turns = Annotated[
    list[Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]], Meta(max_length=TURNS_PER_ROW_MAX)
]

_LISTS = {
    "tokens": "token_offsets",
    "segment_kinds": "segment_offsets",
    "segment_lengths": "segment_offsets",
    "segment_finishes": "segment_offsets",
    "log_probabilities": "model_offsets",
    "span_policies": "span_offsets",
    "span_lengths": "span_offsets",
}
"""List columns, and the name of each column's array of offsets."""


class BadSubmission(PeerError):
    """A file that no honest worker writes, with the failed check, its figure and its threshold."""

    def __init__(
        self, check: str, figure: float, threshold: float, detail: str, *, proven: bool = True
    ) -> None:
        super().__init__(detail)
        self.check = check
        self.figure = figure
        self.threshold = threshold
        self.detail = detail
        self.proven = proven
        """Whether anyone who reads the same bytes finds the same fault."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The worker, the policy, and the exact sampling settings of a submission's rollouts."""

    format: int = FORMAT
    run: Name
    lineage: Count
    step: Count
    policy: Count
    worker: Key
    number: Count
    environments: Annotated[list[tuple[Name, Name]], Meta(max_length=ENVIRONMENTS_MAX)]
    """Name and version of each of the run's environments."""
    temperature: float | Annotated[list[float], Meta(max_length=ENVIRONMENTS_MAX)]
    """Of all environments, or a list of each one's."""
    max_new_tokens: Count
    stop_ids: Annotated[list[Count], Meta(max_length=16)]
    engine: Line
    """The worker's engine class: name, version, dtype and kind of device. Nobody can check it."""

    def temperature_of(self, environment: int) -> float | None:
        """The temperature of an environment's rollouts; None for an index that is not there."""
        found = self.temperature
        return found if isinstance(found, float) else dict(enumerate(found)).get(environment)


class _Version(msgspec.Struct):
    """The field that headers of every format have."""

    format: int


HeaderT = TypeVar("HeaderT", Header, _Version)


@dataclass(frozen=True)
class ReadLimits:
    """Bounds on a file; all limits in tokens are per row."""

    bytes_max: int
    rows_max: int
    prompt_tokens_max: int
    model_tokens_max: int
    environment_tokens_max: int
    """0 allows single turns only."""


@dataclass(frozen=True)
class Submission:
    header: Header
    rollouts: Rollouts
    turns: list[list[bytes]]
    """[rows] Signed turns of environment peers; empty for a file without any."""


def write(
    path: Path, rollouts: Rollouts, header: Header, turns: Sequence[Sequence[bytes]] | None = None
) -> tuple[bytes, int]:
    """Write a submission durably and return its BLAKE3-256 and its size in bytes.

    `turns`: [rows] signed turns, for a submission with served environments. The same rollouts,
    header and turns give the same bytes (with the same pyarrow). Raises `OSError`."""
    raw = encode(rollouts, header, turns)
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return blake3.blake3(raw).digest(), len(raw)


def encode(
    rollouts: Rollouts, header: Header, turns: Sequence[Sequence[bytes]] | None = None
) -> bytes:
    """Encode a submission as the bytes that `write` writes."""
    if turns is not None:
        header = msgspec.structs.replace(header, format=FORMAT_SERVED)
    schema = _SCHEMAS[header.format]

    def lists(name: str, flat: NDArray[Any], offsets: Offsets) -> Any:
        return pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), pa.array(flat), type=SCHEMA.field(name).type
        )

    proof = pa.Array.from_buffers(
        pa.binary(),
        len(rollouts),
        [
            None,
            pa.py_buffer(rollouts.proof_offsets.astype(np.int32)),
            pa.py_buffer(np.ascontiguousarray(rollouts.proofs)),
        ],
    )
    scalars = [pa.array(getattr(rollouts, name)) for name in SCHEMA.names[:3]]
    columns = [
        lists(name, getattr(rollouts, name), getattr(rollouts, offsets))
        for name, offsets in _LISTS.items()
    ]
    signed = [] if turns is None else [_packed(turns)]
    table = pa.Table.from_arrays([*scalars, *columns, proof, *signed], schema=schema)
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(
        out,
        schema,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_size=max(1, len(rollouts)))
        writer.add_key_value_metadata({HEADER_KEY: msgspec.json.encode(header)})
    return bytes(out.getvalue())


def _packed(turns: Sequence[Sequence[bytes]]) -> Any:
    return pa.array([msgspec.msgpack.encode(list(each)) for each in turns], pa.binary())


def read(path: Path, limits: ReadLimits, digest: bytes | None = None) -> Submission:
    """Read an untrusted file; raises `BadSubmission` with the first fault found.

    The whole file is read before it is parsed, so it cannot change meanwhile. Raises `OSError`
    when the file is missing, or when its BLAKE3-256 is not `digest`: the worker did not cause that.
    """
    with path.open("rb") as file:
        raw = file.read(limits.bytes_max + 1)
    check_digest(raw, digest)
    return decode(raw, limits)


def read_header(path: Path) -> Header:
    """Read a header alone, unchecked rollouts. Raises `BadSubmission` and `OSError`."""
    with path.open("rb") as file:
        try:
            raw = _raw_header(_open(file).metadata)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _not_parquet(error) from error
    return _header(raw, Header)


def _open(source: Any) -> Any:
    return pq.ParquetFile(
        source, thrift_string_size_limit=HEADER_BYTES_MAX, thrift_container_size_limit=1024
    )


def _not_parquet(error: Exception) -> BadSubmission:
    reason = str(error).partition("\n")[0][:200]
    return BadSubmission("schema", 1, 0, f"the file is not valid Parquet ({reason})")


def decode(raw: bytes, limits: ReadLimits) -> Submission:
    """Decode a submission from its bytes; raises `BadSubmission`."""
    if len(raw) > limits.bytes_max:
        raise BadSubmission(
            "schema", len(raw), limits.bytes_max, f"the file exceeds {limits.bytes_max} bytes"
        )
    try:
        file = _open(pa.BufferReader(raw))
        header = _check_metadata(file, len(raw), limits)
        table = file.read(use_threads=False)
        table.validate(full=True)
        if table.num_rows != file.metadata.num_rows:
            raise ValueError("the number of rows differs from the footer's")
        # Not earlier: pyarrow aborts when asked about an unknown codec.
        group = file.metadata.row_group(0)
        if any(group.column(i).compression != "UNCOMPRESSED" for i in range(group.num_columns)):
            raise BadSubmission("schema", 1, 0, "a column is compressed or not plainly encoded")
    except (pa.ArrowMemoryError, MemoryError) as error:
        raise BadSubmission(
            "schema", 1, 0, "reading the file takes more memory than allowed", proven=False
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _not_parquet(error) from error
    return Submission(header, _rollouts(table, limits), _turns(table, header))


def _turns(table: Any, header: Header) -> list[list[bytes]]:
    """Each row's signed turns, which are not opened here; raises `BadSubmission`."""
    if header.format != FORMAT_SERVED:
        return []
    try:
        return [
            msgspec.msgpack.decode(row, type=Turns) for row in table.column("turns").to_pylist()
        ]
    except DECODE_ERRORS as error:
        raise BadSubmission("schema", 1, 0, f"the signed turns are malformed: {error}") from error


def _check_metadata(file: Any, size_bytes: int, limits: ReadLimits) -> Header:
    """Check the footer before any data is read, and decode the header; raises `BadSubmission`."""
    metadata = file.metadata
    if metadata.num_row_groups != 1:
        raise BadSubmission(
            "schema", metadata.num_row_groups, 1, "the file must have one row group"
        )
    if not 1 <= metadata.num_rows <= limits.rows_max:
        raise BadSubmission(
            "schema",
            metadata.num_rows,
            limits.rows_max,
            f"{metadata.num_rows} rows, at least 1 and at most {limits.rows_max} are allowed",
        )
    raw = _raw_header(metadata)
    if file.schema_arrow != _SCHEMAS[_header(raw, _Version).format]:
        raise BadSubmission("schema", 1, 0, "the columns are not those of a submission")
    group = metadata.row_group(0)
    for index in range(metadata.num_columns):
        column = group.column(index)
        if (
            column.total_compressed_size != column.total_uncompressed_size
            or column.has_dictionary_page
            or not set(column.encodings) <= {"PLAIN", "RLE"}
        ):
            raise BadSubmission("schema", 1, 0, "a column is compressed or not plainly encoded")
        # A value takes four bytes; an empty list counts as an entry but takes none.
        if (
            column.num_values > size_bytes // 4 + metadata.num_rows
            or column.total_uncompressed_size > size_bytes
        ):
            raise BadSubmission(
                "schema",
                column.num_values,
                size_bytes // 4,
                "a column claims more data than the file holds",
            )
    return _header(raw, Header)


def _raw_header(metadata: Any) -> bytes:
    """The bytes of the header in a footer, of a format that can be read; raises `BadSubmission`."""
    if set(metadata.metadata or {}) != {HEADER_KEY}:
        raise BadSubmission("schema", 1, 0, "the file's metadata must be the key `swarm` alone")
    raw = metadata.metadata[HEADER_KEY]
    found = _header(raw, _Version).format  # before any other field is read
    if found not in _SCHEMAS:
        raise BadSubmission(
            "header",
            found,
            FORMAT,
            f"the file has format {found}; this version reads {FORMAT} and {FORMAT_SERVED}",
            proven=False,  # a version of Swarm that reads this format may find no fault
        )
    return bytes(raw)


def _header(raw: bytes, type_: type[HeaderT]) -> HeaderT:
    """Decode the header, or the part that `type_` has; raises `BadSubmission`."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except DECODE_ERRORS as error:
        raise BadSubmission("header", 1, 0, f"the header is malformed: {error}"[:300]) from error


def _rollouts(table: Any, limits: ReadLimits) -> Rollouts:
    """Convert the table's columns to arrays and check their bounds; raises `BadSubmission`."""
    chunked = zip(table.column_names, table.columns, strict=True)
    columns = {
        name: column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        for name, column in chunked
        if name in SCHEMA.names
    }
    arrays: dict[str, Any] = {name: columns[name].to_numpy() for name in SCHEMA.names[:3]}
    for name, offsets_name in _LISTS.items():
        arrays[name], offsets = _flat_list(columns[name])
        if not np.array_equal(arrays.setdefault(offsets_name, offsets), offsets):
            raise BadSubmission("schema", 1, 0, f"{name} has other lengths than its neighbours")
    arrays["proofs"], arrays["proof_offsets"] = _flat_bytes(columns["proof"])
    rollouts = Rollouts(**arrays)
    try:
        rollouts.check()
    except ValueError as error:
        raise BadSubmission("schema", 1, 0, str(error)) from error
    if not np.isfinite(rollouts.log_probabilities).all():
        raise BadSubmission("schema", 1, 0, "a log-probability is not finite")
    for kind, longest in (
        (PROMPT, limits.prompt_tokens_max),
        (MODEL, limits.model_tokens_max),
        (ENVIRONMENT, limits.environment_tokens_max),
    ):
        lengths = np.where(rollouts.segment_kinds == kind, rollouts.segment_lengths, 0)
        most = int(np.add.reduceat(lengths.astype(np.int64), rollouts.segment_offsets[:-1]).max())
        if most > longest:
            raise BadSubmission(
                "schema",
                most,
                longest,
                f"a rollout has {most} {KINDS[kind]} tokens, at most {longest} are allowed",
            )
    return rollouts


def _flat_list(array: Any) -> tuple[NDArray[Any], Offsets]:
    """(values, offsets from 0) of a list array."""
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.to_numpy()[offsets[0] : offsets[-1]]
    return values, offsets - offsets[0]


def _flat_bytes(array: Any) -> tuple[NDArray[np.uint8], Offsets]:
    """(bytes, offsets from 0) of a binary array."""
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[array.offset : array.offset + len(array) + 1]
    flat = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return flat[offsets[0] : offsets[-1]], offsets.astype(np.int64) - offsets[0]
