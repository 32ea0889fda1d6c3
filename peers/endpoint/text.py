"""The text of a model segment that is still being sampled."""

from __future__ import annotations

from collections.abc import Sequence

from peers.environments.renderer import Renderer

UNFINISHED = "\ufffd"
"""What a decoder gives for bytes that are no whole character yet."""

WINDOW_TOKENS_MAX = 256
"""Tokens that are decoded at a look. A character has at most four tokens, so a longer run of bytes
that are none is garbage."""


class Text:
    """Decodes a growing list of tokens, looks for stop texts, and says what is certain."""

    def __init__(self, renderer: Renderer, stop_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._renderer = renderer
        self._stop_ids = stop_ids
        self._stops = [stop for stop in stops if stop]
        self._longest_stop = max(map(len, self._stops), default=0)
        self._seen = 0
        """Tokens at the last look."""
        self._start, self._read, self._text = 0, 0, ""
        """`_text` is the text of the tokens before `_read`. A look decodes from `_start` on, since
        the text of a token may depend on the one before it."""
        self.whole = ""
        """The text, without the stop token, and up to the stop text."""
        self.certain = ""
        """The part of `whole` that further tokens leave as it is."""

    def add(self, tokens: Sequence[int], ended: bool) -> int | None:
        """Decode the tokens so far; `ended`: no others follow.

        Returns the number of tokens up to the first stop text's end, or None without one.
        """
        self.whole = self._decode(tokens) if ended else self._decode_on(tokens)
        found = self._first_stop(self.whole, max(0, len(self.certain) - self._longest_stop))
        if found is None:
            self.certain = self.whole if ended else self._without_doubt()
            self._seen = len(tokens)
            return None
        self.whole = self.certain = self.whole[:found]
        for count in range(self._seen + 1, len(tokens)):
            if self._first_stop(self._decode(tokens[:count])) is not None:
                return count
        return len(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._renderer.decode_completion(tokens, self._stop_ids)[0]

    def _decode_on(self, tokens: Sequence[int]) -> str:
        """The text of all tokens, from what was read of them before."""
        known = self._decode(tokens[self._start : self._read])
        grown = self._decode(tokens[self._start :])
        text = self._text + grown[len(known) :]
        is_garbage = len(tokens) - self._start > WINDOW_TOKENS_MAX
        if is_garbage or not grown.endswith(UNFINISHED):
            self._start, self._read, self._text = self._read, len(tokens), text
        return text

    def _first_stop(self, text: str, start: int = 0) -> int | None:
        """Index of the first stop text from `start` on."""
        found = [at for stop in self._stops if (at := text.find(stop, start)) >= 0]
        return min(found, default=None)

    def _without_doubt(self) -> str:
        """`whole` without an unfinished character, or the beginning of a stop text, at its end."""
        text = self.whole.rstrip(UNFINISHED)
        doubtful = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), doubtful, -1):
                if text.endswith(stop[:length]):
                    doubtful = length
                    break
        return text[: len(text) - doubtful]
