"""The state of a demo's swarm, from the events (JSON lines) of its own processes."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.sentences import numbered, unrewarded
from swarm.terminal.untrusted import printable, shown

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


@dataclass
class PeerState:
    """One peer, shown as a row of the table."""

    name: str
    role: str
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
    detail: str
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
    accuracy: dict[str, dict[str, float]] = field(default_factory=dict)
    """Accuracies `sampled` and `greedy`, `before` and `after`."""
    finished_folder: str | None = None
    """Folder of the trained policy; None until the run is complete."""
    warning: str = ""
    """Why the finished run learnt nothing; empty if it learnt."""
    phase: str = "preparing"
    marks: dict[str, float] = field(default_factory=dict)

    def add_peer(self, name: str, role: str, peer: str, *, own: bool = True) -> PeerState:
        self.peers[peer] = PeerState(name, role, own, "starting" if own else "live")
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
        return max(self.trained, default=-1) + 1

    def rewards(self) -> list[tuple[int, float]]:
        return [(step, self.trained[step].reward) for step in sorted(self.trained)]

    def tokens_per_second(self, now: float) -> float:
        """Tokens per second that the demo's own peers generated lately."""
        tokens = sum(count for at, count in self.generated if at > now - SPEED_SECONDS)
        return tokens / SPEED_SECONDS

    def restarts(self) -> int:
        return sum(peer.restarts for peer in self.peers.values())

    def seconds_left(self) -> float | None:
        """By the pace of the last steps; None before the second step."""
        recent = [self.trained[step] for step in sorted(self.trained)[-SPEED_STEPS:]]
        if len(recent) < 2:
            return None
        pace = (recent[-1].at - recent[0].at) / (len(recent) - 1)
        return max(0.0, pace * (self.steps_wanted - self.step))

    # --- what happens ------------------------------------------------------------------------

    def enter(self, phase: str, now: float) -> None:
        self.phase = phase
        self.marks.setdefault(phase, now)

    def note(self, line: str, now: float, *, grave: bool = False) -> None:
        self.notes.append(Note(now, numbered(line), grave))

    def show(
        self, policy: str, answers: Iterable[Mapping[str, Any]], now: float
    ) -> list[ShownAnswer]:
        found = [
            ShownAnswer(now, policy, each["question"], each["text"], each["reward"] >= RIGHT)
            for each in shown(list(answers))
        ]
        self.answers.extend(found)
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

    def apply(self, event: Mapping[str, Any], now: float) -> None:
        """Apply one event of a process of the demo."""
        name, f = event.get("event", ""), shown(event)  # strangers wrote some of the texts
        if name in _STANDINGS:
            self._stand(f["remote"], _STANDINGS[name], now)
        elif name.startswith("trainer."):
            self._train(name, f, now)
        elif name == "membership.peer_admitted":
            self._welcome(f["remote"], f["roles"], now)
        elif name == "membership.peer_evicted":
            self._evict(f["remote"], f.get("reason", ""), now)
        elif name == "validator.verdict":
            self._judge(f, now)
        elif name == "inference.submission_made":
            self.generated.append((now, f["tokens"]))
        elif (peer := self.peers.get(f.get("peer", ""))) is not None:
            _live(peer, name, f)

    def _welcome(self, remote: str, roles: Sequence[str], now: float) -> None:
        role = printable(roles[0], 20) if roles else "guest"
        if remote not in self.peers and role != "observer":
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

    def _evict(self, remote: str, reason: str, now: float) -> None:
        name = self.name_of(remote)
        if not reason or name in self.evicted:
            return  # the reporter only heard of the eviction; the evicting peer gives the reason
        self.evicted[name] = reason
        held = self.peers.get(remote)
        if held is not None:
            held.state, held.doing, held.tokens_per_second = "evicted", "", 0.0
        self.note(f"{name} evicted: {reason}", now, grave=True)

    def _train(self, name: str, f: Mapping[str, Any], now: float) -> None:
        if name == "trainer.step_opened" and self.phase == "joining":
            self.enter("training", now)
        elif name == "trainer.step_trained" and 0 <= f["step"] < self.steps_wanted:
            # A figure that is not finite is null.
            reward, norm = f.get("reward") or 0.0, f.get("gradient_norm") or 0.0
            self.trained[f["step"]] = TrainedStep(now, reward, norm, int(f.get("groups") or 0))
            if self.step >= self.steps_wanted:
                self.enter("ending", now)
        elif name == "trainer.run_complete":
            self.finished_folder = f["folder"]
            if f["unrewarded_steps"]:
                self.warning = unrewarded(dict(f))
                self.note(f"WARNING: {self.warning}", now, grave=True)
            self.enter("ending", now)

    def evaluated(self, moment: str, f: Mapping[str, Any], now: float) -> None:
        """Take the accuracies and answers of the policy `before` or `after`."""
        self.accuracy[moment] = {"sampled": f["sampled"], "greedy": f["greedy"]}
        self.measured[moment] = self.show(moment, f["answers"], now)
        if moment == "before":
            self.note(
                f"base policy ready: sampled {f['sampled']:.2f}, greedy {f['greedy']:.2f} on "
                f"{self.held_out} held-out prompts",
                now,
            )

    def _judge(self, f: Mapping[str, Any], now: float) -> None:
        outcome, failed, worker = f["outcome"], f["failed"], f["worker"]
        self.counts[outcome if outcome != "refused" else failed or "refused"] += 1
        kept = self.verdicts if outcome == "accepted" else self.refusals
        kept.append(
            VerdictLine(
                at=now,
                worker=self.name_of(worker),
                step=f["step"],
                number=f["number"],
                outcome=outcome,
                failed=failed,
                figure=f["figure"] or 0.0,
                threshold=f["threshold"] or 0.0,
                detail=f["detail"],
            )
        )
        guest = self.peers.get(worker)
        if guest is not None and not guest.own:
            guest.policy, guest.step, guest.doing = f["policy"], f["step"], f"judged {outcome}"


def _live(peer: PeerState, name: str, f: Mapping[str, Any]) -> None:
    """Apply what a process says of itself."""
    if name == "peer.status":
        peer.moved(f["bytes_sent"], f["bytes_received"])
    if peer.state == "evicted":
        return
    if name == "peer.status":
        peer.doing, peer.policy, peer.step = f["doing"], f["policy"], f["step"]
        peer.tokens_per_second = f["tokens_per_second"] or 0.0
    elif name == "inference.policy_loaded":
        peer.policy = f["policy"]
    elif name == "peer.listening":
        peer.state = "live" if peer.role == "bootstrap" else "joining"
    elif name == "membership.admitted" or (
        name == "peer.run_found" and peer.role in ("trainer", "validator")
    ):
        peer.state = "live"
