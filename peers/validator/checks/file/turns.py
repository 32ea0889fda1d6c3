"""Environment segments are the environment's answers, and episodes end where it ends them."""

from __future__ import annotations

from peers.environments import multi_turn
from peers.environments.episodes import environment_tokens
from peers.validator.checks.base import Check, Finding, at_most
from peers.validator.checks.file.evidence import Inspection
from swarm.world.progress import checkpoint


class Turns(Check[Inspection]):
    """Figure: rows in which an environment's turn differs. Raises `UserError` if it cannot answer.

    This check is the last in its folder, because it runs the environment's code.
    """

    name = "turns"
    proven = True

    def examine(self, evidence: Inspection) -> Finding:
        wrong = [row for row in range(len(evidence.rollouts)) if not self._replays(evidence, row)]
        detail = ""
        if wrong:
            detail = f"row {wrong[0]} differs from the environment's answer"
        return at_most(len(wrong), 0, detail)

    def _replays(self, evidence: Inspection, row: int) -> bool:
        drawn = evidence.groups[row // evidence.group_size]
        if multi_turn(drawn.environment) is None:
            return int(evidence.rollouts.segment_counts()[row]) == 2
        segments = evidence.rollouts.rollout(row).segments
        for count in range(2, len(segments) + 1, 2):
            checkpoint()
            answer = environment_tokens(
                drawn.environment,
                drawn.task,
                evidence.renderer,
                segments[:count],
                evidence.limits,
            )
            given = None if count == len(segments) else list(segments[count].tokens)
            if answer != given:
                return False
        return True
