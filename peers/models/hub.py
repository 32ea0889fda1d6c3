"""Models of the Hugging Face hub, downloaded by its own library into its own cache.

`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT` and `HF_HUB_OFFLINE` mean what they mean to the library. Only
config, tokenizer and safetensors are fetched, never programs or pickles. A file counts once its
SHA-256 is the one that the hub states for it.
"""

from __future__ import annotations

import hashlib
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors

from peers.models.find import Model
from swarm.errors import UserError
from swarm.terminal.figures import readable_bytes
from swarm.world.machine import free_memory_bytes

ABOUT = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template*"),
    "adapter_config.json",
)
"""Files that say what a model is."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
INDEX = "model.safetensors.index.json"

SECONDS = 20.0
"""Silence of the hub after which it counts as unreachable, for its answers about files."""

_CHECKED = "swarm-checked"
"""File in a model's place in the cache: the names of the blobs whose SHA-256 was right."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def download(name: str, revision: str | None, option: str, *, weights: bool) -> Model:
    """The folder of a model of the hub in the library's cache; raises `UserError`."""
    wanted = [*ABOUT, *(WEIGHTS if weights else ())]
    called = f"{option} {name}" + (f"@{revision}" if revision else "")
    hub = HfApi(endpoint=constants.ENDPOINT)
    try:
        if weights and not constants.HF_HUB_OFFLINE:
            _check_size(hub, name, revision, called)
        folder = Path(
            hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=constants.HF_HUB_CACHE,
                allow_patterns=wanted,
                etag_timeout=SECONDS,
            )
        )
    except Exception as error:
        raise explained(error, name, called) from error
    _check_digests(folder, called)
    _check_whole(folder, called, weights)
    return Model(folder, f"{name}@{folder.name}")


def _check_size(hub: HfApi, name: str, revision: str | None, called: str) -> None:
    """Refuse a model whose weights no memory of this machine holds, before they are fetched."""
    info = hub.model_info(name, revision=revision, files_metadata=True, timeout=SECONDS)
    files = {each.rfilename: each.size or 0 for each in info.siblings or []}
    weights = {file: size for file, size in files.items() if fnmatch(file, WEIGHTS[0])}
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
    """Check the SHA-256 of each large file that was not checked before; raises `UserError`.

    The cache names a large file's blob by the SHA-256 that the hub states.
    """
    noted = folder.parent.parent / _CHECKED
    known = set(noted.read_text().split()) if noted.exists() else set()
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
    noted.write_text("\n".join(sorted(known)) + "\n")


def _check_whole(folder: Path, called: str, weights: bool) -> None:
    """Raise `UserError` for a repository that lacks what every model has."""
    missing = [each for each in ("config.json", "tokenizer.json") if not (folder / each).exists()]
    if missing:
        raise UserError(f"{called} has no {missing[0]}, so it is no model that can be used here")
    if weights and not any(folder.glob("*.safetensors")):
        raise UserError(f"{called}: its weights are not in the cache; try again online")


def explained(error: Exception, name: str, called: str, *, pushing: bool = False) -> Exception:
    """The sentence for an error of the hub's library, with the way out.

    `name` is the repository's; `called` begins the sentence.
    """
    hub = constants.ENDPOINT
    causes: list[Any] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)

    def is_one(*kinds: type[BaseException]) -> bool:
        return any(isinstance(each, kinds) for each in causes)

    if isinstance(error, UserError):
        return error
    if is_one(errors.GatedRepoError):
        why = (
            f"needs its owner's leave: ask for it at {hub}/{name}, then set HF_TOKEN to a token "
            "of yours (or hf auth login)"
        )
    elif pushing and _status_of(error) in (401, 403):
        why = f"may not be written with this token; set HF_TOKEN to one of {hub}/settings/tokens"
    elif is_one(errors.RevisionNotFoundError):
        why = f"does not exist: the hub has {name}, but no such revision; see {hub}/{name}/commits"
    elif is_one(errors.RepositoryNotFoundError):
        why = (
            f"is no folder here, and {hub} has no model of that name that you may see; correct "
            "it, or set HF_TOKEN if it is private"
        )
    elif is_one(errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        why = "is not whole in the cache, and HF_HUB_OFFLINE is set; fetch it once without it"
    elif is_one(errors.HFValidationError):
        why = "is no name of the hub; names are OWNER/NAME"
    elif isinstance(error, OSError) and error.errno is not None:
        why = f"cannot be stored: {error.strerror} ({constants.HF_HUB_CACHE}; set HF_HOME)"
    else:
        last = str(causes[-1]).strip().split("\n")[0][:200]
        failed = "cannot be sent to" if pushing else "is no folder here, and cannot be fetched from"
        why = f"{failed} {hub}: {last or type(error).__name__}; correct the name, or try again"
    return UserError(f"{called} {why}")


def _status_of(error: Exception) -> int | None:
    """The HTTP status of an answer of the hub."""
    return error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
