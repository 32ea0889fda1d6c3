"""The demo as plain lines, for logs and pipes."""

from __future__ import annotations

from typing import IO

import trio

from peers.demo.state import SwarmState
from peers.demo.view import REFRESH_SECONDS
from swarm.terminal.figures import figure, readable_seconds


class PlainLines:
    """Formats the demo's progress: one line per step, refusal and note."""

    def __init__(self, state: SwarmState) -> None:
        self._state = state
        self._shown_join = False
        self._last_step = -1
        self._last_note = 0.0
        self._last_verdict = 0.0

    def lines(self) -> list[str]:
        """Format the steps, refusals and notes since the last call."""
        state = self._state
        lines = []
        if state.join_line and not self._shown_join:
            self._shown_join = True
            lines.append(f"to join from another terminal: {state.join_line}")
        for note in [note for note in state.notes if note.at > self._last_note]:
            lines.append(f"{readable_seconds(note.at - state.started)}: {note.text}")
            self._last_note = note.at
        for verdict in [v for v in state.refusals if v.at > self._last_verdict]:
            self._last_verdict = verdict.at
            lines.append(
                f"{verdict.worker} step {verdict.step} #{verdict.number} {verdict.outcome}: "
                f"{verdict.failed} {figure(verdict.figure)} against {figure(verdict.threshold)}"
                f"{f' ({verdict.detail})' if verdict.detail else ''}"
            )
        for step in sorted(step for step in state.trained if step > self._last_step):
            trained = state.trained[step]
            self._last_step = step
            left = state.seconds_left()
            speed = state.tokens_per_second(trained.at)
            lines.append(
                f"step {step + 1}/{state.steps_wanted} reward {trained.reward:.3f} "
                f"gradient norm {trained.gradient_norm:.3g} groups {trained.groups} "
                f"{speed:,.0f} tokens/s accepted {state.counts['accepted']}"
                + (f" · {readable_seconds(left)} left" if left is not None else "")
            )
        return lines


async def print_lines(state: SwarmState, file: IO[str]) -> None:
    """Print new lines until cancelled."""
    plain = PlainLines(state)
    try:
        while True:
            for line in plain.lines():
                print(line, file=file, flush=True)
            await trio.sleep(REFRESH_SECONDS)
    finally:
        for line in plain.lines():
            print(line, file=file, flush=True)
