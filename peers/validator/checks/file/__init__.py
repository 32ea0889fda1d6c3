"""The exact checks of a file.

Anyone with the file, the step order and the manifest gets the same results.
"""

from peers.validator.checks.base import Check
from peers.validator.checks.file.counts import Counts
from peers.validator.checks.file.ending import Ending
from peers.validator.checks.file.evidence import Inspection
from peers.validator.checks.file.header import HeaderFields
from peers.validator.checks.file.prompts import Prompts
from peers.validator.checks.file.proof_format import ProofFormat
from peers.validator.checks.file.schema import Schema
from peers.validator.checks.file.spans import Spans
from peers.validator.checks.file.tokens import Tokens
from peers.validator.checks.file.turns import Turns

CHECKS: tuple[Check[Inspection], ...] = (
    Schema(),
    HeaderFields(),
    Counts(),
    Prompts(),
    Tokens(),
    Spans(),
    Ending(),
    ProofFormat(),
    Turns(),
)

__all__ = ["CHECKS", "Inspection"]
