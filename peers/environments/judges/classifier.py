"""A judge that is a sequence classifier: a reward model in a Hugging Face folder.

It computes in a killable process with limited memory and without a network, one text at a time in
fp32, so that a score does not depend on what else is scored.
"""

from __future__ import annotations

import atexit
from functools import cache
from pathlib import Path

from peers.environments.graders.pool import Overdue, Pool, ProcessFailed, ServiceError
from peers.environments.interface import NotGradable
from peers.environments.judges.definition import Access, Definition
from swarm.errors import UserError

SERVICE = "peers.environments.judges.classifier_service:ClassifierService"

MEMORY_BYTES = 4 << 30
"""Memory of the process beside the weights."""


class Classifier:
    """Scores texts with the classifier in `access.folder`."""

    def __init__(self, definition: Definition, access: Access, name: str) -> None:
        """Raises `UserError` for a folder without weights."""
        self._definition, self._name = definition, name
        self._folder = Path(access.folder).expanduser().absolute()
        sizes = [path.stat().st_size for path in self._folder.glob("*.safetensors")]
        if not sizes:
            raise UserError(
                f"judge {name!r}: folder {self._folder} has no *.safetensors; name the folder of a "
                "sequence classifier"
            )
        self._pool = _pool(access.deadline_seconds, MEMORY_BYTES + 4 * sum(sizes))

    def score(self, text: str) -> tuple[float, int]:
        """(score, tokens of the text); raises `NotGradable`."""
        told = self._definition
        request = {
            "folder": str(self._folder),
            "model": told.model,
            "text": text,
            "output": told.output,
            "label": told.label,
            "tokens_max": told.tokens_max,
        }
        try:
            reply = self._pool.ask(request)
        except (ServiceError, Overdue, ProcessFailed) as error:
            raise NotGradable(f"judge {self._name!r}, a classifier: {error}") from error
        if reply["problem"]:
            raise NotGradable(f"judge {self._name!r}: {reply['problem']}")
        return float(reply["score"]), int(reply["tokens"])


@cache
def _pool(seconds: float, memory_bytes: int) -> Pool:
    """One process for all classifiers with these limits: weights are large."""
    pool = Pool(SERVICE, seconds, 1, memory_bytes)
    atexit.register(pool.close)
    return pool
