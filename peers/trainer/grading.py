"""The check that at least one validator of a run can still grade."""

from __future__ import annotations

from collections import Counter

from swarm.envelope import Envelope
from swarm.messages import Verdict
from swarm.node.trusted import UNGRADED_MAX
from swarm.run.run import Run


class GradingWatch:
    """Counts, per validator, consecutive submissions that its environment could not grade."""

    def __init__(self, run: Run, since_ms: float) -> None:
        """Ignore verdicts issued before `since_ms`: a person has restarted the trainer since."""
        self._run = run
        self._since_ms = since_ms
        self._ungraded: Counter[str] = Counter()

    def look(self, envelope: Envelope, verdict: Verdict) -> str:
        """Why the run must pause: no validator can grade any more. Empty while one can."""
        if envelope.body.issued_ms < self._since_ms:
            return ""
        if verdict.failed == "environment":
            self._ungraded[envelope.sender] += 1
        elif verdict.outcome == "accepted":
            self._ungraded[envelope.sender] = 0
        validators = self._run.manifest.validator_ids()
        heard = [self._ungraded[each] for each in validators if each in self._ungraded]
        if not heard or min(heard) < UNGRADED_MAX:
            return ""
        return f"no validator can grade: {verdict.detail}"
