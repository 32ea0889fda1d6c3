"""How alike two texts are, by the runs of words that they share; and which of many are alike."""

import re
from collections.abc import Iterable
from itertools import islice

from blake3 import blake3

SHINGLE_WORDS = 5
"""Two texts are compared by the runs of five words that they share."""

WORDS = re.compile(r"\w+|[^\w\s]")

DIGEST_BYTES = 8
SKETCH = 8
"""Texts are found by the smallest digests of their runs. Two that share four fifths of their runs
have none of the eight in common with probability 3e-6 (Broder 1997)."""

ALIKE_MAX = 64
"""Texts that one run leads to: an instruction that ends every prompt says nothing."""


def shingles(text: str) -> frozenset[bytes]:
    """Digests of a text's runs of words; of a shorter text, of all its words."""
    words = WORDS.findall(text.lower())
    count = max(1, len(words) - SHINGLE_WORDS + 1)
    runs = (" ".join(words[at : at + SHINGLE_WORDS]) for at in range(count))
    return frozenset(blake3(run.encode()).digest(DIGEST_BYTES) for run in runs)


def similarity(one: frozenset[bytes], other: frozenset[bytes]) -> float:
    """Jaccard's index: the share of runs in common among all runs of both."""
    return len(one & other) / len(one | other)


class Texts:
    """Many texts with their names, of which the one most like another is found."""

    def __init__(self) -> None:
        self._by_run: dict[bytes, list[int]] = {}
        self._texts: list[tuple[bytes, str]] = []
        """Each text's digests, end to end, and its name."""

    def add(self, runs: frozenset[bytes], name: str) -> None:
        """Remember a text by its `shingles`."""
        for run in self._sketch(runs):
            self._by_run.setdefault(run, []).append(len(self._texts))
        self._texts.append((b"".join(runs), name))

    def nearest(self, runs: frozenset[bytes]) -> tuple[float, str]:
        """The similarity of the text most like this one, and its name; 0 if none is alike."""
        near = {at for run in self._sketch(runs) for at in self._by_run.get(run, ())}
        found = (self._texts[at] for at in near)
        return max(
            ((similarity(runs, _split(raw)), name) for raw, name in found), default=(0.0, "")
        )

    def _sketch(self, runs: frozenset[bytes]) -> list[bytes]:
        """The smallest digests, without those of runs that many texts share."""
        rare = (run for run in sorted(runs) if len(self._by_run.get(run, ())) < ALIKE_MAX)
        return list(islice(rare, SKETCH))


def _split(raw: bytes) -> frozenset[bytes]:
    places = range(0, len(raw), DIGEST_BYTES)
    return frozenset(raw[place : place + DIGEST_BYTES] for place in places)


class Novelty:
    """Leaves out texts that repeat an earlier one, or are like one of an evaluation."""

    def __init__(self, similarity: float, evaluations: Iterable[tuple[str, str]]) -> None:
        """Texts and their names; `similarity`: from which on two texts are alike."""
        self._similarity = similarity
        self._seen: set[str] = set()
        self._kept, self._evaluations = Texts(), Texts()
        for text, name in evaluations:
            self._evaluations.add(shingles(text), name)
        self.contaminated: list[str] = []
        """A sentence for each text that is like one of an evaluation."""

    def why_not(self, text: str, name: str) -> str:
        """Why a text is left out; empty: it is new, and remembered."""
        if (plain := " ".join(text.split())) in self._seen:
            return "duplicates"
        self._seen.add(plain)
        runs = shingles(text)
        alike, other = self._evaluations.nearest(runs)
        if alike >= self._similarity:
            self.contaminated.append(f"{name} is like {other} ({alike:.2f})")
            return "like --apart-from"
        if self._kept.nearest(runs)[0] >= self._similarity:
            return "near duplicates"
        self._kept.add(runs, name)
        return ""
