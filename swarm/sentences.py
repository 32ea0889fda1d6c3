"""The sentence of each event, for a person. An event without one shows only with `--verbose`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def sentence(name: str, fields: dict[str, Any]) -> str | None:
    """Format an event as a sentence; None if it has none."""
    words = _SENTENCES.get(name)
    try:
        line = words(fields) if words is not None else None
        return line and numbered(line)
    except (KeyError, TypeError, ValueError):
        return None  # another program's event of this name, with other fields


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


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


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


def _times(f: dict[str, Any]) -> str:
    """Format how often an event happened since the last report, if more than once."""
    return f" ({f['times']} times)" if f.get("times", 1) > 1 else ""


def _untold(f: dict[str, Any]) -> str:
    """Format the number of dropped events of this kind (`Rationed`), if any."""
    return f" ({f['untold']} more like it were not logged)" if f.get("untold", 0) > 0 else ""


def _for_minutes(seconds: float) -> str:
    return f" for {seconds / 60:.0f} min" if seconds >= 60 else ""


_SENTENCES: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "compute.child_died": lambda f: (
        f"child process {f['name']} {f['how']}; its last words: {' | '.join(f['last']) or 'none'}"
    ),
    "compute.child_restarted": lambda f: (
        f"child process {f['name']} died and was started again ({f['deaths']} of {f['of']} times "
        "in a row at most)"
    ),
    "dht.joined_through_others": lambda f: (
        f"no bootstrap peer answers; joining through {f['peers']} peers met before"
    ),
    "dht.bootstrap_full": lambda f: (
        f"{f['remote']} has no room for newcomers now; asking it again for up to {f['seconds']} s"
    ),
    "dht.bootstrap_partly_silent": lambda f: (
        f"some of the bootstrap addresses lead to no peer: {'; '.join(f['reasons'])}"
    ),
    "alarm.raised": lambda f: f"alarm {f['alarm']} ({f['severity']}): {f['sentence']}; {f['do']}",
    "alarm.cleared": lambda f: f"alarm {f['alarm']} is over: {f['sentence']}",
    "peer.identity_made": lambda f: f"new key: {f['key']}; a peer that has worked before has one",
    "peer.listening": lambda f: f"listening on {', '.join(f['addresses'])}",
    "transport.reachability": lambda f: (
        f"others reach this peer: {f['reachability']} ({f['reason']})"
    ),
    "relay.limit_reached": lambda f: (
        f"a carried connection reached this relay's limit on {f['limit']}{_untold(f)}"
    ),
    "transport.relay_used": lambda f: f"relay {_short(f['relay'])} carries connections to here",
    "transport.relay_refused": lambda f: (
        f"relay {_short(f['relay'])} carries no connections to here: {f['reason']}"
    ),
    "peer.metrics": lambda f: f"figures for Prometheus are at {f['url']}",
    "peer.run_found": lambda f: (
        f"found the run {f['run'].partition('/')[2]} of owner {_short(f['owner'])}"
    ),
    "peer.run_pinned": lambda f: "\n  ".join(
        [
            f"joined the run {f['run'].partition('/')[2]} for the first time; this home keeps to "
            f"its owner, {f['owner']}: if you expected another, stop it, and give --run a full id",
            *f["lines"],
        ]
    ),
    "peer.earned": lambda f: (
        f"earned: {f['completions']:,} completions in {f['groups']:,} groups are credited; of the "
        f"submissions {f['accepted']:,} were accepted, {f['refused']:,} refused, "
        f"{f['quarantined']:,} quarantined"
    ),
    "run.version_signed": lambda f: (
        f"version {f['version']} of the run was signed: "
        f"{'; '.join(f['changes']) or 'nothing else changes'}"
    ),
    "run.version_in_force": lambda f: f"version {f['version']} is in force from step {f['step']}",
    "run.version_refused": lambda f: f"a new manifest of the run is refused: {f['reason']}",
    "run.version_awaited": lambda f: (
        f"step {f['step']} follows version {f['version']} of the run, which no trusted peer has "
        "handed out yet; asking them again"
    ),
    "peer.work_over": lambda f: "the run is over, and so is this peer's work",
    "membership.admitted": lambda f: f"admitted to the run by {_short(f['by'])}",
    "membership.lease_lost": lambda f: (
        "no trusted peer has renewed the admission in time; asking again"
    ),
    "membership.peer_admitted": lambda f: (
        f"peer {_short(f['remote'])} joined ({', '.join(f['roles'])})"
    ),
    "membership.peer_suspected": lambda f: f"peer {_short(f['remote'])} is silent",
    "membership.peer_gone": lambda f: f"peer {_short(f['remote'])} is gone, without a goodbye",
    "membership.peer_left": lambda f: f"peer {_short(f['remote'])} has left",
    "membership.peer_finished": lambda f: (
        f"peer {_short(f['remote'])} has finished: the run is over"
    ),
    "membership.peer_returned": lambda f: f"peer {_short(f['remote'])} is back",
    "membership.peer_evicted": lambda f: f"peer {_short(f['remote'])} was evicted: {f['reason']}",
    "membership.waiting_for_place": lambda f: f"not admitted yet: {f['reason']}",
    "membership.invite_redeemed": lambda f: (
        f"peer {_short(f['remote'])} redeemed invite {f['invite']}"
    ),
    "membership.place_lost": lambda f: (
        f"peer {_short(f['remote'])} delivered nothing and lost its slot to a waiting peer"
    ),
    "membership.bad_admission": lambda f: (
        f"trusted peer {_short(f['remote'])} sent an invalid admission: {f['reason']}"
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
    "membership.trusted_silent": lambda f: (
        f"trusted peer {_short(f['remote'])} does not answer{_for_minutes(f['seconds'])}: "
        f"{f['reason']}"
    ),
    "membership.refused": lambda f: (
        f"peer {_short(f['remote'])} was not admitted: {f['reason']}{_untold(f)}"
    ),
    "shardcast.checkpoint_complete": lambda f: (
        f"fetched {f['name']}: "
        f"{_megabytes(f['bytes_fetched'])} in {f['seconds']:.1f} s "
        f"from {len(f['by_source'])} peers"
    ),
    "shardcast.delta_applied": lambda f: (
        f"made policy {f['step']} from policy {f['base']} and {_megabytes(f['bytes_deltas'])} "
        "of deltas"
    ),
    "shardcast.delta_failed": lambda f: (
        f"no delta for policy {f['step']}, fetching it in full: {f['reason']}"
    ),
    "shardcast.not_synced": lambda f: (
        f"checkpoint {f['lineage']}/{f['step']} could not be made durable yet: {f['reason']}"
    ),
    "shardcast.pieces_lost": lambda f: (
        f"{f['pieces']} pieces of {f['file']} are damaged on this disk; fetching them again"
    ),
    "shardcast.checkpoint_failed": lambda f: (
        f"policy {f['step']} could not be fetched yet: {f['reason']}"
    ),
    "inference.ready": lambda f: "\n  ".join(["ready to generate:", *f["lines"]]),
    "inference.policy_loaded": lambda f: f"generating with policy {f['policy']}",
    "inference.submission_made": lambda f: (
        f"submission {f['number']} of step {f['step']}: generated {f['tokens']} tokens "
        f"in {f['seconds']:.1f} s"
    ),
    "inference.memory_short": lambda f: (
        f"memory ran out; generating at most {f['slots']} completions at once from now on"
    ),
    "inference.device": lambda f: (
        f"device {f['busy']:.0%} busy".replace("%", " %")
        + ("; idle: " + ", ".join(f["idle"]) if f["idle"] else "")
    ),
    "inference.submission_delivered": lambda f: (
        f"submission {f['number']} of step {f['step']}: delivered to validator "
        f"{_short(f['validator'])}"
    ),
    "inference.receipt": lambda f: (
        f"submission {f['number']} of step {f['step']}: receipt from {_short(f['by'])}, "
        f"{_judgement(f)}"
    ),
    "inference.delivery_failed": lambda f: (
        f"validator {_short(f['validator'])} could not be given a submission"
        f"{_times(f)}: {f['reason']}"
    ),
    "inference.verdict_late": lambda f: (
        f"validator {_short(f['validator'])} has not sent its verdict in time; asking the next"
    ),
    "inference.no_validator": lambda f: (
        f"no validator takes a submission of step {f['step']}{_times(f)}; trying again"
    ),
    "inference.starved": _starved,
    "validator.starved": _starved,
    "inference.proofs_deleted": lambda f: (
        f"deleted the {f['proofs']} oldest receipts to make room for newer ones"
    ),
    "inference.proofs_not_kept": lambda f: (
        f"no proofs of sealed work from {_short(f['remote'])} yet: {f['reason']}; asking again"
    ),
    "inference.resumed": lambda f: (
        f"{f['submissions']} submissions made before the restart have no verdict yet and are "
        f"delivered again; going on with submission {f['number']} of step {f['step']}"
    ),
    "inference.states_missing": lambda f: (
        f"the work of step {f['step']} is left for now: {f['reason']}"
    ),
    "inference.submission_given_up": lambda f: (
        f"submission {f['number']} of step {f['step']} is given up: {f['reason']}"
    ),
    "evaluation.done": lambda f: (
        f"held-out tasks with policy {f['policy']}: mean reward {f['reward']:.3f}"
    ),
    "evaluation.failed": lambda f: (
        f"policy {f['policy']} could not be evaluated: {f['reason']}; the run goes on"
    ),
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
    "inference.run_over": lambda f: f"the run is over (its last step was {f['step']})",
    "validator.verdict": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])}: "
        f"{_judgement(f)}, in {f['seconds']:.1f} s"
    ),
    "validator.audited": lambda f: (
        f"audit of submission {f['number']} of step {f['step']} by {_short(f['worker'])}: "
        f"{f['outcome']} {f['failed']} {f['detail']}".rstrip()
    ),
    "validator.audit_failed": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])} could not be "
        f"recomputed again: {f['reason']}"
    ),
    "validator.judged_again": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])} is judged again, "
        f"because its check failed here: {f['reason']}"
    ),
    "validator.turned_down": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])} is not checked: "
        f"{f['reason']}{_untold(f)}"
    ),
    "validator.not_first": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])} is judged by "
        f"validator {_short(f['first'])} first{_untold(f)}"
    ),
    "validator.settled_elsewhere": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])}: "
        f"validator {_short(f['by'])} has judged it already"
    ),
    "validator.second_opinion_failed": lambda f: (
        f"a submission that validator {_short(f['by'])} judged cannot be judged again here: "
        f"{f['reason']}"
    ),
    "validator.second_opinions_lost": lambda f: (
        f"{f['submissions']} submissions that validator {_short(f['by'])} judged, and that were to "
        f"be judged again here before the restart, are not: {f['reason']}"
    ),
    "verdicts.contradict": lambda f: (
        f"submission {f['number']} of step {f['step']} by {_short(f['worker'])}: validator "
        f"{_short(f['refuses'])} refuses it, validator {_short(f['accepts'])} accepts it after "
        "recomputing it; one of them judges wrongly, and the refusal binds"
    ),
    "validator.cases_dropped": lambda f: (
        f"{f['cases']} acknowledged submissions were stored by another version of Swarm and are "
        f"not judged here: {f['reason']}"
    ),
    "validator.cannot_grade": lambda f: (
        f"{f['submissions']} submissions in a row could not be graded; taking no work for "
        f"{f['seconds']:.0f} s: {f['reason']}"
    ),
    "validator.not_admitted": lambda f: (
        f"a submission by {_short(f['remote'])} does not count: {f['reason']}{_untold(f)}"
    ),
    "validator.receipt_undelivered": lambda f: (
        f"peer {_short(f['worker'])} could not be given its receipt: {f['reason']}"
    ),
    "ledger.bad_entry": lambda f: (
        f"an entry of a trusted peer's log is invalid and was ignored: {f['reason']}"
    ),
    "membership.trusted_over_rate": lambda f: (
        f"trusted peer {_short(f['remote'])} signs more messages than any honest peer, and those "
        f"above its rate are dropped; its key may be stolen{_untold(f)}"
    ),
    "ledger.forked": lambda f: (
        f"the log of trusted peer {_short(f['owner'])} contradicts what it signed before: "
        f"{f['reason']}"
    ),
    "ledger.false_seal": lambda f: (
        f"trusted peer {_short(f['owner'])} sealed epoch {f['epoch']} of the ledger falsely, so it "
        f"is not pruned here: {f['reason']}"
    ),
    "ledger.sealed": lambda f: (
        f"epoch {f['epoch']} of the ledger is sealed, up to step {f['step']}"
    ),
    "ledger.pruned": lambda f: (
        f"{f['entries']} entries of the log of trusted peer {_short(f['owner'])}, sealed up to "
        f"epoch {f['epoch']}, were deleted here"
    ),
    "ledger.skipped": lambda f: (
        f"{f['entries']} entries of the log of trusted peer {_short(f['owner'])} were sealed and "
        "pruned while this peer lacked them; it trusts the seal of the others"
    ),
    "ledger.mirror_failed": lambda f: (
        f"the log of trusted peer {_short(f['owner'])} could not be copied yet: {f['reason']}"
    ),
    "ledger.reinstatement_not_logged": lambda f: (
        "too many reinstatements came at once, and one is not in this peer's log yet"
    ),
    "ledger.waits_for_copies": lambda f: (
        "this home has no log of this peer, and the run is not new, so it writes nothing before "
        f"{', '.join(map(_short, f['remotes']))} say whether they have a copy (at most "
        f"{f['seconds']:.0f} s); --new-log skips this for a peer that has never taken part"
    ),
    "ledger.restore_failed": lambda f: (
        f"peer {_short(f['remote'])} could not give back this peer's log: {f['reason']}"
    ),
    "ledger.restored": lambda f: (
        f"{f['entries']} entries of this peer's log were restored from other trusted peers"
    ),
    "outer.alone": lambda f: f"no other trainer is present; going on alone with round {f['round']}",
    "outer.together": lambda f: f"other trainers are present in round {f['round']}",
    "outer.behind": lambda f: (
        f"the outer state after round {f['round']} is older than another trainer's: {f['reason']}; "
        + ("staying on this branch for a while" if f["last"] else "trying again")
    ),
    "outer.branch_lost": lambda f: (
        f"another branch of the run has more tokens; {len(f['rounds'])} rounds with "
        f"{f['contributions']} contributions ({f['tokens']:,} tokens) of this one are lost"
    ),
    "outer.contributed": lambda f: (
        f"round {f['round']}: contributed {f['tokens']:,} tokens in {_megabytes(f['bytes'])}, "
        f"after {f['seconds']:.1f} s"
    ),
    "outer.contribution_refused": lambda f: (
        f"the contribution of trainer {_short(f['trainer'])} from round {f['base_round']} does not "
        f"count: {f['reason']}"
    ),
    "outer.fetch_failed": lambda f: (
        f"the contribution of trainer {_short(f['trainer'])} could not be fetched yet: "
        f"{f['reason']}"
    ),
    "outer.measured": lambda f: (
        f"the outer state after round {f['round']} has a loss of {f['loss']:.4f} on data held back"
    ),
    "outer.merged": lambda f: (
        f"round {f['round']}: merged {len(f['trainers'])} contributions; {f['tokens']:,} tokens "
        f"in all, state {_readable(f['state'])}"
        + (
            f"; that of {', '.join(map(_short, f['shortened']))} was longer than twice the median, "
            "and shortened to that"
            if f["shortened"]
            else ""
        )
    ),
    "outer.not_answered": lambda f: (
        f"trainer {_short(f['remote'])} could not be given records: {f['reason']}"
    ),
    "outer.not_merged": lambda f: (
        f"round {f['round']} could not be merged, fetching a newer state: {f['reason']}"
    ),
    "outer.record_refused": lambda f: (
        f"a record that trainer {_short(f['signer'])} has signed is refused: {f['reason']}"
    ),
    "outer.recovered": lambda f: (
        f"fetched the outer state after round {f['round']} of trainer {_short(f['trainer'])} "
        f"in {f['seconds']:.1f} s"
    ),
    "outer.round_abandoned": lambda f: (
        f"gave up the inner steps of round {f['round']}: the others are too far ahead of it"
    ),
    "outer.round_closed": lambda f: (
        f"round {f['round']} closed with {f['contributions']} contributions"
        + (
            ", without " + ", ".join(_short(trainer) for trainer in f["missing"])
            if f["missing"]
            else ""
        )
        + (
            f"; that is fewer than its quorum of {f['quorum']}, but the wait is over"
            if f["contributions"] < f["quorum"]
            else ""
        )
    ),
    "outer.run_complete": lambda f: (
        f"the run is complete after {f['round']} rounds, with state {_readable(f['state'])}; its "
        f"model is in {f['folder']}"
    ),
    "outer.waiting": lambda f: (
        f"round {f['round']} has {f['contributions']} contributions (quorum {f['quorum']}) and has "
        f"waited {f['seconds']:.0f} s for "
        + (", ".join(_short(trainer) for trainer in f["waiting_for"]) or "its record")
        + f"; it closes in {f['seconds_left']:.0f} s at the latest"
    ),
    "standby.standing_by": lambda f: "stands by, with the run's newest policy",
    "trainer.alarm": lambda f: f"alarm in step {f['step']}: {f['sentence']}",
    "trainer.evaluated": lambda f: (
        f"held-out tasks {f['moment']} the run: accuracy {f['sampled']:.3f} sampled, "
        f"{f['greedy']:.3f} greedy"
    ),
    "trainer.fetch_failed": lambda f: (
        f"validator {_short(f['validator'])} could not hand over an accepted submission "
        f"(attempt {f['attempt']}): {f['reason']}"
    ),
    "trainer.log_completed": lambda f: (
        f"{f['submissions']} submissions trained on before the stop were added to the log"
    ),
    "trainer.paused": lambda f: f"training is paused, {f['reason']}; {f['remedy']}",
    "trainer.rolled_back": lambda f: f"went back to policy {f['step']}: {f['reason']}",
    "trainer.stale_dropped": lambda f: (
        f"{f['submissions']} accepted submissions are too old to be trained on"
    ),
    "trainer.starved": lambda f: (
        f"step {f['step']} has waited {f['seconds']:.0f} s for {f['groups_missing']} groups "
        f"({f['groups_unjudged']} are not judged yet) from "
        + (
            f["waiting_for"]
            if isinstance(f["waiting_for"], str)
            else ", ".join(_short(peer) for peer in f["waiting_for"])
        )
    ),
    "trainer.verdicts_missed": lambda f: (
        f"more than {f['held']:,} verdicts came while the trainer loaded; it reads the others in "
        "their validators' logs"
    ),
    "trainer.unjudged_forgotten": lambda f: (
        f"{f['submissions']} submissions were announced but got no verdict; excluded from the "
        "forecast"
    ),
    "trainer.unreadable": lambda f: (
        f"an accepted submission by {_short(f['worker'])} cannot be read and is left out: "
        f"{f['reason']}"
    ),
    "trainer.rollouts_missing": lambda f: (
        f"{f['submissions']} accepted submissions stored here cannot be read and are copied again "
        "if their validators still offer them"
    ),
    "trainer.planned": lambda f: (
        f"{f['parameters']:,} parameters on {f['ranks']} ranks, passes of {f['pass_tokens']:,} "
        f"tokens; memory of each rank: {'; '.join([*f['device_parts'], *f['host_parts']])}"
        + f"; a crash loses at most {f['save_steps']} steps, which are repeated"
        + (f". It does not fit: {f['problem']}" if f["problem"] else "")
    ),
    "trainer.resumed": lambda f: f"resuming from the state of step {f['step']}",
    "trainer.step_opened": lambda f: (
        f"step {f['step']} is open: {f['groups_wanted']} groups of policy {f['policy']} wanted"
    ),
    "trainer.step_repeated": lambda f: f"repeated step {f['step']}, with the same result",
    "trainer.step_trained": lambda f: (
        f"step {f['step']} trained on {f['submissions']} submissions in {f['seconds']:.1f} s: "
        f"reward {f['reward']:.3f}"
    ),
    "trainer.checkpoint_published": lambda f: (
        f"policy {f['step']} published ({_megabytes(f['bytes'])})"
    ),
    "trainer.pushed": lambda f: f"policy {f['step']} uploaded: {f['address']}",
    "trainer.push_failed": lambda f: (
        f"WARNING: policy {f['step']} was not uploaded to {f['repository']}: {f['reason']}"
    ),
    "trainer.run_complete": lambda f: (
        f"the run is complete after {f['steps']} steps; its policy is in {f['folder']}"
        + (f". WARNING: {unrewarded(f)}" if f.get("unrewarded_steps") else "")
    ),
}
"""Functions that format an event's fields as a sentence, by event name."""
