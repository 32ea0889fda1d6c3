"""The invariants of docs/simulation.md, checked throughout every simulation.

The checks do not rely on the peers' claims: the cost models of their children report what was
trained on, saved and loaded (`Simulation.tell`), as read from the simulated disk.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import trio

from peers.trainer.precedence import ACKNOWLEDGED_KEPT
from simnet.clock import source
from simnet.compute.rollouts import SimulatedRollouts, true_rewards, ungradable_groups
from simnet.simulation import Peer, Simulation
from swarm.events import Event
from swarm.gossip.slots import NEIGHBOURS_MAX
from swarm.gossip.store import EVENTS_MAX
from swarm.jobs.training import AcceptedSubmission
from swarm.ledger.entries import Consumed, Judged, decode
from swarm.ledger.log import Log
from swarm.ledger.mirror import LogMirror
from swarm.transport import limits
from swarm.wire.envelope import SEEN_ENVELOPES_MAX

LOG_ENTRIES_READ = 1000
_TRUSTED = {"trainer", "validator"}

AGREEMENT_SECONDS = 60.0
"""Time within which connected trusted peers must hold each other's logs."""
LOG_LAG_ENTRIES_MAX = 20
"""Entries by which a mirror may lag behind a log that still grows."""

INSPECT_SECONDS = 10.0
"""Virtual time between two inspections of some peers' state."""
INSPECTED_AT_ONCE = 16
"""Peers per inspection, in turn, so that a thousand peers cost little."""

PIECES_HASHED = 64
"""Most pieces hashed of a complete checkpoint; if it has more, they are drawn by seed."""

COLLECTION_ENTRIES_MAX = 2000
COLLECTION_ENTRIES_PER_PEER = 40
"""Most entries in a collection inside a peer: a fixed part, and this many per peer of the run."""
COLLECTIONS = {
    "BlobIndex._positions": 1_000_000,
    "Gate._seen": SEEN_ENVELOPES_MAX,
    "Store._events": EVENTS_MAX,
    "Gossip._asked": EVENTS_MAX,
    "Neighbour.knows": 2 * EVENTS_MAX,
    "Neighbour.news": EVENTS_MAX,
    "Neighbour.wanted": EVENTS_MAX,
    "Neighbour.offers": EVENTS_MAX,
    "Forecast._judged": 10_000,
    "Precedence._acknowledged": ACKNOWLEDGED_KEPT,
}
"""Collections with bounds of their own: pieces held, and records that detect repetitions."""

SETTLED_SECONDS = 60.0
"""Age of an accepted submission, and time since the last fault, after which the trainer has it."""


class Invariants:
    """Watches a simulation from its start; the first violation stops it (`Simulation.violate`)."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._accepted: dict[bytes, tuple[float, str]] = {}
        """(time of the first acceptance, worker) of each accepted submission."""
        self._others: dict[bytes, str] = {}
        """Check by which a validator refused or quarantined a submission."""
        self._exported: dict[tuple[str, int], dict[str, None]] = {}
        """Weights that each trainer's child has exported as each policy."""
        self._manifests: dict[tuple[int, int], str] = {}
        self._places: dict[str, tuple[str, int, int, int]] = {}
        """(worker, lineage, step, number) of each submission ever trained on, by hex digest."""
        self._evicted_at: dict[tuple[str, str], float] = {}
        """When a peer last learned of another peer's eviction."""
        self._batches: set[tuple[Any, ...]] = set()
        """(step, digests) of each batch that a trainer has trained on."""
        self._random = source(simulation.seed, "invariants")
        self._turn = 0
        simulation.listeners.append(self._hear)
        simulation.witnesses.append(self._witness)

    # --- what happens in children ---

    def _witness(self, peer: Peer, what: str, facts: Mapping[str, Any]) -> None:
        if peer.plan.acts is not None:
            return  # an adversary may harm itself
        if what == "trained":
            batch = (facts["step"], *(submission.digest for submission, _ in facts["rollouts"]))
            repeats = batch in self._batches
            self._batches.add(batch)
            for submission, rollouts in facts["rollouts"]:
                self._trained(peer, submission, rollouts, repeats)
        elif what == "saved":
            twice = [name for name, times in Counter(facts["consumed"]).items() if times > 1]
            if twice:
                self._broken(
                    "a rollout is trained on once",
                    f"submission {twice[0][:12]} is listed twice in {peer.name}'s state of step "
                    f"{facts['step']}",
                )
            places: dict[tuple[str, int, int, int], str] = {}
            for name in facts["consumed"]:
                place = self._places.get(name)
                first = places.setdefault(place, name) if place is not None else name
                if place is not None and first != name:
                    self._broken(
                        "a rollout is trained on once",
                        f"submissions {first[:12]} and {name[:12]} in {peer.name}'s state of step "
                        f"{facts['step']} are both number {place[3]} of step {place[2]} by "
                        f"{self._name(place[0])}: the same groups",
                    )
        elif what == "exported":
            self._exported.setdefault((peer.id, facts["step"]), {})[facts["weights"]] = None
        elif what == "loaded":
            self._loaded(peer, facts["policy"], facts["weights"])

    def _trained(
        self, peer: Peer, submission: AcceptedSubmission, rollouts: SimulatedRollouts, repeats: bool
    ) -> None:
        digest, ungraded = submission.digest, submission.ungraded
        short = digest.hex()[:12]
        if digest not in self._accepted:
            why = self._others.get(digest, "never judged")
            self._broken(
                "only accepted rollouts are trained on",
                f"{peer.name} trains on submission {short} ({why})",
            )
        elif submission.rewards != [
            [0.0] * len(rewards) if group in ungraded else rewards
            for group, rewards in enumerate(true_rewards(self._simulation.workload, rollouts))
        ]:
            self._broken(
                "only validators' rewards are trained on",
                f"{peer.name} trains on submission {short} with other rewards",
            )
        unknown = ungradable_groups(self._simulation.workload, rollouts)
        if any(submission.kept[group] for group in {*ungraded, *unknown}):
            self._broken(
                "ungraded groups are not trained on",
                f"{peer.name} trains on a group of submission {short} that nobody has graded",
            )
        part = peer.part
        # A resumed trainer repeats its recorded steps as they were, whatever it has heard since.
        if part is not None and part.run.evicted(rollouts.worker) is not None and not repeats:
            self._broken(
                "an evicted peer's rollouts are not trained on",
                f"{peer.name} trains on submission {short} of {self._name(rollouts.worker)}, "
                "which it knows as evicted",
            )
        self._places[digest.hex()] = (
            rollouts.worker, rollouts.lineage, rollouts.step, rollouts.number,
        )  # fmt: skip

    def _loaded(self, peer: Peer, policy: int, weights: list[str]) -> None:
        known = [
            name
            for (_, step), names in sorted(self._exported.items())
            if step == policy
            for name in names
        ]
        if len(weights) != 1 or weights[0] not in known:
            self._broken(
                "only signed weights are loaded",
                f"{peer.name} loads {' and '.join(weights) or 'nothing'} as policy {policy}",
            )

    # --- what peers say ---

    def _hear(self, now: float, peer: Peer, event: Event) -> None:
        fields = event.fields
        if peer.plan.acts is not None:
            if event.name == "validator.verdict" and fields["outcome"] == "accepted":
                # A trusted peer's word counts, though it lies.
                self._accepted.setdefault(fields["submission"], (now, fields["worker"]))
            return
        if event.name == "validator.verdict":
            digest = fields["submission"]
            if fields["outcome"] == "accepted":
                self._accepted.setdefault(digest, (now, fields["worker"]))
                self._check_worker(peer, fields["worker"], digest, now - fields["written_seconds"])
            else:
                self._others[digest] = f"{fields['outcome']} by {fields['failed']}"
        elif event.name == "trainer.checkpoint_published":
            key = (fields["lineage"], fields["step"])
            if self._manifests.setdefault(key, fields["manifest"]) != fields["manifest"]:
                self._broken(
                    "one manifest for each policy",
                    f"{peer.name} publishes policy {key[1]} of lineage {key[0]} a second time, "
                    "with another manifest",
                )
        elif event.name == "shardcast.checkpoint_complete":
            self._check_pieces(peer, (fields["lineage"], fields["step"]))
        elif event.name == "membership.peer_evicted":
            self._evicted_at[peer.name, fields["remote"]] = now
            evicted = self._simulation.peers.get(self._name(fields["remote"]))
            if evicted is not None and evicted.plan.acts is None:
                self._broken(
                    "an honest peer is not evicted",
                    f"{peer.name} hears that {evicted.name} is: {fields['reason']}",
                )
        elif event.name == "ledger.forked":
            self._broken("logs only grow", f"{peer.name}: {fields['reason']}")

    def _check_worker(self, peer: Peer, worker: str, digest: bytes, decided: float) -> None:
        part = peer.part
        known = part is not None and part.run.evicted(worker) is not None
        if known and self._evicted_at.get((peer.name, worker), 0.0) < decided:
            self._broken(
                "an evicted peer's rollouts are refused",
                f"{peer.name} accepts {digest.hex()[:12]} of {worker}, which it knows as evicted",
            )

    def _check_pieces(self, peer: Peer, key: tuple[int, ...]) -> None:
        part = peer.part
        held = part.store.held(key) if part is not None else None
        if held is None:
            return
        here = [i for i in range(len(held.manifest.pieces)) if held.complete or held.pieces[i]]
        if len(here) > PIECES_HASHED:
            here = self._random.sample(here, PIECES_HASHED)
        for index in here:
            piece = held.manifest.pieces[index]
            path = held.piece_path(index)
            if peer.disk.digest_now(path, piece.offset, piece.size_bytes) != piece.digest:
                self._broken(
                    "what is stored matches its hash",
                    f"{peer.name} holds other bytes as piece {index} of policy {key[1]}",
                )
                return

    def _name(self, peer_id: str) -> str:
        peers = self._simulation.peers.values()
        return next((peer.name for peer in peers if peer.id == peer_id), peer_id)

    # --- from time to time ---

    async def watch(self) -> None:
        """Inspect a few peers' state every `INSPECT_SECONDS`, in turn, until cancelled."""
        while True:
            await trio.sleep(INSPECT_SECONDS)
            peers = [
                peer
                for peer in self._simulation.peers.values()
                if peer.part is not None and peer.plan.acts is None
            ]
            for _ in range(min(INSPECTED_AT_ONCE, len(peers))):
                self._turn += 1
                self._inspect(peers[self._turn % len(peers)])

    def _inspect(self, peer: Peer) -> None:
        """Check that no collection inside a peer grows without a bound."""
        peers = len(self._simulation.peers)
        most = COLLECTION_ENTRIES_MAX + COLLECTION_ENTRIES_PER_PEER * peers
        assert peer.node is not None
        for where, size in collections_in(peer.part, *peer.roles):
            if size > COLLECTIONS.get(where, most):
                self._broken(
                    "nothing grows without a bound", f"{peer.name} holds {size} entries in {where}"
                )

    @contextmanager
    def hearing_errors(self) -> Iterator[None]:
        """Make every error that a peer logs inside this block a violation."""
        handler, logger = _Errors(self), logging.getLogger("swarm")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)

    # --- at the end ---

    async def settle(self) -> None:
        """Wait, once faults are over, for trusted peers to agree, then check their books."""
        peers = [
            peer
            for peer in self._simulation.peers.values()
            if not peer.left and _TRUSTED.intersection(peer.plan.roles)
        ]
        with trio.move_on_after(AGREEMENT_SECONDS):
            while self._disagreement(peers) is not None:  # noqa: ASYNC110 (nobody announces it)
                await trio.sleep(1.0)
        disagreement = self._disagreement(peers)
        if disagreement is not None:
            self._broken(
                "trusted peers come to agree", f"{disagreement} after {AGREEMENT_SECONDS:g} s"
            )
        with trio.move_on_after(SETTLED_SECONDS):
            while self._lost(self._read_books(peers)):  # noqa: ASYNC110 (nobody announces it)
                await trio.sleep(1.0)
        self._check_books(peers)
        self._check_bounds()

    def _disagreement(self, peers: list[Peer]) -> str | None:
        for owner in peers:
            if owner.node is None:
                return f"{owner.name} is not back"
        for owner in peers:
            size = Log(owner.disk.database("ledger.sqlite"), owner.id).size()
            for other in peers:
                if other is owner:
                    continue
                held = LogMirror(other.disk.database("ledger.sqlite"), owner.id).log.size()
                # Heads are announced every few seconds, so the newest entries may be on their way.
                if size - held > LOG_LAG_ENTRIES_MAX:
                    return f"{other.name} lacks {size - held} entries of {owner.name}'s log"
        evicted = {peer.name: peer.evicted() for peer in peers}
        for name, known in evicted.items():
            first = peers[0].name
            if known != evicted[first]:
                return f"{first} holds {evicted[first]} evicted, and {name} {known}"
        return None

    def _read_books(self, peers: list[Peer]) -> "_Books":
        books = _Books()
        for peer in peers:
            log = Log(peer.disk.database("ledger.sqlite"), peer.id)
            for start in range(log.start(), log.size(), LOG_ENTRIES_READ):
                for entry in map(decode, log.entries(start, LOG_ENTRIES_READ)):
                    if isinstance(entry, Consumed):
                        books.used[entry.submission] += 1
                    elif isinstance(entry, Judged) and entry.outcome == "accepted":
                        books.judged[entry.submission] = None
            if "trainer" in peer.plan.roles:
                books.trainers += 1
                rows = peer.disk.database("trainer.sqlite").read(
                    "SELECT digest FROM accepted ORDER BY digest"
                )
                books.held |= dict.fromkeys(row[0] for row in rows)
        return books

    def _lost(self, books: "_Books") -> list[tuple[bytes, float]]:
        """(submission, time of acceptance) of submissions accepted long ago and found nowhere."""
        now = self._simulation.now()
        return [
            (submission, when)
            for submission, (when, _) in self._accepted.items()
            if books.trainers
            and now - when > SETTLED_SECONDS
            and submission not in books.used
            and submission not in books.held
        ]

    def _check_books(self, peers: list[Peer]) -> None:
        """Check that every accepted submission is used, held or stale, and used at most once."""
        books = self._read_books(peers)
        for submission, times in books.used.items():
            if times > 1:
                self._broken(
                    "a rollout is trained on once",
                    f"submission {submission.hex()[:12]} stands {times} times in the log",
                )
            if submission not in books.judged:
                self._broken(
                    "only accepted rollouts are trained on",
                    f"submission {submission.hex()[:12]} was used and no log says it was accepted",
                )
        for submission, (when, _) in self._accepted.items():
            if submission not in books.judged:
                self._broken(
                    "a verdict is never forgotten",
                    f"submission {submission.hex()[:12]} was accepted at {when:.1f} s, and no log "
                    "says so",
                )
        for submission, when in self._lost(books):
            self._broken(
                "an accepted rollout is never lost",
                f"submission {submission.hex()[:12]}, accepted at {when:.1f} s, is neither "
                "used nor held nor stale",
            )

    def _check_bounds(self) -> None:
        for name, peer in self._simulation.peers.items():
            node = peer.node
            if node is None:
                continue
            part = peer.part
            if part is None:
                continue
            for what, size, most in (
                ("connections", len(node.transport.connected()), limits.CONNECTIONS_MAX),
                ("neighbours", len(part.gossip.neighbours()), NEIGHBOURS_MAX),
                ("announcements kept", part.gossip.kept(), EVENTS_MAX),
                # The newest ones, those being fetched, and those in use.
                ("checkpoints kept", len(part.store.all()), 2 * part.run.checkpoints_kept + 2),
            ):
                if size > most:
                    self._broken("nothing grows without a bound", f"{name}: {size} {what}")

    def _broken(self, invariant: str, how: str) -> None:
        self._simulation.violate(f"{invariant}: {how}")


@dataclass
class _Books:
    used: Counter[bytes] = field(default_factory=Counter)
    """How often the log lists each as consumed or stale."""
    held: dict[bytes, None] = field(default_factory=dict)
    judged: dict[bytes, None] = field(default_factory=dict)
    trainers: int = 0


class _Errors(logging.Handler):
    def __init__(self, invariants: Invariants) -> None:
        super().__init__(logging.ERROR)
        self._invariants = invariants

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._invariants._broken(
            "no message makes a handler fail", f"{record.getMessage()}: {error!r}"
        )


def collections_in(*roots: object) -> Iterator[tuple[str, int]]:
    """Yield (class and attribute, entries) of the collections in Swarm's objects that are reachable
    from `roots` by attributes."""
    seen: dict[int, object] = {}
    todo = list(roots)
    while todo:
        held = todo.pop()
        if id(held) in seen:
            continue
        seen[id(held)] = held
        for name, value in getattr(held, "__dict__", {}).items():
            if isinstance(value, (dict, list, set, deque)):
                yield f"{type(held).__name__}.{name}", len(value)
            elif type(value).__module__.startswith(("swarm.", "peers.")):
                todo.append(value)
