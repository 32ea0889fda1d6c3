"""The service of `swarm environment check`: one environment, over its own answers and junk."""

from __future__ import annotations

from typing import ClassVar, Protocol

import msgspec

from swarm.wire.manifest import OptionValue
from swarm.world import Job, Setup

PATIENCE_SECONDS = 60.0
"""Each call of the environment's code is bounded by its own limit; this ends a call that even that
limit cannot interrupt."""


class TrialSetup(Setup, frozen=True, kw_only=True):
    """Raises `UserError` for an environment that cannot be loaded, and for a wrong option."""

    environment: str
    options: dict[str, OptionValue]
    model: str = ""
    """Hugging Face folder whose tokenizer renders the prompts; empty: none does."""


class ListInstalled(Job, frozen=True, kw_only=True):
    patience_seconds: ClassVar[float] = PATIENCE_SECONDS


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """An environment of this machine."""

    name: str
    package: str
    """The package that registers it, with its version; empty: built into Swarm."""
    version: str = ""
    several_turns: bool = False
    options: list[str] = []
    """Names of its own options."""
    problem: str = ""
    """Why it cannot be loaded."""


class InstalledList(msgspec.Struct, frozen=True, kw_only=True):
    environments: list[Installed]


class CatalogueService(Protocol):
    """Lists the environments of this machine."""

    async def list(self, job: ListInstalled) -> InstalledList: ...


class Describe(Job, frozen=True, kw_only=True):
    patience_seconds: ClassVar[float] = PATIENCE_SECONDS


class Described(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    several_turns: bool
    call_seconds: float


class Findings(msgspec.Struct, kw_only=True):
    """What a part of the trial found."""

    faults: list[str] = []
    """Sentences, each of which would prevent or spoil a run."""
    warnings: list[str] = []
    answers: list[tuple[str, str]] = []
    """(the call, its result), for a comparison with another process."""


class DrawTrial(Job, frozen=True, kw_only=True):
    """Draw `tasks` tasks of each split."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS

    tasks: int


class TrialDrawn(Findings, kw_only=True):
    seconds: list[float] = []
    """Of each draw of a training task."""
    different: int = 0
    """Different prompts among the training tasks."""
    held_out_share: float | None = None
    """None: the tasks do not say how they are split."""
    prompt_tokens: list[int] = []
    answer_tokens: list[int] = []
    probe_hash: str = ""
    """Hex; empty without a tokenizer."""


class GradeTrial(Job, frozen=True, kw_only=True):
    """Play the first `tasks` training tasks over their answers, and over junk."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS

    tasks: int


class TrialGraded(Findings, kw_only=True):
    answer_rewards: list[float] = []
    """Rewards of the tasks' own answers; empty if they have none."""
    junk_rewards: list[float] = []
    parts: list[str] = []
    not_gradable: int = 0
    """Grades that the environment could not know."""
    grade_seconds: list[float] = []
    step_seconds: list[float] = []
    grown_bytes: int = 0
    """Growth of the process's memory while it graded."""


class TrialService(Protocol):
    """Tries one environment."""

    async def describe(self, job: Describe) -> Described: ...

    async def draw(self, job: DrawTrial) -> TrialDrawn: ...

    async def grade(self, job: GradeTrial) -> TrialGraded: ...
