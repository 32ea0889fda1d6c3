"""Merging a round in shards: whose turn it is, what the trainers have merged, who merged wrongly.

The mean of a shard is a pure function of the round's record. So nobody has to be believed: of two
results one is wrong, whoever makes the shard again knows which, and it does not matter who made it
or how often. Each shard is merged by the first in rank; who is further back does so if its result
takes too long. Of what the others have merged, each trainer makes a random share again."""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import trio

from peers.outer.chain import ROUNDS_KEPT, Link
from peers.outer.presence import OuterLoop
from peers.outer.rating import weights
from swarm.errors import PeerError, SwarmError
from swarm.jobs.outer import Contributed, InspectContribution, Merged, MergeShard, OuterService
from swarm.rollouts.seeds import rendezvous
from swarm.shardcast.have.claims import indices_of
from swarm.wire.manifest import SHARDS_MAX, TRAINERS_MAX
from swarm.wire.outer import (
    DISPUTED_MAX,
    MERGED_MAX,
    Contribution,
    HeldShards,
    MergedShard,
    OuterStatus,
)
from swarm.world import ChildDied
from swarm.world.recent import Recent

TAKEOVER_SECONDS = 15.0
"""How much longer than the trainer before it in rank a trainer waits for a record, or for a shard:
enough for a signature, a write to disk, and gossip across the world."""

MISSED_SECONDS = 120.0
"""A contribution of which nobody could give a part is not listed in a record for this long."""

AUDITORS = 13
"""Number of trainers beside a shard's own up to which each makes `outer.audit_share` again. Of more
each makes fewer: else 60 trainers would make each shard again once a round, for 1 byte per
parameter and trainer, where 14 spend a fifth of that and find a wrong one as surely in time."""

RETRY_SECONDS = 5.0
RETRIES_MAX = 3
"""A shard that cannot be made again to check it is given up after as many attempts."""

_Key = tuple[bytes, int]
"""A record and a shard of it."""


Line = tuple[str, ...]


@lru_cache(maxsize=1024)
def lines(
    trainers: tuple[str, ...], run: str, round: int, here: frozenset[str], shards: int
) -> tuple[Line, ...]:
    """For each shard of a round, those of `here` who may merge it: the first at once, each further
    one after a while. One that goes away moves only its own shards."""
    ranked = rendezvous(trainers, b"shards", run.encode(), round.to_bytes(8, "big"))
    begins = [shard % len(ranked) for shard in range(shards)]
    return tuple(
        tuple(trainer for trainer in ranked[begin:] + ranked[:begin] if trainer in here)
        for begin in begins
    )


@lru_cache(maxsize=1024)
def _duties(
    trainers: tuple[str, ...], run: str, round: int, here: frozenset[str], shards: int, me: str
) -> tuple[int, dict[str, int], tuple[int, ...]]:
    """The shards of which a trainer is the first in line (`lines`), those of which it is the
    second, by the first (bit s is shard s), and its place in each line."""
    first, second, queue = 0, dict[str, int](), lines(trainers, run, round, here, shards)
    for shard, line in enumerate(queue):
        if line[0] == me:
            first |= 1 << shard
        elif line[1] == me:  # of all that are in line, this one is
            second[line[0]] = second.get(line[0], 0) | 1 << shard
    places = tuple(line.index(me) if me in line else len(line) for line in queue)
    return first, second, places


def audited(share: float, others: int) -> float:
    """The probability with which a trainer makes a shard again that another one has merged."""
    return share * min(1.0, AUDITORS / max(1, others))


class View(NamedTuple):
    """Who is there for a round; computed once for many contributions."""

    lines: tuple[Line, ...]
    first: int
    """The shards of which this trainer is the first in line."""
    second: dict[str, int]
    """Those of which it is the second, by the first."""
    places: tuple[int, ...]
    """Its place in each line."""


def _mask(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in set(numbers))


class Sharing:
    """The shards of the newest rounds, as this trainer knows them."""

    def __init__(self, loop: OuterLoop) -> None:
        self._loop = loop
        self._me: str = loop.peer.peer_id
        self.bytes_max = 0
        """Size of the largest contribution, which no merged shard exceeds."""
        self._held: Recent[bytes, int] = Recent(2 * TRAINERS_MAX)
        """Shards of others' contributions that are here and checked: bit s is shard s."""
        self._held_by: dict[str, dict[bytes, int]] = {}
        """The same of each other trainer, as it says."""
        self._told_present: list[str] = []
        self._here: frozenset[str] = frozenset()
        """Those of them that count."""
        self._covers: Recent[bytes, int] = Recent(2 * TRAINERS_MAX)
        """What those that are present hold of a contribution: asked for at every news of each."""
        self._merged: dict[str, dict[_Key, MergedShard]] = {}
        """What each trainer has signed, this one included."""
        self._unusable: Recent[bytes, None] = Recent(MERGED_MAX)
        """Signatures of merged shards whose files are not what was signed."""
        self._used: Recent[_Key, bytes] = Recent(16 * SHARDS_MAX)
        """Values of the shards that led to a state on this disk."""
        self._right: Recent[_Key, bytes] = Recent(16 * SHARDS_MAX)
        """Values of the shards that were made here."""
        self._suspect: Recent[_Key, int] = Recent(16 * SHARDS_MAX)
        """Shards to make again, and the failed attempts."""
        self._accused: Recent[tuple[str, bytes], MergedShard] = Recent(ROUNDS_KEPT)
        """The dispute of each accuser and round; by this trainer's id, all contradicting claims."""
        self._told: list[HeldShards] = []
        self.missed: Recent[bytes, float] = Recent(TRAINERS_MAX)
        """Contributions of which nobody could give a part, and when that was."""
        self.left_out: set[str] = set()
        """Signers of a wrong shard."""
        self.false: set[str] = set()
        """Accusers of a right one."""
        self.disputed: list[MergedShard] = []
        self.to_repeat: list[bytes] = []
        """Records whose state has a wrong shard."""
        self._took = 0.0
        """How long the last shard took to make."""

    @property
    def count(self) -> int:
        return self._loop.peer.run.manifest.outer.shards

    # --- whose turn it is --------------------------------------------------------------------

    def view(self, round: int) -> View:
        """Who may merge the shards of a round: the trainers that are present, have not merged that
        round yet, and are not further behind than a round."""
        others, run = self._loop.presence.others(), self._loop.peer.run
        here = frozenset(
            trainer
            for trainer in self._present()
            if trainer == self._me or round - 2 <= others[trainer].round < round
        )
        trainers = tuple(sorted({*run.manifest.trainer_ids(), self._me}))
        place = trainers, run.id, round, here, self.count
        return View(lines(*place), *_duties(*place, self._me))

    def _present(self) -> frozenset[str]:
        told = self._loop.presence.present()
        if told is not self._told_present:
            self._told_present, here = told, frozenset(told) - self.left_out
            if here != self._here:
                self._here = here
                self._covers.clear()
        return self._here

    def took(self, seconds: float) -> None:
        """Note how long it took to fetch what a shard needs, or to merge it."""
        self._took = max(seconds, self._took / 2)

    @property
    def _patience(self) -> float:
        """Wait for each trainer further in front, which is about as fast as this one."""
        return max(TAKEOVER_SECONDS, 2 * self._took)

    def hold(self, contribution: Contribution, shards: Collection[int]) -> None:
        """Note shards of a contribution that are here and checked."""
        digest = contribution.artifact.digest
        self._held[digest] = self._held.get(digest, 0) | _mask(shards)
        self._covers.pop(digest, None)
        self._told = [HeldShards(of, indices_of(mask)) for of, mask in self._held.items()]

    def _holders(self, part: Contribution) -> int:
        """The shards of a contribution that trainers other than its own have, of those present."""
        digest, present = part.artifact.digest, self._present()
        mask = self._covers.get(digest)
        if mask is None:
            mask = self._held.get(digest, 0)
            for trainer in present - {part.trainer}:
                mask |= self._held_by.get(trainer, {}).get(digest, 0)
            self._covers[digest] = mask
        return mask

    def holding(self, part: Contribution, shards: Collection[int]) -> list[str]:
        """The other trainers that say to have some shards of a contribution."""
        wanted, digest = _mask(shards), part.artifact.digest
        held = self._held_by.items()
        return [who for who, has in held if wanted and has.get(digest, 0) & wanted == wanted]

    def due(self, part: Contribution, view: View, since: float) -> list[int]:
        """The shards of another's contribution, heard of at `since`, to fetch now.

        Another trainer than the contribution's own has to have each: so no single death costs one.
        """
        mine = self._held.get(part.artifact.digest, 0)
        due = view.first | view.second.get(part.trainer, 0)
        waited = self._loop.peer.node.world.now() - since
        if waited > self._patience:
            for shard in indices_of(self._all & ~self._holders(part)):
                line, place = view.lines[shard], view.places[shard]
                if (place - 1) * self._patience < waited:  # in front of it may be the part's own
                    place -= part.trainer in line[:place]
                    due |= (place * self._patience < waited) << shard
        return indices_of(due & ~mine)

    def is_covered(self, part: Contribution, view: View) -> bool:
        """Whether a record may list a contribution: each shard is at another trainer, if any."""
        missed_at = self.missed.get(part.artifact.digest)
        if missed_at is not None and self._loop.peer.node.world.now() < missed_at + MISSED_SECONDS:
            return False
        alone = view.lines[0] == (part.trainer,)  # every line has the same trainers
        return alone or not self._all & ~self._holders(part)

    @property
    def _all(self) -> int:
        return (1 << self.count) - 1

    # --- what the others say -----------------------------------------------------------------

    def hear(self, trainer: str, status: OuterStatus) -> None:
        """Take over what a status says of shards."""
        run = self._loop.peer.run
        had = self._held_by.get(trainer, {})
        held = {each.contribution: _mask(each.shards) for each in status.held}
        self._held_by[trainer] = held
        for digest, _ in had.items() ^ held.items():
            self._covers.pop(digest, None)
        before, now = self._merged.get(trainer, {}), {}
        for each in status.merged:
            key = (each.record, each.shard)
            known = before.get(key) == each
            if known or (each.trainer == trainer and each.is_signed(run.id)):
                now[key] = each
                old = before.get(key, each)
                ours = self._right.get(key, self._used.get(key, old.values))
                if not known and {ours, old.values} != {each.values}:
                    self._suspect[key] = 0
                    for claim in (old, each):  # its next status may not have them any more
                        self._accused[self._me, claim.signature] = claim
        self._merged[trainer] = now
        for each in status.disputed:
            self._hear_dispute(trainer, each)

    def _hear_dispute(self, accuser: str, each: MergedShard) -> None:
        key, place = (each.record, each.shard), (accuser, each.record)
        run, settled = self._loop.peer.run, each.trainer in self.left_out or place in self._accused
        if accuser in self.false or settled or not run.trusts(each.trainer):
            return
        if each.record in self._loop.chain and each.is_signed(run.id):
            self._accused[place] = each
            self._suspect[key] = 0

    def status(self) -> dict[str, Any]:
        """What this trainer's status says of shards."""
        merged = list(self._merged.get(self._me, {}).values())[-MERGED_MAX:]
        return {"held": self._told, "merged": merged, "disputed": self.disputed}

    def _offers(self, record: bytes) -> dict[int, list[MergedShard]]:
        """What trainers that count have signed for each shard of a record."""
        found: dict[int, list[MergedShard]] = {}
        trusted = self._loop.peer.run.manifest.trainer_ids()
        for trainer, merged in sorted(self._merged.items()):
            if trainer not in trusted or trainer in self.left_out:
                continue
            for (of, shard), each in merged.items():
                right = self._right.get((record, shard), each.values) == each.values
                if of == record and right and each.signature not in self._unusable:
                    found.setdefault(shard, []).append(each)
        return found

    # --- merging -----------------------------------------------------------------------------

    async def parts(self, link: Link, shard: int | None = None) -> list[Contributed]:
        """A record's contributions on this disk, or one shard of each; fetches what is missing."""
        parts: dict[str, Contributed] = {}
        failed: list[Exception] = []
        artifacts, of_strangers = self._loop.artifacts, weights(link.record.rated)

        async def fetch(part: Contribution) -> None:
            try:
                shards = () if shard is None else (shard,)
                holders = self.holding(part, shards)
                folder = await artifacts.fetch_contribution(part, shards=shards, holders=holders)
                folder = artifacts.local(folder)
                folder = folder if shard is None else f"{folder}/{shard}"
                parts[part.trainer] = Contributed(
                    trainer=part.trainer,
                    folder=folder,
                    tokens=part.tokens,
                    weight=of_strangers.get(part.trainer),
                )
            except (SwarmError, OSError) as error:
                self.missed[part.artifact.digest] = self._loop.peer.node.world.now()
                failed.append(error)

        async with trio.open_nursery() as nursery:
            for part in link.record.contributions:
                nursery.start_soon(fetch, part)
        if failed:
            raise failed[0]
        return [parts[part.trainer] for part in link.record.contributions]

    async def collect(self, link: Link, child: OuterService) -> list[str]:
        """The folders on this machine of all merged shards of a record, in order.

        Each is fetched from whoever has merged it, or merged here when it is this trainer's turn.
        Raises `PeerError` when nobody that is present has a part of a contribution any more."""
        record, world = link.digest, self._loop.peer.node.world
        folders: dict[int, str] = {}
        busy: set[int] = set()
        tried: set[bytes] = set()
        failed: list[Exception] = []
        begun = world.now()

        async def get(shard: int, offer: MergedShard | None) -> None:
            try:
                each = offer or await self._make(link, shard, child)
                if offer is not None:
                    await self._take(link, offer, child)
                folder = self._loop.artifacts.folder(each.artifact)
                assert folder is not None
                folders[shard] = self._loop.artifacts.local(folder)
                self._used[record, shard] = each.values
            except ChildDied:
                raise
            except (SwarmError, OSError) as error:
                if offer is None:
                    failed.append(error)
                else:
                    tried.add(offer.signature)
                    self._say("outer.shard_refused", offer.trainer, link, shard, reason=str(error))
            busy.discard(shard)
            self._loop.changed.touch()

        async with trio.open_nursery() as nursery:
            while len(folders) < self.count and not failed:
                offers, view = self._offers(record), self.view(link.round)
                wake_at = world.now() + self._loop.presence.gone_in()
                # From the own one on, so that not all fetch from the same trainer at first.
                own, here = max(1, view.first.bit_length()) - 1, {*folders, *busy}
                todo = [n for n in (*range(own, self.count), *range(own)) if n not in here]
                self._check_parts(link, [each for each in todo if each not in offers])
                for shard in todo:
                    some = [e for e in offers.get(shard, []) if e.signature not in tried]
                    turn = begun + view.places[shard] * self._patience
                    agree = len({each.values for each in some}) == 1
                    if some or turn <= world.now():
                        busy.add(shard)
                        nursery.start_soon(get, shard, some[0] if agree else None)
                    else:
                        wake_at = min(wake_at, turn)
                with trio.move_on_at(wake_at):
                    await self._loop.changed.wait_change()
            nursery.cancel_scope.cancel()
        if failed:
            raise failed[0]
        self._draw(link)
        return [folders[shard] for shard in range(self.count)]

    def _check_parts(self, link: Link, shards: Sequence[int]) -> None:
        """Raise `PeerError` if nobody present has one of some shards of a record's contribution."""
        present = set(self._loop.presence.present())
        for part in link.record.contributions if shards else ():
            if part.trainer in present:
                continue
            there = self._holders(part)
            for shard in shards:
                reference, folder = part.artifact, str(shard)
                if there >> shard & 1 or self._loop.artifacts.folder(reference, [folder]):
                    continue
                self.missed[reference.digest] = self._loop.peer.node.world.now()
                raise PeerError(
                    f"nobody that is present has shard {shard} of the contribution of "
                    f"{part.trainer}"
                )

    async def _take(self, link: Link, each: MergedShard, child: OuterService) -> None:
        if each.total_bytes > self.bytes_max:
            raise PeerError(f"it has {each.total_bytes} bytes; {self.bytes_max} are the most")
        name = f"shard {each.shard} of round {link.round}"
        folder = await self._loop.artifacts.fetch(
            each.artifact, name, each.total_bytes, holders=[each.trainer]
        )
        job = InspectContribution(
            contribution=self._loop.artifacts.local(folder), shard=each.shard, shards=self.count
        )
        found = await child.inspect(job)
        if found.problem or found.digest != each.values:
            self._unusable[each.signature] = None
            raise PeerError(found.problem or "its values are not those that were signed")

    def _say(self, event: str, trainer: str, link: Link, shard: int, **more: str) -> None:
        events = self._loop.peer.node.events
        events.emit(event, trainer=trainer, round=link.round, shard=shard, **more)

    async def _mean(self, link: Link, shard: int, child: OuterService, folder: str) -> Merged:
        self._check_parts(link, [shard])
        parts = await self.parts(link, shard)
        begun = self._loop.peer.node.world.now()
        job = MergeShard(
            contributions=parts,
            shard=shard,
            shards=self.count,
            compression=self._loop.peer.run.manifest.outer.compression,
            folder=self._loop.artifacts.local(folder),
        )
        merged = await child.merge_shard(job)
        self.took(self._loop.peer.node.world.now() - begun)
        self._right[link.digest, shard] = merged.digest
        return merged

    async def _make(self, link: Link, shard: int, child: OuterService) -> MergedShard:
        peer = self._loop.peer
        folder = self._loop.artifacts.new_shard_folder(link.digest, shard)
        merged = await self._mean(link, shard, child, folder)
        held = await self._loop.artifacts.publish_shard(folder, link.digest, link.round, shard)
        each = MergedShard(
            trainer=self._me,
            record=link.digest,
            shard=shard,
            artifact=held.reference,
            total_bytes=held.manifest.total_bytes,
            values=merged.digest,
        ).signed(peer.node.identity, peer.run.id)
        kept = self._merged.setdefault(self._me, {})
        kept[link.digest, shard] = each
        oldest = link.round - peer.run.manifest.outer.staleness_max
        for of, number in list(kept):
            if of not in self._loop.chain or self._loop.chain.round_of(of) < oldest:
                del kept[of, number]
        self._judge(link, shard)
        return each

    # --- checking ----------------------------------------------------------------------------

    def _draw(self, link: Link) -> None:
        """Draw which shards of a record are made again here."""
        share = self._loop.peer.run.manifest.outer.audit_share
        share = audited(share, len(self._present() - {self._me}))
        for shard in range(self.count):
            drawn = self._loop.peer.node.world.random.random() < share
            if drawn and (link.digest, shard) not in self._right:
                self._suspect[link.digest, shard] = 0

    async def check(self, child: OuterService) -> None:
        """Make shards again that were drawn, or about which trainers differ, until cancelled."""
        while True:
            if not self._suspect:
                await self._loop.changed.wait_change()
                continue
            key, failures = self._suspect.popitem(last=False)
            link = self._loop.chain.get(key[0])
            if link is None:
                continue
            try:
                if key not in self._right:
                    folder = self._loop.artifacts.new_shard_folder(*key) + "-again"
                    await self._mean(link, key[1], child, folder)
                    await self._loop.peer.node.disk.remove(folder)
                self._judge(link, key[1])
            except ChildDied:
                raise
            except (SwarmError, OSError):
                if failures < RETRIES_MAX:
                    self._suspect[key] = failures + 1
                await trio.sleep(RETRY_SECONDS)

    def _judge(self, link: Link, shard: int) -> None:
        """Leave out who has signed another result for a shard than the right one, and who has
        accused the signer of the right one."""
        key = (link.digest, shard)
        right = self._right[key]
        signed = [merged[key] for merged in self._merged.values() if key in merged]
        for (accuser, _), each in self._accused.items():
            if (each.record, each.shard) == key:
                signed.append(each)
                if each.values == right and accuser not in {*self.false, self._me}:
                    self.false.add(accuser)
                    self._say("outer.accusation_false", accuser, link, shard)
        for each in signed:
            if each.values != right and each.trainer not in {*self.left_out, self._me}:
                self.left_out.add(each.trainer)
                self._told_present = []
                self.disputed = [*self.disputed, each][-DISPUTED_MAX:]
                self._say("outer.shard_wrong", each.trainer, link, shard)
        if self._used.get(key, right) != right:
            del self._used[key]
            self.to_repeat.append(link.digest)
        self._loop.changed.touch()
