"""An older build of Swarm: the source of an earlier revision, run by this interpreter."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

from tests.end_to_end.harness import REPOSITORY

OLDEST = "bf7da88"
"""A build whose homes have this build's format."""

VARIABLE = "SWARM_OLDER"
"""Environment variable with the folder of an older build, or with another revision."""


class NoOlderBuild(Exception):
    """The older build cannot be had here; the message is the reason."""


def older_build(folder: Path) -> Path:
    """Return a folder with an older build's source, made in `folder` if it is a revision.

    Raises `NoOlderBuild`.
    """
    wanted = os.environ.get(VARIABLE, OLDEST)
    if Path(wanted).is_dir():
        return Path(wanted)
    try:
        archive = subprocess.run(
            ["git", "archive", wanted, "swarm", "peers", "pyproject.toml"],
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or str(error)
        raise NoOlderBuild(
            f"no revision {wanted} here ({reason}); fetch the whole history, or set {VARIABLE} to "
            "a folder with an older build"
        ) from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder
