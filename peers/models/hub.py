"""Downloads from the Hugging Face hub into its library's cache, whose `HF_…` variables count.

Only config, tokenizer, safetensors and the data files that are read are fetched, never programs or
pickles. A file counts once its SHA-256 is the one that the hub states."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from glob import escape
from pathlib import Path, PurePath
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, errors, set_client_factory
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import tqdm

from peers.engines.tokenizer import BYTES_MAX, PATTERNS
from peers.models.find import Model
from swarm.errors import UserError
from swarm.terminal.figures import readable_bytes
from swarm.world.machine import free_memory_bytes
from swarm.world.progress import current

ABOUT = ("config.json", "adapter_config.json", *PATTERNS)
"""Files that say what a model is."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
ELSEWHERE = tuple(f"*/{pattern}" for pattern in WEIGHTS)
"""Weights in folders of a repository, which no engine reads."""

SECONDS = 20.0
"""Silence of the hub after which it counts as unreachable."""
ANSWER_SECONDS = 60.0
ANSWER_BYTES = 64 << 20
"""Most of one answer about a repository; a list of 100,000 files takes 30 MB."""

_CHECKED = "swarm-checked"
"""File in a model's place in the cache: the names of the blobs whose SHA-256 was right."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def download(name: str, revision: str | None, option: str, *, weights: bool) -> Model:
    """The folder of a model of the hub in the library's cache; raises `UserError`."""
    called = f"{option} {name}" + (f"@{revision}" if revision else "")

    def fetch(hub: HfApi) -> Path:
        if weights and not constants.HF_HUB_OFFLINE:
            _check_size(hub, name, revision, called)
        return Path(
            hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                allow_patterns=[*ABOUT, *(WEIGHTS if weights else ())],
                ignore_patterns=list(ELSEWHERE),
                tqdm_class=_bounded_bar(BYTES_MAX + (free_memory_bytes() if weights else 0)),
                etag_timeout=SECONDS,
            )
        )

    folder = _fetched(fetch, name, called)
    _check_whole(folder, called, weights)
    return Model(folder, f"{name}@{folder.name}")


def download_data(
    name: str, revision: str | None, choose: Callable[[Sequence[PurePath]], list[PurePath]]
) -> tuple[str, list[Path]]:
    """A data set's commit, and the files that `choose` names, cached; raises `UserError`."""
    called = f"the data set {name}" + (f"@{revision}" if revision else "")
    place = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset")
    chosen: list[PurePath] = []

    def fetch(hub: HfApi) -> Path:
        nonlocal chosen
        # A commit never changes, so the hub need not be asked: its files were listed here before.
        listing = place / f"swarm-files-{revision}".replace("/", "-")
        with suppress(OSError, ValueError):
            chosen = choose(list(map(PurePath, json.loads(listing.read_bytes()))))
            folder = place / "snapshots" / str(revision)
            if all((folder / each).is_file() for each in chosen):
                return folder
        info = hub.dataset_info(name, revision=revision, files_metadata=True, timeout=SECONDS)
        sizes = {PurePath(each.rfilename): each.size or 0 for each in info.siblings or []}
        chosen = choose([each for each in sizes if not {"..", "/"} & {*each.parts}])
        folder = Path(
            hub.snapshot_download(
                name,
                repo_type="dataset",
                revision=info.sha,
                cache_dir=constants.HF_HUB_CACHE,
                # A pattern, in which a name with [ or ? stands for itself.
                allow_patterns=[escape(str(each)) for each in chosen],
                tqdm_class=_bounded_bar(sum(sizes[each] for each in chosen)),
                etag_timeout=SECONDS,
            )
        )
        listing = place / f"swarm-files-{info.sha}"
        listing.write_text(json.dumps(list(map(str, sizes))))
        return folder

    folder = _fetched(fetch, name, called, "data set")
    return folder.name, [folder / each for each in chosen]


def _fetched(fetch: Callable[[HfApi], Path], name: str, called: str, kind: str = "model") -> Path:
    """The folder that `fetch` downloads with the library, its digests checked."""
    set_client_factory(_client)
    try:
        folder = fetch(HfApi(endpoint=constants.ENDPOINT))
    except Exception as error:
        raise explained(error, name, called, kind=kind) from error
    _check_digests(folder, called)
    return folder


class _Refused(Exception):
    """What the hub sent is more than it may send; the text is the end of a sentence."""


class _Answer(httpx2.SyncByteStream):
    def __init__(self, body: Any, until: float) -> None:
        self._body, self._until = body, until

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for part in self._body:
            count += len(part)
            if count > ANSWER_BYTES or time.monotonic() > self._until:
                raise _Refused(
                    f"gave no whole answer within {ANSWER_SECONDS:.0f} seconds and "
                    f"{ANSWER_BYTES >> 20} MiB"
                )
            yield part

    def close(self) -> None:
        self._body.close()


def _client() -> httpx2.Client:
    """The library's own client, whose answers about repositories are bounded."""
    client = default_client_factory()
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _note_start],
        "response": [*hooks["response"], _bound],
    }
    return client


_UNTIL = "swarm_until"


def _note_start(request: httpx2.Request) -> None:
    if "/api/" in request.url.path:  # a redirected request inherits it
        request.extensions.setdefault(_UNTIL, time.monotonic() + ANSWER_SECONDS)
        request.headers["Accept-Encoding"] = "identity"
        # The library asks with timeouts of None, which would wait for ever.
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), SECONDS)


def _bound(response: httpx2.Response) -> None:
    if _UNTIL not in response.request.extensions:
        return
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise _Refused("compresses its answers without being asked")
    response.stream = _Answer(response.stream, response.request.extensions[_UNTIL])


def _bounded_bar(most: int) -> type[tqdm]:
    """The library's progress bar, which ends larger downloads; a child's reports to its owner."""
    reporter = current.get()

    class Bar(tqdm):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)  # type: ignore[no-untyped-call]
            self._counts_bytes = named.get("unit") == "B"
            self._received = 0.0

        def update(self, n: float | None = 1) -> bool | None:
            self._received += n or 0
            if self._counts_bytes and self._received > most:
                raise _Refused(f"sent more than {readable_bytes(most)}, all that fits here")
            if reporter is not None:
                reporter.report_from_any_thread()
            super().update(n)
            return None

    return Bar


def _check_size(hub: HfApi, name: str, revision: str | None, called: str) -> None:
    """Refuse a model whose weights no memory of this machine holds, before they are fetched."""
    info = hub.model_info(name, revision=revision, files_metadata=True, timeout=SECONDS)
    files = {each.rfilename: each.size or 0 for each in info.siblings or []}
    weights = {n: size for n, size in files.items() if "/" not in n and fnmatch(n, WEIGHTS[0])}
    if not weights:
        others = sorted(
            each for each in files if each.endswith((".bin", ".pt", ".pth", ".gguf", ".ckpt"))
        )
        raise UserError(
            f"{called} has no weights as safetensors"
            + (f" (only {', '.join(others[:3])})" if others else "")
            + "; choose another repository of this model, or convert it"
        )
    total, free = sum(weights.values()), free_memory_bytes()
    if total > free:
        raise UserError(
            f"{called} has {readable_bytes(total)} of weights, but only {readable_bytes(free)} of "
            "memory are free on this machine; choose a smaller model, or a larger machine"
        )


def _check_digests(folder: Path, called: str) -> None:
    """Check large files' SHA-256, which the cache names blobs by, once; raises `UserError`."""
    noted = folder.parent.parent / _CHECKED
    known: set[str] = set()
    with suppress(OSError, UnicodeDecodeError):
        known = set(noted.read_text().split())
    before = len(known)
    for link in sorted(folder.rglob("*")):
        blob = link.resolve()
        if not link.is_file() or not _SHA256.fullmatch(blob.name) or blob.name in known:
            continue
        with blob.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != blob.name:
            link.unlink()
            blob.unlink()
            raise UserError(
                f"{called}: {link.name} arrived with another SHA-256 than the hub states; it was "
                "deleted, so type the command again"
            )
        known.add(blob.name)
    if len(known) > before:
        with suppress(OSError):  # a cache that may only be read: they are checked again
            noted.write_text("\n".join(sorted(known)) + "\n")


def _check_whole(folder: Path, called: str, weights: bool) -> None:
    """Raise `UserError` for a repository that lacks what every model has."""
    missing = [each for each in ("config.json", "tokenizer.json") if not (folder / each).exists()]
    if missing:
        raise UserError(f"{called} has no {missing[0]}, so it is no model that can be used here")
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(f"{called}: its weights are not in the cache; try again online")


def explained(
    error: Exception, name: str, called: str, *, kind: str = "model", pushing: bool = False
) -> Exception:
    """The sentence for a hub error, begun by `called`, with a way out. `name`: the repository's."""
    hub = re.sub("//[^/@]*@", "//", constants.ENDPOINT)  # without a password
    causes: list[Any] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)

    def is_one(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in causes)

    status = next((found for each in causes if (found := _status_of(each)) is not None), 0)
    refused = next((str(each) for each in causes if isinstance(each, _Refused)), "")
    if isinstance(error, UserError):
        return error
    if not hub.startswith(("http://", "https://")):
        return UserError(f"HF_ENDPOINT is {hub}; it must begin with https:// (or http://)")
    if is_one(errors.GatedRepoError):
        why = (
            f"needs its owner's leave: ask for it at {hub}/{name}, then set HF_TOKEN to a token "
            "of yours (or hf auth login)"
        )
    elif pushing and status in (401, 403):
        why = f"may not be written with this token; set HF_TOKEN to one of {hub}/settings/tokens"
    elif is_one(errors.RevisionNotFoundError):
        why = f"does not exist: the hub has {name}, but no such revision; see {hub}/{name}/commits"
    elif is_one(errors.RepositoryNotFoundError):
        why = (
            f"is no folder here, and {hub} has no {kind} of that name that you may see; correct "
            "it, or set HF_TOKEN if it is private"
        )
    elif is_one(errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        why = (
            "is no folder here and not whole in the cache, and HF_HUB_OFFLINE is set; correct the "
            "name, or fetch it once without that"
        )
    elif is_one(errors.HFValidationError):
        why = "is no name of the hub; names are OWNER/NAME"
    elif isinstance(error, OSError) and error.errno is not None:
        why = f"cannot be stored: {error.strerror} ({constants.HF_HUB_CACHE}; set HF_HOME)"
    elif refused:
        why = f"cannot be fetched: {hub} {refused}; choose another hub (HF_ENDPOINT) or {kind}"
    elif status == 429:
        why = f"has to wait: {hub} is asked too often; try again in some minutes, or set HF_TOKEN"
    elif status >= 500:
        why = f"has to wait: {hub} answers with status {status}; try again later"
    elif isinstance(error, (ValueError, TypeError, LookupError, AttributeError, RecursionError)):
        why = f"cannot be understood: {hub} does not answer as a hub ({_kind(error)}); correct "
        why += "HF_ENDPOINT or the name, or try again"
    else:
        last = _kind(causes[-1])
        failed = "cannot be sent to" if pushing else "is no folder here, and cannot be fetched from"
        why = f"{failed} {hub}: {last}; correct the name, or try again"
    return UserError(f"{called} {why}")


def _kind(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__


def _status_of(error: Any) -> int | None:
    return error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
