"""From what a person gives as a model to a Hugging Face folder on this machine."""

import fcntl
import json
import os
import re
import struct
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from swarm.errors import UserError
from swarm.terminal.extras import require_extra
from swarm.terminal.figures import readable_bytes
from swarm.world.machine import free_memory_bytes

FORMS = "a Hugging Face folder, a .gguf file, or OWNER/NAME[@REVISION] of the hub"
"""What a person may give, for the help of options."""

_HUB_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?"
)
_HERE = ("/", "./", "../", "~")
"""Beginnings that only a path on this machine has."""


@dataclass(frozen=True)
class Model:
    """A model on this machine."""

    folder: Path
    """With config.json, tokenizer and safetensors."""
    name: str
    """As it was given; of the hub, with the commit: OWNER/NAME@COMMIT."""

    @property
    def title(self) -> str:
        """A short name for people."""
        return self.name.partition("@")[0] if is_hub_name(self.name) else self.folder.resolve().name


def hub_name(text: str) -> tuple[str, str | None] | None:
    """Name and revision of OWNER/NAME or OWNER/NAME@REVISION; None for other texts."""
    found = None if text.startswith(_HERE) else _HUB_NAME.fullmatch(text)
    return None if found is None else (found["name"], found["revision"])


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a name of the hub, OWNER/NAME or OWNER/NAME@REVISION."""
    return hub_name(text) is not None


def find_model(given: str | Path, option: str, *, weights: bool = True) -> Model:
    """The folder of a model: given as a folder, a GGUF file, or `OWNER/NAME[@REVISION]`.

    What is on the hub is downloaded into its cache (`HF_HOME`) once, with a progress bar; a GGUF
    file is converted once. `option` begins the sentence of an error: `--model`. Without `weights`
    only config and tokenizer are fetched. Raises `UserError`."""
    text = str(given)
    path = Path(text)
    try:
        path = path.expanduser()
        is_folder = text != "" and path.is_dir()
    except (OSError, RuntimeError):  # too long, or no such user
        raise UserError(f"{option} {text[:300]} is no folder; give {FORMS}") from None
    if is_folder:
        return Model(path, text)
    if text and path.is_file() and path.suffix.lower() == ".gguf":
        return Model(converted(path, option), text)
    named = hub_name(text)
    if named is None or path.exists():
        raise UserError(
            f"{option} {text[:300]} is {'a file' if path.is_file() else 'no folder'}; give {FORMS}"
        )
    from peers.models.hub import download

    return download(*named, option, weights=weights)


VALUE_BYTES = 6
"""Memory of a value while it is converted: in fp32 and in bfloat16."""
ENTRIES_MAX = 1 << 22
"""Most entries of a header: a vocabulary of 262,144 tokens with its merges takes 1.4 million."""
_STRING, _ARRAY = 8, 9
_KINDS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, _STRING: 0, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its kind."""
_DIGITS = 6
"""Digits of a number in a config: a GGUF holds them in fp32, so 1e-5 reads 9.99999974e-06."""


def converted(path: Path, option: str) -> Path:
    """The folder of a GGUF file's model, in bfloat16 in the cache; raises `UserError`."""
    require_extra("gguf", f"{option} {path.name}")
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "swarm" / "gguf"
    folder = cache / f"{path.stem[:80]}-{digest}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be converting it
            if not folder.is_dir():
                _convert(path, folder, option)
    except OSError as error:
        raise UserError(
            f"{option} {path} cannot be converted into {cache}: {error.strerror or error}; set "
            "XDG_CACHE_HOME to a folder with room"
        ) from error
    return folder


def _convert(path: Path, folder: Path, option: str) -> None:
    from peers.learning.durable import whole_folder

    values, kinds = _described(path, option)
    free = free_memory_bytes()
    if VALUE_BYTES * values > free:
        raise UserError(
            f"{option} {path} has {values:,} values; to convert them takes "
            f"{readable_bytes(VALUE_BYTES * values)} of memory, and {readable_bytes(free)} are free"
        )
    print(
        f"converting {path.name} ({values / 1e6:,.0f} million values, {kinds}) to bfloat16, once; "
        "what its quantisation has rounded away stays lost",
        file=sys.stderr,
    )
    try:
        with whole_folder(folder) as aside:
            _write(path, aside)
    except (UserError, OSError):
        raise
    except Exception as error:
        raise UserError(
            f"{option} {path} cannot be converted: {str(error).splitlines()[0][:300]}; use the "
            "model's own repository of safetensors"
        ) from error


def _described(path: Path, option: str) -> tuple[int, str]:
    """A GGUF's number of values and the kinds that most of them have; raises `UserError`."""
    import gguf

    try:
        _check_header(path)
        tensors = gguf.GGUFReader(path).tensors
        sizes = Counter[str]()
        for each in tensors:
            sizes[each.tensor_type.name] += int(each.n_elements)
    except Exception as error:  # numpy's and the library's own, for files that are cut or no GGUF
        raise UserError(
            f"{option} {path} cannot be read as GGUF ({str(error)[:200]}); fetch it again"
        ) from error
    if not sizes:
        raise UserError(f"{option} {path} is a GGUF without weights; name the one that has them")
    return sizes.total(), ", ".join(kind for kind, _ in sizes.most_common(2))


def _check_header(path: Path) -> None:
    """Refuse a header that promises more than the file holds: the library would read on forever."""
    with path.open("rb") as file:
        total = path.stat().st_size

        def skip(count: int) -> None:
            if count > total - file.tell():
                raise ValueError("it ends in the middle of its header")
            file.seek(count, os.SEEK_CUR)

        def number(form: str) -> int:
            data = file.read(struct.calcsize(form))
            if len(data) < struct.calcsize(form):
                raise ValueError("it ends in the middle of its header")
            return int(struct.unpack("<" + form, data)[0])

        if file.read(4) != b"GGUF":
            raise ValueError("it is no GGUF file")
        if not 2 <= number("I") <= 3:
            raise ValueError("its version is neither 2 nor 3, little-endian")
        tensors, keys = number("Q"), number("Q")
        left = ENTRIES_MAX - tensors - keys
        for _ in range(keys if left >= 0 else 0):
            skip(number("Q"))
            kind, count = number("I"), 1
            if kind == _ARRAY:
                kind, count = number("I"), number("Q")
                left -= count
            if left < 0 or kind not in _KINDS:
                raise ValueError("its header has too many values, or of an unknown kind")
            for _ in range(count if kind == _STRING else 0):
                skip(number("Q"))
            skip(_KINDS[kind] * count)
        for _ in range(tensors if left >= 0 else 0):
            skip(number("Q"))
            skip(8 * number("I") + 12)
        if left < 0:
            raise ValueError("its header has too many values")


def _write(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from peers.engines.stored import readable_as_folder

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model: Any
    model, found = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
    )
    if found["missing_keys"]:  # transformers would make them up
        raise ValueError(f"it lacks {min(found['missing_keys'])}")
    # `save_pretrained` refuses a model that was loaded as quantised, so it moves into a new one.
    said = model.config.to_dict()
    said.pop("quantization_config", None)
    floats = {name: value for name, value in said.items() if isinstance(value, float)}
    said |= {name: float(f"{value:.{_DIGITS}g}") for name, value in floats.items()}
    if tokenizer.eos_token_id is not None:
        said["eos_token_id"] = tokenizer.eos_token_id
    with torch.device("meta"):
        plain = type(model)(type(model.config)(**said))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config.eos_token_id = said.get("eos_token_id")
    plain.to(torch.bfloat16).save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        readable_as_folder(weights)
    tokenizer.save_pretrained(folder)
    _name_architecture(folder / "config.json", type(model).__name__)


def _name_architecture(path: Path, name: str) -> None:
    config = json.loads(path.read_text())
    config["architectures"] = [name]
    config.pop("_name_or_path", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
