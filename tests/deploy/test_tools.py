"""Validators of other projects read the files of `deploy/`: `make test-deploy` installs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY, ROOT, UNIT

pytestmark = pytest.mark.deploy

TOOLS = ROOT / "build/deploy/bin"
KUBERNETES = "1.32.0"
OVERLAYS = sorted(path.parent.name for path in (DEPLOY / "kubernetes").glob("*/kustomization.yaml"))


def tool(name: str, *arguments: str | Path) -> str:
    """Run a tool of `make test-deploy`, or of this machine; skips the test where it is missing."""
    path = TOOLS / name if (TOOLS / name).exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed here")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_takes_the_overlay(overlay: str, tmp_path: Path) -> None:
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(tool("kubectl", "kustomize", DEPLOY / "kubernetes" / overlay))
    tool("kubernetes-validate", "--strict", "-k", KUBERNETES, rendered)
    for each in yaml.safe_load_all(rendered.read_text(encoding="utf-8")):
        if each["kind"] not in ("StatefulSet", "Job"):
            continue
        pod = each["spec"]["template"]["spec"]
        name = f"{overlay} {each['metadata']['name']}"
        assert pod["securityContext"]["runAsNonRoot"], name
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {
            claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])
        }
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounted.keys() <= volumes and {"/data", "/tmp"} <= set(mounted.values()), name
            assert container["securityContext"]["readOnlyRootFilesystem"], name
            assert container["resources"]["limits"]["memory"], name
        (peer,) = pod["containers"]
        assert ("livenessProbe" in peer) == (each["kind"] == "StatefulSet"), name
        gpus = peer["resources"]["limits"].get("nvidia.com/gpu", 0)
        role = each["metadata"]["name"]
        many = overlay in ("gpu", "two-nodes")
        assert gpus == {"trainer": 8, "validator": 1, "worker": 1}.get(role, 0) * many, name
        if role == "trainer":
            values = {each["name"]: each["value"] for each in peer["env"]}
            assert values == {
                "NODES": str(1 + (overlay == "two-nodes")),
                "RANKS": "8" if many else "1",
            }
            assert (
                each["spec"]["completions"] == each["spec"]["parallelism"] == int(values["NODES"])
            )


def test_compose_takes_its_file() -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    tool("check-jsonschema", *schema, DEPLOY / "compose.yaml")


def test_cloud_init_takes_its_file() -> None:
    tool("cloud-init", "schema", "--config-file", DEPLOY / "cloud-init/worker.yaml")


def test_yaml_is_tidy() -> None:
    untidy = ("line-length", "document-start", "comments", "comments-indentation")
    rules = ", ".join(f"{rule}: disable" for rule in untidy)
    tool("yamllint", "--strict", "-d", f"{{extends: default, rules: {{{rules}}}}}", DEPLOY)


def test_prometheus_takes_its_files() -> None:
    tool("promtool", "check", "config", DEPLOY / "prometheus/prometheus.yml")
    tool("promtool", "check", "rules", DEPLOY / "prometheus/alerts.yml")


def test_scripts_are_clean() -> None:
    scripts = [DEPLOY / "place-key.sh", *sorted((DEPLOY / "slurm").glob("*.sbatch"))]
    tool("shellcheck", *scripts, *sorted((ROOT / "tools").glob("*.sh")))


def test_the_containerfile_is_clean() -> None:
    """Versions are not pinned there: Debian deletes old ones, and requirements.lock has pip's."""
    tool("hadolint", "--ignore", "DL3008", "--ignore", "DL3013", DEPLOY / "Containerfile")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """The program itself is replaced by one that every machine has."""
    unit = tmp_path / "swarm@worker.service"
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/swarm/bin/swarm", "/bin/true"))
    assert not tool("systemd-analyze", "verify", "--man=no", unit).strip()
