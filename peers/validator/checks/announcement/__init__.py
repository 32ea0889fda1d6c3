"""The checks of an announcement.

An announcement costs nothing to make, so a refusal enters no log, and no verdict lists the checks
that pass.
"""

from peers.validator.checks.announcement.admission import Admitted
from peers.validator.checks.announcement.evidence import Announcement
from peers.validator.checks.announcement.file import Pushed
from peers.validator.checks.announcement.groups import Groups
from peers.validator.checks.announcement.number import Number
from peers.validator.checks.announcement.policy import Policy
from peers.validator.checks.announcement.size import Size
from peers.validator.checks.announcement.slot import FreeSlot
from peers.validator.checks.announcement.step import Step
from peers.validator.checks.announcement.version import Version
from peers.validator.checks.base import Check

CHECKS: tuple[Check[Announcement], ...] = (
    Admitted(),
    Step(),
    Version(),
    Policy(),
    Number(),
    Groups(),
    FreeSlot(),
    Pushed(),
    Size(),
)

__all__ = ["CHECKS", "Announcement"]
