"""Files of training data, here or at addresses that fsspec knows: https://, s3://, gs://, hf://.

What is elsewhere is fetched as a stream into `~/.cache/swarm/data` (or below `XDG_CACHE_HOME`),
one file ahead of the one that is being read. A download that was cut off resumes where it ended."""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlsplit

import fsspec
import msgspec
from blake3 import blake3

from peers.environments.rows import SUFFIXES, Rows, chosen_files
from peers.models.find import hub_name
from swarm.errors import DECODE_ERRORS, DiskFullError, UserError
from swarm.terminal.figures import readable_bytes
from swarm.world.disk import replace_file
from swarm.world.progress import report

CHUNK_BYTES = 8 << 20
SILENCE_SECONDS = 120.0
"""Time without a byte after which a server counts as gone."""
FREE_SHARE = 0.05
"""Part of the disk that stays free: of the cache, what was used longest ago is deleted first."""

UNFINISHED, LOCK = ".partial", ".lock"
_HTTP = ("http://", "https://")
_VERSIONS = ("ETag", "etag", "blob_id", "xet_hash", "Last-Modified", "LastModified", "updated")
"""What file systems say of a file's contents, besides its size; `created` is the memory's."""


@dataclass(frozen=True)
class DataFile:
    """A file of a data set: a path, or an address with a protocol."""

    address: str
    size_bytes: int = 0
    version: str = ""
    """What the file system of another machine says of the contents, which changes with them."""

    def identity(self) -> str:
        """A text that is another one once the contents have changed."""
        report()
        if "://" in self.address:
            return f"{self.address} {self.size_bytes} {self.version}"
        digest = blake3(max_threads=blake3.AUTO).update_mmap(self.address)
        return digest.hexdigest() + _suffix(self.address)


def _suffix(address: str) -> str:
    return PurePath(urlsplit(address).path if "://" in address else address).suffix


def cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swarm" / "data"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_room(size_bytes: int) -> None:
    """Delete what was used longest ago until the disk takes so much more; raises `UserError`."""
    cache = cache_folder()
    least = FREE_SHARE * shutil.disk_usage(cache).total
    whole = [each for each in cache.iterdir() if each.suffix not in (UNFINISHED, LOCK)]
    for oldest in [*sorted(whole, key=lambda each: each.stat().st_mtime), None]:
        if shutil.disk_usage(cache).free - size_bytes >= least:
            return
        if oldest is None:
            raise DiskFullError(
                f"the disk of {cache} has no room for {readable_bytes(size_bytes)} more; free "
                "some, or set XDG_CACHE_HOME to a folder with room: what has been done is kept"
            )
        oldest.unlink(missing_ok=True)  # who has mapped it keeps it


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process makes the entry `path` of the cache."""
    with path.with_name(path.name + LOCK).open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report()
                time.sleep(0.5)
        yield


def cached(files: Sequence[DataFile], key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The cached file of these files and `key`, which `make` writes; raises `UserError`."""

    def states() -> list[tuple[int, int]]:
        found = [Path(each.address).stat() for each in files if "://" not in each.address]
        return [(each.st_size, each.st_mtime_ns) for each in found]

    names = ", ".join(each.address for each in files[:3])
    try:
        before = states()
        named = msgspec.json.encode([key, [each.identity() for each in files]])
        path = cache_folder() / f"{blake3(named).hexdigest()[:32]}{suffix}"
        with locked(path):
            if not path.exists():
                make(path)
                if states() != before:
                    path.unlink()
                    raise UserError(f"a file of {names} has changed while it was read; start again")
            os.utime(path)
        return path
    except OSError as error:
        raise UserError(
            f"the tokens of {names} cannot be made ({error}); it must be readable, and the cache "
            "writable: set XDG_CACHE_HOME to choose another folder for that"
        ) from error


def find_files(
    address: str, split: str | None = None, subset: str | None = None, texts: Sequence[str] = ()
) -> list[DataFile]:
    """The file at a path or address, or those with rows of a folder; raises `UserError`.

    `texts`: suffixes that a file without rows may have."""
    is_remote, is_named = "://" in address, _suffix(address) in (*texts, *SUFFIXES)
    if not is_remote and not Path(address).exists() and hub_name(address) is None:
        raise UserError(f"data {address} does not exist; give a file, a folder, or an address")
    if not is_named and (address.startswith(_HTTP) or Path(address).is_file()):
        wanted = ", ".join((*texts, *SUFFIXES))
        raise UserError(f"data names {address}, which is no {wanted} file; convert it to one")
    if not is_remote:
        is_text = _suffix(address) in texts
        files = [address] if is_text else Rows.files_at(address, split, subset)[0]
        return [DataFile(str(each)) for each in files]
    wanted = f"{address} {split} {subset}"
    listing = cache_folder() / f"{blake3(wanted.encode()).hexdigest()[:32]}.listing"
    try:
        found = _find_remote(address, split, subset, is_file=is_named)
        replace_file(listing, msgspec.json.encode(found))
        return found
    except Exception as error:  # each file system has its own
        with suppress(OSError, *DECODE_ERRORS):  # a restart while the server is away
            return msgspec.json.decode(listing.read_bytes(), type=list[DataFile])
        raise _explained(address, error) from error


def _find_remote(
    address: str, split: str | None, subset: str | None, *, is_file: bool
) -> list[DataFile]:
    system, path = fsspec.url_to_fs(address)
    system.invalidate_cache()
    if is_file or not system.isdir(path):
        return [_described(system, address)]
    within = {PurePath(os.path.relpath(each, path)): each for each in system.find(path)}
    chosen = chosen_files(list(within), split, subset, address)
    return [_described(system, system.unstrip_protocol(within[each])) for each in chosen]


def _described(system: Any, address: str) -> DataFile:
    info = system.info(system._strip_protocol(address))
    if not isinstance(info.get("size"), int):
        raise ValueError("it does not say its size")
    version = [f"{name}={info[name]}" for name in (*_VERSIONS, "created") if info.get(name)]
    return DataFile(address, info["size"], " ".join(version))


def _explained(address: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    said = (str(cause).splitlines() or [""])[0][:200] or type(cause).__name__
    return UserError(
        f"{address} cannot be read ({said}); check the address, the network and your access. What "
        "has been read is kept: the same command continues"
    )


def fetch(files: Sequence[DataFile]) -> Generator[Path]:
    """Where each file is on this machine; the next one is fetched meanwhile. Raises `UserError`."""
    ahead = ThreadPoolExecutor(1, "fetch")
    futures: list[Future[Path]] = []
    try:
        for at, file in enumerate(files):
            for each in files[len(futures) : at + 2]:
                futures.append(ahead.submit(_fetched, each))
            yield _waited(futures[at], file)
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)


def _waited(future: Future[Path], file: DataFile) -> Path:
    partial, seen, since = _partial(_place(file)), -1, time.monotonic()
    while True:
        try:
            return future.result(timeout=1.0)
        except Exception as error:
            if future.done():  # the error is its own
                raise _explained(file.address, error) from error
        done = partial.stat().st_size if partial.exists() else 0
        if done != seen:
            report()
            seen, since = done, time.monotonic()
        elif time.monotonic() - since > SILENCE_SECONDS:
            raise _explained(file.address, TimeoutError("it sends nothing"))


def _place(file: DataFile) -> Path:
    if "://" not in file.address:
        return Path(file.address)
    name = blake3(file.identity().encode()).hexdigest()[:32]
    return cache_folder() / (name + _suffix(file.address))


def _partial(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


def _fetched(file: DataFile) -> Path:
    path = _place(file)
    if "://" not in file.address:
        return path
    with locked(path):
        if path.exists():
            os.utime(path)
            return path
        make_room(file.size_bytes)
        system, there = fsspec.url_to_fs(file.address)
        # Blocks of the library's own would be read twice.
        source = system.open(there, "rb", block_size=CHUNK_BYTES, cache_type="none")
        with _partial(path).open("ab", buffering=0) as to, source:
            try:
                source.seek(to.tell())
            except ValueError:  # a server that only sends all
                to.seek(0)
                to.truncate()
            while wanted := min(CHUNK_BYTES, file.size_bytes - to.tell()):
                chunk = source.read(wanted)
                if not 0 < len(chunk) <= wanted:
                    raise ValueError(f"it sends {len(chunk):,} bytes where {wanted:,} were asked")
                to.write(chunk)
        if _described(system, file.address) != file:
            _partial(path).unlink()
            raise ValueError("it changed while it was read")
        return _partial(path).rename(path)
