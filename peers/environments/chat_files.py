"""The files of a model folder that may hold its chat template, read without Jinja."""

from __future__ import annotations

from pathlib import Path

from swarm.errors import UserError

FILES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
"""Of the first two the first that has a template wins, as in transformers. The third names tokens
that the second leaves out."""

BYTES_MAX = 16 << 20
"""Size of one file; the largest in use, for 262,000 tokens, has 1.2 MB."""


def read_files(folder: Path) -> dict[str, bytes]:
    """The contents of those of `FILES` that exist in `folder`; raises `UserError`."""
    return {name: _read(folder / name) for name in FILES if (folder / name).exists()}


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size <= BYTES_MAX:
            return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    raise UserError(f"{path} has {size} bytes; {BYTES_MAX} are the most; use the checkpoint's own")
