"""Small packages of both interfaces of `verifiers`, written by us, for the tests marked so."""

from __future__ import annotations

from pathlib import Path

LEGACY = """
import os, time
import verifiers as vf
from datasets import Dataset

class Countdown(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "hang":
            time.sleep(600)
        if said == "eat":
            bytearray(1 << 34)
        if said == "die":
            os._exit(3)
        left = state["info"]["left"] - len(state["trajectory"])
        if left == 0:
            state["final_env_response"] = [{"role": "user", "content": "over"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"{left} left"}]

def length(completion, **kwargs):
    said = [each.content for each in completion if each.role == "assistant"]
    return sum(each == "x" for each in said) / 4

def broken(completion, **kwargs):
    raise KeyError("no such column")

async def judged(prompt, completion, answer, judge):
    return 1.0

def load_environment(weight=0.0, kind="plain"):
    rows = [
        {"prompt": [{"role": "user", "content": f"task {i}"}], "answer": "x", "info": {"left": 2}}
        for i in range(40)
    ]
    rubric = vf.Rubric(funcs=[length, broken], weights=[1.0, weight])
    if kind == "judge":
        rubric = vf.JudgeRubric()
        rubric.add_reward_func(judged)
    if kind == "group":
        def best(completions, **kwargs) -> list[float]:
            return [1.0] * len(completions)
        rubric = vf.Rubric(funcs=[best])
    return Countdown(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="Play.")
"""

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    kind: str = "plain"
    alike: bool = False

class Word(vf.Task[Data]):
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise KeyError("no such column")
        return 2.0 * float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.0)
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

    @vf.metric
    async def cut(self, trace: vf.Trace) -> float:
        return float(trace.is_truncated)

class Closed(Word):
    async def setup(self, trace, runtime):
        raise KeyError("no such room")

class InBox(Word):
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float((await runtime.run(["test", "-w", "/app"], {})).exit_code == 0)

class Guess(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await interaction.turn("no")

class PairConfig(vf.EnvConfig):
    writer: vf.AgentConfig = vf.AgentConfig()
    reviewer: vf.AgentConfig = vf.AgentConfig()

class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents):
        review = vf.Task(vf.TaskData(prompt=None, system_prompt="Review a word."))
        async with (
            agents.writer.interaction(task) as writer,
            agents.reviewer.interaction(review) as reviewer,
        ):
            word = await writer.turn()
            verdict = await reviewer.turn(word.last_reply)
            if verdict.last_reply == "no":
                await writer.turn("Another.")
        reviewer.trace.record_reward("agreed", float(verdict.last_reply == "yes"))

class Words(vf.Taskset[Word, Config]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            kind = {"runtime": InBox, "closed": Closed}.get(self.config.kind, Word)
            prompt = "Guess a word." if self.config.alike else f"Guess word {number}."
            yield kind(Data(prompt=prompt, system_prompt="Play.", answer=f"w{number}"),
                       self.config.task)
            number += 1

__all__ = ["Words", "Guess"]
"""


COUNTER = """
import verifiers as vf
from datasets import Dataset

def double(number: int) -> int:
    \"\"\"Twice a number.

    Args:
        number: Any integer.
    \"\"\"
    return 2 * number

class Counter(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[double], **kwargs)
        self.add_tool(self.count, args_to_skip=["state"])

    def count(self, by: int, state: dict) -> str:
        \"\"\"Adds to the counter, and says its value.\"\"\"
        if by < 0:
            raise ValueError("it counts upwards only")
        state["counter"] = state.get("counter", 0) + by
        return f"counter {state['counter']}"

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "state": state} if tool_name == "count" else tool_args

def reached(state, answer, **kwargs):
    return float(str(state.get("counter")) == answer)

def said(completion, answer, **kwargs):
    return float((completion[-1].content or "").strip() == answer)

def load_environment():
    rows = [
        {"prompt": [{"role": "user", "content": f"Count to {i}."}], "answer": str(i)}
        for i in range(5, 40)
    ]
    rubric = vf.Rubric(funcs=[reached, said], weights=[0.5, 0.5])
    return Counter(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=6)
"""

SHELF = """
import verifiers.v1 as vf

class Kept(vf.State):
    books: list[str] = []

class Books(vf.Toolset[vf.ToolsetConfig, Kept]):
    @vf.tool
    async def put(self, book: str) -> str:
        \"\"\"Puts a book on the shelf, and says what is there.\"\"\"
        self.state.books = [*self.state.books, book]
        return ", ".join(self.state.books)

class Data(vf.TaskData):
    answer: str

class Shelf(vf.Task[Data, Kept]):
    @classmethod
    def toolsets(cls, config):
        return [Books(vf.ToolsetConfig())]

    @vf.reward
    async def kept(self, trace: vf.Trace) -> float:
        return float(len(trace.state.books) == 2)

    @vf.reward(weight=0.5)
    async def told(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

class Shelves(vf.Taskset[Shelf, vf.TasksetConfig]):
    def load(self):
        return [Shelf(Data(prompt=f"Shelve two, then say w{i}.", answer=f"w{i}"), self.config.task)
                for i in range(20)]

__all__ = ["Shelves"]

if __name__ == "__main__":
    Books.run()
"""

BOXED = """
import verifiers as vf
from datasets import Dataset

class Boxed(vf.SandboxEnv):
    async def setup_state(self, state, **kwargs):
        state = await super().setup_state(state, **kwargs)
        given = (state["sandbox_id"], "/app/words.txt", b"elm\\nash\\n", "words.txt")
        await self.sandbox_client.upload_bytes(*given)
        state["working_dir"] = "/app"
        return state

    async def post_rollout(self, state):
        found = await self.sandbox_client.execute_command(
            state["sandbox_id"], "cat sorted.txt", working_dir="/app", timeout=5
        )
        state["left"] = found.stdout

def sorted_words(state, **kwargs):
    return float(state["left"] == "ash\\nelm\\n")

def said(completion, answer, **kwargs):
    return float((completion[-1].content or "").strip() == answer)

def load_environment(kind="bash", **options):
    rows = [{"prompt": [{"role": "user", "content": f"Sort {i}."}], "answer": "42"}
            for i in range(20)]
    given = {"dataset": Dataset.from_list(rows), "timeout_per_command_seconds": 5, **options}
    if kind == "python":
        return vf.PythonEnv(rubric=vf.Rubric([said]), **given)
    return Boxed(rubric=vf.Rubric([sorted_words]), **given)
"""

CONTAINED = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Config(vf.TasksetConfig):
    image: str = "python:3.12-slim"

class Contained(vf.Task[Data]):
    NEEDS_CONTAINER = True

    async def setup(self, trace, runtime):
        await runtime.write("words.txt", b"elm\\nash\\n")

    @vf.reward
    async def left(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return float(await runtime.read("sorted.txt", max_bytes=100) == b"ash\\nelm\\n")

class Folders(vf.Taskset[Contained, Config]):
    def load(self):
        given = {"image": self.config.image, "workdir": "/app", "network_allow": []}
        return [Contained(Data(prompt=f"Sort words.txt {i}.", answer="", **given), self.config.task)
                for i in range(20)]

__all__ = ["Folders"]
"""


SORTING = """
import random
import verifiers as vf
from datasets import Dataset

def sorted_digits(completion, answer):
    return float(completion[-1].content == answer)

def load_environment():
    chance = random.Random(0)
    digits = [f"{chance.randrange(10**6):06d}" for _ in range(1000)]
    rows = [{"prompt": each + ">", "answer": "".join(sorted(each))} for each in digits]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric([sorted_digits]))
"""


def write(folder: Path) -> None:
    """Write packages of 0.3 (`swarm_countdown`, `swarm_sorting`, `swarm_counter`: with tools,
    `swarm_boxed`: with sandboxes) and of 1.x (`swarm_words`, `swarm_shelf`: with tools,
    `swarm_contained`: in containers), and `swarm_pair`, whose two agents play the tasks of
    `swarm_words`."""
    (folder / "swarm_boxed.py").write_text(BOXED, encoding="utf-8")
    (folder / "swarm_contained.py").write_text(CONTAINED, encoding="utf-8")
    (folder / "swarm_counter.py").write_text(COUNTER, encoding="utf-8")
    (folder / "swarm_shelf.py").write_text(SHELF, encoding="utf-8")
    pair = "from swarm_words import Pair\n__all__ = ['Pair']\n"
    (folder / "swarm_pair.py").write_text(pair, encoding="utf-8")
    (folder / "swarm_countdown.py").write_text(LEGACY, encoding="utf-8")
    (folder / "swarm_words.py").write_text(TASKSET, encoding="utf-8")
    (folder / "swarm_sorting.py").write_text(SORTING, encoding="utf-8")
