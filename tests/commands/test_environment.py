"""`swarm environment`: packages that people write, and what the command says of broken ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.environments import registry
from peers.environments.registry import load_any
from swarm.errors import UserError
from tests.commands.harness import complaint, swarm

CODE = """
import ctypes, os, time
from peers.environments import SingleTurn, Task, TaskList

class Lab(SingleTurn):
    name, version = "lab", "3"
    call_seconds = 0.2
    def tasks(self):
        return TaskList([Task(str(number), "7") for number in range(200)])
    def grade(self, task, transcript):
        return float(transcript.text == task.answer)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the search path, in which the package of `CODE` is installed."""
    info = tmp_path / "lab-4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 4\n")
    (info / "entry_points.txt").write_text("[swarm.environments]\nlab = lab_environment:Lab\n")
    (tmp_path / "lab_environment.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("lab_environment", None)
    yield tmp_path
    sys.modules.pop("lab_environment", None)


def test_a_new_package_passes_its_own_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mirror"
    made = swarm("environment", "new", "word-mirror", "--out", folder)
    assert made.status == 0 and str(folder / "word_mirror.py") in made.output
    assert 'word-mirror = "word_mirror:WordMirror"' in (folder / "pyproject.toml").read_text()
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("test_word_mirror").test_the_answer_and_nothing_else_is_rewarded()
    for name in ("word_mirror", "test_word_mirror"):
        monkeypatch.delitem(sys.modules, name)
    assert "exists already; give --out" in complaint(
        "environment", "new", "word-mirror", "--out", folder
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Word", "NAME is 'Word'; use lower-case letters"),
        ("word--chain", "use lower-case letters"),
        ("w" * 41, "at most 40"),
        ("json", "which is a name of Python's own"),
        ("class", "which is a name of Python's own"),
        ("peers", "which is a package of Swarm's own"),
        ("sort-digits", "which is built into Swarm and would hide yours"),
    ],
)
def test_a_name_that_no_package_can_have(name: str, sentence: str) -> None:
    assert sentence in complaint("environment", "new", name)


def test_an_environment_that_is_not_installed() -> None:
    assert "'chess' is not installed here; known environments: calculator" in complaint(
        "environment", "check", "chess"
    )


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('"lab", "3"', '"lab", 3', "its class has 3 as its version; it must be text in quotes"),
        ('name, version = "lab", "3"', "", "its class has None as its name; it must be text"),
        ("call_seconds = 0.2", "call_seconds = 0", "has the call_seconds 0; it must be a number"),
        ("call_seconds = 0.2", "Options = dict", "it must be a subclass of msgspec.Struct"),
        (
            "import ctypes, os, time",
            "raise SystemExit('no GPU')",
            "cannot be loaded (SystemExit: no GPU)",
        ),
        (
            "import ctypes, os, time",
            "while True:\n    pass",
            "took more than 0.5 s to import; repair its package",
        ),
    ],
)
def test_a_class_that_cannot_be_used(
    old: str, new: str, sentence: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "lab_environment.py").write_text(CODE.replace(old, new))
    monkeypatch.setattr(registry, "IMPORT_SECONDS", 0.5 if "while True" in new else 60.0)
    with pytest.raises(UserError) as raised:
        load_any("lab")
    assert "environment 'lab'" in str(raised.value) and sentence in str(raised.value)


def test_numbers_that_no_manifest_holds() -> None:
    assert "--option has an integer beyond 64 bits" in complaint(
        "environment", "check", "tools", "--option", f"digits={1 << 70}"
    )


def test_a_set_is_found_out_by_the_second_process(site: Path) -> None:
    """It iterates over text in a set, whose order differs from process to process."""
    changed = CODE.replace('Task(str(number), "7")', 'Task(str(number), "".join({*"abcdefgh"}))')
    (site / "lab_environment.py").write_text(changed)
    checked = swarm("environment", "check", "lab@4", "--graded", "1")
    assert checked.status == 1 and "version '3' is installed, not '4'" in checked.errors
    assert "'lab' gives train task 0 differently in another process" in checked.errors


def test_rows_that_nobody_can_grade_are_a_fault(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"q": "Q{n}?", "a": "{"none" if n % 10 else 7}"}}\n' for n in range(50))
    )
    options = [f"path='{rows}'", "columns={prompt='q', answer='a'}", "grader='number'"]
    arguments = [part for each in options for part in ("--option", each)]
    checked = swarm("environment", "check", "dataset", *arguments, "--graded", "2")
    assert checked.status == 1 and "no fault was found" not in checked.output
    assert "error: 45 of 50 rows of dataset cannot be used, and are passed over" in checked.errors
    assert "rows.jsonl: row 1: the answer 'none' holds no number" in checked.errors
    rows.write_text(rows.read_text().replace("none", "7"))
    checked = swarm("environment", "check", "dataset", *arguments, "--graded", "2")
    assert checked.status == 0 and "no fault was found" in checked.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        ("while True: pass", "took more than 0.2 s to grade the completion '7'"),
        ("time.sleep(60)", "took more than 0.2 s to grade the completion '7'"),
        ("return len(bytearray(1 << 36))", "cannot grade the completion '7' (MemoryError"),
        ("os._exit(3)", "ended while it was tried: child environment ended with status 3"),
        (
            "ctypes.string_at(0)",
            "ended while it was tried: child environment was killed by SIGSEGV",
        ),
        ("raise SystemExit(3)", "cannot grade the completion '7' (SystemExit: 3)"),
    ],
)
def test_code_that_ends_its_process_is_one_sentence(act: str, sentence: str, site: Path) -> None:
    broken = CODE.replace("return float(transcript.text == task.answer)", act)
    (site / "lab_environment.py").write_text(broken)
    checked = swarm("environment", "check", "lab", "--graded", "1")
    assert checked.status == 1
    assert sentence in checked.errors
    assert checked.errors.count("error: ") == 1, checked.errors


def test_the_list_names_versions_and_options(site: Path) -> None:
    lines = [line.split(None, 1) for line in swarm("environment", "list").output.splitlines()]
    assert ["lab", "version 3, single turns, lab 4"] in lines
    assert ["calculator", "version 1, several turns, built in; options: digits"] in lines
    (site / "lab_environment.py").write_text("1 / 0")
    sys.modules.pop("lab_environment", None)
    assert "environment 'lab' cannot be loaded" in swarm("environment", "list").output
