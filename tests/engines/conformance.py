"""What every engine must do: inherit `Conformance`, give an engine, and run its tests.

Each test judges an engine by its own prefill, or by another that computes the same model: the
sampling gate of a validator, and the hidden states that proofs are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers.engines.batch import generate, requests_for
from peers.engines.engine import Engine, Piece, Request
from peers.engines.noise import gumbel_noise
from peers.engines.winners import judge_margins

KEY = (7, 8)
PROMPTS = [[1, 5, 9], [3], [7, 7, 2, 40, 41, 42, 8], [1, 5, 9], [11, 12], list(range(1, 20))]
STOPS = (0, 3)


@dataclass(frozen=True)
class Tolerance:
    """How far an engine may be from the prefill that judges it."""

    margin: float
    """Largest perturbed logit minus the sampled token's."""
    log_probability: float
    hidden: float
    """Of hidden states, relative to their norm."""
    same_tokens: bool
    """Whether the tokens are the same at any batch composition."""


FP32 = Tolerance(margin=1e-3, log_probability=1e-4, hidden=0.01, same_tokens=True)
BF16 = Tolerance(margin=0.5, log_probability=0.3, hidden=0.05, same_tokens=False)

Policies = Callable[[str], list[Path]]
"""Two policies of the model with a name in `tests.engines.families`; a fixture."""


def requests(prompts: Sequence[Sequence[int]] = PROMPTS, limit: int = 12) -> list[Request]:
    return requests_for(prompts, range(len(prompts)), KEY, 1.0, STOPS, limit)


def drain(engine: Engine) -> dict[int, Piece]:
    """Step until two steps in a row finish nothing and change nothing."""
    found: dict[int, Piece] = {}
    idle = 0
    while idle < 100:
        pieces = engine.step()
        found |= {piece.id: piece for piece in pieces}
        idle = 0 if pieces else idle + 1
    return found


class Conformance:
    """Inherit it in a module of tests."""

    tolerance = FP32
    families: Sequence[str] = ("qwen2-tied", "qwen2")
    """Models to test with, by their names in `tests.engines.families`; tied and untied heads."""

    def make(self, folder: Path, policy: int = 0) -> Engine:
        """An engine with a policy."""
        raise NotImplementedError

    _kept: ClassVar[dict[type, Engine]] = {}

    def engine_kept(self, folder: Path) -> Engine:
        """An engine that all examples of a property share."""
        if type(self) not in self._kept:
            self._kept[type(self)] = self.make(folder)
        return self._kept[type(self)]

    @pytest.fixture
    def folder(self, policies: Policies) -> Path:
        return policies(self.families[0])[0]

    def judge(
        self, judge: Engine, asked: Sequence[Request], pieces: Sequence[Piece], start: int = 0
    ) -> None:
        """Check pieces as a validator would; `start` skips as many tokens of each."""
        for request, piece in zip(asked, pieces, strict=True):
            count = len(piece.tokens) - start
            before = len(request.tokens) + start
            sequence = [*request.tokens, *piece.tokens]
            prefill = judge.prefill([sequence], [range(before, len(sequence))])
            positions = torch.arange(count) + request.start + start
            noise = gumbel_noise(
                KEY, torch.tensor(request.row), positions, judge.capabilities.vocabulary_size
            )
            drawn = torch.tensor(piece.tokens[start:])
            logits = judge.logits(prefill.states[0]).cpu()
            found = judge_margins(logits, drawn, request.temperature, noise)
            assert float(found.margin.max()) <= self.tolerance.margin
            difference = found.log_probability - piece.log_probabilities[start:]
            assert float(difference.abs().max()) <= self.tolerance.log_probability
            self.near(piece.hidden[start:], prefill.hidden[0])
            if start == 0:
                self.near(piece.prompt_hidden, prefill.prompt_hidden[0])

    def near(self, one: torch.Tensor, other: torch.Tensor) -> None:
        assert one.shape == other.shape and one.dtype == other.dtype == torch.bfloat16
        one, other = one.cpu(), other.cpu()
        distance = (one.float() - other.float()).norm(dim=-1)
        assert bool((distance <= self.tolerance.hidden * other.float().norm(dim=-1)).all())

    def same(self, one: Sequence[Piece], other: Sequence[Piece]) -> None:
        if self.tolerance.same_tokens:
            assert [piece.tokens for piece in one] == [piece.tokens for piece in other]

    def test_hidden_states_and_samples_are_those_of_a_prefill(self, policies: Policies) -> None:
        for family in self.families:
            engine = self.make(policies(family)[0])
            asked = requests(limit=20)
            self.judge(engine, asked, generate(engine, asked))

    def test_a_row_gets_the_same_tokens_in_any_batch(self, folder: Path) -> None:
        engine = self.make(folder)
        asked = requests()
        together = generate(engine, asked)
        alone = [generate(engine, [request])[0] for request in asked]
        late: dict[int, Piece] = {}
        for request in reversed(asked):
            engine.submit(request)
            late |= {piece.id: piece for piece in engine.step()}
        late |= drain(engine)
        for pieces in (alone, [late[request.id] for request in asked]):
            self.same(together, pieces)
            self.judge(engine, asked, pieces)

    def test_settings_differ_by_row(self, folder: Path) -> None:
        """Other temperatures, stop ids, limits, keys and greedy rows in one batch."""
        engine = self.make(folder)
        first = requests(limit=6)
        asked = [
            replace(first[0], temperature=0.7),
            replace(first[1], stop_ids=(), limit=17),
            replace(first[2], temperature=1.3, limit=1),
            replace(first[3], noise_key=(1, 2)),
            replace(first[4], noise_key=None),
        ]
        together = generate(engine, asked)
        self.same(together, [generate(engine, [request])[0] for request in asked])
        assert len(together[1].tokens) == 17 and len(together[2].tokens) == 1
        self.judge(engine, asked[:3], together[:3])

    def test_a_group_shares_its_prompt(self, folder: Path) -> None:
        engine = self.make(folder)
        asked = requests([[5, 6, 7, 8]] * 12 + [[9, 10]] * 12)
        made = generate(engine, asked)
        assert len({tuple(piece.tokens) for piece in made[:12]}) > 1
        self.judge(engine, asked, made)

    def test_a_swap_leaves_no_trace_of_the_old_weights(self, policies: Policies) -> None:
        """Tied and untied heads; caches kept for the next turn; shared prompts."""
        for family in self.families:
            old, new = policies(family)
            engine, fresh = self.make(old, 4), self.make(new, 5)
            first = [replace(each, keep=True, stop_ids=(), limit=20) for each in requests(limit=5)]
            first = [replace(each, limit=5) for each in first]
            made = generate(engine, first)
            assert all(piece.spans == [(4, 5)] for piece in made)
            engine.load_weights(new, 5)
            asked = requests()
            asked = [replace(each, id=100 + each.id) for each in asked]
            pieces = generate(engine, asked)
            self.same(pieces, generate(fresh, asked))
            self.judge(fresh, asked, pieces)
            turns = [
                replace(
                    each,
                    id=200 + each.id,
                    tokens=[*each.tokens, *piece.tokens, 4, 6],
                    start=5,
                    limit=9,
                    continues=each.id,
                    keep=False,
                )
                for each, piece in zip(first, made, strict=True)
            ]
            pieces = generate(engine, turns)
            assert {policy for piece in pieces for policy, _ in piece.spans} == {5}
            self.judge(fresh, turns, pieces)

    def test_a_swap_in_flight_is_recorded(self, policies: Policies) -> None:
        """Tokens after the swap are those of the new policy after the same tokens."""
        old, new = policies(self.families[0])
        engine = self.make(old, 1)
        if not engine.capabilities.in_flight:
            pytest.skip("the engine swaps between requests only")
        asked = [replace(each, stop_ids=()) for each in requests([*PROMPTS, [1, 5, 9]], limit=10)]
        for request in asked:
            engine.submit(request)
        for _ in range(4):
            assert engine.step() == []
        engine.load_weights(new, 2)
        found = drain(engine)
        judge, crossed = self.make(new, 2), 0
        whole = generate(self.make(old, 1), asked)
        for request, before in zip(asked, whole, strict=True):
            piece = found[request.id]
            first = sum(count for policy, count in piece.spans if policy == 1)
            spans = [(1, first), (2, 10 - first)]
            assert piece.spans == [span for span in spans if span[1]] and first <= 4
            self.judge(judge, [request], [piece], start=first)
            crossed += first > 0
            assert len(piece.swap_hidden) == len(piece.spans) - 1
            for rows in piece.swap_hidden:  # what the new policy makes of all before the swap
                text = [*request.tokens, *piece.tokens]
                given = len(request.tokens) + first
                expected = judge.prefill([text], [range(given, len(text))]).prompt_hidden[0]
                self.near(rows, expected[len(expected) - len(rows) :])
            if first:
                self.near(piece.prompt_hidden, before.prompt_hidden)
                self.near(piece.hidden[:1], before.hidden[:1])
                if self.tolerance.same_tokens:
                    assert piece.tokens[:first] == before.tokens[:first]
                    self.near(piece.hidden[:first], before.hidden[:first])
        assert crossed

    def test_an_episode_of_several_turns_keeps_its_cache(self, folder: Path) -> None:
        """Model segments with environment tokens between them equal a prefill of the whole."""
        engine = self.make(folder)
        for keep in (True, False):
            before: list[Request | None] = [None] * len(PROMPTS)
            tokens = [list(prompt) for prompt in PROMPTS]
            for turn in range(3):
                asked = [
                    Request(
                        id=turn * 100 + row,
                        tokens=tokens[row],
                        row=row,
                        noise_key=KEY,
                        temperature=1.0,
                        stop_ids=(),
                        limit=4 * turn + 4,
                        start=4 * turn,
                        continues=None if last is None else last.id,
                        keep=keep,
                    )
                    for row, last in enumerate(before)
                ]
                pieces = generate(engine, asked)
                self.judge(engine, asked, pieces)
                tokens = [
                    [*request.tokens, *piece.tokens, 20 + turn, 21]
                    for request, piece in zip(asked, pieces, strict=True)
                ]
                before = list(asked)
            for request in asked:
                engine.cancel(request.id)

    def test_a_cache_that_does_not_fit_the_episode_is_not_used(self, folder: Path) -> None:
        engine = self.make(folder)
        first = replace(requests()[2], keep=True, limit=3, stop_ids=())
        generate(engine, [first])
        other = replace(first, id=9, tokens=[9] * 30, continues=first.id, keep=False, limit=6)
        self.judge(engine, [other], generate(engine, [other]))
        unknown = replace(other, id=10, continues=77)
        self.judge(engine, [unknown], generate(engine, [unknown]))

    def test_cancelled_requests_vanish(self, folder: Path) -> None:
        engine = self.make(folder)
        asked = [replace(each, stop_ids=()) for each in requests()]
        whole = generate(engine, asked)
        for request in asked:
            engine.submit(request)
        engine.cancel(5)
        for _ in range(3):
            engine.step()
        for id in (1, 3, 3, 99):
            engine.cancel(id)
        engine.submit(asked[3])
        found = drain(engine)
        assert sorted(found) == [0, 2, 3, 4]
        left = [asked[id] for id in sorted(found)]
        self.same([found[each.id] for each in left], [whole[each.id] for each in left])
        self.judge(engine, left, [found[each.id] for each in left])

    def test_ends(self, folder: Path) -> None:
        """At a stop token, also as the first token, and at a limit, also of one token."""
        engine = self.make(folder)
        free = [replace(each, stop_ids=()) for each in requests()]
        whole = generate(engine, free)
        first = [
            replace(each, stop_ids=(piece.tokens[0],))
            for each, piece in zip(free, whole, strict=True)
        ]
        for piece, ended in zip(generate(engine, first), whole, strict=True):
            if self.tolerance.same_tokens:
                assert (piece.tokens, piece.finish) == (ended.tokens[:1], "stop")
        one = generate(engine, [replace(each, limit=1) for each in free])
        assert [(len(piece.tokens), piece.finish) for piece in one] == [(1, "length")] * len(one)
        further = [replace(each, start=11, row=0) for each in free]
        assert all(len(piece.tokens) == 1 for piece in generate(engine, further))
        for request, piece in zip(asked := requests(), generate(engine, asked), strict=True):
            assert piece.finish == ("stop" if piece.tokens[-1] in STOPS else "length")
            assert not set(piece.tokens[:-1]) & set(STOPS)
            assert len(piece.tokens) == len(piece.log_probabilities) == len(piece.hidden)
            assert piece.finish == "stop" or len(piece.tokens) == request.limit

    def test_bad_requests_are_refused(self, folder: Path) -> None:
        engine = self.make(folder)
        good = requests()[0]
        length_max = engine.capabilities.length_max
        for bad, words in (
            (replace(good, tokens=[]), "no token"),
            (replace(good, tokens=[engine.capabilities.vocabulary_size]), "outside the vocabulary"),
            (replace(good, tokens=[-1]), "outside the vocabulary"),
            (replace(good, limit=0), "below the limit"),
            (replace(good, start=12), "below the limit"),
            (replace(good, temperature=0.0), "the temperature is 0; it must be above 0"),
            (replace(good, temperature=-1.0), "the temperature is -1;"),
            (replace(good, temperature=float("nan")), "the temperature is nan;"),
            (replace(good, temperature=float("inf")), "the temperature is inf;"),
            (replace(good, tokens=[1] * (length_max - 11)), "positions are needed"),
        ):
            with pytest.raises(ValueError, match=words):
                engine.submit(bad)
        assert len(generate(engine, [replace(good, tokens=[1] * (length_max - 12))])) == 1
        engine.submit(good)
        with pytest.raises(ValueError, match="in use"):
            engine.submit(good)
        engine.cancel(good.id)
        assert drain(engine) == {} and engine.step() == []

    # Each class that inherits the property has an engine of its own.
    @settings(
        max_examples=10, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(
        actions=st.lists(
            st.tuples(
                st.sampled_from(["submit", "submit", "step", "step", "step", "cancel"]),
                st.integers(0, 9),
            ),
            max_size=40,
        )
    )
    def test_any_interleaving_gives_the_same_pieces(
        self, policies: Policies, actions: list[tuple[str, int]]
    ) -> None:
        engine = self.engine_kept(policies(self.families[0])[0])
        asked = requests([*PROMPTS, *PROMPTS[:3], [1, 5, 9]], limit=9)
        waiting, flying = list(asked), list[int]()
        found: dict[int, Piece] = {}
        cancelled = set[int]()

        def finish(pieces: list[Piece]) -> None:
            for piece in pieces:
                flying.remove(piece.id)
                found[piece.id] = piece

        for action, index in actions:
            if action == "submit" and waiting:
                request = waiting.pop(index % len(waiting))
                engine.submit(request)
                flying.append(request.id)
            elif action == "cancel" and flying:
                id = flying.pop(index % len(flying))
                engine.cancel(id)
                cancelled.add(id)
            else:
                finish(engine.step())
        for request in waiting:
            engine.submit(request)
            flying.append(request.id)
        while flying:
            finish(engine.step())
        left = [request for request in asked if request.id not in cancelled]
        self.judge(engine, left, [found[request.id] for request in left])
