"""Every alarm: how bad it is, which events raise and clear it, and what to do (docs/alarms.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["warn", "page"]
"""warn: look at it today. page: the run stands still, or is in danger."""

MINUTE = 60.0


@dataclass(frozen=True)
class Kind:
    """One alarm of the catalogue."""

    severity: Severity
    when: str
    """When it is raised, for the documentation."""
    do: str
    """What a person can do."""
    signs: int = 1
    """Signs within `within_seconds` that raise it."""
    within_seconds: float = 10 * MINUTE
    quiet_seconds: float = 10 * MINUTE
    """Time without a sign after which it is cleared."""
    events: tuple[str, ...] = ()
    """Events that are signs by themselves; `ringing` knows the signs that depend on figures."""
    over: tuple[str, ...] = ()
    """Events that prove that its cause is gone."""


CATALOGUE: dict[str, Kind] = {
    "starved": Kind(
        "warn",
        "trainer, validator or worker has had no work for `starved_seconds`",
        "see whom it waits for in the sentence; swarm status shows whether they are there",
        quiet_seconds=3 * MINUTE,
        over=(
            "trainer.step_trained",
            "validator.verdict",
            "inference.submission_made",
            "trainer.run_complete",
            "inference.run_over",
        ),
    ),
    "no_step": Kind(
        "page",
        "the trainer has finished no step for `no_step_seconds`, and the run is not over",
        "see the trainer's log, and whether workers deliver: swarm status",
        quiet_seconds=2 * MINUTE,
        over=("trainer.step_trained", "trainer.run_complete"),
    ),
    "broadcast_stalled": Kind(
        "warn",
        "a peer fails to fetch policies three times in 10 minutes",
        "see what the sources answered; add a relay, or raise uplink_mbps",
        signs=3,
        events=("shardcast.checkpoint_failed",),
        over=("shardcast.checkpoint_complete",),
    ),
    "validators_disagree": Kind(
        "page",
        "a validator accepts after recomputing what another refuses",
        "compare the two validators' engines and hardware; swarm why SUBMISSION has both",
        quiet_seconds=60 * MINUTE,
        events=("verdicts.contradict",),
    ),
    "training": Kind(
        "page",
        "the trainer's own alarms: gradient norm, clipped share, entropy, skipped steps, reward",
        "see docs/training.md, alarms: pause, go back to an earlier state, lower the rate",
        quiet_seconds=30 * MINUTE,
        events=("trainer.alarm",),
    ),
    "refusals_rise": Kind(
        "warn",
        "more than a fifth of the last 50 verdicts refuse (a worker: of its last 20 receipts)",
        "swarm why SUBMISSION says which check and what it means",
    ),
    "disk_low": Kind(
        "page",
        "less than `disk_free_share` of the home's disk is free, or the disk does not answer",
        "free some space, or set quota_bytes; nothing is lost while the peer waits",
        quiet_seconds=2 * MINUTE,
    ),
    "clock_wrong": Kind(
        "warn",
        "this machine's clock, or a trusted peer's, is wrong by more than 30 s",
        "sudo timedatectl set-ntp true, on the machine that the sentence names",
        quiet_seconds=60 * MINUTE,
        events=(
            "membership.clock_corrected",
            "membership.clocks_differ",
        ),
    ),
    "log_forked": Kind(
        "page",
        "a trusted peer's log contradicts what it signed before, or is sealed falsely",
        "its key is stolen or its disk was restored: the owner removes it from the manifest",
        quiet_seconds=24 * 60 * MINUTE,
        events=("ledger.forked", "ledger.false_seal"),
    ),
    "trusted_silent": Kind(
        "warn",
        "a trusted peer has not answered for three minutes",
        "see whether its process and its network are up",
        signs=3,
        within_seconds=5 * MINUTE,
        quiet_seconds=3 * MINUTE,
    ),
    "key_abused": Kind(
        "page",
        "a trusted peer signs more messages than any honest peer",
        "its key may be stolen: the owner replaces it in the manifest",
        quiet_seconds=60 * MINUTE,
        events=("membership.trusted_over_rate",),
    ),
    "device_idle": Kind(
        "warn",
        "a worker's device has generated for less than a fifth of each of 10 minutes",
        "the sentence says what it waited for: the run, the network, or proofs",
        signs=10,
        within_seconds=11 * MINUTE,
        quiet_seconds=3 * MINUTE,
        over=("inference.run_over",),
    ),
    "children_die": Kind(
        "warn",
        "three child processes have died within 15 minutes",
        "see their last words in the log: memory, a driver, a package",
        signs=3,
        within_seconds=15 * MINUTE,
        quiet_seconds=15 * MINUTE,
        events=("compute.child_died",),
    ),
}
