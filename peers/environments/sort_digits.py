"""Sort six digits: `428190>` asks for `012489`. Small enough to be learned on a CPU in seconds."""

from __future__ import annotations

from peers.environments.base import Split, Task, draw

DIGITS = 6


class SortDigits:
    """Rewards exactly the digits in ascending order, followed by the stop token."""

    name = "sort-digits"
    version = "1"

    def task(self, seed: bytes, split: Split = "train") -> Task:
        """Draw six digits, uniform over the prompts of the split; see `Environment.task`."""
        return draw(seed, split, self._make)

    def reward(self, task: Task, completion_text: str, finished: bool) -> float:
        """1.0 for an exact match that ended with a stop token, 0.0 otherwise."""
        return float(finished and completion_text == task.answer)

    @staticmethod
    def _make(randomness: bytes) -> Task:
        # 256 bits modulo 10^6 favours no number by more than 1e-70.
        number = int.from_bytes(randomness, "big") % 10**DIGITS
        digits = f"{number:0{DIGITS}d}"
        return Task(prompt=f"{digits}>", answer="".join(sorted(digits)))
