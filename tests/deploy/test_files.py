"""The files of `deploy/` start what the program takes, and give it time to leave."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main
import yaml
from typer.core import TyperGroup

from peers.inference.settings import InferenceSettings
from swarm.commands.main import app
from swarm.roles import check_tables, load_role
from swarm.settings import BOOTSTRAP, load_settings
from swarm.terminal.exit import FAILED, MEANINGS, MISTAKE
from swarm.terminal.interrupt import ASK_TO_END
from swarm.transport.limits import CLOSE_SECONDS
from swarm.world.process import GRACE_SECONDS
from tests.deploy.files import (
    DEPLOY,
    ROOT,
    UNIT,
    commands,
    compose,
    containers,
    documents,
    grace_seconds,
    workloads,
)
from tests.docs.pages import section, table, text

PLACE_KEY = DEPLOY / "place-key.sh"
SWARM = typer.main.get_command(app)
PAGE = text("docs/deployment.md")


@pytest.mark.parametrize(
    ("where", "words"), [pytest.param(*each, id=each[0]) for each in commands()]
)
def test_the_program_takes_every_command(where: str, words: list[str]) -> None:
    if words[0] == "torchrun":
        words = ["swarm", "peer", *words[words.index("swarm.peer") + 1 :]]
    program, name, *arguments = words
    assert program == "swarm"
    if name == "--help":
        return
    assert isinstance(SWARM, TyperGroup)
    given = SWARM.commands[name].make_context(name, arguments).params  # raises for a wrong option
    assert given["home"] or where == "systemd"
    for role in set(given.get("role") or ()) - {BOOTSTRAP}:
        load_role(role)


def test_a_trusted_peer_keeps_the_key_that_the_manifest_names() -> None:
    """Its home is in a folder or volume that outlives the process, and has the owner's key."""
    for name in ("bootstrap", "trainer", "validator"):
        assert any(str(each).endswith(f"/{name}:/data") for each in compose()[name]["volumes"])
        key, peer = containers(workloads()[name])
        assert "place-key" in " ".join(key["command"])
        assert {"name": "data", "mountPath": "/data"} in peer["volumeMounts"]


def test_the_settings_are_those_of_the_program(tmp_path: Path) -> None:
    trainer = load_settings(DEPLOY / "kubernetes/base/trainer.toml", {"role": ["trainer"]})
    check_tables(trainer)
    (cloud,) = documents(DEPLOY / "cloud-init/worker.yaml")
    files = {each["path"]: each["content"] for each in cloud["write_files"]}
    path = tmp_path / "worker.toml"
    path.write_text(files["/etc/swarm/worker.toml"], encoding="utf-8")
    check_tables(load_settings(path, {}))
    assert files["/etc/systemd/system/swarm@.service"] == UNIT.read_text(encoding="utf-8")


def test_there_is_time_to_deliver_the_submission_under_way() -> None:
    """The child may need its own grace twice: to give up its call, and to end."""
    needed = InferenceSettings().leave_seconds + CLOSE_SECONDS + 2 * GRACE_SECONDS
    assert grace_seconds() and all(each > 1.2 * needed for each in grace_seconds().values())


def test_only_mistakes_are_not_tried_again() -> None:
    unit = UNIT.read_text(encoding="utf-8")
    assert f"RestartPreventExitStatus={MISTAKE}\n" in unit and "Restart=on-failure\n" in unit
    assert "KillMode=mixed\n" in unit, "a signal to the engine would end the submission under way"
    assert MISTAKE != FAILED


def test_the_page_has_the_exit_statuses_and_signals_of_the_program() -> None:
    rows = table(section(PAGE, "Exit statuses"))
    assert {int(status): meaning for status, meaning, _ in rows} == MEANINGS
    rows = table(section(PAGE, "Signals"))
    in_order = {row[0].strip("`") for row in rows if row[1].startswith("leaves")}
    assert in_order == {each.name for each in ASK_TO_END}


def test_no_container_has_more_rights_than_it_needs() -> None:
    (pod,) = documents(DEPLOY / "kubernetes/base/pod.yaml")
    (shared,) = pod["spec"]["template"]["spec"]["containers"]
    for name, workload in workloads().items():
        for container in containers(workload):
            rights = container.get("securityContext") or shared["securityContext"]
            assert container.get("securityContext") or container["name"] == shared["name"], name
            assert rights["readOnlyRootFilesystem"] and rights["capabilities"] == {"drop": ["ALL"]}
            assert not rights["allowPrivilegeEscalation"]
    for service in compose().values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_image_has_every_package_and_one_user() -> None:
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    for pattern in packages["find"]["include"]:
        name = pattern.rstrip("*")
        assert f"COPY {name} {name}\n" in image
        assert f"!{name}\n" in (DEPLOY / "Containerfile.dockerignore").read_text()
    uid = re.findall(r"^USER (\d+):\1$", image, re.M)
    (pod,) = documents(DEPLOY / "kubernetes/base/pod.yaml")
    assert uid == [str(pod["spec"]["template"]["spec"]["securityContext"]["runAsUser"])]
    assert f"--uid {uid[0]} " in image and f"-o {uid[0]} " in image


def test_every_yaml_file_of_kubernetes_is_used() -> None:
    for folder in sorted((DEPLOY / "kubernetes").iterdir()):
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
        named = {each for each in listed["resources"] if each.endswith(".yaml")}
        named |= {patch["path"] for patch in listed.get("patches", []) if "path" in patch}
        found = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert named == found, folder


def place(key: Path, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", PLACE_KEY, key, home], capture_output=True, text=True)


def test_a_key_is_placed_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    home, key = tmp_path / "home", tmp_path / "secret"
    home.mkdir()
    key.write_text("00" * 32 + "\n")
    for _ in range(2):
        assert place(key, home).returncode == 0
        assert (home / "identity.key").read_text() == key.read_text()
        assert stat.S_IMODE((home / "identity.key").stat().st_mode) == 0o600
    key.write_text("11" * 32 + "\n")
    refused = place(key, home)
    assert refused.returncode == MISTAKE and "is not the key in" in refused.stderr
    assert [path.name for path in home.iterdir()] == ["identity.key"]


def test_the_array_passes_the_signal_on_and_waits_for_the_peer(tmp_path: Path) -> None:
    program = tmp_path / "swarm"
    program.write_text(
        f"#!{sys.executable} -IS\n"
        "import signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "print('delivered', flush=True)\n"
        "raise SystemExit(3)\n"
    )
    program.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BOOTSTRAP": "/ip4/192.0.2.1/tcp/4001",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_ARRAY_TASK_ID": "5",
    }
    with subprocess.Popen(
        ["bash", DEPLOY / "slurm/workers.sbatch"], stdout=subprocess.PIPE, text=True, env=variables
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        script.send_signal(signal.SIGTERM)
        assert script.stdout.readline() == "delivered\n"
        assert script.wait(20) == 3
