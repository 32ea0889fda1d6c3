"""Hostile files kill at most the reader."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from blake3 import blake3

from peers.validator.reader import MEMORY_BYTES_MAX, Reader
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import BadSubmission, ReadLimits
from swarm.world.child import CHILD_ENVIRONMENT
from swarm.world.compute import LocalChild
from tests.background import Ask, in_background
from tests.rollouts.test_submission_file import HONEST, LIMITS


class Reading:
    """A reader, and its loop."""

    def __init__(self, reader: Reader, ask: Ask) -> None:
        self.reader = reader
        self.ask = ask

    def read(
        self, path: Path, digest: bytes, out_path: Path, limits: ReadLimits = LIMITS
    ) -> Rollouts:
        function = self.reader.read
        return self.ask(trio.to_thread.run_sync, function, path, digest, out_path, limits).rollouts


@contextmanager
def reading(memory_bytes_max: int = MEMORY_BYTES_MAX) -> Iterator[Reading]:
    reader = Reader(memory_bytes_max)
    with in_background(reader.run) as ask:
        yield Reading(reader, ask)


@pytest.fixture(scope="module")
def reader() -> Iterator[Reading]:
    with reading() as reader:
        yield reader


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parsing")


def read_bytes(reader: Reading, folder: Path, raw: bytes) -> Rollouts:
    (folder / "pushed").write_bytes(raw)
    digest = blake3(raw).digest()
    return reader.read(folder / "pushed", digest, folder / "canonical")


def test_a_file_that_kills_the_reader_is_refused_unproven(folder: Path) -> None:
    huge = folder / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 26)
    limits = dataclasses.replace(LIMITS, bytes_max=1 << 26)
    with reading(memory_bytes_max=16 << 20) as reader:
        for _ in range(2):
            with pytest.raises(BadSubmission, match="kills the reader") as caught:
                reader.read(huge, bytes(32), folder / "canonical", limits)
            assert not caught.value.proven
            assert len(read_bytes(reader, folder, HONEST)) == 4


def test_a_reader_that_died_meanwhile_is_replaced(reader: Reading, folder: Path) -> None:
    assert len(read_bytes(reader, folder, HONEST)) == 4
    child = reader.reader._child.value
    assert isinstance(child, LocalChild)
    child._process.kill()
    reader.ask(child._gone.wait)
    assert len(read_bytes(reader, folder, HONEST)) == 4


def test_a_file_whose_reader_is_killed_is_read_again(reader: Reading, folder: Path) -> None:
    """By somebody else than the file: a reader that opens a pipe is killed as it waits."""
    path, digest = folder / "pushed", blake3(HONEST).digest()
    path.unlink(missing_ok=True)
    os.mkfifo(path)

    async def main() -> Rollouts:
        found: list[Rollouts] = []

        async def read() -> None:
            function, out = reader.reader.read, folder / "canonical"
            contents = await trio.to_thread.run_sync(function, path, digest, out, LIMITS)
            found.append(contents.rollouts)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            pipe = await trio.to_thread.run_sync(os.open, path, os.O_WRONLY)  # until it is read
            (folder / "honest").write_bytes(HONEST)
            (folder / "honest").replace(path)
            child = reader.reader._child.value
            assert isinstance(child, LocalChild)
            child._process.kill()
            os.close(pipe)
        return found[0]

    assert len(reader.ask(main)) == 4


def test_trouble_of_this_machine_is_no_fault_of_the_file(reader: Reading, folder: Path) -> None:
    (folder / "pushed").write_bytes(HONEST)
    digest = blake3(HONEST).digest()
    with pytest.raises(OSError, match="nowhere"):
        reader.read(folder / "pushed", digest, folder / "nowhere" / "canonical")
    with pytest.raises(OSError, match="its hash differs"):
        reader.read(folder / "pushed", bytes(32), folder / "canonical")


def test_arrow_in_a_child_reserves_no_more_than_it_uses() -> None:
    """A memory limit counts reserved memory: with Arrow's own allocator, 1 GiB at once."""
    code = (
        "import pyarrow\n"
        "def pages(): return int(open('/proc/self/statm').read().split()[5])\n"
        "before = pages()\n"
        "buffer = pyarrow.allocate_buffer(1000)\n"
        "print((pages() - before) * 4096)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | CHILD_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 1 << 26
