"""`swarm why`: what happened to a submission or a peer, and why."""

import re

from swarm.commands.ledger_checks import asked, readable_archive, report
from swarm.errors import UserError
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.options import AsJson, Bootstrap, LedgerSource, WhichRun, explained
from swarm.terminal.output import print_json

_HASH = re.compile(r"[0-9a-fA-F]+")

_PART_OF_ID = re.compile(r"…?[1-9A-HJ-NP-Za-km-z]{4,}")
"""Base58. What is hexadecimal too is a hash, unless `…` is before it, as before ids in logs."""


@exits
@explained(__file__)
def why(
    what: str,
    source: LedgerSource = None,
    bootstrap: Bootstrap = None,
    run: WhichRun = None,
    as_json: AsJson = False,
) -> None:
    """Explain what happened to a submission or a peer.

    The answer is in the ledger. Of the network it also asks what a peer does now."""
    from swarm.look import why as words
    from swarm.look.prefixes import peers_beside

    if source is not None:
        what = peers_beside(source.expanduser()).get(what, what)
    if not (_PART_OF_ID.fullmatch(what) or _HASH.fullmatch(what)):
        raise UserError(
            f"{what!r} is neither the beginning of a submission's hash (hexadecimal) or of a "
            "peer's id (12D3…), nor its end; copy one from swarm status or swarm ledger"
        )
    archive, status = asked(source, bootstrap, run)
    readable_archive(archive)
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
