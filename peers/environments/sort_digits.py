"""Sort six digits: `428190>` asks for `012489`. Small enough to be learned on a CPU in seconds."""

from peers.environments.interface import SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated

DIGITS = 6


class SortDigits(SingleTurn):
    """Rewards exactly the digits in ascending order, followed by the stop token."""

    name = "sort-digits"
    version = "1"
    safe_for_strangers = True

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> float:
        return float(transcript.finished and transcript.text == task.answer)

    @staticmethod
    def _make(randomness: bytes) -> Task:
        # 256 bits modulo 10^6 favours no number by more than 1e-70.
        number = int.from_bytes(randomness, "big") % 10**DIGITS
        digits = f"{number:0{DIGITS}d}"
        return Task(prompt=f"{digits}>", answer="".join(sorted(digits)))
