"""Advantages of single tokens from the values of states within a rollout (VinePPO).

Source: VinePPO (arXiv 2410.01679), without discount. The advantage of the tokens between two states
is the later state's value less the earlier one's. The first state's value is the group's mean
reward, which is the mean over G continuations of the prompt, and the last one's is the rollout's
own reward. A rollout without further states so has its group's advantage at every token."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from peers.learning.advantages import divisor
from peers.learning.batch import AcceptedGroups
from swarm.jobs.training import StateValue
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
        reward = rewards[row % size]
        parts.append(token_advantages(by_row[row], length, reward, rewards, objective))
    given.token_advantage = torch.cat([torch.zeros(0), *parts])


def token_advantages(
    values: Sequence[StateValue],
    length: int,
    reward: float,
    rewards: Sequence[float],
    objective: Objective,
) -> Tensor:
    """Advantages of a rollout's `length` model tokens, fp32 [length].

    `rewards` are the group's. Divided as the group's advantages are
    (`peers.learning.advantages.divisor`), so that rollouts with and without values have one
    scale. Values at positions outside 1 to `length` - 1 are ignored, and of several at one
    position the last counts."""
    group = torch.tensor(rewards).float()
    known = {each.position: each.value for each in values if 0 < each.position < length}
    positions = [0, *sorted(known), length]
    levels = [float(group.mean()), *(known[each] for each in positions[1:-1]), reward]
    steps = torch.tensor(levels).diff() / divisor(group, objective)
    return steps.repeat_interleave(torch.tensor(positions).diff())
