"""What the rollouts of a model may contain, by its config.json."""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarm.errors import DECODE_ERRORS, UserError


class ModelFacts(msgspec.Struct, frozen=True):
    """Fields of config.json that bound token ids and episodes."""

    vocab_size: int
    """Size of the model's vocabulary, which may be larger than the tokenizer's."""
    max_position_embeddings: int
    """The context length."""

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        try:
            return msgspec.json.decode((folder / "config.json").read_bytes(), type=cls)
        except (OSError, *DECODE_ERRORS) as error:
            raise UserError(
                f"{folder} has no config.json that gives vocab_size and max_position_embeddings "
                f"({error})"
            ) from error
