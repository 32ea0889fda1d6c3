"""Examples to learn from, as the rows of a data set have them.

A row is a prompt with an answer, a chat, a prompt with a chosen and a rejected answer, a response
of SYNTHETIC-1 (`swarm synthesize`), or a rollout (`swarm rollouts export`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peers.environments import Renderer, Task
from peers.environments.columns import Row, flat, value_of
from peers.environments.dataset import prompt_columns, prompt_in, prompt_of, text_in
from peers.environments.interface import Conversation, Message, Prompt, messages_of
from peers.environments.rows import Rows
from swarm.errors import UserError
from swarm.jobs.offline import Reading
from swarm.rollouts.rollout import Rollout, Segment, Span

ROLLOUT = "turns"
"""The column that only exported rollouts have."""

CHAT = "messages"
"""The column with a whole conversation."""

RESPONSE = "llm_response"
SOLUTION = {"problem_id", "score", RESPONSE}
"""The columns that a teacher's solutions have."""

KINDS = ("prompt", "model", "environment")


@dataclass(frozen=True)
class Chat:
    """A conversation; the model writes the messages of the role `assistant`."""

    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Sampled:
    """What a policy answered, with its reward."""

    example: Rollout | Task | Chat
    group: tuple[str, str | int]
    """Shared by all answers to a prompt."""
    reward: float


Record = Task | Chat | Sampled


class Records:
    """The examples of a data set."""

    def __init__(self, rows: Rows, reading: Reading, renderer: Renderer) -> None:
        self._rows, self._data = rows, rows.where
        self._reading, self._renderer = reading, renderer
        self.unwanted = 0
        """Answers of policies passed over so far: refused, or with a reward out of bounds."""
        columns = set(rows.columns)
        self._are_rollouts = ROLLOUT in columns
        self._are_solutions = columns >= SOLUTION and not self._are_rollouts
        self._reward = "score" if self._are_solutions else "reward"
        self._answer = reading.answer_column
        if self._are_solutions and self._answer not in columns:
            self._answer = RESPONSE
        where = flat(reading.where)
        self._indices = rows.matching(where, "--where") if where else range(len(rows))

    def __iter__(self) -> Iterator[Record]:
        """Each example; raises `UserError` with the row."""
        columns, asked = self._rows.columns, self._reading.prompt_column
        if not self._are_rollouts and (CHAT not in columns or asked in columns):
            wanted = [*prompt_columns(asked), self._answer]
            self._rows.check_columns(wanted, "--prompt-column or --answer-column")
        for index in self._indices:
            row = self._rows[index]
            where = f"{self._data}, row {index}"
            if not self._is_wanted(row):
                self.unwanted += 1
                continue
            if self._are_rollouts:
                yield self._rollout(row, where)
            elif self._are_solutions:
                group = str(row.get("task_type")), str(row["problem_id"])
                yield Sampled(self._written(row, where), group, float(row[self._reward]))
            else:
                yield self._written(row, where)

    def pairs(self) -> Iterator[tuple[Record, Record]]:
        """Each (chosen, rejected) pair: best and worst, if they differ; raises `UserError`."""
        if self._are_rollouts or self._are_solutions:
            yield from self._best_and_worst()
            return
        self._rows.check_columns(("chosen", "rejected"), "--data")
        for index in self._indices:
            row = self._rows[index]
            where = f"{self._data}, row {index}"
            chosen, rejected = (
                self._answered(row, answer, where) for answer in ("chosen", "rejected")
            )
            yield chosen, rejected

    def _best_and_worst(self) -> Iterator[tuple[Record, Record]]:
        groups: dict[tuple[str, str | int], tuple[Sampled, Sampled]] = {}
        for record in self:
            assert isinstance(record, Sampled)
            best, worst = groups.get(record.group, (record, record))
            groups[record.group] = (
                record if record.reward > best.reward else best,
                record if record.reward < worst.reward else worst,
            )
        for best, worst in groups.values():
            if best.reward > worst.reward:
                yield best, worst

    def _answered(self, row: Row, answer: str, where: str) -> Record:
        """A prompt with one of its answers, either of them text or messages."""
        asked = self._reading.prompt_column
        try:
            values = {name: value_of(row, name) for name in prompt_columns(asked)}
        except ValueError:
            values = {}
        prompt = prompt_of(asked, values, where) if any(values.values()) else ()
        answered = prompt_in(row, answer, where)
        if isinstance(answered, str):
            if not prompt:
                raise UserError(f"{where} lacks {asked!r}, the prompt of its answers; add it")
            return Task(self._asked(prompt), answered)
        begin, messages = messages_of(prompt), messages_of(answered)
        if messages[: len(begin)] != begin and (
            not isinstance(prompt, str) or messages[0].role == "assistant"
        ):
            messages = begin + messages
        return Chat(messages)

    def _is_wanted(self, row: Row) -> bool:
        """Whether the reward of a policy's answer is within bounds, and not refused."""
        if not self._are_rollouts and not self._are_solutions:
            return True
        reward = row.get(self._reward)
        low, high = self._reading.reward
        return (
            isinstance(reward, (int, float))
            and low <= reward <= high
            and row.get("verdict") != "refused"
        )

    def _written(self, row: Row, where: str) -> Chat | Task:
        if row.get(CHAT):
            return Chat(messages_of(prompt_in(row, CHAT, where)))
        asked, answered = self._reading.prompt_column, self._answer
        try:
            values = {name: value_of(row, name) for name in (*prompt_columns(asked), answered)}
        except ValueError as error:
            raise UserError(f"{where} cannot be used ({error}); repair it") from error
        prompt, answer = prompt_of(asked, values, where), text_in(values, answered, where)
        return Task(self._asked(prompt), answer)

    def _asked(self, prompt: Prompt) -> Prompt:
        is_chat = self._reading.chat or not isinstance(prompt, str)
        return Conversation(messages_of(prompt)) if is_chat else prompt

    def _rollout(self, row: Row, where: str) -> Sampled:
        """An exported rollout, or its messages if it was sampled with another tokenizer."""
        try:
            rollout = Rollout([_segment(turn) for turn in row[ROLLOUT]])
            group = str(row["submission"]), int(row["group"])
            own = self._are_own(row[ROLLOUT], where)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{where} is no rollout as `swarm rollouts export` writes them ({error}); export "
                "the rollouts again"
            ) from error
        if own:
            return Sampled(rollout, group, float(row["reward"]))
        if not row.get(CHAT):
            raise UserError(
                f"{where} was sampled with another tokenizer than the model's, so its tokens "
                "mean other texts; choose a model of that run, or make examples of texts"
            )
        return Sampled(self._written(row, where), group, float(row["reward"]))

    def _are_own(self, turns: Sequence[Any], where: str) -> bool:
        """Whether this tokenizer gives the tokens their text; raises `UserError` if none."""
        for turn in turns:
            if turn["text"] is None:
                raise UserError(
                    f"{where} has no text, so that its tokenizer is unknown; export the rollouts "
                    "with --tokenizer FOLDER"
                )
        return all(
            self._renderer.decode_completion(turn["tokens"], ())[0] == turn["text"]
            for turn in turns
        )


def _segment(turn: Any) -> Segment:
    if turn["kind"] not in KINDS:
        raise ValueError(f"kind is {turn['kind']!r}")
    tokens = [int(token) for token in turn["tokens"]]
    if turn["kind"] != "model":
        return Segment(turn["kind"], tokens)
    return Segment("model", tokens, turn["finish"], spans=[Span(policy=0, tokens=len(tokens))])
