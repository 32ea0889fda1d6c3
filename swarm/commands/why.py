"""`swarm why`: what happened to a submission or a peer, and why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.commands.ledger_checks import readable, readable_archive, report
from swarm.errors import UserError
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson, Bootstrap, WhichRun
from swarm.terminal.output import print_json

if TYPE_CHECKING:
    from swarm.ledger.archive import Archive
    from swarm.look.onlooker import RunStatus

_HASH = re.compile(r"[0-9a-fA-F]+")

_PART_OF_ID = re.compile(r"…?[1-9A-HJ-NP-Za-km-z]{4,}")
"""Base58. What is hexadecimal too is a hash, unless `…` is before it, as before ids in logs."""


@exits
def why(
    what: Annotated[
        str,
        typer.Argument(help="Hash of a submission or id of a peer, or its beginning or end."),
    ],
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Home of a worker (its own receipts), trainer or validator, or an export; "
            "default: ask the network.",
        ),
    ] = None,
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    as_json: AsJson = False,
) -> None:
    """Explain what happened to a submission or a peer.

    The answer is in the ledger. Of the network it also asks what a peer does now.
    """
    from swarm.look import why as words
    from swarm.look.prefixes import peers_beside

    if source is not None:
        what = peers_beside(source.expanduser()).get(what, what)
    if not (_PART_OF_ID.fullmatch(what) or _HASH.fullmatch(what)):
        raise UserError(
            f"{what!r} is neither the beginning of a submission's hash (hexadecimal) or of a "
            "peer's id (12D3…), nor its end; copy one from swarm status or swarm ledger"
        )
    archive, status = _asked(source, bootstrap, run)
    if not _HASH.fullmatch(what):
        peer = words.peer_named(archive, what, status.present if status is not None else ())
        told = words.about_peer(archive, peer, status)
        lines = words.peer_lines(told)
    else:
        told = words.about_submission(archive, words.submission_named(archive, what))
        lines = words.submission_lines(told)
    if as_json:
        print_json(told)
    else:
        print(numbered("\n".join(lines)))
    report(archive)


def _asked(
    source: Path | None, bootstrap: list[str] | None, run: str | None
) -> tuple[Archive, RunStatus | None]:
    """The logs and, from the network, the run's state now."""
    from swarm.look.kept_proofs import keeps_proofs, kept_archive

    if source is not None:
        if keeps_proofs(home := source.expanduser()):
            return kept_archive(home, run), None
        return readable(source, bootstrap, run), None
    from swarm.errors import PeerError
    from swarm.look.archives import fetch_archive
    from swarm.look.onlooker import status_of
    from swarm.node.local import last_bootstrap, visit
    from swarm.run.run import Run
    from swarm.terminal.interrupt import run_until_interrupted

    async def ask() -> tuple[Archive, RunStatus | None]:
        async with visit(bootstrap or last_bootstrap(), run, looks_on=True) as (node, found):
            archive = await fetch_archive(node, found)
            try:
                return archive, await status_of(node, Run(found.manifest_envelope))
            except PeerError:
                return archive, None  # the logs of those that answered will do

    archive, status = run_until_interrupted(ask)
    return readable_archive(archive), status
