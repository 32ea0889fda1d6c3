"""A sandbox that fails under a package of `verifiers`; needs no such library."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from peers.environments.graders.pool import Pool
from peers.environments.verifiers.child.boxes import Box
from peers.environments.verifiers.child.service import Player
from peers.sandbox import SandboxError, execute


class Swallowing(Player):
    """Its package makes a reward of whatever its command raises, as some do."""

    def __init__(self, loop: asyncio.Runner) -> None:
        self._loop = loop

    async def _answer(
        self, what: str, task: int = 0, texts: list[Any] | None = None, finished: bool = True
    ) -> Any:
        if what == "grade":
            with suppress(Exception):
                Box().run("true", 1.0, {})
        return 0.0


def test_a_reward_is_none_where_the_machine_failed_its_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute, "SETUP_SECONDS", 0.0)
    with asyncio.Runner() as loop:
        player = Swallowing(loop)
        with pytest.raises(SandboxError, match="no sandbox works on this machine"):
            player({"what": "grade"})
        assert player({"what": "draw"}) == 0.0, "the next request is another matter"


def test_a_service_whose_sandbox_fails_is_told_from_one_that_raises() -> None:
    pool = Pool("tests.environments.grader_service:Service", 60.0)
    with pytest.raises(SandboxError, match=r"no sandbox works on this machine .no memory"):
        pool.ask(["sandbox"])
    assert pool.ask([""]), "its process goes on"
    assert pool.replaced == 0
