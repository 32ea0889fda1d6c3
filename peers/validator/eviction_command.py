"""`swarm ledger check-eviction`."""

from swarm.commands.ledger_checks import readable, report
from swarm.terminal import options
from swarm.terminal.exit import exits
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.output import print_json
from swarm.terminal.untrusted import printable


@exits
@options.explained(__file__)
def check_eviction(
    peer: str,
    source: options.LedgerSource = None,
    bootstrap: options.Bootstrap = None,
    run: options.WhichRun = None,
    tokenizer: options.TokenizerFolder = None,
    as_json: options.AsJson = False,
) -> int:
    """Compute the reason of an eviction again. Exit status 1: not confirmed.

    For a proven fault this fetches the file and the signed messages, and runs the same checks on
    this machine; for statistical evidence it sums the evidence in the logs."""
    from peers.validator import eviction_check
    from swarm.look import why
    from swarm.look.prefixes import peers_beside

    archive = readable(source, bootstrap, run)
    if source is not None:
        peer = peers_beside(source.expanduser()).get(peer, peer)
    checked = eviction_check.newest_eviction(archive, why.peer_named(archive, peer))
    eviction, by = checked.eviction, checked.record.owner
    if eviction_check.is_proven_fault(archive, checked):
        evidence = eviction_check.find_evidence(archive, eviction, source, bootstrap)
        run_until_interrupted(
            eviction_check.check_fault,
            archive,
            checked,
            evidence,
            tokenizer,
            waiting="computing the check again",
        )
    else:
        eviction_check.check_statistics(archive, checked)
    if as_json:
        print_json(
            {
                "peer": eviction.peer,
                "by": by,
                "issued_ms": checked.issued_ms,
                "reason": eviction.reason,
                "confirmed": checked.confirmed,
                "lines": checked.lines,
            }
        )
    else:
        print(f"{eviction.peer} was evicted by {by}:")
        print(f"  {printable(eviction.reason)}")
        for line in checked.lines:
            print(f"- {printable(line)}")
        print("confirmed" if checked.confirmed else "NOT CONFIRMED")
    report(archive)
    return 0 if checked.confirmed else 1
