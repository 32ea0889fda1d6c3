"""The tokenizer files of a model folder: checked, and copied to a new policy.

Files are selected by name from a closed list, so that no code (Python, pickles) is ever published.
They are copied byte for byte, because the run manifest holds the hash of tokenizer.json."""

import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import tokenizers

from swarm.data import beside
from swarm.errors import UserError

PATTERNS = beside(__file__, dict[str, tuple[str, ...]])["patterns"]
"""From `tokenizer.toml`."""
FILES_MAX = 64
BYTES_MAX = 256 << 20
"""Size of all tokenizer files together. The largest in use, for 256,000 tokens, take 40 MB."""


def check_tokenizer(folder: Path, vocabulary_size: int) -> None:
    """Raise `UserError` if the tokenizer in `folder`, if any, has more tokens than the model.

    A smaller one is common, because sizes are rounded up: the ids above decode to nothing. Special
    tokens may lie above (Gemma 3's image token); a text with one is refused where it is encoded."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return
    largest = max(vocabulary(folder, with_added=False).values(), default=0)
    if largest >= vocabulary_size:
        raise UserError(
            f"{path} has the token {largest}, but the model's vocabulary has {vocabulary_size} "
            "tokens; use the tokenizer that belongs to the model"
        )


def vocabulary(folder: Path, *, with_added: bool = True) -> dict[str, int]:
    """The tokens of a folder's tokenizer, and their ids; raises `UserError`."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{path} is no tokenizer file ({error})") from error
    return tokenizer.get_vocab(with_added_tokens=with_added)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer files in `source` to the folder `target`; raises as `tokenizer_files`."""
    for path in tokenizer_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def tokenizer_files(source: Path) -> list[Path]:
    """The tokenizer files to publish; raises `UserError` for too many, or links out of `source`."""
    files = [
        path
        for path in sorted([*source.glob("*"), *source.glob("*/*")])
        if any(fnmatchcase(path.relative_to(source).as_posix(), each) for each in PATTERNS)
    ]
    if len(files) > FILES_MAX:
        raise UserError(f"{source} holds {len(files)} tokenizer files; {FILES_MAX} are the most")
    # A snapshot in the Hugging Face cache consists of links into the folder `blobs`.
    homes = [source.resolve()]
    if source.parent.name == "snapshots":
        homes.append((source.parent.parent / "blobs").resolve())
    for path in files:
        real = path.resolve()
        if not any(real.is_relative_to(home) for home in homes):
            raise UserError(f"{path} is a link to {real}, outside the model's folder; copy it in")
        if not real.is_file():
            raise UserError(f"{path} is no file; remove it from the model's folder")
    size_bytes = sum(path.stat().st_size for path in files)
    if size_bytes > BYTES_MAX:
        raise UserError(
            f"the tokenizer files in {source} have {size_bytes} bytes; {BYTES_MAX} are the most"
        )
    return files
