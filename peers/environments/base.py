"""The interface of an environment, and the rendering of its tasks into token ids.

An environment draws tasks from a seed and grades completions. Both must be deterministic, because
a validator redraws every task and regrades every completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import blake3
import tokenizers

from swarm.errors import UserError
from swarm.rollouts.seeds import digest

PROBE_TASKS = 64
HELD_OUT_BELOW = 16
"""A prompt whose BLAKE3 starts with a byte below this is held out: one in sixteen."""

REWARD_MAX = 1e6
"""Largest magnitude of a reward that a verdict can carry."""

DRAWS_MAX = 10_000
"""Attempts to draw a task of the requested split. A training task is missed by all of them with
probability (1/16)^10000, a held-out task with (15/16)^10000, which is below 1e-280."""

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Task:
    """One problem to solve."""

    prompt: str
    answer: str
    target_length: int = 0
    """Completion tokens that the prompt asks for; 0: it asks for no length."""
    length_weight: float = 0.0
    """Reward lost per token of distance from the target."""
    inner: Task | None = None
    """The task of the wrapped environment, if another environment changed its prompt."""

    @property
    def own(self) -> Task:
        """The task as the innermost environment drew it."""
        return self if self.inner is None else self.inner.own

    def length_penalty(self, tokens: int) -> float:
        """The reward that a completion of `tokens` tokens, stop token included, loses."""
        return self.length_weight * abs(self.target_length - tokens)


class Environment(Protocol):
    """Draws tasks from seeds and grades completions.

    A change to any task or grade needs a new `version`. The class is constructed without
    arguments. If it has an attribute `Options`, a `msgspec.Struct`, it is constructed with an
    instance of it that holds the options in the run manifest.
    """

    name: str
    version: str

    def task(self, seed: bytes, split: Split = "train") -> Task:
        """Draw a task; equal seeds give equal tasks on every machine."""
        ...

    def reward(self, task: Task, completion_text: str, finished: bool) -> float:
        """Grade a completion, without its stop token, in [0, 1].

        `finished` says whether the completion ended with a stop token rather than at the length
        limit. The text comes from an untrusted peer. Must not raise.
        """
        ...


@runtime_checkable
class Curriculum(Protocol):
    """An optional extension of `Environment`: tasks that grow harder during the run."""

    def task_at(self, seed: bytes, step: int, split: Split = "train") -> Task:
        """Draw a task for rollout step `step`; equal arguments give equal tasks everywhere."""
        ...


@runtime_checkable
class MultiTurn(Protocol):
    """An optional extension of `Environment`: it answers the model, in episodes of several turns.

    `turns` are the texts after the prompt: model, environment, model, and so on; the last is the
    model's. Model texts lack their stop token and come from an untrusted peer.
    """

    def answer(self, task: Task, turns: Sequence[str]) -> str | None:
        """The environment's next turn, or None when the episode is over.

        Called only after a model turn that ended with a stop token. Must be deterministic,
        because a validator replays every episode. Must not raise.
        """
        ...

    def episode_reward(self, task: Task, turns: Sequence[str], finished: bool) -> float:
        """Grade a whole episode in [0, 1]; called instead of `Environment.reward`."""
        ...


def multi_turn(environment: Environment) -> MultiTurn | None:
    """The environment that answers the model, or None for an environment with single turns.

    That is the environment itself, or the environment that it wraps (its attribute `inner`).
    """
    if isinstance(environment, MultiTurn):
        return environment
    inner: Environment | None = getattr(environment, "inner", None)
    return None if inner is None else multi_turn(inner)


def answer_of(environment: Environment, task: Task, turns: Sequence[str]) -> str | None:
    """The environment's next turn; raises `UserError` when its code raises or gives no text."""
    answering = multi_turn(environment)
    if answering is None:
        return None
    text = repr(turns[-1][:40])
    try:
        answer = answering.answer(task.own, turns)
    except Exception as error:  # the code is a lab's, and may raise anything
        raise UserError(
            f"environment {environment.name!r} cannot answer the turn {text} "
            f"({described(error)}); repair it"
        ) from error
    if answer is not None and not isinstance(answer, str):
        raise UserError(
            f"environment {environment.name!r} answers the turn {text} with {answer!r:.100}; it "
            "must be text, or None to end the episode"
        )
    return answer


def task_of_step(environment: Environment, seed: bytes, step: int, split: Split = "train") -> Task:
    """Draw the task of a seed in a rollout step, with `task_at` if the environment has it.

    Raises `UserError` when the environment's code raises or returns no task.
    """
    if isinstance(environment, Curriculum):
        return _drawn(environment, partial(environment.task_at, seed, step, split))
    return task_of(environment, seed, split)


def task_of(environment: Environment, seed: bytes, split: Split = "train") -> Task:
    """Draw the task of a seed independently of the step; raises `UserError` as `task_of_step`."""
    return _drawn(environment, partial(environment.task, seed, split))


def _drawn(environment: Environment, draw_it: Callable[[], Task]) -> Task:
    try:
        task = draw_it()
    except Exception as error:  # the code is a lab's, and may raise anything
        raise UserError(
            f"environment {environment.name!r} cannot draw a task ({described(error)}); repair it"
        ) from error
    if not isinstance(task, Task) or not isinstance(task.prompt, str):
        raise UserError(
            f"environment {environment.name!r} draws {task!r:.100}; it must be a Task with a "
            "prompt of text"
        )
    return task


def grade(environment: Environment, task: Task, turns: Sequence[str], finished: bool) -> float:
    """The environment's reward for an episode.

    `turns` as for `MultiTurn.answer`; without `MultiTurn` it holds one text. Raises `UserError`
    when the environment's code raises or the reward is not a number within ±`REWARD_MAX`.
    """
    text = repr(turns[-1][:40])
    try:
        answering = multi_turn(environment)
        if answering is not None:
            reward = answering.episode_reward(task.own, turns, finished)
        else:
            reward = environment.reward(task, turns[-1], finished)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"environment {environment.name!r} cannot grade the completion {text} "
            f"({described(error)}); a reward must never raise, but be 0 for what it does not "
            "understand"
        ) from error
    if not isinstance(reward, (int, float)) or not abs(reward) <= REWARD_MAX:
        raise UserError(
            f"environment {environment.name!r} gives the completion {text} the reward {reward!r}; "
            f"it must be a number of at most {REWARD_MAX:g}"
        )
    return float(reward)


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def split_of(prompt: str) -> Split:
    """The split a prompt belongs to, by its hash, so that training never sees a held-out prompt."""
    first_byte = blake3.blake3(prompt.encode("utf-8")).digest()[0]
    return "held_out" if first_byte < HELD_OUT_BELOW else "train"


def draw(seed: bytes, split: Split, make: Callable[[bytes], Task]) -> Task:
    """The first task of `split` that `make` returns.

    Attempt 0, 1, … passes 32 bytes to `make`, derived from the seed and the attempt's number.
    Raises `ValueError` when `DRAWS_MAX` attempts give none: `make` then ignores its argument or
    has too few prompts.
    """
    for attempt in range(DRAWS_MAX):
        task = make(digest("swarm/1/draw", seed, attempt.to_bytes(4, "big")))
        if split_of(task.prompt) == split:
            return task
    raise ValueError(f"no {split} task in {DRAWS_MAX} draws")


class Renderer:
    """The tokenizer of a Hugging Face model folder, without transformers."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`/tokenizer.json; raises `UserError` when it is missing or broken."""
        path = folder / "tokenizer.json"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise UserError(f"tokenizer {path} cannot be read ({error.strerror})") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"{path} is no tokenizer file ({error})") from error
        self.tokenizer_hash: bytes = blake3.blake3(raw).digest()
        """BLAKE3-256 of the bytes of tokenizer.json."""

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds (`<bos>`)."""
        return list(self._tokenizer.encode(prompt).ids)

    def encode_completion(self, text: str) -> list[int]:
        """Token ids of a completion's text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode_completion(self, tokens: Sequence[int], stop_ids: Sequence[int]) -> tuple[str, bool]:
        """Decode a completion into (text without its final stop token, finished).

        Any other special token stays visible in the text, so that no grader overlooks it.
        Raises `ValueError` for an id outside every vocabulary.
        """
        if any(not 0 <= token < 1 << 31 for token in tokens):
            raise ValueError("a token id is negative or beyond 31 bits")
        finished = bool(tokens) and tokens[-1] in stop_ids
        kept = tokens[:-1] if finished else tokens
        return self._tokenizer.decode(list(kept), skip_special_tokens=False), finished


def probe_seed(index: int) -> bytes:
    """The seed of one of the `PROBE_TASKS` probe tasks."""
    return digest("swarm/1/probe", index.to_bytes(4, "big"))


def probe_hash(environment: Environment, renderer: Renderer) -> bytes:
    """BLAKE3-256 over the token ids of 64 probe tasks: two machines with equal hashes render alike.

    Each task adds three items: the token ids of its prompt, those of its answer (each list as a
    4-byte big-endian count and 4-byte big-endian ids), and its target length (4 bytes, big endian).
    """
    hasher = blake3.blake3(b"swarm/1/probe")
    for index in range(PROBE_TASKS):
        task = task_of(environment, probe_seed(index))
        for tokens in (
            renderer.encode_prompt(task.prompt),
            renderer.encode_completion(task.answer),
        ):
            hasher.update(b"".join(n.to_bytes(4, "big") for n in (len(tokens), *tokens)))
        hasher.update(task.target_length.to_bytes(4, "big"))
    return hasher.digest()
