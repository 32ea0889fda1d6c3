"""The states that steps continue (`swarm.rollouts.continuations`), fetched by the order's hash."""

from collections import OrderedDict

import trio
from blake3 import blake3

from swarm.errors import PeerError
from swarm.node.node import Node
from swarm.node.policies import Policies
from swarm.rollouts.continuations import BadStates, State, decode_states, encode_states
from swarm.run.run import Run
from swarm.shardcast.service import BlobService
from swarm.transport import BlobReference
from swarm.wire.identity import PeerId
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import StepOrder

FOLDER = "states"

STEPS_KEPT_MAX = 64
"""Blobs kept and served, at most: those of the newest steps used here. More steps than these are
never judged at a time; an older blob is fetched again."""

FETCH_SECONDS = 30.0
"""Deadline of one source."""


class States:
    """Fetches, keeps and serves blobs of states; every peer that has one is a source of it."""

    def __init__(self, node: Node, run: Run, policies: Policies, blobs: BlobService) -> None:
        self._node = node
        self._run = run
        self._policies = policies
        self._blobs = blobs
        self._disk = node.disk
        self._held: OrderedDict[bytes, list[State] | None] = OrderedDict(
            (bytes.fromhex(name), None) for name in self._disk.list(FOLDER) if _is_digest(name)
        )
        """By hash, the least recently used first; None for one that an earlier process left."""
        self._fetching = trio.Lock()

    async def of(self, order: StepOrder, manifest: RunManifest) -> list[State]:
        """The states of an order's step; empty if it has none.

        Raises `PeerError` when no peer has them, or when they break a bound: the caller leaves
        that work, and nobody but the trainer is at fault."""
        if not order.states:
            return []
        async with self._fetching:
            held = self._held.get(order.states)
            if held is None:
                held = await self._open(order, manifest)
            self._held[order.states] = held
            self._held.move_to_end(order.states)
        return held

    def held(self, order: StepOrder) -> list[State]:
        """The states of an order's step, if `of` has returned them before; else none."""
        return self._held.get(order.states) or []

    async def publish(self, states: list[State]) -> tuple[bytes, int]:
        """Serve this peer's own states, durable on return; returns the blob's hash and size."""
        raw = encode_states(states)
        digest = blake3(raw).digest()
        await self._disk.write(_path(digest), raw)
        await self._serve(digest, len(raw))
        self._held[digest] = states
        return digest, len(raw)

    async def _open(self, order: StepOrder, manifest: RunManifest) -> list[State]:
        path = _path(order.states)
        if not await self._is_here(order):
            await self._fetch(order)
        try:
            states = decode_states(
                await self._disk.read(path), manifest.sampling.max_new_tokens - 1
            )
            _check(states, manifest)
        except BadStates as error:
            raise PeerError(f"the states of step {order.step} cannot be used: {error}") from error
        await self._serve(order.states, order.states_bytes)
        return states

    async def _is_here(self, order: StepOrder) -> bool:
        path = _path(order.states)
        if not self._disk.exists(path) or self._disk.size_bytes(path) != order.states_bytes:
            return False
        return await self._disk.digest(path, 0, order.states_bytes) == order.states

    async def _serve(self, digest: bytes, size_bytes: int) -> None:
        """Serve a blob on this disk, and remove the ones that have not been used for longest."""
        self._blobs.register(digest, _path(digest), 0, size_bytes)
        while len(self._held) >= STEPS_KEPT_MAX:
            old, _ = self._held.popitem(last=False)
            self._blobs.unregister(old)
            await self._disk.remove(_path(old))

    # --- fetching ----------------------------------------------------------------------------

    async def _fetch(self, order: StepOrder) -> None:
        reasons: list[str] = []
        manifest = self._run.manifest
        others = [each.peer for each in self._policies.sources(order.states) if each.peer]
        named = [PeerId(each) for each in manifest.trainer_ids() + manifest.validator_ids()]
        for source in dict.fromkeys(named + others):
            if source == self._node.peer_id:
                continue
            try:
                with trio.fail_after(FETCH_SECONDS):
                    wanted = BlobReference(order.states, order.states_bytes)
                    await self._node.fetch_file(source, wanted, _path(order.states))
                return
            except (PeerError, trio.TooSlowError) as error:
                reasons.append(str(error) or f"no answer within {FETCH_SECONDS:g} s")
        last = reasons[-1] if reasons else "no other peer is known"
        raise PeerError(f"no peer sent the states of step {order.step}: {last}")


def _check(states: list[State], manifest: RunManifest) -> None:
    """Raise `BadStates` for a state of an environment that cannot be continued here."""
    for index in sorted({state.environment for state in states}):
        if index >= len(manifest.environments) or manifest.environments[index].where != "local":
            raise BadStates(f"a state is of environment {index}, which is no local one of the run")


def _is_digest(name: str) -> bool:
    return len(name) == 64 and set(name) <= set("0123456789abcdef")


def _path(digest: bytes) -> str:
    return f"{FOLDER}/{digest.hex()}"
