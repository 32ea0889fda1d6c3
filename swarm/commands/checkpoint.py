"""`swarm checkpoint`: checkpoints as files, on mirrors, and from a run's peers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarm.errors import UserError
from swarm.terminal.exit import exits
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, WhichRun, explained
from swarm.terminal.output import print_json
from swarm.terminal.untrusted import printable

if TYPE_CHECKING:
    from swarm.shardcast.held import Held

app = typer.Typer(help="Put checkpoints on mirrors, fetch them, merge them.", no_args_is_help=True)


@app.command("export")
@exits
@explained(__file__)
def export_command(folder: Path, out: Path, as_json: AsJson = False) -> None:
    """Write a checkpoint as plain files that any web server or bucket serves.

    Copy them anywhere; `swarm checkpoint fetch http://…` downloads them and checks every piece. The
    same command resumes an interrupted export."""
    import msgspec

    from swarm.shardcast.mirror.publish import export as write_mirror
    from swarm.terminal.progress import progress_bar

    with progress_bar("exporting") as progress:
        index = run_until_interrupted(partial(write_mirror, folder, out, progress=progress))
    if as_json:
        print(msgspec.json.encode(index).decode())
        return
    print(f"{index.total_bytes:,} bytes in {out}, manifest {index.manifest}")
    print("serve that folder with any web server, then:")
    print("  swarm checkpoint fetch http://HOST/PATH --out FOLDER")


@app.command("fetch")
@exits
@explained(__file__)
def fetch_command(
    out: Path,
    source: str | None = None,
    digest: str | None = None,
    bootstrap: list[str] | None = None,
    run: WhichRun = None,
    deadline: float = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Fetch a checkpoint: from a mirror, or a run's newest from its peers.

    Every piece is checked. The same command resumes a download. An adapter comes with its base."""
    from swarm.look.newest_policy import from_peers
    from swarm.shardcast.mirror.fetch import fetch as fetch_from_mirrors
    from swarm.terminal.progress import progress_bar

    wanted = _digest(digest)
    if bool(source) == bool(bootstrap):
        raise UserError("give either a mirror's address, or --bootstrap for a run's newest policy")
    if source and run is not None:
        raise UserError(
            f"--run {run!r} goes with --bootstrap; leave it out: what is fetched here is one "
            "checkpoint of one run"
        )
    with progress_bar("fetching") as progress:
        if source:
            fetch = partial(
                fetch_from_mirrors,
                out,
                mirrors=[source],
                manifest_digest=wanted,
                deadline_seconds=deadline,
                progress=progress,
            )
        else:
            fetch = partial(
                from_peers,
                out,
                bootstrap,
                run=run,
                digest=wanted,
                deadline=deadline,
                progress=progress,
            )
        held = run_until_interrupted(fetch)
    _say_fetched(out, held, as_json=as_json)


def _say_fetched(out: Path, held: Held, *, as_json: bool) -> None:
    from swarm.shardcast.mirror.folder import BASE_FOLDER

    fetched = {
        "folder": str(out),
        "run": held.manifest.run,
        "lineage": held.manifest.lineage,
        "step": held.manifest.step,
        "bytes": held.manifest.total_bytes,
        "manifest": held.digest.hex(),
    }
    if as_json:
        print_json(fetched)
        return
    print(
        f"{out}: policy {fetched['step']} of {printable(held.manifest.run)}, "
        f"{fetched['bytes']:,} bytes, every piece checked against manifest {fetched['manifest']}"
    )
    if held.manifest.base is not None:
        print(f"it is an adapter; its base, {held.manifest.base}, is in {out / BASE_FOLDER}")


def _digest(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise UserError(f"--digest {text!r} is not 64 hexadecimal digits")
    return digest
