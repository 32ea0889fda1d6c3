"""The rows of the native engine: the queue, the slots, and who gets which memory.

A finished row's slot is given to the next waiting row before the next step. Rows with the same
prompt share one computation of it, and an episode's next turn continues the cache of its last.
When memory is short, copies are dropped first, and then the newest rows wait again: their tokens
are kept, and their caches are computed again later."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peers.engines.cache import Cache, Cached, Copy
from peers.engines.device import is_out_of_memory
from peers.engines.drafts import Lookup
from peers.engines.engine import PROMPT_ROWS_MAX, Piece, Request
from peers.engines.sampling import Ahead, OfRequest
from swarm.errors import UserError

PREFILL_TOKENS_MAX = 1 << 14
"""Tokens of prompts in one forward pass; more wait for the next."""


@dataclass(eq=False, kw_only=True)
class Row(OfRequest, Cached):
    """A request that is waiting or being generated."""

    request: Request
    prompt: tuple[int, ...] | None = None
    """The request's tokens if rows with the same ones can share them."""
    number: int = -1
    """Counts admissions: the newest row gives way when memory is short."""
    tokens: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    policies: list[tuple[int, int]] = field(default_factory=list)
    """(policy, index of the first token sampled from it)"""
    prompt_hidden: Tensor | None = None
    swap_hidden: list[Tensor] = field(default_factory=list)
    saved: list[Tensor] = field(default_factory=list)
    """Hidden states of tokens sampled before the row's cache was dropped."""
    saved_policy: int = -1
    """The policy of the newest of them."""
    noise: Ahead | None = None
    lookup: Lookup = field(default_factory=Lookup)
    position: int = field(init=False)
    """Index of the next model token in the episode."""

    def __post_init__(self) -> None:
        self.position = self.request.start

    def append(self, token: int, log_probability: float) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        self.log_probabilities.append(log_probability)
        self.position += 1

    @property
    def ended(self) -> bool:
        """Whether its newest token ends it."""
        return self.tokens[-1] in self.request.stop_ids or self.position == self.request.limit

    @property
    def fed_length(self) -> int:
        """Positions filled once all tokens have passed the layers."""
        return len(self.request.tokens) + len(self.tokens)

    def all_tokens(self) -> list[int]:
        return [*self.request.tokens, *self.tokens]

    def save_hidden(self) -> None:
        """Copy the hidden states of the tokens sampled so far out of the cache."""
        assert self.bucket is not None
        states = self.bucket.states[self.index]
        first = sum(map(len, self.saved))
        if first == len(self.tokens):
            return
        offset = len(self.request.tokens) - 1  # of the state from which the first token is sampled
        start, policy = offset + first, self.policies[-1][0]
        if policy != self.saved_policy:
            before = states[max(0, start - PROMPT_ROWS_MAX) : start].clone()
            if self.prompt_hidden is None:
                self.prompt_hidden = before
            else:
                self.swap_hidden.append(before)
        self.saved.append(states[start : offset + len(self.tokens)].clone())
        self.saved_policy = policy

    def spans(self) -> list[tuple[int, int]]:
        """`Piece.spans`."""
        if len(self.policies) == 1:
            return [(self.policies[0][0], len(self.tokens))]
        found: list[tuple[int, int]] = []
        ends = [first for _, first in self.policies[1:]] + [len(self.tokens)]
        for (policy, first), end in zip(self.policies, ends, strict=True):
            if found and found[-1][0] == policy:
                found[-1] = (policy, found[-1][1] + end - first)
            elif end > first:
                found.append((policy, end - first))
        return found


@dataclass(eq=False)
class Admitted:
    """Rows admitted in one step, by what gives them their first hidden state."""

    computed: list[Row] = field(default_factory=list)
    followers: list[tuple[Row, Row]] = field(default_factory=list)
    """(row, the computed row with the same prompt)"""
    known: list[tuple[Row, Tensor]] = field(default_factory=list)
    """(row, the last hidden state of its prompt, computed in an earlier step)"""

    def rows(self) -> list[Row]:
        return [*self.computed, *(row for row, _ in (*self.followers, *self.known))]


class Rows:
    """All rows of an engine."""

    def __init__(self, cache: Cache[Row], slots: int) -> None:
        """At most `slots` rows are generated at once."""
        self.cache, self.slots = cache, slots
        self.live: dict[int, Row] = {}
        """By request id."""
        self._waiting: OrderedDict[int, Row] = OrderedDict()
        self._admissions = 0
        self._demand: Counter[tuple[int, ...]] = Counter()
        """Waiting rows by prompt."""
        self._prompts: dict[tuple[int, ...], tuple[Copy, Tensor]] = {}
        """Computed prompts that waiting rows share, with their last hidden state."""
        self._kept: OrderedDict[int, tuple[list[int], Copy]] = OrderedDict()
        """Caches of finished requests that may be continued, and the tokens they hold."""

    def __contains__(self, id: int) -> bool:
        return id in self._waiting or id in self.live or id in self._kept

    def submit(self, request: Request) -> None:
        """Queue a request."""
        row = Row(request=request)
        if request.continues is None:
            row.prompt = tuple(request.tokens)
        self._waiting[request.id] = row
        self._demand_prompt(row, 1)

    def cancel(self, id: int) -> None:
        """Drop a request and its kept cache."""
        if id in self._waiting:
            row = self._waiting.pop(id)
            self._demand_prompt(row, -1)
            before = row.request.continues
            if before is not None and before in self._kept:  # no request continues it any more
                self._drop(self._kept.pop(before)[1])
        elif id in self.live:
            self._leave(self.live[id])
        elif id in self._kept:
            self._drop(self._kept.pop(id)[1])

    def admit(self, policy: int) -> Admitted:
        """Give free slots to waiting rows, in order; they sample from `policy`."""
        admitted = Admitted()
        leaders: dict[tuple[int, ...], Row] = {}
        computed_tokens = 0
        while self._waiting and len(self.live) < self.slots:
            row = next(iter(self._waiting.values()))
            length = row.fed_length
            shared = row.prompt is not None and (
                row.prompt in self._prompts or row.prompt in leaders
            )
            # Whoever does not fit ends the admissions: rows that overtook it could keep it waiting
            # for ever. The first one is computed however long it is.
            if not shared and computed_tokens and computed_tokens + length > PREFILL_TOKENS_MAX:
                break
            more = min(len(self._waiting), self.slots - len(self.live)) - 1
            if not self.cache.add(row, length + 1, more):
                if self.free_memory():
                    continue
                break
            del self._waiting[row.request.id]
            self.live[row.request.id] = row
            self._admissions += 1
            row.number = self._admissions
            row.policies.append((policy, len(row.tokens)))
            assert row.bucket is not None
            if row.prompt is not None and row.prompt in self._prompts:
                copy, last = self._prompts[row.prompt]
                row.bucket.copy_in(row, copy)
                admitted.known.append((row, last))
            elif row.prompt is not None and row.prompt in leaders:
                admitted.followers.append((row, leaders[row.prompt]))
            else:
                self._continue_kept(row)
                admitted.computed.append(row)
                computed_tokens += length - row.length
                if row.prompt is not None:
                    leaders[row.prompt] = row
            self._demand_prompt(row, -1)
        return admitted

    def check_room(self) -> None:
        """Raise `UserError` if a row waits although no other is live: there is no memory for it."""
        if self._waiting:
            raise self.no_room_for(next(iter(self._waiting.values())))

    def no_room_for(self, row: Row) -> UserError:
        """The error that says that the device has too little memory for one row."""
        request = row.request
        positions = len(request.tokens) + request.limit - request.start
        return UserError(
            f"device {self.cache.shape.device} has no memory for a completion of {positions} "
            "positions; use a smaller model or a shorter limit"
        )

    def share(self, admitted: Admitted, last: dict[Row, Tensor]) -> None:
        """Give followers the computed prompts; keep those that waiting rows share.

        `last` are the last hidden states [hidden] of computed rows."""
        by_bucket: dict[int, list[tuple[Row, Row]]] = {}
        for row, leader in admitted.followers:
            by_bucket.setdefault(id(row.bucket), []).append((row, leader))
        for pairs in by_bucket.values():
            bucket = pairs[0][0].bucket
            assert bucket is not None
            sources, targets = [row.index for _, row in pairs], [row.index for row, _ in pairs]
            bucket.share(sources, targets, max(leader.length for _, leader in pairs))
            for row, leader in pairs:
                row.length = leader.length
        for row in admitted.computed:
            if row.prompt is not None and self._demand[row.prompt] and self._fits(row.length):
                assert row.bucket is not None
                copy = row.bucket.copy_out(row, row.length)
                self._prompts[row.prompt] = (copy, last[row].clone())
                self.cache.copies_bytes += self._bytes(copy.length)

    def make_columns(self) -> None:
        """Move rows without a free column to the next bucket."""
        for row in list(self.live.values()):
            while row.bucket is not None and row.length == row.bucket.columns:
                if self.cache.move(row, row.length + 1) or self.free_memory():
                    continue
                self.requeue([max(self.live.values(), key=lambda each: each.number)])

    def finish(self, rows: Sequence[Row]) -> list[Piece]:
        """Take finished rows out of their slots."""
        if not rows:
            return []
        # One tensor for all: a tensor of its own for each row would cost as much as sampling it.
        flat = torch.tensor([value for row in rows for value in row.log_probabilities])
        parts = torch.split(flat, [len(row.tokens) for row in rows])
        return [self._finish(row, part) for row, part in zip(rows, parts, strict=True)]

    def _finish(self, row: Row, log_probabilities: Tensor) -> Piece:
        row.save_hidden()
        assert row.prompt_hidden is not None and row.bucket is not None
        saved = row.saved
        piece = Piece(
            id=row.request.id,
            tokens=row.tokens,
            hidden=saved[0] if len(saved) == 1 else torch.cat(saved),
            log_probabilities=log_probabilities,
            prompt_hidden=row.prompt_hidden,
            finish="stop" if row.tokens[-1] in row.request.stop_ids else "length",
            spans=row.spans(),
            swap_hidden=row.swap_hidden,
        )
        if row.request.keep and self._fits(row.length):
            self._keep(row)
        self._leave(row)
        return piece

    def _keep(self, row: Row) -> None:
        """Keep a finished row's cache, unless the device has less memory than its bound."""
        assert row.bucket is not None
        try:
            copy = row.bucket.copy_out(row, row.length)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return
        self._kept[row.request.id] = row.all_tokens()[: row.length], copy
        self.cache.copies_bytes += self._bytes(row.length)

    def requeue(self, rows: Iterable[Row]) -> None:
        """Let live rows wait again, before all others and in their order of admission."""
        for row in sorted(rows, key=lambda each: -each.number):
            if row.tokens:
                # They and their hidden states stay as they were sampled and proven, although
                # another policy may go on; the cache is computed from prompt and tokens, which
                # nobody shares.
                row.save_hidden()
                row.prompt = None
            self.cache.remove(row)
            del self.live[row.request.id]
            self._waiting[row.request.id] = row
            self._waiting.move_to_end(row.request.id, last=False)
            self._demand_prompt(row, 1)

    def restart(self) -> None:
        """Drop all that is computed: rows wait again; the buckets' memory stays, without rows."""
        self.requeue(list(self.live.values()))
        self._prompts.clear()
        self._kept.clear()
        self.cache.copies_bytes = 0

    def free_memory(self) -> bool:
        """Free memory that no live row needs; False if there is none."""
        if self.cache.drop_idle():
            return True
        if self._kept:
            self._drop(self._kept.popitem(last=False)[1][1])
            return True
        if self._prompts:
            self._drop(self._prompts.pop(next(iter(self._prompts)))[0])
            return True
        return False

    def _leave(self, row: Row) -> None:
        self.cache.remove(row)
        del self.live[row.request.id]

    def _demand_prompt(self, row: Row, change: int) -> None:
        """Count a waiting row's demand for its prompt; forget a prompt that no row waits for."""
        if row.prompt is None:
            return
        self._demand[row.prompt] += change
        if self._demand[row.prompt] == 0:
            del self._demand[row.prompt]
            if row.prompt in self._prompts:
                self._drop(self._prompts.pop(row.prompt)[0])

    def _continue_kept(self, row: Row) -> None:
        """Fill the cache of an episode's next turn with the one kept after its last turn."""
        if row.request.continues is None or row.request.continues not in self._kept:
            return
        tokens, copy = self._kept.pop(row.request.continues)
        self._drop(copy)
        given = row.request.tokens
        if len(tokens) < len(given) and tokens == list(given[: len(tokens)]):
            assert row.bucket is not None
            row.bucket.copy_in(row, copy)

    def _fits(self, length: int) -> bool:
        """Whether there is memory for a copy of that length, dropping older kept ones."""
        needed = self._bytes(length)
        while self.cache.bytes + needed > self.cache.bytes_max:
            if not self._kept:
                return False
            self._drop(self._kept.popitem(last=False)[1][1])
        return True

    def _bytes(self, length: int) -> int:
        return length * self.cache.shape.position_bytes

    def _drop(self, copy: Copy) -> None:
        self.cache.copies_bytes -= self._bytes(copy.length)
