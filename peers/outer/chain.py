"""The chain of round records, which everyone checks and follows by the same rules.

No consensus is needed. Two trainers that do not hear each other may sign two records with the same
parent; each leads a branch. Once a trainer knows both branches it follows the *heaviest*. A round
weighs the number of trainers that it merges besides one, so that however many rounds one trainer
makes by itself, they weigh nothing; nobody's claims weigh anything. Of equals the longer branch is
followed, then the one with the smaller digest. What the lighter branch has merged is lost."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from peers.outer.rating import rate, weights
from swarm.errors import SwarmError
from swarm.wire.envelope import Envelope
from swarm.wire.outer import CONTRIBUTION_TOKENS_MAX, GENESIS, Contribution, RoundRecord
from swarm.world.recent import Recent

ROUNDS_KEPT = 500
"""Rounds of the chain kept in memory: as long as two parts of a network may be apart and still
know where they parted. 30 MB with the most trainers."""

WAITING_MAX = 1000
"""Records kept whose parent is unknown."""


RECORDS_MAX = 2 * ROUNDS_KEPT
"""Records of one signer kept: more than one for each round that is remembered, on two branches."""


class BadRecord(SwarmError):
    """A round record is refused. The message says why in one sentence."""


@dataclass(frozen=True)
class Link:
    """A record of the chain."""

    digest: bytes
    signer: str
    record: RoundRecord
    envelope: Envelope
    counted: frozenset[object]
    """Names of the contributions that cannot count again."""

    @staticmethod
    def of(envelope: Envelope) -> "Link":
        record = envelope.expect(RoundRecord)
        counted = frozenset(name for each in record.contributions for name in names_of(each))
        return Link(envelope.digest, envelope.sender, record, envelope, counted)

    @property
    def round(self) -> int:
        return self.record.round

    def gain(self, trainers: Collection[str] | None) -> int:
        """What the record adds to its chain's weight, if only these trainers count."""
        if trainers is None:
            return len(self.record.contributions) - 1
        if self.signer not in trainers:
            return 0
        counted = sum(each.trainer in trainers for each in self.record.contributions)
        return max(0, counted - 1)


class Chain:
    """The records of the newest rounds, and the rules by which one of their branches counts."""

    def __init__(
        self, staleness_max: int, contribution_tokens_max: int = CONTRIBUTION_TOKENS_MAX
    ) -> None:
        self._staleness_max = staleness_max
        self._contribution_tokens_max = contribution_tokens_max
        self._trainers: Collection[str] | None = None
        """Trainers whose records and contributions weigh something; None: all."""
        self._links: dict[bytes, Link] = {}
        """Checked records, whose parents are known."""
        self._weights: dict[bytes, int] = {GENESIS: 0}
        """Weights of the chains that end in them."""
        self._signed: Counter[str] = Counter()
        """Records of each signer."""
        self._by_weight: list[tuple[int, int, bytes]] = []
        """Their weights, rounds and digests, sorted: the heaviest first."""
        self._waiting: Recent[bytes, Link] = Recent(WAITING_MAX)
        """Records whose parents are unknown, oldest first."""

    # --- adding ------------------------------------------------------------------------------

    def add(self, envelope: Envelope) -> list[Link]:
        """Add a record, and those that waited for it; return what joins the chain.

        A record whose parent is unknown waits. Raises `BadRecord`."""
        link = Link.of(envelope)
        if link.digest in self._links or link.digest in self._waiting:
            return []
        if link.record.parent != GENESIS and link.record.parent not in self._links:
            _check_alone(link.record)
            self._waiting[link.digest] = link
            return []
        self._check(link)
        return self._join(link)

    def begin_at(self, envelope: Envelope) -> list[Link]:
        """Add a record whose ancestors this trainer does not need, because it has the outer state
        that the record leads to; return what joins the chain."""
        link = Link.of(envelope)
        if link.digest in self._links:
            return []
        _check_alone(link.record)
        _check_signatures(link)
        self._waiting.pop(link.digest, None)
        return self._join(link)

    def _join(self, link: Link) -> list[Link]:
        """Add a checked record and, in turn, all that waited for it."""
        joined: list[Link] = []
        joining = [link]
        while joining:
            link = joining.pop()
            self._links[link.digest] = link
            self._signed[link.signer] += 1
            self._weigh(link, self._weight_before(link))
            joined.append(link)
            children = [c for c in self._waiting.values() if c.record.parent == link.digest]
            for child in children:
                del self._waiting[child.digest]
                with suppress(BadRecord):  # it stays out, like one that comes after its parent
                    self._check(child)
                    joining.append(child)
        return joined

    def _weight_before(self, link: Link) -> int:
        """The weight of a record's parent. An unknown one (`begin_at`) weighs as much as any chain
        known here that is shorter, or nobody who missed many rounds would follow it."""
        known = self._weights.get(link.record.parent)
        if known is not None:
            return known
        shorter = (each.digest for each in self._links.values() if each.round < link.round)
        return max((self._weights[digest] for digest in shorter), default=0)

    def _weigh(self, link: Link, before: int) -> None:
        """Note a record's weight; `before` is its parent's."""
        self._weights[link.digest] = before + link.gain(self._trainers)
        insort(self._by_weight, self._rank(link))

    def _rank(self, link: Link) -> tuple[int, int, bytes]:
        """Of two links the one with the smaller value is followed."""
        return -self._weights[link.digest], -link.round, link.digest

    def trust(self, trainers: Collection[str]) -> None:
        """Let only the records and contributions of these trainers weigh anything, past ones too:
        what a trainer that the owner has removed signed or sent decides nothing any more."""
        if trainers == self._trainers:
            return
        before, had = self._weights, self._trainers
        self._trainers, self._weights, self._by_weight = trainers, {GENESIS: 0}, []
        # Parents before children. Where the parent is forgotten, its weight is what is left of the
        # old one without this record's gain.
        for link in sorted(self._links.values(), key=lambda each: each.round):
            parent = self._weights.get(link.record.parent)
            self._weigh(link, before[link.digest] - link.gain(had) if parent is None else parent)

    def forget_before(self, round: int) -> None:
        """Forget the records of older rounds."""
        for link in [link for link in self._links.values() if link.round < round]:
            del self._links[link.digest]
            self._signed[link.signer] -= 1
            # Before the weight is gone, by which the place is found.
            del self._by_weight[bisect_left(self._by_weight, self._rank(link))]
            del self._weights[link.digest]

    # --- reading -----------------------------------------------------------------------------

    def __contains__(self, digest: bytes) -> bool:
        return digest == GENESIS or digest in self._links

    def get(self, digest: bytes) -> Link | None:
        return self._links.get(digest)

    def children(self, digest: bytes) -> list[Link]:
        """The records that follow one."""
        return [link for link in self._links.values() if link.record.parent == digest]

    def round_of(self, digest: bytes) -> int:
        return 0 if digest == GENESIS else self._links[digest].round

    def tokens_of(self, digest: bytes) -> int:
        """Tokens of all rounds up to a record, by the word of each trainer."""
        return 0 if digest == GENESIS else self._links[digest].record.tokens

    def best(self, counts: Callable[[Link], bool] = lambda link: True) -> bytes:
        """The last record of the heaviest chain; `GENESIS` if there is none.

        Only records for which `counts` is true can be the last."""
        heads = (digest for *_, digest in self._by_weight if counts(self._links[digest]))
        return next(heads, GENESIS)

    def weight_of(self, digest: bytes) -> int:
        """The weight of a known chain that ends in a record."""
        return self._weights[digest]

    def ancestor(self, digest: bytes, round: int) -> bytes | None:
        """The record of a round in the chain that ends at `digest`; None: unknown, or later."""
        while digest != GENESIS and digest in self._links:
            link = self._links[digest]
            if link.round <= round:
                return digest if link.round == round else None
            digest = link.record.parent
        return GENESIS if digest == GENESIS and round == 0 else None

    def path(self, start: bytes, end: bytes) -> list[Link] | None:
        """The records after `start` up to `end`, in order; None unless `end` follows `start`."""
        found: list[Link] = []
        while end != start:
            link = self._links.get(end)
            if link is None:
                return None
            found.append(link)
            end = link.record.parent
        return found[::-1]

    def fork(self, one: bytes, other: bytes) -> bytes | None:
        """The last record that two chains share; None if their beginnings are unknown."""
        if one == other and one in self:
            return one
        known = set(self._back(one))
        return next((digest for digest in self._back(other) if digest in known), None)

    def _back(self, digest: bytes) -> Iterable[bytes]:
        while digest in self._links:
            yield digest
            digest = self._links[digest].record.parent
        if digest == GENESIS:
            yield digest

    # --- rules -------------------------------------------------------------------------------

    def refusal(self, contribution: Contribution, parent: bytes) -> str | None:
        """Return in one sentence why the record after `parent` cannot have a contribution.

        Every trainer that knows the parent's chain gives the same answer."""
        if contribution.tokens > self._contribution_tokens_max:
            return (
                f"it claims {contribution.tokens:,} tokens; the inner steps of a contribution have "
                f"at most {self._contribution_tokens_max:,} (outer.inner_steps times "
                "outer.step_tokens_max)"
            )
        age = self.round_of(parent) - contribution.base_round
        if age < 0:
            return f"its base is round {contribution.base_round}, which this chain lacks"
        if age > self._staleness_max:
            return (
                f"it is too late: its base is {age} rounds old, more than outer.staleness_max "
                f"({self._staleness_max})"
            )
        # If the chain's beginning is not known here, neither is its record of that round: the base
        # then counts, unless it is known to be on another branch.
        base = self.ancestor(parent, contribution.base_round)
        if base != contribution.base and (base is not None or contribution.base in self):
            return f"it has another base than round {contribution.base_round} of this chain"
        for link in self._recent(parent):
            if not link.counted.isdisjoint(names_of(contribution)):
                return f"round {link.round} counted it already"
        return None

    def _recent(self, digest: bytes) -> Iterable[Link]:
        """The records in which a contribution that is young enough may have been counted."""
        for _ in range(self._staleness_max + 1):
            link = self._links.get(digest)
            if link is None:
                return
            yield link
            digest = link.record.parent

    def _check(self, link: Link) -> None:
        """Raise `BadRecord` unless a record may follow its parent."""
        record = link.record
        if self._signed[link.signer] >= RECORDS_MAX:
            raise BadRecord(
                f"{link.signer} has signed {RECORDS_MAX} records of the rounds that are remembered"
            )
        _check_alone(record)
        expected = self.round_of(record.parent) + 1
        if record.round != expected:
            raise BadRecord(
                f"the record is of round {record.round}, but its parent leads to {expected}"
            )
        tokens = self.tokens_of(record.parent) + tokens_in(record.contributions)
        if record.tokens != tokens:
            raise BadRecord(
                f"the record of round {record.round} states {record.tokens} tokens, but its chain "
                f"has {tokens}"
            )
        before = self._links.get(record.parent)
        scores = {each.trainer: (each.gain, each.own) for each in record.rated if each.is_scored}
        if record.rated != rate(before.record.rated if before else [], scores):
            raise BadRecord(
                f"the record of round {record.round} has ratings of strangers that do not follow "
                "from its scores and the record before"
            )
        for contribution in record.contributions:
            why = self.refusal(contribution, record.parent)
            if why is not None:
                raise BadRecord(
                    f"the record of round {record.round} has a contribution of "
                    f"{contribution.trainer} that does not count: {why}"
                )
        _check_signatures(link)  # last, as it costs most


def names_of(contribution: Contribution) -> tuple[object, object]:
    """What no two contributions that count have in common: trainer with base, and files."""
    return (contribution.trainer, contribution.base), contribution.artifact.digest


def tokens_in(contributions: Iterable[Contribution]) -> int:
    return sum(contribution.tokens for contribution in contributions)


def _check_alone(record: RoundRecord) -> None:
    """Raise `BadRecord` for faults that show without the parent."""
    trainers = [contribution.trainer for contribution in record.contributions]
    if trainers != sorted(set(trainers)):
        raise BadRecord(
            f"the record of round {record.round} lists a trainer twice, or not by peer id"
        )
    digests = {contribution.artifact.digest for contribution in record.contributions}
    if len(digests) < len(trainers):
        raise BadRecord(f"the record of round {record.round} lists the same files twice")
    given = [weights(record.rated).get(each) for each in trainers]
    if None not in given or 0.0 in given:
        raise BadRecord(
            f"the record of round {record.round} lists strangers alone, or one without a weight"
        )
    if (record.round == 1) != (record.parent == GENESIS):
        raise BadRecord(f"the record of round {record.round} has a parent of another round")


def _check_signatures(link: Link) -> None:
    """Raise `BadRecord` for a contribution that its trainer has not signed."""
    run = link.envelope.body.run
    for contribution in link.record.contributions:
        if not contribution.is_signed(run):
            raise BadRecord(
                f"the record of round {link.round} has a contribution that {contribution.trainer} "
                "has not signed"
            )


def lost(chain: Chain, old: bytes, new: bytes) -> Sequence[Link]:
    """The records of a chain that another chain does not have."""
    fork = chain.fork(old, new)
    return (chain.path(fork, old) if fork is not None else None) or []
