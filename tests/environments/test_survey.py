"""`swarm environment survey`: lists, results that are kept, and packages that misbehave."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.engines.installed import Installed, python_of, record_of, site_packages
from peers.environments.verifiers import survey
from peers.environments.verifiers.installed import RECIPES
from peers.environments.verifiers.survey import Limits, Surveyed
from swarm.errors import UserError
from tests.commands.harness import complaint, swarm
from tests.environments import verifiers_packages
from tests.environments.test_verifiers_options import script

ROOT = Path(__file__).parents[2]
LIMITS = Limits(60.0, 64)


def wheel(folder: Path, name: str, source: str, needs: str = "") -> str:
    """Write a wheel with one module; its path, as pip takes it."""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}"
    files = {
        f"{name}.py": source,
        f"{name}-1.dist-info/METADATA": metadata,
        f"{name}-1.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in files)
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in {**files, f"{name}-1.dist-info/RECORD": record}.items():
            archive.writestr(each, text)
    return str(path)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose "verifiers" are this Python, which lacks the library; pip has no index."""
    for recipe in RECIPES.values():
        folder = recipe.folder(tmp_path)
        python_of(folder).parent.mkdir(parents=True)
        site_packages(folder).mkdir(parents=True)
        script(python_of(folder), f'exec {sys.executable} "$@"')
        made = Installed(requirements=recipe.requirements, complete=True)
        record_of(folder).write_bytes(msgspec.json.encode(made))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path


def surveyed(home: Path, *packages: str, limits: Limits = LIMITS) -> list[Surveyed]:
    return list(survey.survey(packages, home, home / "out.jsonl", limits))


def test_a_package_that_is_none_or_floods_or_never_ends_costs_itself_only(home: Path) -> None:
    plain = wheel(home, "plain", "print('hello')\n")
    (found,) = surveyed(home, plain)
    assert (found.version, found.verdict, found.why) == (
        "1",
        "no environment",
        "it has no import of it",
    )
    missing, again = surveyed(home, "no-such-package-of-ours", plain)
    assert missing.verdict == "not installed"
    assert missing.why == "the package index has no such package"
    assert again == found, "kept in the file of results"
    large = wheel(home, "large", "#" * (3 << 20))
    (found,) = surveyed(home, large, limits=Limits(60.0, 1))
    assert found.why == "its installation took more than 1 MiB of disk"
    later = wheel(home, "later", "", "Requires-Python: >=3.99\n")
    assert surveyed(home, later)[0].why == "it needs Python >=3.99"
    assert not list(home.glob("survey-*"))


def test_results_are_kept_as_they_come_and_a_torn_line_is_done_again(home: Path) -> None:
    done = Surveyed(package="done==1", version="1", module="done", turns=2, reward=0.5)
    torn = msgspec.json.encode(done) + b"\n" + b'{"package": "to'
    out = home / "out.jsonl"
    out.write_bytes(torn)
    assert surveyed(home, "done==1") == [done]
    assert done.line == "done==1 done (0 s, 0 MiB): works: 2 turns, reward 0.5"
    assert out.read_bytes() == msgspec.json.encode(done) + b"\n"
    out.write_text("[1]\n")
    with pytest.raises(UserError, match=r"out.jsonl holds no results of a survey .*another --out"):
        surveyed(home, "done==1")


@pytest.mark.parametrize(
    ("why", "verdict"),
    [
        ("ModuleNotFoundError: No module named 'datasets'", "needs a package"),
        ("ModuleNotFoundError: No module named 'verifiers.utils'", "refused"),
        ("ValueError: FACADE_URL or base_url is required", "needs a service"),
        ("ConnectionError: Couldn't reach 'gsm8k' on the Hub (offline)", "needs data"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'rows.json'", "needs data"),
        ("it was still answering after 60 s and was killed", "refused"),
    ],
)
def test_a_verdict_says_what_is_lacking(why: str, verdict: str) -> None:
    assert survey.verdict_of(why) == verdict


def test_wrong_arguments_of_a_survey(tmp_path: Path) -> None:
    command = ("environment", "survey", "--home", tmp_path, "--out")
    out = tmp_path / "out.jsonl"
    assert "must end with .jsonl" in complaint(*command, tmp_path / "out.txt")
    said = complaint(*command, out, "--list", tmp_path / "none.txt")
    assert said.startswith(f"--list {tmp_path}/none.txt cannot be read")
    (tmp_path / "empty.txt").write_text("# nothing\n")
    said = complaint(*command, out, "--list", tmp_path / "empty.txt")
    assert "names no package; write one a line" in said
    for wrong in ("--index-url=x", "no/such", "x y", ""):
        assert f"{wrong!r} is no package" in complaint(*command, out, "--", wrong)


def test_the_list_names_a_version_of_each_package() -> None:
    found = survey.listed(survey.LISTED)
    assert len(found) == len(set(found)) > 20
    assert all(each.count("==") == 1 for each in found)


# --- with the library: `make test-verifiers` ----------------------------------------------------

IMPORT = "import verifiers\n"
HANG = IMPORT + "import time\ntime.sleep(600)\ndef load_environment():\n    pass\n"
NOISY = verifiers_packages.COUNTER.replace(
    "def load_environment():\n",
    "def load_environment():\n    import sys\n    for _ in range(100):\n"
    "        sys.stderr.write('x' * (1 << 20))\n        sys.stdout.write('x' * (1 << 20))\n",
)


@pytest.mark.verifiers
def test_packages_are_played_and_one_that_hangs_or_prints_costs_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    home, out = ROOT / "build" / "verifiers", tmp_path / "out.jsonl"
    packages = [
        wheel(tmp_path, "hang", HANG),
        wheel(tmp_path, "noisy", NOISY),
        wheel(tmp_path, "words", verifiers_packages.TASKSET, "Requires-Dist: verifiers\n"),
        wheel(tmp_path, "shelf", verifiers_packages.SHELF, "Requires-Dist: verifiers<0.2\n"),
    ]
    found = {each.module: each for each in survey.survey(packages, home, out, Limits(30.0, 64))}
    assert found["hang"].verdict == "refused"
    assert found["hang"].why == "it was still loading its library after 30 s and was killed"
    assert (found["noisy"].verdict, found["noisy"].tools) == ("works", 2)
    assert found["noisy"].reward == 0.5, "the answer is said, and not reached"
    assert (found["words"].library, found["words"].reward) == ("0.4.0", 2.0)
    assert found["shelf"].pinned == "<0.2" and found["shelf"].reward == 0.5
    given = (*packages, "--out", str(out), "--home", str(home), "--json")
    printed: Any = json.loads(swarm("environment", "survey", *given).output)
    assert [each["module"] for each in printed["packages"]] == list(found)
