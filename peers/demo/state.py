"""The state of a demo's swarm, gathered from the peers' events for view and summary.

Events come as JSON lines from the demo's own processes. Every field is still read with a default,
so that a missing one leaves a gap in the table and does not end the demo.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.sentences import numbered, unrewarded
from swarm.terminal.untrusted import printable

VERDICTS_KEPT = 64
NOTES_KEPT = 64
ANSWERS_KEPT = 64
RIGHT = 1.0 - 1e-6
"""Reward of an answer that is shown as right."""
SPEED_STEPS = 20
"""Number of last steps that the estimate of the time left uses."""

SPEED_SECONDS = 10.0
"""Window over which tokens per second are averaged."""

_STANDINGS = {
    "membership.peer_suspected": "suspected",
    "membership.peer_gone": "gone",
    "membership.peer_left": "left",
    "membership.peer_finished": "finished",
    "membership.peer_returned": "live",
}
"""State of a peer after an event."""

Fields = Mapping[str, Any]


def number(fields: Fields, name: str, default: float = 0.0) -> float:
    """Read a numeric field; the default if it is missing, not a number, or above 2⁵³."""
    value = fields.get(name)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 2**53:
        return float(value)
    return default


def text(fields: Fields, name: str) -> str:
    """Read a text field and make it safe to print; empty if it is missing.

    Strangers write some of the texts.
    """
    value = fields.get(name)
    return printable(value) if isinstance(value, str) else ""


@dataclass
class PeerState:
    """One peer, shown as a row of the table."""

    name: str
    role: str
    peer: str
    own: bool = True
    """Whether it is a process of this demo; otherwise it is a guest that someone started."""
    state: str = "starting"
    """One of starting, joining, live, suspected, gone, left, evicted, restarting, finished."""
    doing: str = ""
    policy: int = -1
    step: int = -1
    tokens_per_second: float = 0.0
    restarts: int = 0
    sent: int = 0
    received: int = 0
    """Bytes of blobs received, over all restarts of the process. `sent` is counted likewise."""
    _sent_before: int = 0
    _received_before: int = 0

    def moved(self, sent: int, received: int) -> None:
        """Update the totals from a process's own counts, which restart at 0."""
        self.sent = self._sent_before + sent
        self.received = self._received_before + received

    def new_life(self) -> None:
        self._sent_before, self._received_before = self.sent, self.received
        self.tokens_per_second = 0.0


@dataclass(frozen=True)
class VerdictLine:
    """One verdict, with the fields that the view shows."""

    at: float
    worker: str
    step: int
    number: int
    outcome: str
    failed: str
    figure: float
    threshold: float
    detail: str = ""
    """The check's finding as a sentence."""


@dataclass(frozen=True)
class TrainedStep:
    at: float
    reward: float
    gradient_norm: float
    groups: int


@dataclass(frozen=True)
class ShownAnswer:
    """What some policy answered."""

    at: float
    policy: str
    question: str
    text: str
    right: bool


@dataclass
class Note:
    """One line about an event: a restart, an eviction, a guest."""

    at: float
    text: str
    grave: bool = False


@dataclass
class SwarmState:
    """The data of view and summary. Times are seconds of trio's clock."""

    steps_wanted: int
    started: float
    title: str = ""
    """What is learned."""
    held_out: int = 512
    """Prompts of an evaluation."""
    join_line: str = ""
    peers: dict[str, PeerState] = field(default_factory=dict)
    """Peers by id, in the order of the table."""
    trained: dict[int, TrainedStep] = field(default_factory=dict)
    """Trained steps by number, so that a step trained again after a crash counts once."""
    counts: Counter[str] = field(default_factory=Counter)
    """Verdicts counted by "accepted", "quarantined", or the name of the failed check."""
    verdicts: deque[VerdictLine] = field(default_factory=lambda: deque(maxlen=VERDICTS_KEPT))
    """Latest accepted verdicts."""
    refusals: deque[VerdictLine] = field(default_factory=lambda: deque(maxlen=VERDICTS_KEPT))
    """Latest other verdicts, kept apart because accepted ones would soon displace them."""
    answers: deque[ShownAnswer] = field(default_factory=lambda: deque(maxlen=ANSWERS_KEPT))
    """The latest ones of the run."""
    measured: dict[str, list[ShownAnswer]] = field(default_factory=dict)
    """Answers to the same held-out prompts `before` and `after`."""
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))
    generated: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))
    """Time and number of tokens of each submission."""
    evicted: dict[str, str] = field(default_factory=dict)
    """Reasons of evictions, by peer name."""
    accuracy_after: dict[str, float] = field(default_factory=dict)
    """Accuracies `sampled` and `greedy`, once evaluated."""
    accuracy_before: dict[str, float] = field(default_factory=dict)
    finished_folder: str | None = None
    warning: str = ""
    """Why the finished run learnt nothing; empty if it learnt."""
    """Folder of the trained policy; None until the run is complete."""
    phase: str = "preparing"
    marks: dict[str, float] = field(default_factory=dict)
    """Start time of each phase."""
    changes: int = 0
    """Counter that grows with every visible change."""

    def add_peer(self, name: str, role: str, peer: str, *, own: bool = True) -> PeerState:
        self.peers[peer] = PeerState(name, role, peer, own, "starting" if own else "live")
        return self.peers[peer]

    def name_of(self, peer: str) -> str:
        """Name of a peer in the table, or the end of a stranger's id."""
        held = self.peers.get(peer)
        return held.name if held else f"…{peer[-6:]}"

    def named(self, name: str) -> PeerState | None:
        return next((peer for peer in self.peers.values() if peer.name == name), None)

    # --- figures -----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps trained."""
        return max(self.trained, default=-1) + 1

    def rewards(self) -> list[tuple[int, float]]:
        """Step and mean reward of each trained step, in order."""
        return [(step, self.trained[step].reward) for step in sorted(self.trained)]

    def tokens_per_second(self, now: float) -> float:
        """Tokens per second that the demo's own peers generated lately."""
        tokens = sum(count for at, count in self.generated if at > now - SPEED_SECONDS)
        return tokens / SPEED_SECONDS

    def restarts(self) -> int:
        return sum(peer.restarts for peer in self.peers.values())

    def seconds_left(self) -> float | None:
        """Estimate the time left from the pace of the last steps; None before the second step."""
        recent = [self.trained[step] for step in sorted(self.trained)[-SPEED_STEPS:]]
        if len(recent) < 2:
            return None
        pace = (recent[-1].at - recent[0].at) / (len(recent) - 1)
        return max(0.0, pace * (self.steps_wanted - self.step))

    # --- what happens ------------------------------------------------------------------------

    def enter(self, phase: str, now: float) -> None:
        """Begin a new phase."""
        self.phase = phase
        self.marks.setdefault(phase, now)
        self.changes += 1

    def note(self, line: str, now: float, *, grave: bool = False) -> None:
        self.notes.append(Note(now, numbered(line), grave))
        self.changes += 1

    def show(self, policy: str, answers: Iterable[Fields], now: float) -> list[ShownAnswer]:
        """Show answers of a policy, called `policy`."""
        found = [
            ShownAnswer(
                now,
                policy,
                text(each, "question"),
                text(each, "text"),
                number(each, "reward") >= RIGHT,
            )
            for each in answers
            if isinstance(each, Mapping)
        ]
        self.answers.extend(found)
        self.changes += 1
        return found

    def process_died(self, name: str, status: int, now: float) -> None:
        peer = self.named(name)
        if peer is not None:
            peer.restarts += 1
            peer.state, peer.doing = "restarting", ""
            peer.new_life()
        cause = f"by signal {-status}" if status < 0 else f"with status {status}"
        self.note(f"{name} ended {cause}; restarted", now, grave=True)

    def process_finished(self, name: str) -> None:
        peer = self.named(name)
        if peer is not None:
            peer.doing = ""
            peer.tokens_per_second = 0.0
            if peer.state != "evicted":
                peer.state = "finished"
        self.changes += 1

    def apply(self, event: Fields, now: float) -> None:
        """Apply one event of a peer; unknown events change nothing."""
        name = text(event, "event")
        if name in _STANDINGS:
            self._stand(text(event, "remote"), _STANDINGS[name], now)
            self.changes += 1
        handler = getattr(self, f"_on_{name.replace('.', '_')}", None)
        if handler is not None:
            handler(event, self.peers.get(text(event, "peer")), now)
            self.changes += 1

    def _on_peer_listening(self, event: Fields, peer: PeerState | None, now: float) -> None:
        if peer is not None and peer.state != "evicted":
            peer.state = "live" if peer.role == "bootstrap" else "joining"

    def _on_peer_run_found(self, event: Fields, peer: PeerState | None, now: float) -> None:
        if peer is not None and peer.role in ("trainer", "validator"):
            peer.state = "live"

    def _on_membership_admitted(self, event: Fields, peer: PeerState | None, now: float) -> None:
        if peer is not None and peer.state != "evicted":
            peer.state = "live"

    def _on_peer_status(self, event: Fields, peer: PeerState | None, now: float) -> None:
        if peer is None:
            return
        if peer.state != "evicted":
            peer.doing = text(event, "doing")
            peer.policy = int(number(event, "policy", -1))
            peer.step = int(number(event, "step", -1))
            peer.tokens_per_second = number(event, "tokens_per_second")
        peer.moved(int(number(event, "bytes_sent")), int(number(event, "bytes_received")))

    def _on_membership_peer_admitted(
        self, event: Fields, peer: PeerState | None, now: float
    ) -> None:
        remote = text(event, "remote")
        roles = event.get("roles")
        role = printable(str(roles[0]), 20) if isinstance(roles, Sequence) and roles else "guest"
        if remote and remote not in self.peers and role != "observer":
            guests = sum(not known.own for known in self.peers.values())
            guest = self.add_peer(f"guest-{guests + 1}", role, remote, own=False)
            self.note(f"{guest.name} joined as {guest.role} ({remote})", now)

    def _stand(self, peer: str, state: str, now: float) -> None:
        remote = self.peers.get(peer)
        if remote is not None and remote.state not in ("evicted", "finished", "restarting"):
            if remote.state != state:
                verb = "has" if state in ("left", "finished") else "is"
                grave = state in ("suspected", "gone")
                self.note(f"{remote.name} {verb} {state}", now, grave=grave)
            remote.state = state
            if state not in ("live", "suspected"):
                remote.tokens_per_second = 0.0

    def _on_membership_peer_evicted(
        self, event: Fields, peer: PeerState | None, now: float
    ) -> None:
        remote = text(event, "remote")
        name = self.name_of(remote)
        reason = text(event, "reason")
        if not remote or not reason or name in self.evicted:
            return  # the reporter only heard of the eviction; the evicting peer gives the reason
        self.evicted[name] = reason
        held = self.peers.get(remote)
        if held is not None:
            held.state, held.doing, held.tokens_per_second = "evicted", "", 0.0
        self.note(f"{name} evicted: {self.evicted[name]}", now, grave=True)

    def _on_trainer_evaluated(self, event: Fields, peer: PeerState | None, now: float) -> None:
        figures = {"sampled": number(event, "sampled"), "greedy": number(event, "greedy")}
        moment = "after" if text(event, "moment") == "after" else "before"
        self.measured[moment] = self.show(moment, event.get("answers") or (), now)
        if moment == "after":
            self.accuracy_after = figures
        else:
            self.accuracy_before = figures
            self.note(
                f"base policy ready: sampled {figures['sampled']:.2f}, greedy "
                f"{figures['greedy']:.2f} on {self.held_out} held-out prompts",
                now,
            )
            if self.phase == "preparing":
                self.enter("joining", now)

    def _on_trainer_step_opened(self, event: Fields, peer: PeerState | None, now: float) -> None:
        if self.phase == "joining":
            self.enter("training", now)

    def _on_trainer_step_trained(self, event: Fields, peer: PeerState | None, now: float) -> None:
        step = int(number(event, "step", -1))
        if not 0 <= step < self.steps_wanted:
            return
        self.trained[step] = TrainedStep(
            at=now,
            reward=number(event, "reward"),
            gradient_norm=number(event, "gradient_norm"),
            groups=int(number(event, "groups")),
        )
        if self.step >= self.steps_wanted:
            self.enter("ending", now)

    def _on_trainer_run_complete(self, event: Fields, peer: PeerState | None, now: float) -> None:
        self.finished_folder = text(event, "folder")
        if steps := int(number(event, "unrewarded_steps")):
            self.warning = unrewarded({"unrewarded_steps": steps, "advice": text(event, "advice")})
            self.note(f"WARNING: {self.warning}", now, grave=True)
        self.enter("ending", now)

    def _on_inference_policy_loaded(
        self, event: Fields, peer: PeerState | None, now: float
    ) -> None:
        if peer is not None:
            peer.policy = int(number(event, "policy", peer.policy))

    def _on_inference_submission_made(
        self, event: Fields, peer: PeerState | None, now: float
    ) -> None:
        self.generated.append((now, int(number(event, "tokens"))))

    def _on_validator_verdict(self, event: Fields, peer: PeerState | None, now: float) -> None:
        outcome, failed = text(event, "outcome"), text(event, "failed")
        self.counts[outcome if outcome != "refused" else failed or "refused"] += 1
        worker = text(event, "worker")
        kept = self.verdicts if outcome == "accepted" else self.refusals
        kept.append(
            VerdictLine(
                at=now,
                worker=self.name_of(worker),
                step=int(number(event, "step", -1)),
                number=int(number(event, "number", -1)),
                outcome=outcome,
                failed=failed,
                figure=number(event, "figure"),
                threshold=number(event, "threshold"),
                detail=text(event, "detail"),
            )
        )
        guest = self.peers.get(worker)
        if guest is not None and not guest.own:
            guest.policy = int(number(event, "policy", guest.policy))
            guest.step = int(number(event, "step", guest.step))
            guest.doing = f"judged {outcome}"
