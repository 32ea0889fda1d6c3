"""Drafts by prompt lookup: a row that repeats its own text is given its next tokens in advance.

Where the last tokens of a row have come before in it, those that followed them then are a draft
(Saxena, "Prompt lookup decoding", 2023). One pass computes the draft's hidden states beside those
of the newest token, each position is sampled with its own noise, and the draft counts as far as the
samples agree with it. So the tokens are those of sampling one at a time: noise is forced, a draft
is right exactly if it is the argmax, and a validator sees no difference."""

from collections.abc import Sequence
from dataclasses import dataclass, field

GRAM = 3
"""Tokens that must have come before."""

DRAFT_MAX = 8
"""Longest draft of a row."""

PASS_MAX = 16
"""Most tokens in a pass with drafts, on a CPU: up to about so many, reading the weights takes
longer than computing with them, so that more tokens cost little."""

LENGTH_MAX = 2048
"""Positions of a row up to which it drafts: with longer caches the attention of a wrong draft costs
more than a tenth of a step (measured at 6,000)."""


@dataclass
class Lookup:
    """The drafts of one row."""

    _tokens: list[int] = field(default_factory=list)
    """The row's tokens, as far as they are known here."""
    _after: dict[tuple[int, ...], int] = field(default_factory=dict)
    """By tokens: the index of the token that followed them last."""
    _length: int = 1
    """Tokens of the next draft: as many as were right last, and one more, or twice as many if all
    were. A prompt that makes drafts wrong costs little."""
    _wrong: int = 0
    """Drafts in a row of which no token was right."""
    _pause: int = 0
    """Steps without a draft, after drafts that were wrong."""

    def draft(self, prompt: Sequence[int], sampled: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow the row's tokens; `most` is at least 1."""
        if self._pause:
            self._pause -= 1
            return []
        known = self._tokens or list(prompt)
        first = max(GRAM, len(self._tokens))
        self._tokens = known
        known += sampled[len(known) - len(prompt) :]
        for end in range(first, len(known)):
            self._after[tuple(known[end - GRAM : end])] = end
        start = self._after.get(tuple(known[-GRAM:]), len(known))
        return known[start : start + min(self._length, most)]

    def judge(self, right: int) -> None:
        """Tell how many tokens of the last draft were right."""
        self._length = min(DRAFT_MAX, right + 1 if right < self._length else 2 * right)
        self._wrong = 0 if right else self._wrong + 1
        self._pause = 2 ** min(self._wrong, 6) - 1
