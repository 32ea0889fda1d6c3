"""Joining: how a peer enters the network and its DHT, and finds a run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import trio

from swarm.errors import DeadlineError, PeerError, UserError
from swarm.node.node import PEERS_MET, Node
from swarm.run.admission import TRUSTED_ROLES
from swarm.run.choice import check_joined, choose_run, joined_runs, pin_owner, terms
from swarm.run.manifest import Outgrown, manifest_in
from swarm.run.manifest_exchange import ask_for_manifests
from swarm.run.records import run_key
from swarm.run.run import Run
from swarm.transport import ConnectError, DialFailure, Transport
from swarm.wire.envelope import Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.succession import ownership_of

BOOTSTRAP_DEADLINE_SECONDS = 60.0
"""Deadline for an answer from the bootstrap addresses. Without one, joining is an error. Where many
peers start at once, those that they ask first are busy for a while."""

ROOM_DEADLINE_SECONDS = 300.0
"""The same while a bootstrap peer is there and has no room. It serves 64 newcomers of one address
at a time, each until its connection is idle (`swarm.transport.room`): usually for half a minute."""

DIAL_AGAIN_SECONDS = 2.0
"""Shortest pause before a bootstrap address that was silent, or closed the connection, is dialled
again; at most twice as long, so that those who wait do not all come at the same moment."""

DHT_DEADLINE_SECONDS = 15.0
"""Deadline for entering the DHT. A peer that has not entered it by then does so later."""

RUNS_DEADLINE_SECONDS = 300.0
"""Deadline for a list of runs, for a peer that knows none. A bootstrap peer that a hundred ask at
once on a busy machine answers late, or closes the connection for others first."""

LAST_BOOTSTRAP = "last-bootstrap"
"""File in the home with the addresses that this peer last joined through. `swarm status` and other
commands use them as well."""

MET_AFTER_SECONDS = 2.0
"""Head start of the bootstrap peers. After it, peers met earlier are tried as well."""

ENTRY_GRACE_SECONDS = 1.0
"""Time that the other attempts get after one peer has answered."""

ITSELF = "that is this peer itself"

NOT_ITSELF = "give the address of another peer"

NEWER_MANIFEST_SECONDS = 1.0
"""Deadline of a joining peer's search in the DHT for a newer manifest than it has."""

EntryPoints: TypeAlias = Mapping[PeerId, Sequence[str]]
"""Peers through which a peer joins the network, with their addresses."""

LOOKED_FOR = frozenset({"bootstrap", "relay", *TRUSTED_ROLES})
"""Roles of peers that others look for. Such a peer may start alone and wait for connections."""

NO_WAY_IN = "no way into the network: give --bootstrap MULTIADDR (a running peer prints its own)"


async def join_network(
    node: Node, *, room_seconds: float = BOOTSTRAP_DEADLINE_SECONDS
) -> EntryPoints:
    """Connect to the bootstrap peers; returns those that answered.

    This peer does not enter the DHT yet, because a run may hide its peers. If no bootstrap peer
    answers and the settings name the same ones as last time, the peers met then are tried.

    Raises `PeerError` if none answers within `BOOTSTRAP_DEADLINE_SECONDS`, or within `room_seconds`
    if one is there and has no room, and `UserError` if no address is known and no other peer looks
    for this one (`LOOKED_FOR`)."""
    settings = node.settings
    attempt = Attempt(node, room_seconds)
    answered = await attempt.run(settings.bootstrap, await _peers_met(node))
    if not settings.bootstrap:
        if not answered and not LOOKED_FOR.intersection(settings.role):
            raise UserError(NO_WAY_IN)
        return answered
    if not answered:
        silent = f"no answer within {BOOTSTRAP_DEADLINE_SECONDS:g} s"
        tried = [
            attempt.failures.get(each, DialFailure(each, silent)) for each in settings.bootstrap
        ]
        # Usually the bootstrap peer starts later or restarts, so it is no mistake of the user.
        raise PeerError(
            "no bootstrap peer can be reached: "
            + "; ".join(f"{failure} ({failure.advice})" for failure in tried)
        )
    failed = [
        str(why)
        for why in attempt.failures.values()
        if not by_peer([why.address]).keys() & answered.keys()
    ]
    if not answered.keys() & by_peer(node.bootstrap).keys():
        node.events.emit("dht.joined_through_others", peers=len(answered))
    elif failed:
        node.events.emit("dht.bootstrap_partly_silent", reasons=failed)
    await node.disk.write(LAST_BOOTSTRAP, "\n".join(settings.bootstrap).encode())
    return answered


class Attempt:
    """One attempt to join: all bootstrap addresses side by side."""

    def __init__(self, node: Node, room_seconds: float) -> None:
        """`room_seconds`: how long to wait for a peer that is there and has no room."""
        self._node = node
        self._room_until = trio.current_time() + room_seconds
        self.failures: dict[str, DialFailure] = {}
        """The last one of each address."""
        self._peers: dict[PeerId, list[str]] = {}
        self._dialling: defaultdict[PeerId, trio.Lock] = defaultdict(trio.Lock)
        self._full: set[PeerId] = set()
        """Peers that were there and had no room."""
        self._answered = False

    async def run(self, named: Sequence[str], met: EntryPoints) -> EntryPoints:
        """Connect to the peers of these addresses and, unless one answers soon, to those `met`;
        returns those that answered.

        Waits for `BOOTSTRAP_DEADLINE_SECONDS`, or for room if that is longer and a peer is there
        and has none, but only `ENTRY_GRACE_SECONDS` after the first answer."""
        with trio.move_on_after(BOOTSTRAP_DEADLINE_SECONDS) as self._scope:
            async with trio.open_nursery() as nursery:
                for peer, addresses in by_peer(named).items():
                    if peer == self._node.peer_id:
                        self._note([DialFailure(each, ITSELF, NOT_ITSELF) for each in addresses])
                    else:
                        nursery.start_soon(self._connect, peer, addresses)
                if met and named:
                    await trio.sleep(MET_AFTER_SECONDS)
                if not self._answered:
                    for peer, known in met.items():
                        nursery.start_soon(self._connect, peer, known)
        connected = self._node.transport.connected()
        return {peer: each for peer, each in self._peers.items() if peer in connected}

    def _note(self, failures: Sequence[DialFailure]) -> None:
        self.failures.update((each.address, each) for each in failures)

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._peers.setdefault(peer, []).extend(addresses)
        told = ""
        while True:
            try:
                async with self._dialling[peer]:  # not two addresses of a peer at once
                    await self._node.transport.connect(peer, addresses)
            except ConnectError as error:
                if str(error) != told:
                    told = str(error)
                    self._node.events.emit("dht.bootstrap_silent", remote=peer, reason=told)
                self._note(error.failures)
                if any(each.turned_away for each in error.failures):
                    self._wait_for_room(peer)
                if not any(each.may_pass for each in error.failures):
                    return
                await trio.sleep(DIAL_AGAIN_SECONDS * (1 + self._node.world.random.random()))
            else:
                self._answered = True
                soon = trio.current_time() + ENTRY_GRACE_SECONDS
                self._scope.deadline = min(self._scope.deadline, soon)
                return

    def _wait_for_room(self, peer: PeerId) -> None:
        if self._answered:
            return
        self._scope.deadline = max(self._scope.deadline, self._room_until)
        if peer not in self._full:
            self._full.add(peer)
            seconds = round(self._scope.deadline - trio.current_time())
            self._node.events.emit("dht.bootstrap_full", remote=peer, seconds=seconds)


async def _peers_met(node: Node) -> EntryPoints:
    """The peers connected before a restart; none if other bootstrap peers were used then."""
    last, met = [
        (await node.disk.read(name)).decode().split() if node.disk.exists(name) else []
        for name in (LAST_BOOTSTRAP, PEERS_MET)
    ]
    return by_peer(met) if last == list(node.settings.bootstrap) else {}


def by_peer(addresses: Sequence[str]) -> dict[PeerId, list[str]]:
    """Group addresses by the peer whose they are."""
    found: dict[PeerId, list[str]] = {}
    for address in addresses:
        found.setdefault(PeerId(address.rpartition("/p2p/")[2]), []).append(address)
    return found


async def join_dht(node: Node, entry_points: EntryPoints) -> None:
    """Enter the DHT through peers that answered; returns silently if it fails."""
    answered = [address for addresses in entry_points.values() for address in addresses]
    if not answered:
        return
    with trio.move_on_after(DHT_DEADLINE_SECONDS):
        try:
            await node.dht.bootstrap(answered, node.bootstrap)
        except PeerError as error:
            node.events.emit("dht.bootstrap_failed", reason=str(error))


async def runs_of(
    transport: Transport,
    peer: PeerId,
    addresses: Sequence[str],
    wanted: str | None,
    patience_seconds: float,
) -> list[Envelope]:
    """The runs that a peer lists. One that is too busy to answer is asked again for a while, and so
    is one that has closed the connection, at `addresses`: it needs the room for other newcomers."""
    until = trio.current_time() + patience_seconds
    while True:
        try:
            return await ask_for_manifests(transport, peer, wanted=wanted)
        except PeerError as error:
            lost = peer not in transport.connected()
            if not (lost or isinstance(error, DeadlineError)):
                raise
            if trio.current_time() >= until:
                raise DeadlineError(f"{peer} did not list its runs in time") from error
        if lost:
            await trio.sleep(DIAL_AGAIN_SECONDS)
            with suppress(ConnectError):
                await transport.connect(peer, addresses)


def is_outgrown(outgrown: Outgrown, known: Mapping[str, Envelope], wanted: str | None) -> bool:
    """Whether a run that needs a newer build is the one to join, as far as one can know.

    An old version handed out again, or a stranger's run of the same name, keeps nobody out."""
    held = known.get(outgrown.run)
    if held is not None and manifest_in(held).version >= outgrown.version:
        return False
    if not known or outgrown.run == wanted:
        return True
    found = any(wanted in (run, run.partition("/")[2]) for run in known)
    return wanted is not None and not found


async def find_run(node: Node, entry_points: EntryPoints, *, looks_on: bool = False) -> Run:
    """Find the run to join, and enter the DHT as the run's broadcast mode requires.

    The manifest comes from files or from the peers that answered. Raises `UserError`, and
    `DeadlineError` if peers were too busy to answer.

    With `looks_on`, this peer neither serves the DHT nor searches it for a newer manifest."""
    known = dict(node.manifests)
    problems: list[str] = []
    outgrown: list[Outgrown] = []
    silent: list[DeadlineError] = []
    patience_seconds = BOOTSTRAP_DEADLINE_SECONDS if looks_on else RUNS_DEADLINE_SECONDS
    if known:
        patience_seconds = 0.0

    async def ask(peer: PeerId, addresses: Sequence[str]) -> None:
        try:
            for envelope in await runs_of(
                node.transport, peer, addresses, node.settings.run, patience_seconds
            ):
                held = known.get(envelope.body.run)
                if (
                    held is None
                    or ownership_of(held).precedence < ownership_of(envelope).precedence
                ):
                    known[envelope.body.run] = envelope
                scope.deadline = min(scope.deadline, trio.current_time() + ENTRY_GRACE_SECONDS)
        except Outgrown as error:
            outgrown.append(error)
        except DeadlineError as error:
            silent.append(error)
        except PeerError as error:
            problems.append(str(error))

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            for peer, addresses in entry_points.items():
                nursery.start_soon(ask, peer, addresses)
    for error in outgrown:
        if is_outgrown(error, known, node.settings.run):
            raise error
    if not known and silent:
        raise silent[0]
    if not known and problems:
        raise UserError(f"no peer provided a run manifest: {'; '.join(problems)}")
    listed, wanted = [known[run] for run in sorted(known)], node.settings.run
    manifest = choose_run(listed, wanted, await joined_runs(node.disk))
    if wanted is None and not looks_on:
        # Else a bootstrap peer, which nobody vouches for, would choose another run for this home.
        await check_joined(node.disk, manifest.body.run, wanted)
    node.dht.serving = not looks_on and Run(manifest).serves(node.peer_id, node.settings.role)
    await join_dht(node, entry_points)
    raw = None
    if not looks_on:
        # A lookup may wait for hanging peers, and neighbours soon announce the newest manifest.
        with trio.move_on_after(NEWER_MANIFEST_SECONDS):
            raw = await node.dht.get(run_key(manifest.body.run))
    if raw is not None:
        newer = open_envelope(raw)
        if newer.body.run == manifest.body.run:
            manifest = max(manifest, newer, key=lambda e: ownership_of(e).precedence)
    is_new = await pin_owner(node.disk, manifest)
    stored = sorted(
        node.stored_versions(manifest.body.run), key=lambda e: ownership_of(e).precedence
    )
    run = Run(stored[-1] if stored else manifest, stored[:-1])
    node.take_version(run, manifest)
    node.manifests[run.id] = run.manifest_envelope
    if is_new and not looks_on:
        node.events.emit("peer.run_pinned", run=run.id, owner=run.owner, lines=terms(run))
    return run
