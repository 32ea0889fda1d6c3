"""Environments of several turns: who answers, when an episode ends, what it is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.engines.demo import EOS_ID, save_tokenizer
from peers.environments import (
    Episodes,
    Grade,
    Renderer,
    Task,
    Tasks,
    Transcript,
    episodes_of,
    grade,
    load,
    task_of,
)
from peers.environments.calculator import Calculator, CalculatorOptions
from peers.environments.episodes import EpisodeLimits, Replies, demonstrate, grade_segments
from peers.environments.sort_digits import SortDigits
from swarm.errors import UserError
from swarm.rollouts.rollout import TURNS_MAX, Rollout, Segment, Span

LIMITS = EpisodeLimits(stop_ids=[EOS_ID], max_new_tokens=20, positions_max=64)
TASK = Task("42*9>", "378")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Renderer(folder)


def model(renderer: Renderer, text: str, finished: bool = True) -> Segment:
    tokens = renderer.encode_completion(text) + [EOS_ID] * finished
    return Segment("model", tokens, "stop" if finished else "length", None, (Span(0, len(tokens)),))


def begun(renderer: Renderer, text: str, finished: bool = True) -> list[Segment]:
    prompt = Segment("prompt", renderer.encode_prompt(TASK.prompt))
    return [prompt, model(renderer, text, finished)]


def test_a_demonstration_has_full_reward(renderer: Renderer) -> None:
    for environment in (SortDigits(), Calculator(CalculatorOptions(digits=2))):
        task = task_of(environment, b"seed")
        segments = demonstrate(environment, task, renderer, EOS_ID)
        assert Rollout(segments).model_segments[-1].finish == "stop"
        assert grade_segments(environment, task, renderer, segments, [EOS_ID]).reward == 1


def test_a_demonstration_that_is_not_answered_is_refused(renderer: Renderer) -> None:
    task = Task("1+1>", "2", demonstration=("what?", "2"))
    with pytest.raises(UserError, match="does not answer the turn 'what\\?'"):
        demonstrate(Calculator(), task, renderer, EOS_ID)


def test_the_calculator_answers_a_call_and_rewards_the_answer(renderer: Renderer) -> None:
    calculator = load("calculator", "1")
    segments = begun(renderer, "42*9=")
    replies = Replies(calculator, TASK, renderer, LIMITS)
    answer = replies.next(segments)
    assert answer == renderer.encode_completion("378>")
    segments += [Segment("environment", answer), model(renderer, "378")]
    assert replies.next(segments) is None
    assert grade_segments(calculator, TASK, renderer, segments, [EOS_ID]) == Grade(1.0)
    Rollout(segments)  # a well-formed episode


@pytest.mark.parametrize(
    ("turns", "finished"),
    [
        (["378"], True),  # right, without the tool
        (["42*9="], True),  # no answer
        (["42*9=", "378>", "379"], True),
        (["42*9=", "378>", "378"], False),
        (["42+9=", "51>", "378"], True),  # another call than the task's
        (["42*9=378>378"], True),  # the tool's answer made up
        (["42*9=", "378>", "378", "378>", "378"], True),
    ],
)
def test_anything_else_earns_nothing(turns: list[str], finished: bool) -> None:
    assert grade(Calculator(), TASK, Transcript.of(*turns, finished=finished)) == Grade(0.0)


class Echo(Episodes):
    """Answers every turn with the same text."""

    name, version = "echo", "1"

    def __init__(self, text: object = "1>") -> None:
        self.text = text

    def tasks(self) -> Tasks:
        return SortDigits().tasks()

    def start(self, task: Task) -> None:
        pass

    def step(self, state: None, text: str) -> str | None:
        if isinstance(self.text, Exception):
            raise self.text
        return self.text  # type: ignore[return-value]

    def grade(self, task: Task, transcript: Transcript) -> float:
        return 1.0


def next_of(
    text: object, renderer: Renderer, segments: list[Segment], limits: EpisodeLimits
) -> list[int] | None:
    return Replies(Echo(text), TASK, renderer, limits).next(segments)


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", LIMITS),  # nothing to append
        ("1" * 70_000, LIMITS),
        ("1>", EpisodeLimits([EOS_ID], 20, 5 + 3 + 2 + 17 - 1)),  # one position too few
        ("1>", EpisodeLimits([EOS_ID], 3, 64)),  # the token limit is reached
    ],
)
def test_an_episode_ends_where_a_further_turn_has_no_room(
    renderer: Renderer, text: str, limits: EpisodeLimits
) -> None:
    segments = begun(renderer, "42")
    segments[0] = Segment("prompt", [1, 4, 5, 6, 7])
    room = EpisodeLimits([EOS_ID], 20, 5 + 3 + 2 + 17)
    assert next_of("1>", renderer, segments, room) is not None
    assert next_of(text, renderer, segments, limits) is None


def test_an_episode_ends_at_the_limit_and_after_many_turns(renderer: Renderer) -> None:
    cut = begun(renderer, "42", finished=False)
    assert next_of("1>", renderer, cut, LIMITS) is None
    answer = Segment("environment", renderer.encode_completion("1>"))
    long = begun(renderer, "")
    limits = EpisodeLimits([EOS_ID], 1000, 10_000)
    for _ in range(TURNS_MAX - 1):
        assert next_of("1>", renderer, long, limits) is not None
        long += [answer, model(renderer, "")]
    assert next_of("1>", renderer, long, limits) is None
    Rollout(long)


def test_an_environment_of_single_turns_never_answers(renderer: Renderer) -> None:
    segments = begun(renderer, "42")
    assert episodes_of(SortDigits()) is None
    assert Replies(SortDigits(), TASK, renderer, LIMITS).next(segments) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ValueError("no"), r"'echo' cannot answer the turn '42' \(no\); repair it"),
        (7, r"answers the turn '42' with 7; it must be text, a tuple of messages, or None"),
    ],
)
def test_a_failing_environment_is_one_sentence(
    renderer: Renderer, text: object, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        next_of(text, renderer, begun(renderer, "42"), LIMITS)
