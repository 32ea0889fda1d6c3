"""Targets for files and proofs: submissions, rollouts, deltas, safetensors, TOPLOC."""

from __future__ import annotations

import functools
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import trio
from blake3 import blake3

from peers.proofs import toploc
from peers.proofs.format import CHUNK_TOKENS, PROOF_BYTES, ProofFormatError, check_format, split
from peers.validator.reader import Reader
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission
from swarm.shardcast import delta
from swarm.shardcast.delta import BadDelta, Delta
from swarm.world.compute import LocalChild
from tests.background import Ask, in_background
from tests.fuzz.target import Target
from tests.rollouts.test_submission_file import HONEST, LIMITS, make_rollouts
from tests.shardcast.test_delta import changed, safetensors

READER_MEMORY_BYTES_MAX = 64 << 20
"""Growth of the reading process's memory for one file of a few KiB."""

READER_CPU_SECONDS_MAX = 2.0
"""Processor time of the reading process for such a file, its restart not included."""

_closing = ExitStack()


def close() -> None:
    """End the reading process, whose thread would keep this one alive."""
    _closing.close()
    folder.cache_clear()
    _reading.cache_clear()


@functools.cache
def folder() -> Path:
    """A folder for this process's files."""
    return Path(_closing.enter_context(tempfile.TemporaryDirectory(prefix="fuzz")))


# --- submissions ---


@functools.cache
def _reading() -> tuple[Reader, Ask]:
    reader = Reader()
    return reader, _closing.enter_context(in_background(reader.run))


def _process(reader: Reader) -> Path:
    child = reader._child.value
    assert isinstance(child, LocalChild)
    return Path(f"/proc/{child._process.pid()}")


def check_submission(raw: bytes) -> None:
    """Read a submission in the process that may die of it, and measure what it costs there."""
    reader, ask = _reading()
    ask(reader._child.wait_until, lambda child: child is not None)
    process = _process(reader)
    (folder() / "pushed").write_bytes(raw)
    (process / "clear_refs").write_text("5")  # the highest memory is measured from here
    memory, seconds = _memory(process, "VmRSS"), _cpu_seconds(process)
    digest, out = blake3(raw).digest(), folder() / "canonical"
    try:
        contents = ask(
            trio.to_thread.run_sync, reader.read, folder() / "pushed", digest, out, LIMITS
        )
    except BadSubmission as error:
        assert error.check in ("schema", "header")
        assert "more memory" not in error.detail, "a small file took all the reader's memory"
        if "kills the reader" in error.detail:
            return
    else:
        assert contents.header.format == 2
        _check_rollouts(contents.rollouts)
    assert _memory(process, "VmHWM") - memory < READER_MEMORY_BYTES_MAX
    assert _cpu_seconds(process) - seconds < READER_CPU_SECONDS_MAX


def _memory(process: Path, field: str) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _cpu_seconds(process: Path) -> float:
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


# --- rollouts in canonical form ---


def check_rollouts(raw: bytes) -> None:
    try:
        rollouts = Rollouts.from_bytes(raw)
    except ValueError:
        return
    _check_rollouts(rollouts)


def _check_rollouts(rollouts: Rollouts) -> None:
    """What passed the checks has readable rows and one encoding."""
    raw = rollouts.to_bytes()
    assert Rollouts.from_bytes(raw).to_bytes() == raw
    rows = [rollouts.row(index) for index in range(len(rollouts))]
    assert sum(len(row.rollout.tokens) for row in rows) == len(rollouts.tokens)
    assert [len(row.rollout.model_tokens) for row in rows] == rollouts.model_lengths().tolist()


# --- deltas and safetensors ---


def check_delta(raw: bytes) -> None:
    """Apply a delta to blocks of zeros; also read the bytes as one uncompressed block."""
    (folder() / "delta").write_bytes(raw)
    with (folder() / "delta").open("rb") as file:
        try:
            found = Delta(file)
            for name, each in found.files.items():
                for number in range(min(each.blocks, 4)):
                    start = number * delta.DELTA_BLOCK_BYTES
                    size = min(delta.DELTA_BLOCK_BYTES, each.size_bytes - start)
                    found.change(name, number, np.zeros(size, np.uint8))
        except BadDelta as error:
            assert "\n" not in str(error)
    for word in (1, 2, 4, 8):
        block = np.zeros(64, np.uint8)
        try:
            delta.apply_block(raw, block, word)
        except BadDelta:
            continue
        assert delta.encode_block(np.zeros(64, np.uint8), block, word) == raw


def check_safetensors(raw: bytes) -> None:
    """Look for tensors in a file of a checkpoint, as the encoder of deltas does."""
    (folder() / "tensors").write_bytes(raw)
    assert delta.word_bytes_of(folder() / "tensors") in (0, 1, 2, 4, 8)


def _deltas() -> list[bytes]:
    values = np.random.default_rng(1).integers(0, 1 << 16, 300, np.uint16).tobytes()
    base, new, out = (folder() / name for name in ("base", "new", "made"))
    for place, raw in ((base, values), (new, changed(values, 0.2, 2))):
        place.mkdir()
        for name in ("a", "b"):
            (place / name).write_bytes(safetensors({"w": ("BF16", raw)}))
    delta.encode(base, new, out, ["a", "b"], limit_bytes=1 << 20)
    old, fresh = np.zeros(64, np.uint8), np.frombuffer(values[:64], np.uint8)
    return [out.read_bytes(), *(delta.encode_block(old, fresh, word) for word in (1, 2, 4, 8))]


def _safetensors() -> list[bytes]:
    return [
        safetensors({"w": ("BF16", bytes(40)), "b": ("F32", bytes(8))}),
        safetensors({}, note="none"),
        safetensors({"x": ("F8_E4M3", bytes(7))}),
    ]


# --- proofs ---


@functools.cache
def _hidden() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(40, 64, generator=generator).bfloat16()


def check_proof(raw: bytes) -> None:
    """Judge proofs of up to 40 tokens, of which each must be wrong or honest."""
    hidden = _hidden()[: 32 if len(raw) <= PROOF_BYTES else 40]
    chunks = toploc.chunk_rows(hidden[:0], hidden)
    proofs = split(raw)
    try:
        check_format(proofs, [CHUNK_TOKENS * len(chunks)])
    except ProofFormatError:
        return
    honest = toploc.build(chunks)
    for proof, right, result in zip(proofs, honest, toploc.verify(chunks, proofs), strict=True):
        assert 0 <= result.sign_mismatches <= result.exponent_matches <= 128
        assert result.accepted == (proof == right) or result.exponent_matches >= 90


TARGETS = [
    Target("submission", check_submission, lambda: [HONEST]),
    Target(
        "rollouts",
        check_rollouts,
        lambda: [make_rollouts().to_bytes(), make_rollouts(rows=1).to_bytes()],
    ),
    Target("delta", check_delta, _deltas),
    Target("safetensors", check_safetensors, _safetensors),
    Target(
        "proof",
        check_proof,
        lambda: [
            toploc.build([_hidden()[:32]])[0],
            b"".join(toploc.build(toploc.chunk_rows(_hidden()[:0], _hidden()))),
        ],
    ),
]
