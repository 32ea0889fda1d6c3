"""The environment `terminal`: tasks that a model solves by the commands of a shell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from peers.environments.graders import valid
from peers.environments.interface import Episodes, Grade, NotGradable, Task, Tasks, Transcript
from peers.environments.rows import located
from peers.environments.tasks import Indexed
from peers.environments.terminal.problem import Problem, graded, read_problems, say
from peers.environments.tools import called
from peers.sandbox import Limits
from peers.sandbox.program import Tree
from swarm.errors import UserError, file_errors
from swarm.rollouts.seeds import digest
from swarm.wire.manifest import OptionValue
from swarm.world.recent import Recent

BYTES_KEPT = 256 << 20
"""Of files after the last commands; other episodes are played again."""
GRADES_KEPT = 10_000
WALL_PER_CPU = 2.0
"""Wall time of a command and of a test, in units of the CPU time of each of its processes."""

WORDS = (
    "Solve the task with the commands of a shell. End your turn with one, as in "
    "<shell>ls -l</shell>, and its output follows as <result>...</result>. The shell is bash in "
    "{folder}, without a network; variables and files last, processes end with their command. When "
    "you are done, end your turn without a command.\n\nTask: {instruction}\n"
)


class TerminalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks there are, and what a command may use (docs/environments.md)."""

    path: Annotated[str, Meta(max_length=1000)] = ""
    hash: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""
    statement: Literal["words", "bare"] = "words"
    calls: Annotated[int, Meta(ge=1, le=200)] = 16
    cpu_seconds: Annotated[float, Meta(gt=0, le=300)] = 5.0
    test_cpu_seconds: Annotated[float, Meta(gt=0, le=300)] = 20.0
    memory_mib: Annotated[int, Meta(ge=64, le=2048)] = 512
    files_mib: Annotated[int, Meta(ge=1, le=32)] = 16
    processes: Annotated[int, Meta(ge=4, le=60)] = 32
    output_characters: Annotated[int, Meta(ge=100, le=50_000)] = 4_000


@dataclass
class _Played:
    """The state of an episode: the commands, and what they said."""

    problem: Problem
    commands: tuple[str, ...] = ()
    said: tuple[str, ...] = ()


class Terminal(Episodes):
    """Rewards files that pass a task's tests, whatever commands made them.

    Two runs of a command may say different things (a time, a random number), so a run must be
    served. An episode whose files this process does not hold is played again; if a command says
    something else then, the episode can neither go on nor be graded."""

    name = "terminal"
    version = "1"
    replayable = False
    Options = TerminalOptions
    options: TerminalOptions

    def __init__(self, options: TerminalOptions = TerminalOptions()) -> None:  # noqa: B008
        """Read the tasks; raises `UserError`."""
        super().__init__(options)
        self._limits = self._bounds(options.cpu_seconds)
        self._test_limits = self._bounds(options.test_cpu_seconds)
        self._answers: dict[bytes, tuple[str, Tree]] = {}
        self._bytes = 0
        self._grades = Recent[bytes, Grade](GRADES_KEPT)
        self._problems, self._hash = self._read() if options.path else ([], "")
        replay = options.calls * self._limits.seconds
        self.call_seconds = 30.0 + replay + 4 * self._test_limits.seconds

    def pins(self) -> Mapping[str, OptionValue]:
        """The hash of the tasks that were read."""
        return {"hash": self._hash} if self._hash else {}

    def tasks(self) -> Tasks:
        if not self.options.path:
            raise UserError("the environment 'terminal' needs the option path, a file of tasks")
        where = f"{self.options.path}: task {{}}".format
        problems = self._problems
        return Indexed(len(problems), lambda n: self.task(problems[n], where(n)), where)

    def start(self, task: Task) -> _Played:
        return _Played(msgspec.convert(task.data, Problem))

    def step(self, state: _Played, text: str) -> str | None:
        """What the command that ends the text says; None without one or beyond `calls`.

        Raises `NotGradable` where the commands before it say something else when played again."""
        command = _command(text)
        if command is None or len(state.commands) >= self.options.calls:
            return None
        state.commands = (*state.commands, command)
        said, _ = self._after(state.problem, state.commands, state.said)
        state.said = (*state.said, said)
        return said

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """1 if the tests pass over the files that the commands of an episode leave.

        Raises `NotGradable` as `step`. A command that was not answered was not run."""
        problem = msgspec.convert(task.data, Problem)
        texts = [valid(turn.text) for turn in transcript.turns]
        key = digest("swarm/1/terminal-grade", _key(problem, texts))
        if key not in self._grades:
            said = texts[1::2]
            commands = [_command(each) or "" for each in texts[::2]][: len(said)]
            _, left = self._after(problem, commands, said)
            self._grades[key] = graded(problem, left, self._test_limits)
        return self._grades[key]

    def _after(
        self, problem: Problem, commands: Sequence[str], said: Sequence[str]
    ) -> tuple[str, Tree]:
        """What the last command says and leaves; those before it must have said what is in `said`.

        Raises `NotGradable`."""
        last, tree = self._known(problem, (), partial(self._prepared, problem))
        for count, command in enumerate(commands, 1):
            ask = partial(self._asked, problem, tree, command)
            last, tree = self._known(problem, commands[:count], ask)
            if count <= len(said) and last not in said[count - 1]:
                raise NotGradable(
                    f"the command {command[:60]!r} says something else when it is played again"
                )
        return last, tree

    def _prepared(self, problem: Problem) -> tuple[str, Tree]:
        """The files before the first command; raises `NotGradable`."""
        tree = problem.tree
        for command in problem.setup:
            answer = say(problem, tree, command, self._limits)
            if answer.code or answer.ended:
                raise NotGradable(
                    f"the task's own command {command[:60]!r} fails here "
                    f"({answer.readable(100)!r}); repair the task, or leave it out"
                )
            tree = answer.tree
        return "", tree

    def _known(
        self, problem: Problem, commands: Sequence[str], ask: Callable[[], tuple[str, Tree]]
    ) -> tuple[str, Tree]:
        """What the last of some commands says and leaves, asked once while it is remembered.

        So equal turns get equal answers, also of a command that shows the time."""
        key = _key(problem, commands)
        found = self._answers.pop(key, None)
        if found is None:
            found = ask()
            self._bytes += _size(found)
        self._answers[key] = found
        while self._bytes > BYTES_KEPT and len(self._answers) > 1:
            self._bytes -= _size(self._answers.pop(next(iter(self._answers))))
        return found

    def _asked(self, problem: Problem, tree: Tree, command: str) -> tuple[str, Tree]:
        """An answer as the model sees it, and the files."""
        said = say(problem, tree, command, self._limits)
        text = said.readable(self.options.output_characters)
        if self.options.statement == "bare":
            text = "error" if said.code or said.ended else "ok"
        return f"<result>{text}</result>", said.tree

    def task(self, problem: Problem, place: str = "") -> Task:
        bare = self.options.statement == "bare"
        prompt = problem.instruction
        if not bare:
            prompt = WORDS.format(folder=problem.folder, instruction=prompt)
        turns = (*(f"<shell>{each}</shell>" for each in problem.demonstration), "ok")
        known = turns if problem.demonstration else ()
        return Task(prompt, "", msgspec.to_builtins(problem), demonstration=known, place=place)

    def _bounds(self, cpu_seconds: float) -> Limits:
        options = self.options
        return Limits(
            seconds=WALL_PER_CPU * cpu_seconds,
            cpu_seconds=cpu_seconds,
            memory_bytes=options.memory_mib << 20,
            files_bytes=options.files_mib << 20,
            processes=options.processes,
        )

    def _read(self) -> tuple[list[Problem], str]:
        """The tasks of the file, and its hash; raises `UserError`."""
        path = located(self.options.path, "file of tasks")
        with file_errors(path):
            raw = path.read_bytes()
        found = blake3(raw).hexdigest()
        if self.options.hash not in ("", found):
            raise UserError(
                f"{path} has the hash {found}, but the option hash is {self.options.hash}; get the "
                "tasks that the run was created with"
            )
        return read_problems(raw, str(path)), found


def _command(text: str) -> str | None:
    """The command that ends a model's turn."""
    call = called(text, ("shell",))
    return None if call is None else call[1]


def _size(answer: tuple[str, Tree]) -> int:
    """Bytes of memory, about."""
    said, tree = answer
    return len(said) + sum(map(len, tree.files.values())) + (len(tree.files) + 1 << 10)


def _key(problem: Problem, texts: Sequence[str]) -> bytes:
    raw = msgspec.json.encode((problem, [valid(each) for each in texts]))
    return digest("swarm/1/terminal", raw)
