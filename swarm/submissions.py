"""A submission: one Parquet file of rollouts, and the one canonical form of what it holds.

One row per completion, ordered by (group, sample). The file is written without compression,
dictionaries or statistics: proofs do not compress, equal content gives equal bytes, and a file
that cannot unfold bounds what reading it costs. Reading is for hostile files, in a child process
with a memory limit; what it gives, `Rollouts`, is plain arrays that pass on to the process that
recomputes them, so that one token array per completion serves proof, reward and training.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import blake3
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.numpy
from msgspec import Meta
from numpy.typing import NDArray

from swarm.errors import DECODE_ERRORS, PeerError, UserError
from swarm.messages import Count, Key, Line, Name

Integers = NDArray[np.int32]
Floats = NDArray[np.float32]
Offsets = NDArray[np.int64]

HEADER_KEY = b"swarm"
"""Key of the header, as JSON, in the file's metadata."""

HEADER_BYTES_MAX = 16 * 1024

FORMAT = 1
"""Version of the schema and the header."""


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element, nullable=False))


SCHEMA = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("prompt_tokens", _list_of(pa.int32()), nullable=False),
        pa.field("completion_tokens", _list_of(pa.int32()), nullable=False),
        pa.field("proof", pa.binary(), nullable=False),
        pa.field("log_probabilities", _list_of(pa.float32()), nullable=False),
        pa.field("target_length", pa.int32(), nullable=False),
    ]
)
"""`proof`: TOPLOC proofs of 258 bytes, one per 32 completion tokens begun, one after the other.
`log_probabilities`: what the worker's engine says, one per completion token; only ever reported.
`target_length`: completion tokens the prompt asks for, 0 for none."""


class BadSubmission(PeerError):
    """A file that no honest worker writes: which check it fails, and by how much."""

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
    """Whose rollouts these are, of which policy, and exactly how they were sampled."""

    format: int = FORMAT
    run: Name
    lineage: Count
    step: Count
    policy: Count
    worker: Key
    number: Count
    environment: Name
    environment_version: Name
    temperature: float
    max_new_tokens: Count
    stop_ids: Annotated[list[Count], Meta(max_length=16)]
    engine: Line


@dataclass(frozen=True)
class Rollouts:
    """R completions with their prompts. Lists lie end to end: those of row i are at
    `offsets[i] : offsets[i + 1]`."""

    group: Integers
    """[R]."""
    sample: Integers
    """[R]."""
    target_length: Integers
    """[R]."""
    prompt_tokens: Integers
    prompt_offsets: Offsets
    """[R + 1], the first 0."""
    completion_tokens: Integers
    completion_offsets: Offsets
    """[R + 1], the first 0; also of the log-probabilities."""
    log_probabilities: Floats
    proofs: NDArray[np.uint8]
    proof_offsets: Offsets
    """[R + 1], the first 0; in bytes."""

    @classmethod
    def from_lists(
        cls,
        *,
        group: Sequence[int],
        sample: Sequence[int],
        target_length: Sequence[int],
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        log_probabilities: Sequence[Sequence[float]],
        proofs: Sequence[bytes],
    ) -> Rollouts:
        """Rollouts row by row; raises `ValueError` when the rows do not agree."""
        result = cls(
            group=np.array(group, np.int32),
            sample=np.array(sample, np.int32),
            target_length=np.array(target_length, np.int32),
            prompt_tokens=np.array(list(itertools.chain(*prompts)), np.int32),
            prompt_offsets=_offsets(prompts),
            completion_tokens=np.array(list(itertools.chain(*completions)), np.int32),
            completion_offsets=_offsets(completions),
            log_probabilities=np.array(list(itertools.chain(*log_probabilities)), np.float32),
            proofs=np.frombuffer(b"".join(proofs), np.uint8),
            proof_offsets=_offsets(proofs),
        )
        if any(len(a) != len(b) for a, b in zip(completions, log_probabilities, strict=True)):
            raise ValueError("a completion has not as many log-probabilities as tokens")
        result._check()
        return result

    def __len__(self) -> int:
        return len(self.group)

    def prompt(self, row: int) -> list[int]:
        """Token ids."""
        values: list[int] = _part(self.prompt_tokens, self.prompt_offsets, row).tolist()
        return values

    def completion(self, row: int) -> list[int]:
        """Token ids, the stop token included."""
        values: list[int] = _part(self.completion_tokens, self.completion_offsets, row).tolist()
        return values

    def row_log_probabilities(self, row: int) -> list[float]:
        """One a completion token, as the worker's engine reports them."""
        values: list[float] = _part(self.log_probabilities, self.completion_offsets, row).tolist()
        return values

    def proof(self, row: int) -> bytes:
        """The row's proofs, one after the other."""
        return _part(self.proofs, self.proof_offsets, row).tobytes()

    def to_bytes(self) -> bytes:
        """As safetensors: arrays by name, nothing that could run."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        return bytes(safetensors.numpy.save(arrays))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Rollouts:
        """What `to_bytes` wrote; raises `ValueError` for anything else."""
        try:
            arrays = safetensors.numpy.load(raw)
        except safetensors.SafetensorError as error:
            raise ValueError(f"these bytes are no rollouts ({error})") from error
        if {name: array.dtype for name, array in arrays.items()} != _ARRAYS:
            raise ValueError("these arrays are no rollouts")
        if any(array.ndim != 1 for array in arrays.values()):
            raise ValueError("an array of rollouts is not flat")
        result = cls(**arrays)
        result._check()
        return result

    def _check(self) -> None:
        rows = len(self.group)
        if len(self.sample) != rows or len(self.target_length) != rows:
            raise ValueError("columns of rollouts differ in length")
        for offsets, flat in (
            (self.prompt_offsets, self.prompt_tokens),
            (self.completion_offsets, self.completion_tokens),
            (self.completion_offsets, self.log_probabilities),
            (self.proof_offsets, self.proofs),
        ):
            if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != len(flat):
                raise ValueError("offsets of rollouts do not fit their values")
            if (offsets[1:] < offsets[:-1]).any():
                raise ValueError("offsets of rollouts run backwards")


_ARRAYS: dict[str, np.dtype[Any]] = {
    "group": np.dtype(np.int32),
    "sample": np.dtype(np.int32),
    "target_length": np.dtype(np.int32),
    "prompt_tokens": np.dtype(np.int32),
    "prompt_offsets": np.dtype(np.int64),
    "completion_tokens": np.dtype(np.int32),
    "completion_offsets": np.dtype(np.int64),
    "log_probabilities": np.dtype(np.float32),
    "proofs": np.dtype(np.uint8),
    "proof_offsets": np.dtype(np.int64),
}


@dataclass(frozen=True)
class ReadLimits:
    """What a reader lets a file cost."""

    bytes_max: int
    rows_max: int
    prompt_tokens_max: int
    """Of one row."""
    completion_tokens_max: int
    """Of one row."""


@dataclass(frozen=True)
class Submission:
    """What a file holds."""

    header: Header
    rollouts: Rollouts


def write(path: Path, rollouts: Rollouts, header: Header) -> tuple[bytes, int]:
    """Write a submission durably; its BLAKE3-256 and size in bytes.

    The same rollouts and header give the same bytes (with the same pyarrow). Raises `OSError`.
    """
    raw = encode(rollouts, header)
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return blake3.blake3(raw).digest(), len(raw)


def encode(rollouts: Rollouts, header: Header) -> bytes:
    """The bytes that `write` writes."""

    def lists(flat: NDArray[Any], offsets: Offsets, index: int) -> Any:
        return pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), pa.array(flat), type=SCHEMA.field(index).type
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
    table = pa.Table.from_arrays(
        [
            pa.array(rollouts.group),
            pa.array(rollouts.sample),
            lists(rollouts.prompt_tokens, rollouts.prompt_offsets, 2),
            lists(rollouts.completion_tokens, rollouts.completion_offsets, 3),
            proof,
            lists(rollouts.log_probabilities, rollouts.completion_offsets, 5),
            pa.array(rollouts.target_length),
        ],
        schema=SCHEMA,
    )
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(
        out,
        SCHEMA,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        store_schema=False,
    ) as writer:
        writer.write_table(table, row_group_size=max(1, len(rollouts)))
        writer.add_key_value_metadata({HEADER_KEY: msgspec.json.encode(header)})
    return bytes(out.getvalue())


def read(path: Path, limits: ReadLimits, digest: bytes | None = None) -> Submission:
    """Read an untrusted file; raises `BadSubmission` naming the first thing wrong with it.

    The file is read whole before it is parsed, so it cannot change meanwhile. Raises `OSError`
    when there is none, or when its BLAKE3-256 is not `digest`: that is nothing its maker did.
    """
    with path.open("rb") as file:
        raw = file.read(limits.bytes_max + 1)
    check_digest(raw, digest)
    return decode(raw, limits)


def check_digest(raw: bytes, digest: bytes | None) -> None:
    """Raise `OSError` when these are not the bytes that were hashed as they arrived (None: they
    never were)."""
    if digest is not None and blake3.blake3(raw).digest() != digest:
        raise OSError("the file on this machine is not the one that arrived: its hash differs")


def decode(raw: bytes, limits: ReadLimits) -> Submission:
    """A submission from its bytes; raises `BadSubmission`."""
    if len(raw) > limits.bytes_max:
        raise BadSubmission(
            "schema", len(raw), limits.bytes_max, f"the file exceeds {limits.bytes_max} bytes"
        )
    try:
        file = pq.ParquetFile(
            pa.BufferReader(raw),
            thrift_string_size_limit=HEADER_BYTES_MAX,
            thrift_container_size_limit=1024,
        )
        header = _check_metadata(file, len(raw), limits)
        table = file.read(use_threads=False)
        table.validate(full=True)
        if table.num_rows != file.metadata.num_rows:
            raise ValueError("its columns have not as many rows as it says")
        # Only now: pyarrow aborts when asked for a codec it does not know.
        group = file.metadata.row_group(0)
        if any(group.column(i).compression != "UNCOMPRESSED" for i in range(group.num_columns)):
            raise BadSubmission("schema", 1, 0, "a column is compressed or not plainly encoded")
    except (pa.ArrowMemoryError, MemoryError) as error:
        raise BadSubmission(
            "schema", 1, 0, "reading the file takes more memory than allowed", proven=False
        ) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise BadSubmission("schema", 1, 0, f"the file is no sound Parquet ({reason})") from error
    return Submission(header, _rollouts(table, limits))


def _check_metadata(file: Any, size_bytes: int, limits: ReadLimits) -> Header:
    """Everything the footer says, before any data is touched; raises `BadSubmission`."""
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
            f"{metadata.num_rows} rows, allowed are 1 to {limits.rows_max}",
        )
    if set(metadata.metadata or {}) != {HEADER_KEY}:
        raise BadSubmission("schema", 1, 0, "the file's metadata must be the key `swarm` alone")
    if file.schema_arrow != SCHEMA:
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
        # A value takes four bytes; an empty list takes an entry without one.
        if (
            column.num_values > size_bytes // 4 + metadata.num_rows
            or column.total_uncompressed_size > size_bytes
        ):
            raise BadSubmission(
                "schema", column.num_values, size_bytes // 4, "a column claims more than the file"
            )
    try:
        header = msgspec.json.decode(metadata.metadata[HEADER_KEY], type=Header)
    except DECODE_ERRORS as error:
        raise BadSubmission("header", 1, 0, f"the header is malformed: {error}"[:300]) from error
    if header.format != FORMAT:
        raise BadSubmission("header", header.format, FORMAT, "another version of the format")
    return header


def _rollouts(table: Any, limits: ReadLimits) -> Rollouts:
    """The table's columns as arrays, bounded; raises `BadSubmission`."""
    columns = {name: _single(table.column(index)) for index, name in enumerate(table.column_names)}
    prompts, prompt_offsets = _flat_list(columns["prompt_tokens"])
    completions, completion_offsets = _flat_list(columns["completion_tokens"])
    log_probabilities, log_offsets = _flat_list(columns["log_probabilities"])
    proofs, proof_offsets = _flat_bytes(columns["proof"])
    for what, offsets, longest in (
        ("prompt", prompt_offsets, limits.prompt_tokens_max),
        ("completion", completion_offsets, limits.completion_tokens_max),
    ):
        lengths = np.diff(offsets)
        if lengths.min() < 1 or lengths.max() > longest:
            raise BadSubmission(
                "schema",
                int(lengths.max()),
                longest,
                f"a {what} has {int(lengths.min())} to {int(lengths.max())} tokens, "
                f"allowed are 1 to {longest}",
            )
    if not np.array_equal(log_offsets, completion_offsets):
        raise BadSubmission("schema", 1, 0, "log-probabilities and tokens differ in number")
    if not np.isfinite(log_probabilities).all():
        raise BadSubmission("schema", 1, 0, "a log-probability is not finite")
    return Rollouts(
        group=columns["group"].to_numpy(),
        sample=columns["sample"].to_numpy(),
        target_length=columns["target_length"].to_numpy(),
        prompt_tokens=prompts,
        prompt_offsets=prompt_offsets,
        completion_tokens=completions,
        completion_offsets=completion_offsets,
        log_probabilities=log_probabilities,
        proofs=proofs,
        proof_offsets=proof_offsets,
    )


@dataclass(frozen=True)
class Row:
    """One completion, to be looked at."""

    group: int
    sample: int
    target_length: int
    prompt_tokens: list[int]
    completion_tokens: list[int]
    proof_bytes: int
    log_probabilities: list[float]
    prompt: str | None
    """Decoded, where a tokenizer was given; likewise the completion."""
    completion: str | None


def show(path: Path, tokenizer_folder: Path | None = None) -> tuple[Header, Iterator[Row]]:
    """A submission for people: its header and its rows, with text if a tokenizer is given.

    Raises `UserError` when the file is missing or no submission, or the tokenizer is missing.
    """
    decode_text = None
    if tokenizer_folder is not None:
        import tokenizers

        try:
            raw = (tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8")
            decode_text = tokenizers.Tokenizer.from_str(raw).decode
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(
                f"{tokenizer_folder} holds no tokenizer.json that can be read ({error})"
            ) from error
    try:
        size = path.stat().st_size
        # Nothing in an uncompressed file is longer than the file.
        submission = read(path, ReadLimits(size, size, size, size))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except BadSubmission as error:
        raise UserError(f"{path} is no submission: {error.detail}") from error
    return submission.header, _rows(submission.rollouts, decode_text)


def _rows(rollouts: Rollouts, decode_text: Any) -> Iterator[Row]:
    def text(tokens: list[int]) -> str | None:
        return decode_text(tokens, skip_special_tokens=False) if decode_text else None

    for row in range(len(rollouts)):
        prompt, completion = rollouts.prompt(row), rollouts.completion(row)
        yield Row(
            group=int(rollouts.group[row]),
            sample=int(rollouts.sample[row]),
            target_length=int(rollouts.target_length[row]),
            prompt_tokens=prompt,
            completion_tokens=completion,
            proof_bytes=int(rollouts.proof_offsets[row + 1] - rollouts.proof_offsets[row]),
            log_probabilities=rollouts.row_log_probabilities(row),
            prompt=text(prompt),
            completion=text(completion),
        )


def _offsets(rows: Sequence[Sequence[Any] | bytes]) -> Offsets:
    return np.concatenate(([0], np.cumsum([len(row) for row in rows], dtype=np.int64))).astype(
        np.int64
    )


def _part(flat: NDArray[Any], offsets: Offsets, row: int) -> NDArray[Any]:
    return flat[offsets[row] : offsets[row + 1]]


def _single(column: Any) -> Any:
    """A chunked column as one array."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


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
