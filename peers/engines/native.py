"""The native engine: continuous batching, a cache in buckets and sampling around the decoder.

Every step runs one forward pass over a flat batch: the last token of each row being generated, and
the prompts of the rows that have just taken the slots of finished ones. Hidden states and
log-probabilities cost nothing extra, and a prefill runs the same layers as generation. Each row
computes what it would compute alone, up to rounding."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import isnan
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from peers.engines.cache import Cache, Shape
from peers.engines.decoder import Decoder
from peers.engines.device import available_bytes, is_out_of_memory, upload
from peers.engines.drafts import DRAFT_MAX, LENGTH_MAX, PASS_MAX
from peers.engines.engine import Capabilities, Piece, Prefill, Request
from peers.engines.flat import FlatAttention, Fresh, Further, Part
from peers.engines.prefill import Prefiller
from peers.engines.rows import Admitted, Row, Rows
from peers.engines.sampling import Ahead, OfRequest, draw
from swarm.errors import UserError
from swarm.version import __version__

ENTRIES_MAX = 1 << 22
"""Rows times vocabulary sampled at once on a CPU: each entry takes some 16 bytes."""

ENTRIES_MAX_GPU = 1 << 26
"""The same on a GPU, where one call takes as long for many rows as for few: 1 GB."""

SLOTS = 256
"""Most rows generated at once, if memory allows them."""


Drawn = tuple[int, float]
"""A token and its log-probability."""


class _Draft(NamedTuple):
    """Tokens of a row that are computed in advance (`peers.engines.drafts`)."""

    row: Row
    tokens: list[int]
    first: int
    """Index of the first of them in the batch."""


@dataclass(eq=False)
class _Later(OfRequest):
    """A row after tokens of its draft: what is sampled there."""

    request: Request
    position: int
    noise: Ahead | None = None


@dataclass
class _Batch:
    """The tokens of one forward pass."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    """Rows with tokens in the batch."""
    last: list[int] = field(default_factory=list)
    """Per row: index of its last token."""
    drafts: list[_Draft] = field(default_factory=list)


class NativeEngine:
    """See `peers.engines.engine.Engine`. Computes in the stored dtype, logits in fp32."""

    def __init__(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        policy: int = 0,
        slots: int = 0,
        memory_share: float = 0.5,
        merge: bool = True,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """Load the policy in `folder`, whose number is `policy`.

        `dtype` is the precision to compute in; None: the weights' stored dtype. At most `slots`
        rows are generated at once (0: `SLOTS`), with caches of at most
        `memory_share` of the memory that is free once the weights are loaded. `merge` and
        `devices` are as in `Decoder`. Raises `UserError` for an unsupported model."""
        self._decoder = decoder = Decoder(folder, device, dtype, merge=merge, devices=devices)
        model = decoder.model
        self._prefiller = Prefiller(decoder)
        self._policy = policy
        self.out_of_memory = 0
        """How often the batch was halved because memory was short."""
        self._capabilities = Capabilities(
            name="native",
            version=__version__,
            device=str(decoder.device),
            dtype=str(decoder.dtype).removeprefix("torch."),
            vocabulary_size=model.vocabulary_size,
            hidden_size=model.hidden_size,
            length_max=model.length_max,
            in_flight=True,
            masks=True,
        )
        layers = decoder.layer_devices
        # Each device holds its layers' part of a row; the first that is full bounds all.
        free = min(
            available_bytes(each) * len(layers) // layers.count(each) for each in set(layers)
        )
        shape = Shape.of(model, decoder.dtype, layers)
        cache: Cache[Row] = Cache(shape, model.length_max, int(memory_share * free))
        self._rows = Rows(cache, slots or SLOTS)
        on_gpu = decoder.device.type == "cuda"
        self._entries_max = ENTRIES_MAX_GPU if on_gpu else ENTRIES_MAX
        self.pass_max = 0 if on_gpu else PASS_MAX
        """Most tokens of a pass with drafts; 0: there are none."""

    @property
    def capabilities(self) -> Capabilities:
        rows = self._rows
        return replace(self._capabilities, slots=rows.slots, memory_bytes=rows.cache.bytes_max)

    def load_weights(self, folder: Path, policy: int) -> None:
        """See `Engine.load_weights`. Rows go on with the new policy, caches computed again."""
        self._decoder.load_weights(folder)
        self._policy = policy
        with torch.inference_mode():
            self._rows.restart()
            self._rows.cache.clear()

    def submit(self, request: Request) -> None:
        if request.id in self._rows:
            raise ValueError(f"request {request.id} is already in use")
        self._capabilities.check_request(request)
        self._check_room(request)
        self._rows.submit(request)

    @torch.inference_mode()
    def cancel(self, id: int) -> None:
        self._rows.cancel(id)

    @torch.inference_mode()
    def step(self) -> list[Piece]:
        while True:
            self._rows.make_columns()
            admitted = self._rows.admit(self._policy)
            if not self._rows.live:
                self._rows.check_room()
                return []
            try:
                rows, drafts, hidden = self._advance(admitted)
                return self._append(rows, drafts, self._sample(rows, drafts, hidden))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._halve(admitted, error)

    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        self._capabilities.check_prefill(sequences, sampled)
        return self._prefiller.run(sequences, sampled)

    def logits(self, states: Tensor) -> Tensor:
        return self._decoder.logits(states)

    def _check_room(self, request: Request) -> None:
        """Raise `ValueError` for a request that needs more cache than there may be."""
        length = len(request.tokens) + request.limit - request.start
        needed = self._rows.cache.row_bytes(length)
        if needed > self._rows.cache.bytes_max:
            raise ValueError(
                f"a completion of {length} positions needs {needed / 1e9:.3g} GB of cache; there "
                f"are {self._rows.cache.bytes_max / 1e9:.3g}"
            )

    def _advance(self, admitted: Admitted) -> tuple[list[Row], list[_Draft], Tensor]:
        """Run the layers; return the rows to sample for, the drafts, and the hidden states of each
        row, then of each token of each draft [rows + drafted tokens, hidden]."""
        batch = self._batch(admitted)
        rows, hidden, computed = batch.rows, torch.empty(0), set(admitted.computed)
        if batch.tokens:
            decoder = self._decoder
            attention = FlatAttention(batch.parts, decoder.model.kv_heads, decoder.dtype)
            tokens, positions = upload([batch.tokens, batch.positions], decoder.device)
            length = max(batch.positions) + 1
            all_hidden = decoder.forward(tokens[None], positions[None], attention, length)[0]
            attention.write_states(all_hidden)
            hidden = all_hidden
            if admitted.computed or batch.drafts:
                hidden = all_hidden[upload(batch.last, decoder.device)]
            for row in rows:
                row.length = row.fed_length
        if admitted.computed or admitted.known:
            of = {row: hidden[index] for index, row in enumerate(rows) if row in computed}
            self._rows.share(admitted, of)
            pairs = [(row, of[leader]) for row, leader in admitted.followers] + admitted.known
            if pairs:
                rows = [*rows, *(row for row, _ in pairs)]
                more = torch.stack([state for _, state in pairs])
                hidden = torch.cat((hidden, more)) if batch.tokens else more
        if batch.drafts:
            drafted = [all_hidden[each.first :][: len(each.tokens)] for each in batch.drafts]
            hidden = torch.cat([hidden, *drafted])
        return rows, batch.drafts, hidden

    def _batch(self, admitted: Admitted) -> _Batch:
        """Lay the tokens of all live rows into one dimension."""
        batch = _Batch()
        new_rows = set(admitted.rows())
        room = 0 if new_rows else self.pass_max - len(self._rows.live)
        computed: dict[int, list[Row]] = {}
        for row in admitted.computed:
            computed.setdefault(id(row.bucket), []).append(row)
        for bucket in self._rows.cache.buckets:
            new = computed.get(id(bucket), [])
            decoding = bucket.rows
            if new_rows:
                decoding = [row for row in decoding if row not in new_rows]
            if decoding or new:
                part = Part(bucket, len(batch.tokens), [], [], len(decoding))
                batch.parts.append(part)
                _lay_decoding(batch, part, decoding)
                for row in decoding if room > 0 else ():
                    room -= _lay_draft(batch, part, row, room)
                _lay_chunks(batch, part, new)
        return batch

    def _sample(self, rows: Sequence[Row], drafts: Sequence[_Draft], hidden: Tensor) -> list[Drawn]:
        """The next token of each row, then what follows each token of each draft."""
        sampled: list[Row | _Later] = list(rows)
        for row, tokens, _ in drafts:
            positions = range(row.position + 1, row.position + 1 + len(tokens))
            sampled += [_Later(row.request, position, row.noise) for position in positions]
        some = max(1, self._entries_max // self._decoder.model.vocabulary_size)
        drawn: list[Drawn] = []
        for start in range(0, len(sampled), some):
            part = sampled[start : start + some]
            temperatures = [row.request.temperature for row in part]
            logits = self.logits(hidden[start : start + some])
            for each, own in zip(part, logits, strict=True):
                if isinstance(each, Row) and each.request.mask is not None:
                    allowed = each.request.mask.allowed(each.all_tokens())
                    _forbid_others(own, upload(allowed, own.device))
            drawn += draw(part, temperatures, logits)
        return drawn

    def _append(
        self, rows: list[Row], drafts: Sequence[_Draft], drawn: Sequence[Drawn]
    ) -> list[Piece]:
        for row, (_, log_probability) in zip(rows, drawn, strict=False):
            if isnan(log_probability):
                self._rows.restart()
                self._rows.cache.clear()  # what is not a number would spoil even masked columns
                raise UserError(
                    f"policy {self._policy} gives logits that are not numbers (row "
                    f"{row.request.row}, position {row.position}); its weights are broken"
                )
        for row, chosen in zip(rows, drawn, strict=False):
            row.length = row.fed_length
            row.append(*chosen)
        after = iter(drawn[len(rows) :])
        for row, tokens, _ in drafts:
            chosen_after, right = list(islice(after, len(tokens))), 0
            for token, chosen in zip(tokens, chosen_after, strict=True):
                if row.ended or row.tokens[-1] != token or isnan(chosen[1]):
                    break  # what is not a number is an error of the next pass
                row.length = row.fed_length
                row.append(*chosen)
                right += 1
            row.lookup.judge(right)
        # From a bucket's end on, so that few rows move up.
        return self._rows.finish(
            sorted((row for row in rows if row.ended), key=lambda row: -row.index)
        )

    def _halve(self, admitted: Admitted, error: Exception) -> None:
        """Go on with half of the live rows; the newest wait again."""
        rows = self._rows
        live = sorted(rows.live.values(), key=lambda row: row.number)
        if len(live) == 1:
            rows.requeue(live)  # computed again, unless the caller gives it up
            raise rows.no_room_for(live[0]) from error
        self.out_of_memory += 1
        rows.slots = max(1, len(live) // 2)
        new = set(admitted.rows())
        for row in live:
            row.length = min(row.length, row.fed_length - 1)  # its newest token is fed again
        rows.requeue([row for index, row in enumerate(live) if index >= rows.slots or row in new])
        while rows.free_memory():
            pass


def _forbid_others(logits: Tensor, allowed: Tensor) -> None:
    """Leave the logits [vocabulary] of the tokens `allowed` only."""
    kept = logits[allowed]
    logits.fill_(-torch.inf)[allowed] = kept


def _lay_decoding(batch: _Batch, part: Part, rows: Sequence[Row]) -> None:
    """Append the newest token of each of a bucket's first rows."""
    first = len(batch.tokens)
    batch.tokens.extend([row.tokens[-1] for row in rows])
    part.positions = [row.length for row in rows]
    part.rows = list(range(len(rows)))
    batch.positions.extend(part.positions)
    batch.rows.extend(rows)
    batch.last.extend(range(first, first + len(rows)))


def _put(batch: _Batch, part: Part, row: Row, start: int, tokens: Sequence[int]) -> None:
    """Append a row's tokens at its positions from `start` on."""
    part.rows.extend([row.index] * len(tokens))
    positions = range(start, start + len(tokens))
    part.positions.extend(positions)
    batch.positions.extend(positions)
    batch.tokens.extend(tokens)


def _lay(batch: _Batch, part: Part, row: Row, tokens: Sequence[int]) -> None:
    """Append a row's next tokens to the batch; the last of them is sampled from."""
    _put(batch, part, row, row.length, tokens)
    batch.rows.append(row)
    batch.last.append(len(batch.tokens) - 1)


def _lay_draft(batch: _Batch, part: Part, row: Row, room: int) -> int:
    """Append at most so many tokens that may follow a decoding row's; return their number."""
    if row.request.mask is not None:
        return 0  # what may follow a draft is not known yet
    past, left = row.length + 1, row.request.limit - row.position - 1
    most = min(DRAFT_MAX, room, left, part.bucket.columns - past, LENGTH_MAX - past)
    tokens = row.lookup.draft(row.request.tokens, row.tokens, most) if most > 0 else []
    if tokens:
        first = len(batch.tokens)
        batch.drafts.append(_Draft(row, tokens, first))
        part.further.append(Further(first, len(tokens), row.index, past))
        _put(batch, part, row, past, tokens)
    return len(tokens)


def _lay_chunks(batch: _Batch, part: Part, rows: Sequence[Row]) -> None:
    """Append the tokens of new rows; rows of equal length attend together."""
    for row in sorted(rows, key=lambda each: len(each.request.tokens) + len(each.tokens)):
        tokens = row.all_tokens()[row.length :]
        first = len(batch.tokens)
        before = part.fresh[-1] if part.fresh else None
        if row.length:
            part.further.append(Further(first, len(tokens), row.index, row.length))
        elif (
            before is not None
            and before.length == len(tokens)
            and before.first + before.count * before.length == first
        ):
            part.fresh[-1] = Fresh(before.first, before.count + 1, before.length)
        else:
            part.fresh.append(Fresh(first, 1, len(tokens)))
        _lay(batch, part, row, tokens)
