"""Token ids as text, with the run's tokenizer. Imports tokenizers lazily: it loads slowly."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import blake3

from swarm.errors import UserError

TOKENIZER = "tokenizer.json"


class Decoder:
    """Decodes any token ids. Ids that the tokenizer does not have are shown as numbers."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json; raises `UserError`."""
        import tokenizers

        try:
            raw = (folder / TOKENIZER).read_bytes()
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(
                f"--tokenizer {folder} holds no tokenizer.json that can be read ({error})"
            ) from error
        self.folder = folder
        self.hash: bytes = blake3.blake3(raw).digest()
        self._known: dict[int, bool] = {}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some token ids, special tokens included."""
        parts = []
        for known, some in itertools.groupby(tokens, self._knows):
            if known:
                parts.append(self._tokenizer.decode(list(some), skip_special_tokens=False))
            else:
                parts.extend(f"⟨token {token}⟩" for token in some)
        return "".join(parts)

    def _knows(self, token: int) -> bool:
        if token not in self._known:
            self._known[token] = token >= 0 and self._tokenizer.id_to_token(token) is not None
        return self._known[token]


def find_tokenizer(homes: Iterable[Path], wanted: bytes | None) -> Decoder | None:
    """The run's tokenizer, from a checkpoint in one of these homes.

    `wanted`: BLAKE3-256 of its file in the run manifest; None accepts the newest checkpoint's."""
    for home in homes:
        checkpoints = home / "checkpoints"
        if not checkpoints.is_dir():
            continue
        found = [path for path in checkpoints.iterdir() if (path / TOKENIZER).is_file()]
        for folder in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            decoder = Decoder(folder)
            if wanted is None or decoder.hash == wanted:
                return decoder
    return None
