"""Images of `deploy/Containerfile`, built and run by buildah: `make test-image`.

Where no registry is reached, debootstrap makes the base."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.engines.demo import make_policy
from swarm.wire.identity import Identity
from tests.commands.harness import signed_manifest, swarm
from tests.deploy.files import DEPLOY, ROOT

needs_buildah = pytest.mark.skipif(
    shutil.which("buildah") is None or os.geteuid() != 0, reason="needs buildah, as root"
)
pytestmark = [pytest.mark.image, needs_buildah]

BASE = "docker.io/library/debian:12-slim"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
OWN_CERTIFICATES = Path("/usr/local/share/ca-certificates")
"""Of this machine's network: without them its packages cannot be fetched from inside."""
BUILD_SECONDS = 900.0


class Images:
    """Buildah with a store of its own; no container has a network of its own."""

    def __init__(self, folder: Path) -> None:
        places = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self._command = ["buildah", "--storage-driver", "vfs", *places]

    def words(self, name: str, *arguments: str | Path) -> list[str]:
        isolation = ["--isolation", "chroot"] if name in ("run", "build") else []
        return [*self._command, name, *isolation, *map(str, arguments)]

    def __call__(self, name: str, *arguments: str | Path) -> str:
        words = self.words(name, *arguments)
        done = subprocess.run(words, capture_output=True, text=True, timeout=BUILD_SECONDS)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    def build(self, base: str, *arguments: str) -> str:
        """Build an image; return a container of it."""
        file = DEPLOY / "Containerfile"
        files = ("--file", str(file), "--ignorefile", f"{file}.dockerignore")
        self("build", "--tag", "swarm", "--build-arg", f"BASE={base}", *arguments, *files, ROOT)
        return self("from", "--pull-never", "swarm")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    folder = tmp_path_factory.mktemp("images")
    made = Images(folder)
    yield made
    made("rm", "--all")
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def base(images: Images) -> str:
    pulled = subprocess.run(images.words("pull", BASE), capture_output=True, timeout=BUILD_SECONDS)
    if pulled.returncode == 0:
        return BASE
    if shutil.which("debootstrap") is None:
        pytest.skip("no registry is reached, and debootstrap is not installed")
    container = images("from", "scratch")
    root = Path(images("mount", container))
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", "bookworm", root], text=True, stdout=subprocess.PIPE
    )
    if made.returncode:
        pytest.skip(f"no base can be made here: {made.stdout[-300:]}")
    for each in ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt/archives"):
        shutil.rmtree(root / each, ignore_errors=True)
    own = sorted(OWN_CERTIFICATES.glob("*.crt"))
    if own:
        shutil.copytree(OWN_CERTIFICATES, root / OWN_CERTIFICATES.relative_to("/"))
        names = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
        images("config", *(f"--env={name}={CERTIFICATES}" for name in names), container)
    images("umount", container)
    images("commit", "--rm", container, "base")
    return "localhost/base"


def test_the_image_without_torch_runs_a_bootstrap_peer(
    images: Images, base: str, tmp_path: Path
) -> None:
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(signed_manifest(tmp_path / "model", Identity(bytes(32))).raw)
    manifest.chmod(0o644)
    container = images.build(base, "--build-arg", "EXTRAS=")
    peer = "tini -s -- swarm peer --role bootstrap --home /data --listen /ip4/127.0.0.1/tcp/0"
    peer += " --json-logs --manifest /run.manifest"
    ended = f"{peer} & read -r line; kill $!; wait $!"  # buildah passes no signal on
    words = images.words("run", f"--volume={manifest}:/run.manifest:ro", container, "--")
    with subprocess.Popen(
        [*words, "sh", "-c", ended], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            events = map(json.loads, process.stdout)
            told = next(each for each in events if each["event"] == "peer.listening")
            found = swarm("run", "list", "--bootstrap", told["addresses"][0])
            assert found.status == 0 and "test" in found.output, found
            assert "bootstrap" in images("run", container, "--", "swarm", "health", "--home=/data")
            assert images("run", container, "--", "id", "--user") == "10001"
        finally:
            process.stdin.write("end\n")
            process.stdin.close()
        assert process.wait(60) == 0


def test_the_image_for_cpus_loads_a_policy(images: Images, base: str, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    make_policy(policy, seed=1)
    for each in (policy, *policy.iterdir()):
        each.chmod(0o755)
    wheels = os.environ.get("PIP_FIND_LINKS", "")  # a machine that has PyTorch's wheel says where
    given = [f"--volume={wheels}:{wheels}:ro", f"--build-arg=WHEELS={wheels}", "--build-arg=TORCH="]
    container = images.build(base, *(given if Path(wheels).is_absolute() else ()))
    look = ("swarm", "doctor", "--home=/tmp/home", "--model=/policy", "--json")
    told = images("run", f"--volume={policy}:/policy:ro", container, "--", *look)
    found = {each["topic"]: each for each in json.loads(told)}
    assert found["model"]["slots"] > 1 and found["engine"]["torch"].endswith("+cpu")
