"""All imports are declared dependencies, and Swarm's network part needs no heavy libraries."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from swarm.terminal.extras import EXTRAS
from swarm.wire.identity import Identity
from tests.commands.harness import bootstrap_peer, complaint, signed_manifest

REPOSITORY = Path(__file__).parents[2]
SHIPPED = ("swarm", "peers", "simnet")
OPTIONAL = sorted({module for modules in EXTRAS.values() for module in modules})
PYTHONS = ("3.11", "3.12", "3.13")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return table


def name_of(requirement: str) -> str:
    """Return the normalised name of the distribution that a requirement names."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def imported(package: str) -> Iterator[str]:
    """Collect the top-level names of the modules that a package's files import."""
    for path in (REPOSITORY / package).rglob("*.py"):
        if path.is_relative_to(REPOSITORY / "peers/environments/verifiers/child"):
            continue  # it runs under the interpreter of verifiers, with that library's packages
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def test_every_import_is_declared() -> None:
    table = project()["project"]
    extras = table["optional-dependencies"]
    wanted = list(table["dependencies"])
    for extra in set(extras) - {"dev", "fuzz", "toploc", "peft"}:
        wanted += extras[extra]
    declared = {name_of(requirement) for requirement in wanted}
    foreign = {module for package in SHIPPED for module in imported(package)}
    foreign -= {*SHIPPED, *sys.stdlib_module_names}
    distributions = packages_distributions()
    undeclared = {
        module
        for module in foreign
        if not declared & {name_of(name) for name in distributions.get(module, [module])}
    }
    assert undeclared == set()


def test_the_wheel_has_every_file_that_is_no_module() -> None:
    data = project()["tool"]["setuptools"]["package-data"]
    left_out = []
    for package in SHIPPED:
        for path in (REPOSITORY / package).rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            inside = [
                path.relative_to(REPOSITORY).match(f"{name.replace('.', '/')}/{pattern}")
                for name, patterns in data.items()
                for pattern in patterns
            ]
            if not any([*inside, *map(path.match, data["*"])]):
                left_out.append(path)
    assert left_out == []


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_commands_know_what_each_extra_holds(extra: str) -> None:
    extras = project()["project"]["optional-dependencies"]
    requirements = extras["infer"] if extra == "train" else extras[extra]
    names = {name_of(requirement) for requirement in requirements} - {"swarm-rl"}
    called = {"lingua": "lingua-language-detector"}
    assert names == {name_of(called.get(module, module)) for module in EXTRAS[extra]}


def left_out() -> set[str]:
    """The distributions that uv leaves out by `deploy/overrides.txt`."""
    lines = (REPOSITORY / "deploy/overrides.txt").read_text(encoding="utf-8").splitlines()
    return {name_of(line) for line in lines if not line.startswith("#")}


def needed(extra: str, without: set[str], python: str) -> Iterator[tuple[str, str]]:
    """Collect (who requires, what) for all of `swarm-rl[extra]`, but for those `without`."""
    table = project()["project"]
    own = list(table["dependencies"])
    for name, lines in table["optional-dependencies"].items():
        own += [f"{line}; extra == '{name}'" for line in lines]
    queue, seen = [("swarm-rl", extra)], set()
    while queue:
        name, wanted = queue.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for line in own if name == "swarm-rl" else requires(name) or ():
            required = Requirement(line)
            where = {
                "extra": wanted,
                "python_version": python,
                "python_full_version": f"{python}.0",
            }
            child = name_of(required.name)
            if child in without or (
                required.marker and not required.marker.evaluate({**where, "extra": wanted})
            ):
                continue
            yield name, child
            if child == "fastecdsa":
                continue  # which is installed nowhere
            queue += [(child, each) for each in ("", *required.extras)]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_is_complete(python: str) -> None:
    """`make install` takes it without looking for what is required besides, or built from source.

    PyTorch's own packages are installed with it, for they depend on the machine."""
    lines = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8").splitlines()
    locked = {name_of(line) for line in lines if line and not line.startswith("#")}
    found = {child for _, child in needed("dev", {"fastecdsa", "torch"}, python)}
    assert found - locked == {"swarm-rl"} and "fastecdsa" not in locked
    assert f"Programming Language :: Python :: {python}" in project()["project"]["classifiers"]


def test_what_uv_leaves_out_is_required_by_nothing_else_than_libp2p() -> None:
    """But for TensorBoard, of which the file speaks."""
    (own,) = project()["tool"]["uv"]["override-dependencies"]
    assert name_of(own) == "fastecdsa" and left_out() > {"fastecdsa"}
    for python in PYTHONS:
        required = {each for each in needed("dev", set(), python) if each[1] in left_out()}
        by_libp2p = {(name, child) for name, child in required if name == "libp2p"}
        assert {child for _, child in by_libp2p} == left_out()
        assert required - by_libp2p <= {("tensorboard", "grpcio")}


@pytest.fixture
def core_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which child processes find only the core distribution's dependencies, and
    of libp2p's those that uv installs."""
    distributions = packages_distributions()
    without = {
        name for name in distributions if left_out() & set(map(name_of, distributions[name]))
    }
    missing = [*OPTIONAL, *sorted(without)]
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
    )
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def peer(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "swarm.peer", *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.usefixtures("core_only")
def test_a_bootstrap_peer_and_a_relay_need_none_of_the_extras(tmp_path: Path) -> None:
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(signed_manifest(tmp_path / "model", Identity(bytes(32))).raw)
    with bootstrap_peer(tmp_path / "bootstrap", manifest) as address:
        relay = peer("--role", "relay", "--home", tmp_path / "relay", "--bootstrap", address)
        relay += ["--listen", "/ip4/127.0.0.1/tcp/0", "--json-logs"]
        with subprocess.Popen(relay, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                events = (json.loads(line)["event"] for line in process.stdout)
                assert "peer.run_found" in events
            finally:
                process.terminate()
                process.communicate(timeout=10)


@pytest.mark.slow
@pytest.mark.usefixtures("core_only")
def test_the_doctor_needs_none_of_the_extras_and_names_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from swarm.commands.main import main; main()", "doctor"]
    command += ["--home", str(tmp_path / "home"), "--role", "relay", "--role", "validator"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    (problem,) = (line for line in done.stdout.splitlines() if "PROBLEM" in line)
    assert "type: pip install 'swarm-rl[infer]'" in problem


@pytest.mark.usefixtures("core_only")
@pytest.mark.parametrize("role", ["validator", "trainer"])
def test_a_role_that_computes_says_what_to_install(tmp_path: Path, role: str) -> None:
    command = peer("--role", role, "--home", tmp_path / "home", "--manifest", tmp_path / "none")
    done = subprocess.run(command, capture_output=True, text=True)
    extra = "train" if role == "trainer" else "infer"
    assert done.stderr == (
        f"error: --role {role} needs torch, transformers, tokenizers, jinja2, safetensors, "
        "huggingface_hub, httpx2, pyarrow, fsspec, which this environment lacks; type: pip install "
        f"'swarm-rl[{extra}]'\n"
    )
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["demo"], "train"),
        (["sft", "--model", "m", "--out", "o"], "train"),
        (["train", "--model", "m", "--data", "d", "--out", "o"], "train"),
        (["dataset", "filter", "--model", "p", "--environment", "e"], "infer"),
        (["rollouts", "show", "file"], "infer"),
        (["run", "create", "run.toml"], "infer"),
    ],
)
def test_a_command_says_what_to_install(
    arguments: list[str], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "swarm.terminal.extras._is_installed", lambda module: module != "tokenizers"
    )
    assert complaint(*arguments).endswith(
        f"needs tokenizers, which this environment lacks; type: pip install 'swarm-rl[{extra}]'"
    )
