"""Refusals by one validator that overrule the acceptance of another."""

from __future__ import annotations

from dataclasses import dataclass

from peers.trainer.progress import Progress
from swarm.ledger.ruling import binds
from swarm.node.run_node import RunNode
from swarm.node.trusted import TrustedPart
from swarm.run.heard_verdicts import HeardVerdicts, report_contradictions, verdict_in
from swarm.wire.envelope import Envelope
from swarm.wire.messages import Verdict
from swarm.world.observable import Observable


@dataclass(eq=False)
class Refusals:
    """The refusals that bind all validators, from gossip and from the logs."""

    peer: RunNode
    trusted: TrustedPart
    progress: Progress

    def __post_init__(self) -> None:
        validators = self.peer.run.manifest.validator_ids()
        self.heard = Observable(HeardVerdicts(ranked=validators))
        """The verdicts of all validators."""

    def hear(self, envelope: Envelope) -> bool:
        """Take note of a verdict; returns whether it binds all validators."""
        verdict = verdict_in(envelope)
        if (verdict.lineage, verdict.step) < (self.progress.lineage, self.progress.oldest_policy()):
            return False
        report_contradictions(self.heard.value.hear(envelope), envelope, self.peer.node.events)
        self.heard.touch()
        return binds(verdict)

    def bind(self, verdict: Verdict) -> bool:
        """Whether an accepted submission was refused by a validator, and the refusal binds all."""
        key = (verdict.worker, verdict.submission)
        return self.heard.value.is_refused(key) or self.trusted.tables.is_refused(*key)

    def forget_before(self, lineage: int, policy: int) -> None:
        """Forget the verdicts on steps that can no longer be trained on."""
        for key in self.heard.value.older(lineage, policy):
            self.heard.value.forget(key)
