"""Advantages of single tokens: from the values of states within a rollout (VinePPO), or by turn.

Source: VinePPO (arXiv 2410.01679), without discount. The advantage of the tokens between two states
is the later state's value less the earlier one's. The first state's value is the group's mean
reward, which is the mean over G continuations of the prompt, and the last one's is the rollout's
own reward. A rollout without further states so has its group's advantage at every token. By turn,
the environment says what each of the model's turns earned."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from peers.learning.advantages import divisor
from peers.learning.batch import AcceptedGroups
from swarm.jobs.training import StateValue
from swarm.rollouts.rollouts import parts_in
from swarm.wire.manifest import Objective


def give_values(given: AcceptedGroups, values: Sequence[StateValue], objective: Objective) -> None:
    """Give this share advantages from its states' values or, without any, from its groups."""
    given.token_advantage = None
    if not values:
        return
    by_row: defaultdict[int, list[StateValue]] = defaultdict(list)
    for each in values:
        by_row[each.row].append(each)
    size = len(given.rewards[0])
    parts = []
    for row in given.rows.tolist():
        rewards = given.rewards[row // size]
        length = int(given.all_completion_lengths[row])
        parts.append(token_advantages(by_row[row], length, rewards[row % size], rewards, objective))
    given.token_advantage = torch.cat([torch.zeros(0), *parts])


def give_turns(given: AcceptedGroups, objective: Objective) -> None:
    """Give this rank's share of a submission advantages by turn, where the rewards say what each of
    the model's turns earned: in their parts `turn_1`, `turn_2` and so on.

    A turn has the reward less what earlier turns earned, less the mean of that over the group's
    rollouts that had this turn (GRPO with reward to go). So the first turn has the group's
    advantage, and no turn answers for what was lost before it. Turns without a part of their own
    have the advantage of the last that has one, and rollouts without any that of their group."""
    levels: list[list[float]] = []
    """Of every rollout: the advantage of each turn."""
    every = [list(rewards) for rewards in given.rewards]
    for index, rewards in enumerate(every):
        to_go = [
            _to_go(reward, parts)
            for reward, parts in zip(rewards, parts_in(given.parts, every, index), strict=True)
        ]
        scale = float(divisor(torch.tensor(rewards).float(), objective))
        for own in to_go:
            reached = [
                [each[turn] for each in to_go if turn < len(each)] for turn in range(len(own))
            ]
            means = map(fmean, reached)
            levels.append([(a - b) / scale for a, b in zip(own, means, strict=True)])
    found = []
    masks = given.sampled.split(given.lengths.tolist())  # type: ignore[no-untyped-call]
    for row, mask in zip(given.rows.tolist(), masks, strict=True):
        turn = (mask & ~mask.roll(1)).cumsum(0)[mask] - 1  # a sequence's first token is a prompt's
        found.append(torch.tensor(levels[row])[turn.clamp(max=len(levels[row]) - 1)])
    given.token_advantage = torch.cat([torch.zeros(0), *found])


def _to_go(reward: float, parts: Mapping[str, float]) -> list[float]:
    """The reward less what earlier turns earned, by turn; of the first it is the whole."""
    found = [reward]
    while (name := f"turn_{len(found)}") in parts and f"turn_{len(found) + 1}" in parts:
        found.append(found[-1] - parts[name])
    return found


def token_advantages(
    values: Sequence[StateValue],
    length: int,
    reward: float,
    rewards: Sequence[float],
    objective: Objective,
) -> Tensor:
    """Advantages of a rollout's `length` model tokens, fp32 [length].

    `rewards` are the group's. Divided as the group's advantages are
    (`peers.learning.advantages.divisor`), for one scale. Values outside 1 to `length` - 1 are
    ignored; of several at one position the last counts."""
    # As a batch holds them, in fp32; then in fp64, or equal rewards would differ from their mean.
    group = torch.tensor([reward, *rewards]).double()
    known = {each.position: each.value for each in values if 0 < each.position < length}
    positions = [0, *sorted(known), length]
    levels = [group[1:].mean(), *(known[each] for each in positions[1:-1]), group[0]]
    steps = torch.tensor(levels, dtype=torch.float64).diff() / divisor(group[1:], objective)
    return steps.float().repeat_interleave(torch.tensor(positions).diff())
