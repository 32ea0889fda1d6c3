"""A task in a terminal, its commands, and the grade of the files that they leave.

Each command, and each test, is a program in a sandbox of its own: it finds the files that the
command before left, and nothing of it runs on. A shell's variables, functions and folder are in one
of those files. So a test starts with the machine's own programs and variables, whatever the model
changed, and what a check expects never enters a sandbox."""

import re
import secrets
from dataclasses import dataclass, replace

import msgspec

from peers.environments.graders import valid
from peers.environments.graders.code_tests import prints
from peers.environments.interface import Grade, NotGradable
from peers.sandbox import PYTHON, Limits, Program, run
from peers.sandbox.program import Tree
from swarm.errors import DECODE_ERRORS, UserError

TESTS = "/tests"

PYTEST = """import os, sys
nonce = sys.stdin.buffer.read()
sys.path.insert(0, "/opt/pytest")
sys.dont_write_bytecode = True
import pytest
class Counted:
    collected = passed = 0
    def pytest_collection_finish(self, session):
        # A program that a test starts must not read what is expected.
        self.collected = len(session.items)
        for folder, _, names in os.walk("/tests"):
            for name in names:
                if name.endswith(".py"): os.unlink(os.path.join(folder, name))
    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.outcome == "passed"
own = Counted()
options = "-q -x -p no:cacheprovider -c /dev/null --import-mode=importlib --rootdir=/tests"
code = pytest.main([*options.split(), "--confcutdir=/tests", "/tests"], plugins=[own])
sys.stdout.flush()
if code == 0 and own.passed == own.collected > 0:
    os.write(1, b"\\n" + nonce)
"""
"""Runs the tests of a task. The nonce says that it came to its end: a process that ends early with
0, or tests that were skipped, say nothing."""


BASH = ("/bin/bash", "--norc", "--noprofile", "-c")
ENDS = {
    "timeout": "it took too long",
    "output": "it wrote too much",
    "memory": "it took too much memory",
    "signalled": "its shell was killed",
}
STATE = "/tmp/.shell"
SHELL = f"""exec 2>&1 </dev/null
. {STATE} 2>/dev/null
trap 'SWARM_CODE=$?; set +e; {{ declare -p; declare -f; set +o; shopt -p; alias -p
printf "cd -- %q\\n" "$PWD"; }} >{STATE} 2>/dev/null; exit $SWARM_CODE' EXIT
eval "$1"
"""
"""What bash does for one command; it writes the shell's state also after `exit` and `set -e`."""
COMMAND_BYTES_MAX = 1 << 16

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
"""Sequences that move a cursor, set a colour or a title."""


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One condition. Either `run` a command in a copy of the files, or look at a `file`."""

    run: str = ""
    stdin: str = ""
    prints: str = ""
    """What the command prints, word by word; it must exit with 0."""
    file: str = ""
    text: str | None = None
    """The file's text but for white space at its end; None: there must be no such file."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task: an instruction, what the shell finds, and what must be true of what it leaves."""

    instruction: str
    folder: str = "/app"
    """The working folder."""
    files: dict[str, str] = {}
    """Texts by absolute path."""
    binary: dict[str, bytes] = {}
    """Contents that are no text, in base64."""
    executable: list[str] = []
    made: list[str] = []
    """Folders that hold none of the files."""
    setup: list[str] = []
    """Commands before the model's first."""
    checks: list[Check] = []
    pytest: dict[str, str] = {}
    """Tests for pytest, by their path below /tests. They must not import the model's files: code in
    their own process decides what they find."""
    demonstration: list[str] = []
    """Commands that solve it."""

    @property
    def tree(self) -> Tree:
        """What the shell finds; raises `UserError` for a path that no sandbox has."""
        contents = {name: text.encode("utf-8", "replace") for name, text in self.files.items()}
        made = (self.folder, *self.made)
        return Tree({**contents, **self.binary}, {}, made, dict.fromkeys(self.executable, 0o755))

    def check(self) -> None:
        """Raise `UserError` for a task that cannot be played or tells nothing."""
        if not self.checks and not self.pytest:
            raise UserError("it has neither checks nor pytest; add one")
        if any(bool(each.run) == bool(each.file) for each in self.checks):
            raise UserError("a check has both or none of run and file; give it one")
        if any(each.startswith("/") or ".." in each.split("/") for each in self.pytest):
            raise UserError(f"pytest has a path outside of {TESTS}; make it relative")
        if missing := sorted({*self.executable} - {*self.files, *self.binary}):
            raise UserError(f"executable names {missing[0]!r:.100}, none of its files; remove it")
        if TESTS in self.tree.folders:
            raise UserError(f"it has files in {TESTS}, where its tests go; choose another folder")


def read_problems(raw: bytes, where: str) -> list[Problem]:
    """The tasks in lines of JSON; raises `UserError`."""
    found: list[Problem] = []
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=Problem))
            found[-1].check()
        except (*DECODE_ERRORS, UserError) as error:
            raise UserError(
                f"{where}: line {number} is no task for a terminal ({error}); repair it"
            ) from error
    if not found:
        raise UserError(f"{where} is empty; write a task a line")
    return found


@dataclass(frozen=True)
class Said:
    """What a command wrote to both streams, how it ended, and what it left."""

    output: bytes
    code: int
    tree: Tree
    ended: str = ""
    """Why it was ended; the files are then as before it."""

    def readable(self, most: int) -> str:
        """The output as text that steers no terminal, its middle left out; and how it ended."""
        text = ESCAPES.sub("", self.output.decode("utf-8", "replace")).replace("\r\n", "\n")
        text = "".join(
            c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode()
            for c in text
        ).strip("\n")
        if len(text) > most:
            half = most // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
        if self.ended:
            text += f"\n[the command was ended ({self.ended}); the files are as before it]"
        elif self.code:
            text += f"\n[exit code {self.code}]"
        return text.lstrip("\n")


def say(problem: Problem, tree: Tree, command: str, limits: Limits) -> Said:
    """Run a command over files; raises `SandboxError` as `run`, and `NotGradable`."""
    text = valid(command)
    if "\0" in text or len(text.encode()) > COMMAND_BYTES_MAX:
        return Said(b"", 0, tree, f"it has a NUL or more than {COMMAND_BYTES_MAX:,} bytes")
    program = Program(
        argv=(*BASH, SHELL, "bash", text),
        tree=tree,
        folder=_folder(problem, tree),
        with_tools=True,
        returns_tree=True,
    )
    outcome = run(program, limits)
    if outcome.status == "exited" and outcome.tree is not None:
        return Said(outcome.stdout, outcome.code, outcome.tree)
    if outcome.status == "files" and tree == problem.tree:
        raise NotGradable("the task's own files fit no sandbox; repair it, or raise files_mib")
    return Said(
        outcome.stdout, outcome.code, tree, ENDS.get(outcome.status, "its files are too large")
    )


def graded(problem: Problem, left: Tree, limits: Limits) -> Grade:
    """1 if all tests pass over the files that a shell left, else 0.

    Raises `SandboxError` where the machine cannot run the tests."""
    passed = [_passes(check, problem, left, limits) for check in problem.checks]
    if problem.pytest:
        passed.append(_passes_pytest(problem, left, limits))
    return Grade(float(all(passed)), {"tests": sum(passed) / len(passed)})


def _passes(check: Check, problem: Problem, left: Tree, limits: Limits) -> bool:
    if check.file:
        found = left.files.get(check.file)
        if check.text is None or found is None:
            missing = found is None and check.file not in (*left.links, *left.made)
            return check.text is None and missing
        return found.rstrip() == check.text.encode("utf-8", "replace").rstrip()
    program = Program(
        argv=(*BASH, check.run),
        stdin=check.stdin.encode("utf-8", "replace"),
        tree=left,
        folder=_folder(problem, left),
        with_tools=True,
    )
    outcome = run(program, limits)
    said = outcome.stdout.decode("utf-8", "replace")
    return outcome.status == "exited" and outcome.code == 0 and prints(said, check.prints)


def _passes_pytest(problem: Problem, left: Tree, limits: Limits) -> bool:
    nonce = secrets.token_hex(16).encode()
    tests = {f"{TESTS}/{name}": text.encode() for name, text in problem.pytest.items()}
    program = Program(
        argv=(PYTHON, "-I", "-S", "-c", PYTEST),
        stdin=nonce,
        tree=replace(left, files={**left.files, **tests}),
        folder=_folder(problem, left),
        with_tools=True,
        with_pytest=True,
    )
    outcome = run(program, limits)
    return outcome.status == "exited" and outcome.stdout.rstrip().endswith(nonce)


def _folder(problem: Problem, left: Tree) -> str:
    """The working folder, or / if the model removed it or made it a link."""
    return problem.folder if problem.folder in left.made else "/"
