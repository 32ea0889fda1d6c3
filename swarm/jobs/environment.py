"""Renders, plays and grades an environment peer's environments; `swarm environment check` has a
service of its own, over its own answers and junk."""

from typing import ClassVar, Protocol

import msgspec

from swarm.jobs import SubmissionOrder
from swarm.jobs.inference import Probe
from swarm.wire.manifest import EnvironmentReference, OptionValue
from swarm.wire.messages import Digest
from swarm.wire.turns import EpisodeGrade
from swarm.world import Job, Setup


class EnvironmentSetup(Setup, frozen=True, kw_only=True):
    environments: list[EnvironmentReference]
    """The served ones among the run's, which are loaded at once."""
    folder: str
    """Hugging Face folder of a policy of the run: its tokenizer and config.json."""


class EpisodeJob(Job, frozen=True, kw_only=True):
    patience_seconds: ClassVar[float] = 600.0
    """The peer's setting `seconds_max` is the deadline."""

    order: SubmissionOrder
    group: int


class DrawPrompt(EpisodeJob, frozen=True, kw_only=True):
    """Draw a group's task, and render its prompt."""


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    last: bool
    """Whether the episode has a single turn."""


class PlayTurn(EpisodeJob, frozen=True, kw_only=True):
    """Answer the last of an episode's segments, a model segment."""

    sample: int
    segments: list[list[int]]
    """Token ids of the prompt, then of the turns of model and environment."""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    """Empty: the episode is over."""
    differs: bool = False
    """Whether an earlier turn, played again, differs from that in the request."""


class GradeEpisode(EpisodeJob, frozen=True, kw_only=True):
    sample: int
    segments: list[list[int]]


class EnvironmentService(Protocol):
    """Plays one episode at a time. It may be killed at any moment: a request can make all again."""

    async def probe(self, job: Probe) -> Digest: ...

    async def draw(self, job: DrawPrompt) -> Drawn:
        """Raises `UserError` for an environment whose code fails."""

    async def play(self, job: PlayTurn) -> Played:
        """Raises `UserError` if the environment's code fails, `ValueError` for another prompt."""

    async def grade(self, job: GradeEpisode) -> EpisodeGrade:
        """Raises as `play`."""


class TrialSetup(Setup, frozen=True, kw_only=True):
    """Raises `UserError` for an environment that cannot be loaded, and for a wrong option."""

    environment: str
    options: dict[str, OptionValue]
    model: str = ""
    """Hugging Face folder whose tokenizer renders the prompts; empty: none does."""


class TryEnvironment(Job, frozen=True, kw_only=True):
    """Draw `tasks` tasks of each split, and play the first `graded` over their answers and junk."""

    patience_seconds: ClassVar[float] = 60.0
    """Each call of the environment's code is bounded by its own limit; this ends what even that
    cannot."""

    tasks: int
    graded: int


class Tried(msgspec.Struct, kw_only=True):
    version: str = "?"
    several_turns: bool = False
    faults: list[str] = []
    """Sentences, each of which would prevent or spoil a run."""
    warnings: list[str] = []
    answers: list[tuple[str, str]] = []
    """(the call, its result), for a comparison with another process."""
    different: int = 0
    """Different prompts among the training tasks."""
    prompt_tokens: list[int] = []
    answer_tokens: list[int] = []
    probe_hash: str = ""
    """Hex; empty without a tokenizer."""
    answer_rewards: list[float] = []
    """Rewards of the tasks' own answers; empty if they have none."""
    junk_rewards: list[float] = []
    parts: list[str] = []
    not_gradable: int = 0
    """Grades that the environment could not know."""


class TrialService(Protocol):
    async def play(self, job: TryEnvironment) -> Tried: ...
