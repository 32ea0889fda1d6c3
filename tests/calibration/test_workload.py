"""The work that is measured: an environment's prompts, without those that nobody could answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.calibration.work import Workload
from peers.engines import demo
from peers.environments.interface import Grade, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from swarm.errors import UserError
from swarm.wire.manifest import Sampling

SAMPLING = Sampling(max_new_tokens=8, stop_ids=[2], group_size=2, groups_per_submission=8)


class Rows(SingleTurn):
    """A row of a data set in each of some lengths."""

    name, version = "rows", "1"
    lengths: tuple[int, ...] = (4, 1000)

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        raise AssertionError("measuring grades nothing")

    def _make(self, randomness: bytes) -> Task:
        length = self.lengths[randomness[0] % len(self.lengths)]
        return Task("".join(str(byte % 10) for byte in (randomness * 32)[:length]), "")


class TooLong(Rows):
    lengths = (1000,)


def test_a_prompt_that_leaves_no_room_is_drawn_again(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)
    work = Workload(tmp_path, SAMPLING, [Rows()]).work(0)
    lengths = {len(prompt) for prompt in work.prompts}
    assert len(work.prompts) == 16 and max(lengths) < 10
    assert work.prompts[0] == work.prompts[1], "a group has one prompt"


def test_a_data_set_without_a_usable_row_is_one_sentence(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)
    with pytest.raises(UserError, match=r"draws no prompt to measure with .* 1001 tokens"):
        Workload(tmp_path, SAMPLING, [TooLong()]).work(0)


def test_environments_take_turns(tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=1)

    class Short(Rows):
        lengths = (2,)

    work = Workload(tmp_path, SAMPLING, [Rows(), Short()]).work(0)
    assert [len(prompt) < 4 for prompt in work.prompts[::2]] == [False, True] * 4
