"""Hostile files kill at most the reader."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.validator.parsing import Reader
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission
from tests.rollouts.test_submission_file import HONEST, LIMITS


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parsing")


def read_bytes(reader: Reader, folder: Path, raw: bytes) -> Rollouts:
    (folder / "pushed").write_bytes(raw)
    digest = blake3(raw).digest()
    return reader.read(folder / "pushed", digest, folder / "canonical", LIMITS).rollouts


positions = st.one_of(
    st.integers(0, len(HONEST) - 1), st.integers(len(HONEST) - 1200, len(HONEST) - 1)
)


@settings(deadline=None)  # a reader that died takes a second to replace
@given(changes=st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=8))
def test_a_garbled_file_is_refused_or_still_well_formed(
    reader: Reader, folder: Path, changes: list[tuple[int, int]]
) -> None:
    raw = bytearray(HONEST)
    for position, value in changes:
        raw[position] = value
    try:
        rollouts = read_bytes(reader, folder, bytes(raw))
    except BadSubmission as error:
        assert error.check in ("schema", "header")
    else:
        assert len(rollouts) <= LIMITS.rows_max
    assert len(read_bytes(reader, folder, HONEST)) == 4  # and the next one is read


def test_a_file_that_kills_the_reader_is_refused_unproven(folder: Path) -> None:
    reader = Reader(memory_bytes_max=1 << 20)  # too little for anything: it dies at once
    try:
        for _ in range(2):
            with pytest.raises(BadSubmission, match="kills the reader") as caught:
                read_bytes(reader, folder, HONEST)
            assert not caught.value.proven
    finally:
        reader.close()


def test_a_reader_that_died_meanwhile_is_replaced(reader: Reader, folder: Path) -> None:
    reader._process.send_signal(signal.SIGKILL)
    reader._process.wait()
    assert len(read_bytes(reader, folder, HONEST)) == 4


def test_trouble_of_this_machine_is_no_fault_of_the_file(reader: Reader, folder: Path) -> None:
    (folder / "pushed").write_bytes(HONEST)
    digest = blake3(HONEST).digest()
    with pytest.raises(OSError, match="nowhere"):
        reader.read(folder / "pushed", digest, folder / "nowhere" / "canonical", LIMITS)
    with pytest.raises(OSError, match="its hash differs"):
        reader.read(folder / "pushed", bytes(32), folder / "canonical", LIMITS)
