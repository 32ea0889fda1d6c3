"""Submissions of simulated engines: small files whose content follows from the seed."""

from collections.abc import Sequence
from random import Random

import msgspec
from blake3 import blake3

from simnet.compute.setting import Setting, Workload
from swarm.jobs import SubmissionOrder
from swarm.rollouts.seeds import digest as digest_of

POISON = b"a file that crashes its reader"


class Crash(Exception):
    """An operation that kills the child. The argument, if any, is `ChildDied.hung`."""


class SimulatedRollouts(msgspec.Struct, array_like=True):
    """Content of a simulated submission's file."""

    run: str
    lineage: int
    step: int
    policy: int
    worker: str
    number: int
    seed: bytes
    lengths: list[list[int]]
    """Completion lengths in tokens, [groups][G]."""
    invented: bool = False
    """Whether the policy did not generate it; only a prefill notices that."""
    invented_row: int = -1
    """The only row that the policy did not generate; -1: none."""
    edited: bool = False
    """Whether a few tokens were replaced; only the evidence of prefills notices that."""
    variant: int = 0
    """Which of several correct files: another machine's rounding gives other bytes."""
    policies: list[int] = []
    """The policies that sampled it, ascending; empty: `policy` alone."""
    turns: list[list[bytes]] = []
    """[rows] Signed turns of served environments; empty without any."""
    sleeps_seconds: float = 0.0
    """Time that each completion, a program, takes to be graded."""


def rollouts(setting: Setting, order: SubmissionOrder) -> SimulatedRollouts:
    """The honest submission of a worker and number."""
    seed = order.seed()
    chance = Random(seed)
    mean = setting.workload.completion_tokens_mean
    longest = order.sampling.max_new_tokens

    targets: Sequence[int] = ()
    for since, lengths in setting.workload.target_lengths:
        if order.step >= since:
            targets = lengths

    def length() -> int:
        if targets:
            return min(longest, max(1, int(chance.choice(targets) * chance.uniform(0.9, 1.1))))
        return min(longest, 1 + int(chance.expovariate(1 / mean)))

    return SimulatedRollouts(
        run=order.run,
        lineage=order.policy.lineage,
        step=order.step,
        policy=order.policy.step,
        worker=order.worker,
        number=order.number,
        seed=seed,
        lengths=[[length() for _ in range(order.sampling.group_size)] for _ in range(order.groups)],
    )


def true_rewards(workload: Workload, made: SimulatedRollouts) -> list[list[float]]:
    """Rewards of a submission's completions, [groups][G]."""
    skill = workload.reward_start + workload.reward_gain * made.policy
    chance = Random(digest_of("simnet/1/rewards", made.seed))
    return [[float(chance.random() < skill) for _ in group] for group in made.lengths]


def ungradable_groups(workload: Workload, made: SimulatedRollouts) -> list[int]:
    """Groups of a submission with a completion whose reward nobody can know."""
    chance = Random(digest_of("simnet/1/ungradable", made.seed))
    return [
        group
        for group in range(len(made.lengths))
        if workload.ungradable_share and chance.random() < workload.ungradable_share
    ]


async def read_rollouts(setting: Setting, path: str, wanted: bytes) -> SimulatedRollouts:
    """Read a submission's file; raises `OSError` unless its digest is `wanted`."""
    raw = await setting.disk.read(setting.disk.path_of(path))
    if raw.startswith(POISON):
        raise Crash
    if blake3(raw).digest() != wanted:
        raise OSError("the file has changed since it arrived: its hash differs")
    return msgspec.msgpack.decode(raw, type=SimulatedRollouts)
