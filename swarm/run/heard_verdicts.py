"""The verdicts of all validators that a peer knows, and which of them is final."""

from collections.abc import Mapping, Sequence

from swarm.events import Events
from swarm.ledger import ruling
from swarm.wire.envelope import Envelope
from swarm.wire.messages import Check, Verdict

Key = tuple[str, bytes]
"""(worker, digest) of a submission: another worker's copy of a file has another key."""


def verdict_in(envelope: Envelope) -> Verdict:
    return envelope.expect(Verdict)


class HeardVerdicts:
    """Verdicts by submission and validator.

    Whoever owns this calls `forget` for submissions that can no longer be trained on."""

    def __init__(self, ranked: Sequence[str]) -> None:
        """`ranked`: the validators whose verdicts come first among equals."""
        self._ranked = ranked
        self._heard: dict[Key, dict[str, Envelope]] = {}

    def hear(self, envelope: Envelope) -> list[tuple[str, str]]:
        """Take note of a verdict; returns the contradictions (refuses, accepts) that it causes."""
        verdict = verdict_in(envelope)
        heard = self._heard.setdefault((verdict.worker, verdict.submission), {})
        before = ruling.contradictions(_opinions(heard))
        held = heard.setdefault(envelope.sender, envelope)
        if ruling.supersedes(verdict, verdict_in(held)):
            heard[envelope.sender] = envelope
        return [pair for pair in ruling.contradictions(_opinions(heard)) if pair not in before]

    def opinions(self, key: Key) -> Mapping[str, Verdict]:
        return _opinions(self._heard.get(key, {}))

    def by(self, validator: str, key: Key) -> Envelope | None:
        """One validator's verdict on a submission."""
        return self._heard.get(key, {}).get(validator)

    def judged_by(self, validator: str) -> list[Key]:
        return [key for key, heard in self._heard.items() if validator in heard]

    def final(self, key: Key) -> Envelope | None:
        """The final verdict on a submission among those known here."""
        heard = self._heard.get(key)
        return heard[ruling.final(_opinions(heard), self._ranked)] if heard else None

    def is_refused(self, key: Key) -> bool:
        """Whether a known refusal of a submission binds all validators."""
        return any(map(ruling.binds, self.opinions(key).values()))

    def older(self, lineage: int, step: int, *, by: str | None = None) -> list[Key]:
        """The submissions, of one validator or of all, of an older lineage or an older step."""
        return [
            key
            for key, heard in self._heard.items()
            if by is None or by in heard
            for verdict in [verdict_in(next(iter(heard.values())))]
            if verdict.lineage < lineage or verdict.step < step
        ]

    def forget(self, key: Key) -> None:
        self._heard.pop(key, None)


def report_contradictions(
    pairs: Sequence[tuple[str, str]], envelope: Envelope, events: Events
) -> None:
    """Emit an alarm for each pair (refuses, accepts) of validators that contradict each other."""
    for refuses, accepts in pairs:
        verdict = verdict_in(envelope)
        events.emit(
            "verdicts.contradict",
            submission=verdict.submission,
            worker=verdict.worker,
            step=verdict.step,
            number=verdict.number,
            refuses=refuses,
            accepts=accepts,
        )


def _opinions(heard: Mapping[str, Envelope]) -> dict[str, Verdict]:
    return {validator: verdict_in(envelope) for validator, envelope in heard.items()}


STATISTICAL = ("activations", "sampling", "sampling_bound", "selection", "evidence")
"""Checks that honest work may come near to, whose figure must not exceed the threshold."""


def failed_check(checks: Sequence[Check], failed: str) -> Check | None:
    """The check that a verdict names as failed. Others may have failed and only been observed."""
    return next((check for check in checks if check.name == failed and not check.passed), None)


def nearest(checks: Sequence[Check]) -> str:
    """The check nearest to its limit, as "activations 4.1 of 6"; empty without recomputation."""
    found = [check for check in checks if check.name in STATISTICAL and check.threshold > 0]
    if not found:
        return ""
    near = max(found, key=lambda check: check.figure / check.threshold)
    return f"{near.name} {max(0.0, near.figure):.2g} of {near.threshold:.2g}"
