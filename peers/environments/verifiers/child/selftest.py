"""Play an episode of an environment made on the spot: the check of `swarm environment install`."""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from peers.environments.verifiers.child.service import Player

LEGACY = """
import verifiers as vf
from datasets import Dataset

def load_environment():
    def right(completion, answer):
        return float(completion[-1].content == answer)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))
"""

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        return [Sum(Data(prompt="1+1", answer="2"), self.config.task)]

__all__ = ["Sums"]
"""

NAME = "swarm_selftest"


def _play() -> None:
    player = Player(NAME, {}, 1)
    player({"what": "draw", "task": 0})
    for text, reward in (("2", 1.0), ("3", 0.0)):
        graded = player({"what": "grade", "task": 0, "texts": [text]})
        if graded[0] != reward:
            raise SystemExit(f"the grade of {text!r} is {graded}")


def main() -> None:
    """Exit with a sentence unless an environment of this library can be played."""
    library = version("verifiers")
    with tempfile.TemporaryDirectory() as folder:
        source = LEGACY if library.startswith("0.3.") else TASKSET
        (Path(folder) / f"{NAME}.py").write_text(source, encoding="utf-8")
        sys.path.insert(0, folder)
        _play()
    print(f"verifiers {library} plays and grades an episode")


if __name__ == "__main__":
    main()
