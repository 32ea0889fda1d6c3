"""The sentence of each event, for a person. An event without one shows only with `--verbose`."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any


def sentence(name: str, fields: dict[str, Any]) -> str | None:
    """Format an event as a sentence; None if it has none."""
    try:
        if name in _COMPOSED:
            line = _COMPOSED[name](fields)
        elif name in SENTENCES:
            line = _FORMATTER.vformat(SENTENCES[name], (), fields).rstrip()
        else:
            return None
    except (KeyError, TypeError, ValueError):
        return None  # another program's event of this name, with other fields
    if untold := fields.get("untold"):  # see `Rationed`
        line += f" ({untold} more like it were not logged)"
    return numbered(line)


_ONE = re.compile(
    r"(?<![\w.,:/#-])1 ((?:(?:accepted|acknowledged|different|inference|inner|live"
    r"|other|recomputed|signed|training|trusted) )?)"
    r"(bytes|cases|characters|completions|connections|contributions|days|disagreements"
    r"|entries|environments|episodes|examples|files|groups|heads|invites|layers|lines|pairs"
    r"|parameters|parts|peers|pieces|policies|problems|processes|prompts|proofs|questions|ranks|receipts|records"
    r"|reinstatements|replicas|restarts|rollouts|rounds|rows|samples|sources|spans|steps|submissions|tasks"
    r"|threads|times|tokens|trainers|validators|values|verdicts|workers)\b(?: (are|were|have)\b)?"
)
_SINGULAR_VERBS = {"are": "is", "were": "was", "have": "has"}


def numbered(text: str) -> str:
    """Write the noun after a lone 1 in the singular: `1 receipts` becomes `1 receipt`."""

    def one(found: re.Match[str]) -> str:
        adjective, noun, verb = found.groups()
        if noun.endswith("ies"):
            noun = noun[:-3] + "y"
        elif noun.endswith("sses"):
            noun = noun[:-2]
        else:
            noun = noun.removesuffix("s")
        return f"1 {adjective}{noun}" + (f" {_SINGULAR_VERBS[verb]}" if verb else "")

    return _ONE.sub(one, text)


def unrewarded(f: dict[str, Any]) -> str:
    """The warning of a complete run (`trainer.run_complete`) in which no step earned anything."""
    return numbered(
        f"the reward was 0 in each of its last {f['unrewarded_steps']} steps, all that this "
        f"trainer saw, so nothing was learnt from it; {f['advice']}"
    )


def listed(fields: dict[str, Any]) -> str:
    """Format the fields of an event without a sentence."""
    return " ".join(f"{name}={_readable(value)}" for name, value in fields.items())


def _readable(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()[:12]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _short(peer: str) -> str:
    """Return the end of a peer id, since all ids begin alike."""
    return f"…{peer[-8:]}"


def _peers(peers: list[str]) -> str:
    return ", ".join(map(_short, peers))


FORMATS: Mapping[str, Callable[[Any], str]] = {
    "peer": _short,
    "peers": _peers,
    "name": lambda run: str(run.partition("/")[2]),
    "list": ", ".join,
    "clauses": "; ".join,
    "lines": lambda lines: " | ".join(lines) or "none",
    "len": lambda values: str(len(values)),
    "MB": lambda count: f"{count / 1e6:.1f} MB",
    "short": _readable,
    "times": lambda times: f" ({times} times)" if times > 1 else "",
    "minutes": lambda seconds: f" for {seconds / 60:.0f} min" if seconds >= 60 else "",
}
"""How a sentence shows a field, beside Python's own formats."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, spec: str) -> str:
        if spec in FORMATS:
            return FORMATS[spec](value)
        return str(super().format_field(value, spec))


_FORMATTER = _Formatter()

_TEXT = """
compute.child_died: child process {name} {how}; its last words: {last:lines}
compute.child_restarted: child process {name} died and was started again ({deaths} of {of} times
    in a row at most)
dht.joined_through_others: no bootstrap peer answers; joining through {peers} peers met before
dht.bootstrap_full: {remote} has no room for newcomers now; asking it again for up to {seconds} s
dht.bootstrap_partly_silent: some of the bootstrap addresses lead to no peer: {reasons:clauses}
alarm.raised: alarm {alarm} ({severity}): {sentence}; {do}
alarm.cleared: alarm {alarm} is over: {sentence}
peer.identity_made: new key: {key}; a peer that has worked before has one
peer.listening: listening on {addresses:list}
transport.reachability: others reach this peer: {reachability} ({reason})
relay.limit_reached: a carried connection reached this relay's limit on {limit}
transport.relay_used: relay {relay:peer} carries connections to here
transport.relay_refused: relay {relay:peer} carries no connections to here: {reason}
peer.metrics: figures for Prometheus are at {url}
peer.run_found: found the run {run:name} of owner {owner:peer}
peer.earned: earned: {completions:,} completions in {groups:,} groups are credited; of the
    submissions {accepted:,} were accepted, {refused:,} refused, {quarantined:,} quarantined
run.version_in_force: version {version} is in force from step {step}
run.version_refused: a new manifest of the run is refused: {reason}
run.version_awaited: step {step} follows version {version} of the run, which no trusted peer has
    handed out yet; asking them again
peer.work_over: the run is over, and so is this peer's work
membership.admitted: admitted to the run by {by:peer}
membership.lease_lost: no trusted peer has renewed the admission in time; asking again
membership.peer_admitted: peer {remote:peer} joined ({roles:list})
membership.peer_suspected: peer {remote:peer} is silent
membership.peer_gone: peer {remote:peer} is gone, without a goodbye
membership.peer_left: peer {remote:peer} has left
membership.peer_finished: peer {remote:peer} has finished: the run is over
membership.peer_returned: peer {remote:peer} is back
membership.peer_evicted: peer {remote:peer} was evicted: {reason}
membership.waiting_for_place: not admitted yet: {reason}
membership.invite_redeemed: peer {remote:peer} redeemed invite {invite}
membership.place_lost: peer {remote:peer} delivered nothing and lost its slot to a waiting peer
membership.bad_admission: trusted peer {remote:peer} sent an invalid admission: {reason}
membership.trusted_silent: trusted peer {remote:peer} does not answer{seconds:minutes}: {reason}
membership.refused: peer {remote:peer} was not admitted: {reason}
shardcast.checkpoint_complete: fetched {name}: {bytes_fetched:MB} in {seconds:.1f} s from
    {by_source:len} peers
shardcast.delta_applied: made policy {step} from policy {base} and {bytes_deltas:MB} of deltas
shardcast.delta_failed: no delta for policy {step}, fetching it in full: {reason}
shardcast.not_synced: checkpoint {lineage}/{step} could not be made durable yet: {reason}
shardcast.pieces_lost: {pieces} pieces of {file} are damaged on this disk; fetching them again
shardcast.checkpoint_failed: policy {step} could not be fetched yet: {reason}
inference.policy_loaded: generating with policy {policy}
inference.submission_made: submission {number} of step {step}: generated {tokens} tokens in
    {seconds:.1f} s
inference.memory_short: memory ran out; generating at most {slots} completions at once from now on
inference.submission_delivered: submission {number} of step {step}: delivered to validator
    {validator:peer}
inference.delivery_failed: validator {validator:peer} could not be given a
    submission{times:times}: {reason}
inference.verdict_late: validator {validator:peer} has not sent its verdict in time; asking the
    next
inference.no_validator: no validator takes a submission of step {step}{times:times}; trying again
inference.proofs_deleted: deleted the {proofs} oldest receipts to make room for newer ones
inference.proofs_not_kept: no proofs of sealed work from {remote:peer} yet: {reason}; asking again
inference.resumed: {submissions} submissions made before the restart have no verdict yet and are
    delivered again; going on with submission {number} of step {step}
inference.states_missing: the work of step {step} is left for now: {reason}
inference.submission_given_up: submission {number} of step {step} is given up: {reason}
evaluation.done: held-out tasks with policy {policy}: mean reward {reward:.3f}
evaluation.failed: policy {policy} could not be evaluated: {reason}; the run goes on
inference.run_over: the run is over (its last step was {step})
validator.audited: audit of submission {number} of step {step} by {worker:peer}: {outcome}
    {failed} {detail}
validator.audit_failed: submission {number} of step {step} by {worker:peer} could not be
    recomputed again: {reason}
validator.judged_again: submission {number} of step {step} by {worker:peer} is judged again,
    because its check failed here: {reason}
validator.turned_down: submission {number} of step {step} by {worker:peer} is not checked:
    {reason}
validator.not_first: submission {number} of step {step} by {worker:peer} is judged by validator
    {first:peer} first
validator.settled_elsewhere: submission {number} of step {step} by {worker:peer}: validator
    {by:peer} has judged it already
validator.second_opinion_failed: a submission that validator {by:peer} judged cannot be judged
    again here: {reason}
validator.second_opinions_lost: {submissions} submissions that validator {by:peer} judged, and
    that were to be judged again here before the restart, are not: {reason}
verdicts.contradict: submission {number} of step {step} by {worker:peer}: validator {refuses:peer}
    refuses it, validator {accepts:peer} accepts it after recomputing it; one of them judges
    wrongly, and the refusal binds
validator.cases_dropped: {cases} acknowledged submissions were stored by another version of Swarm
    and are not judged here: {reason}
validator.cannot_grade: {submissions} submissions in a row could not be graded; taking no work for
    {seconds:.0f} s: {reason}
validator.not_admitted: a submission by {remote:peer} does not count: {reason}
validator.receipt_undelivered: peer {worker:peer} could not be given its receipt: {reason}
ledger.bad_entry: an entry of a trusted peer's log is invalid and was ignored: {reason}
membership.trusted_over_rate: trusted peer {remote:peer} signs more messages than any honest peer,
    and those above its rate are dropped; its key may be stolen
ledger.forked: the log of trusted peer {owner:peer} contradicts what it signed before: {reason}
ledger.false_seal: trusted peer {owner:peer} sealed epoch {epoch} of the ledger falsely, so it is
    not pruned here: {reason}
ledger.sealed: epoch {epoch} of the ledger is sealed, up to step {step}
ledger.pruned: {entries} entries of the log of trusted peer {owner:peer}, sealed up to epoch
    {epoch}, were deleted here
ledger.skipped: {entries} entries of the log of trusted peer {owner:peer} were sealed and pruned
    while this peer lacked them; it trusts the seal of the others
ledger.mirror_failed: the log of trusted peer {owner:peer} could not be copied yet: {reason}
ledger.reinstatement_not_logged: too many reinstatements came at once, and one is not in this
    peer's log yet
ledger.waits_for_copies: this home has no log of this peer, and the run is not new, so it writes
    nothing before {remotes:peers} say whether they have a copy (at most {seconds:.0f} s);
    --new-log skips this for a peer that has never taken part
ledger.restore_failed: peer {remote:peer} could not give back this peer's log: {reason}
ledger.restored: {entries} entries of this peer's log were restored from other trusted peers
outer.alone: no other trainer is present; going on alone with round {round}
outer.together: other trainers are present in round {round}
outer.branch_lost: another branch of the run has more tokens; {rounds:len} rounds with
    {contributions} contributions ({tokens:,} tokens) of this one are lost
outer.contributed: round {round}: contributed {tokens:,} tokens in {bytes:MB}, after {seconds:.1f}
    s
outer.contribution_refused: the contribution of trainer {trainer:peer} from round {base_round}
    does not count: {reason}
outer.fetch_failed: the contribution of trainer {trainer:peer} could not be fetched yet: {reason}
outer.measured: the outer state after round {round} has a loss of {loss:.4f} on data held back
outer.not_answered: trainer {remote:peer} could not be given records: {reason}
outer.not_merged: round {round} could not be merged, fetching a newer state: {reason}
outer.record_refused: a record that trainer {signer:peer} has signed is refused: {reason}
outer.recovered: fetched the outer state after round {round} of trainer {trainer:peer} in
    {seconds:.1f} s
outer.round_abandoned: gave up the inner steps of round {round}: the others are too far ahead of
    it
outer.run_complete: the run is complete after {round} rounds, with state {state:short}; its model
    is in {folder}
standby.standing_by: stands by, with the run's newest policy
trainer.alarm: alarm in step {step}: {sentence}
trainer.fetch_failed: validator {validator:peer} could not hand over an accepted submission
    (attempt {attempt}): {reason}
trainer.log_completed: {submissions} submissions trained on before the stop were added to the log
trainer.paused: training is paused, {reason}; {remedy}
trainer.rolled_back: went back to policy {step}: {reason}
trainer.stale_dropped: {submissions} accepted submissions are too old to be trained on
trainer.verdicts_missed: more than {held:,} verdicts came while the trainer loaded; it reads the
    others in their validators' logs
trainer.unjudged_forgotten: {submissions} submissions were announced but got no verdict; excluded
    from the forecast
trainer.unreadable: an accepted submission by {worker:peer} cannot be read and is left out:
    {reason}
trainer.rollouts_missing: {submissions} accepted submissions stored here cannot be read and are
    copied again if their validators still offer them
trainer.resumed: resuming from the state of step {step}
trainer.step_opened: step {step} is open: {groups_wanted} groups of policy {policy} wanted
trainer.step_repeated: repeated step {step}, with the same result
trainer.step_trained: step {step} trained on {submissions} submissions in {seconds:.1f} s: reward
    {reward:.3f}
trainer.checkpoint_published: policy {step} published ({bytes:MB})
trainer.pushed: policy {step} uploaded: {address}
trainer.push_failed: WARNING: policy {step} was not uploaded to {repository}: {reason}
"""

SENTENCES = dict(line.split(": ", 1) for line in _TEXT.replace("\n    ", " ").strip().splitlines())
"""Sentences by event, with the event's fields in braces."""


def _judgement(f: dict[str, Any]) -> str:
    if f["outcome"] == "accepted":
        near = f"; nearest limit: {f['nearest']}" if f.get("nearest") else ""
        return "accepted" + (f"; {f['detail']}" if f["detail"] else "") + near
    why = f"{f['outcome']} by check {f['failed']!r}" if f["failed"] else f["outcome"]
    figures = f"figure {f['figure']:.4g}, threshold {f['threshold']:.4g}"
    return f"{why} ({figures}): {f['detail']}"


def _starved(f: dict[str, Any]) -> str:
    peers = ", ".join(
        _short(peer) + (" (not connected)" if peer in f["not_connected"] else "")
        for peer in f["waiting_for"]
    )
    return f"nothing to do for {f['seconds']:.0f} s: {f['reason']}; waiting for {peers or 'any'}"


_COMPOSED: dict[str, Callable[[dict[str, Any]], str]] = {
    "peer.run_pinned": lambda f: "\n  ".join(
        [
            f"joined the run {f['run'].partition('/')[2]} for the first time; this home keeps to "
            f"its owner, {f['owner']}: if you expected another, stop it, and give --run a full id",
            *f["lines"],
        ]
    ),
    "run.version_signed": lambda f: (
        f"version {f['version']} of the run was signed: "
        f"{'; '.join(f['changes']) or 'nothing else changes'}"
    ),
    "membership.clock_corrected": lambda f: (
        f"this machine's clock is {abs(f['seconds']):.0f} s "
        f"{'slow' if f['seconds'] > 0 else 'fast'} by the trusted peers' clocks; counting with "
        "theirs, please set it"
    ),
    "membership.clocks_differ": lambda f: (
        f"the clock of trusted peer {_short(f['remote'])} is {abs(f['seconds']):.0f} s "
        f"{'ahead of' if f['seconds'] > 0 else 'behind'} this machine's; continuing by "
        "sequence numbers, please set the wrong one (NTP)"
    ),
    "inference.ready": lambda f: "\n  ".join(["ready to generate:", *f["lines"]]),
    "inference.device": lambda f: (
        f"device {f['busy']:.0%} busy".replace("%", " %")
        + ("; idle: " + ", ".join(f["idle"]) if f["idle"] else "")
    ),
    "inference.receipt": lambda f: (
        f"submission {f['number']} of step {f['step']}: receipt from {_short(f['by'])}, "
        f"{_judgement(f)}"
    ),
    "inference.starved": _starved,
    "validator.starved": _starved,
    "environment.request_dropped": lambda f: (
        f"a request of {_short(f['remote'])} was dropped: "
        + {"over_rate": "more than requests_per_second"}.get(
            f["cause"], "it shows no valid admission as a worker"
        )
    ),
    "inference.leaving": lambda f: (
        f"leaving after this submission, at most {f['seconds']:.0f} s; Ctrl-C again abandons it"
        if f["seconds"]
        else f"leaving; {f['reason']}"
    ),
    "validator.verdict": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])}: "
        f"{_judgement(f)}, in {f['seconds']:.1f} s"
    ),
    "outer.behind": lambda f: (
        f"the outer state after round {f['round']} is older than another trainer's: {f['reason']}; "
        + ("staying on this branch for a while" if f["last"] else "trying again")
    ),
    "outer.merged": lambda f: (
        f"round {f['round']}: merged {len(f['trainers'])} contributions; {f['tokens']:,} tokens "
        f"in all, state {_readable(f['state'])}"
        + (
            f"; that of {_peers(f['shortened'])} was longer than twice the median, "
            "and shortened to that"
            if f["shortened"]
            else ""
        )
    ),
    "outer.round_closed": lambda f: (
        f"round {f['round']} closed with {f['contributions']} contributions"
        + (", without " + _peers(f["missing"]) if f["missing"] else "")
        + (
            f"; that is fewer than its quorum of {f['quorum']}, but the wait is over"
            if f["contributions"] < f["quorum"]
            else ""
        )
    ),
    "outer.waiting": lambda f: (
        f"round {f['round']} has {f['contributions']} contributions (quorum {f['quorum']}) and has "
        f"waited {f['seconds']:.0f} s for "
        + (_peers(f["waiting_for"]) or "its record")
        + f"; it closes in {f['seconds_left']:.0f} s at the latest"
    ),
    "trainer.starved": lambda f: (
        f"step {f['step']} has waited {f['seconds']:.0f} s for {f['groups_missing']} groups "
        f"({f['groups_unjudged']} are not judged yet) from "
        + (f["waiting_for"] if isinstance(f["waiting_for"], str) else _peers(f["waiting_for"]))
    ),
    "trainer.planned": lambda f: (
        f"{f['parameters']:,} parameters on {f['ranks']} ranks, passes of {f['pass_tokens']:,} "
        f"tokens; memory of each rank: {'; '.join([*f['device_parts'], *f['host_parts']])}"
        + f"; a crash loses at most {f['save_steps']} steps, which are repeated"
        + (f". It does not fit: {f['problem']}" if f["problem"] else "")
    ),
    "trainer.run_complete": lambda f: (
        f"the run is complete after {f['steps']} steps; its policy is in {f['folder']}"
        + (f". WARNING: {unrewarded(f)}" if f.get("unrewarded_steps") else "")
    ),
}
"""Sentences that depend on what the fields hold."""
