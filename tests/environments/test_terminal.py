"""The environment `terminal`: what lasts over turns, what earns the reward, what is replayed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.terminal_tasks import generated, lines_of
from peers.environments import Episode, NotGradable, Task, Transcript, grade, load, task_of
from peers.environments.commands.check import write_package
from peers.environments.terminal.environment import Terminal, TerminalOptions
from peers.environments.terminal.problem import Check, Problem, Said, say
from peers.sandbox import Limits, SandboxError, execute, why_none
from peers.sandbox.program import Tree
from swarm.errors import UserError

pytestmark = pytest.mark.skipif(bool(why_none()), reason=f"no sandbox here: {why_none()}")

BOUNDS = Limits(seconds=20.0, cpu_seconds=5.0, output_bytes=10_000, files_bytes=1 << 20)
PROBLEM = Problem(
    instruction="Do it.",
    files={"/app/a.txt": "alpha\n", "/root/tool.sh": "echo tool $1 in $PWD\n"},
    executable=["/root/tool.sh"],
    checks=[Check(file="/app/b.txt", text="beta")],
)


def after(*commands: str, problem: Problem = PROBLEM) -> tuple[list[str], Tree]:
    """What commands say, and the files after the last."""
    tree, said = problem.tree, []
    for command in commands:
        answer = say(problem, tree, command, BOUNDS)
        said.append(answer.readable(1000))
        tree = answer.tree
    return said, tree


def played(environment: Terminal, task: Task, *turns: str) -> Transcript:
    """The transcript of an episode with these turns of the model."""
    episode, texts = Episode(environment, task), list[str]()
    for turn in turns[:-1]:
        answer = episode.step(turn)
        assert isinstance(answer, str)
        texts += [turn, answer]
    return Transcript.of(*texts, turns[-1])


def test_folder_variables_functions_options_and_files_last() -> None:
    said, tree = after(
        "cd /tmp; X=5; export Y='six 6'; f() { echo f$1; }; set -f; a=(1 2)",
        'pwd; echo $X "$Y" *; f 7; echo ${a[1]}; bash -c "echo child $Y"',
        "echo beta > /app/b.txt; exit 3",
        "echo $X; cat /app/b.txt; /root/tool.sh here",
    )
    assert said == [
        "",
        "/tmp\n5 six 6 *\nf7\n2\nchild six 6",
        "[exit code 3]",
        "5\nbeta\ntool here in /tmp",
    ]
    assert tree.files["/app/b.txt"] == b"beta\n" and tree.modes["/root/tool.sh"] & 0o100


def test_listings_show_no_clock_and_later_files_are_newer() -> None:
    said, _ = after(
        "ls -l --time-style=+%Y a.txt | cut -d' ' -f 1,5-",
        "echo x > made",
        "echo y > a.txt",
        "[ made -nt tool ] && [ a.txt -nt made ] && echo ordered",
        "ls --full-time | grep -c 2020-01-01",
    )
    assert said[0] == "-rw-r--r-- 6 2020 a.txt"
    assert said[3:] == ["ordered", "2"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo z > a.txt; while :; do :; done", "it took too long"),
        ("echo z > a.txt; yes", "it wrote too much"),
        ("echo z > a.txt; kill -9 $$", "its shell was killed"),
        ("echo z > a.txt; head -c 600000 /dev/zero > big; ln big c; ln big d", "too large"),
        ("echo \0", "a NUL"),
        ("#" + "x" * 70_000, "65,536 bytes"),
    ],
)
def test_a_command_that_is_ended_changes_nothing(command: str, why: str) -> None:
    limits = Limits(seconds=10.0, cpu_seconds=0.5, output_bytes=10_000, files_bytes=1 << 20)
    said = say(PROBLEM, PROBLEM.tree, command, limits)
    assert why in said.ended and said.tree == PROBLEM.tree
    assert "as before" in said.readable(1000)


@pytest.mark.parametrize(
    "command",
    [
        "mkdir many; cd many; echo x > 0; for n in $(seq 250); do ln 0 $n; done",
        "mkdir -p /app/work; chmod 0 /app/work",
    ],
)
def test_files_that_fit_no_further_sandbox_are_the_models_fault(command: str) -> None:
    """Not the machine's, which would be asked again and again."""
    problem = msgspec.structs.replace(PROBLEM, folder="/app/work")
    limits = Limits(seconds=20.0, cpu_seconds=5.0, files_bytes=1 << 19)
    left = say(problem, problem.tree, command, limits)
    assert not left.ended
    stuck = say(problem, left.tree, "true", limits)
    assert "too large" in stuck.ended and stuck.tree == left.tree


@pytest.mark.parametrize("more", ["/app/a.txt/b", "/app/big"])
def test_a_task_whose_own_files_do_not_fit_is_not_gradable(more: str) -> None:
    problem = msgspec.structs.replace(PROBLEM, files={**PROBLEM.files, more: "x" * (2 << 20)})
    with pytest.raises(NotGradable, match="own files fit no sandbox"):
        say(problem, problem.tree, "true", BOUNDS)


def test_a_machine_without_a_sandbox_is_at_fault_and_no_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(msgspec.json.encode(PROBLEM))
    environment = load("terminal", "1", {"path": str(path)})
    task = task_of(environment, b"seed")
    monkeypatch.setattr(execute, "SETUP_SECONDS", 0.0)
    sentence = (
        r"^no sandbox works on this machine \(not ready after 0 s\), .* no fault of the task;"
    )
    with pytest.raises(SandboxError, match=sentence):
        Episode(environment, task).step("<shell>true</shell>")
    with pytest.raises(SandboxError, match=sentence):
        grade(environment, task, Transcript.of("<shell>true</shell>", "<result></result>", "ok"))


def test_output_is_text_that_steers_no_terminal() -> None:
    raw = b"\xff \x1b[31mred\x1b[0m \x1b]0;title\x07a\rb\r\n\x00\xe2\x80\xae" + b"n" * 50
    shown = Said(raw, 0, Tree()).readable(1000)
    assert shown == "\ufffd red a\\rb\n\\x00\\u202e" + "n" * 50
    assert Said(b"a" * 50 + b"b" * 50, 2, Tree()).readable(20) == (
        "aaaaaaaaaa\n[80 characters left out]\nbbbbbbbbbb\n[exit code 2]"
    )


@pytest.mark.parametrize("bare", [False, True])
def test_a_demonstration_earns_the_reward_and_nothing_else_does(bare: bool, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(lines_of(generated(40, 3, bare)))
    options = {"path": str(path), "statement": "bare" if bare else "words"}
    environment = load("terminal", "1", options)
    assert isinstance(environment, Terminal) and not environment.replayable
    for seed in (b"seed", b"other", b"third"):
        task = task_of(environment, seed)
        assert task == task_of(load("terminal", "1", options), seed)
        right = played(environment, task, *task.demonstration)
        assert grade(environment, task, right).reward == 1.0
        assert grade(environment, task, Transcript.of("Done.")).reward == 0.0
        # A command that nobody answered was not run.
        assert grade(environment, task, Transcript.of(task.demonstration[0])).reward == 0.0
    # Another process, which holds nothing of the episode, finds the same.
    assert grade(load("terminal", "1", options), task, right).reward == 1.0


def test_an_episode_goes_on_in_another_process_unless_a_command_says_something_else() -> None:
    first, second = Terminal(), Terminal()
    task = first.task(PROBLEM)
    played_first = played(first, task, "<shell>echo beta > c</shell>", "Done.")
    assert grade(second, task, played_first).reward == 0.0
    clock = "<shell>date +%N; head -c 9 /dev/urandom | od -c</shell>"
    lost = played(first, task, clock, "<shell>echo beta > b.txt</shell>", "Done.")
    # This process remembers what the clock said, and answers equal questions alike.
    assert played(first, task, clock, "x").turns[1] == lost.turns[1]
    assert grade(first, task, lost).reward == 1.0
    with pytest.raises(NotGradable, match="says something else when it is played again"):
        grade(second, task, lost)


def test_turns_without_a_command_or_beyond_the_limit_end_the_episode() -> None:
    environment = Terminal(TerminalOptions(calls=2))
    episode = Episode(environment, environment.task(PROBLEM))
    call = '<tool_call>{"name": "shell", "arguments": {"command": "cat a.txt"}}</tool_call>'
    assert episode.step(call) == episode.step(call) == "<result>alpha</result>"
    assert episode.step(call) is None
    assert Episode(environment, environment.task(PROBLEM)).step("alpha") is None


def test_commands_of_the_task_run_before_the_models_first() -> None:
    environment = Terminal()
    prepared = msgspec.structs.replace(
        PROBLEM, setup=["export A=1", "mkdir deep; echo beta > b.txt"]
    )
    task = environment.task(prepared)
    assert Episode(environment, task).step("<shell>echo $A; ls</shell>") == (
        "<result>1\na.txt\nb.txt\ndeep</result>"
    )
    assert grade(environment, task, Transcript.of("Done.")).reward == 1.0
    broken = environment.task(msgspec.structs.replace(PROBLEM, setup=["no-such-command"]))
    with pytest.raises(NotGradable, match="'no-such-command' fails here"):
        grade(environment, broken, Transcript.of("Done."))


def test_checks_compare_outside_and_tests_of_pytest_run_over_the_files() -> None:
    environment = Terminal()
    tests = (
        "import os, subprocess\n"
        "def test_file():\n    assert open('/app/b.txt').read() == 'beta\\n'\n"
        "def test_program():\n"
        "    done = subprocess.run(['bash', '/app/say.sh'], capture_output=True, text=True)\n"
        "    assert done.stdout == 'said\\n' and os.getcwd() == '/app'\n"
    )
    both = msgspec.structs.replace(
        PROBLEM,
        checks=[Check(run="bash say.sh", prints="said"), Check(file="/app/a.txt")],
        pytest={"test_outputs.py": tests},
    )
    task = environment.task(both)
    write = "<shell>echo beta > b.txt; echo 'echo said' > say.sh{}</shell>"
    right = played(environment, task, write.format("; rm a.txt"), "Done.")
    assert grade(environment, task, right).parts == {"tests": 1.0}
    wrong = grade(environment, task, played(environment, task, write.format(""), "Done."))
    assert wrong.reward == 0.0 and wrong.parts == {"tests": 2 / 3}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"instruction": "x"}, "neither checks nor pytest"),
        ({"instruction": "x", "checks": [{}]}, "both or none of run and file"),
        ({"checks": []}, "instruction"),
        ({"instruction": "x", "folder": "/usr/x", "checks": [{"run": "true"}]}, "own folders"),
        ({"instruction": "x", "files": {"a": ""}, "checks": [{"run": "true"}]}, "own folders"),
        ({"instruction": "x", "pytest": {"../x.py": ""}}, "outside of /tests"),
        ({"instruction": "x", "made": ["/tests"], "pytest": {"x.py": ""}}, "files in /tests"),
        (
            {"instruction": "x", "executable": ["/app/a"], "checks": [{"run": "true"}]},
            "'/app/a', none of its files",
        ),
        ({"instruction": "x", "test": []}, "unknown field `test`"),
        (None, "is empty"),
    ],
)
def test_a_file_of_tasks_that_makes_no_sense_is_refused(
    row: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"" if row is None else msgspec.json.encode(row))
    with pytest.raises(UserError, match=said) as refused:
        load("terminal", "1", {"path": str(path)})
    assert str(path) in str(refused.value)


def test_tasks_come_from_a_file_that_is_pinned(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [msgspec.structs.replace(PROBLEM, instruction=f"Task {number}.") for number in range(40)]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    environment = load("terminal", "1", {"path": str(path)})
    assert "Task: Task " in str(task_of(environment, b"seed").prompt)
    pinned = environment.pins()
    assert task_of(load("terminal", "1", {"path": str(path), **pinned}), b"seed") == task_of(
        environment, b"seed"
    )
    path.write_bytes(path.read_bytes() + b"\n" + msgspec.json.encode(PROBLEM))
    with pytest.raises(UserError, match="but the option hash is"):
        load("terminal", "1", {"path": str(path), **pinned})


def test_a_new_package_with_a_terminal_passes_its_own_test(tmp_path: Path) -> None:
    folder = tmp_path / "vote-count"
    write_package("vote-count", folder, (), terminal=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert 'where = "served"' in (folder / "README.md").read_text()
