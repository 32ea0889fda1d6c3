"""Hashes that determine what a worker must not choose: prompts, noise, assignments.

Each is BLAKE3 over a domain string and length-prefixed fields, so that no two inputs collide."""

import math
from collections.abc import Sequence

import blake3


def digest(domain: str, *fields: bytes) -> bytes:
    """BLAKE3-256 over `domain`, then each field preceded by its 4-byte big-endian length."""
    hasher = blake3.blake3(domain.encode("ascii"))
    for field in fields:
        hasher.update(len(field).to_bytes(4, "big") + field)
    return hasher.digest()


class Draws:
    """Small integers from random bytes, equal on every machine."""

    def __init__(self, domain: str, seed: bytes) -> None:
        self._domain, self._seed, self._count = domain, seed, 0

    def below(self, bound: int) -> int:
        """The next integer, uniform over 0, …, `bound` − 1."""
        # 256 bits modulo a bound below 2^16 favour no value by more than 1e-70.
        self._count += 1
        drawn = digest(self._domain, self._seed, self._count.to_bytes(4, "big"))
        return int.from_bytes(drawn, "big") % bound


def nonce_of(nonce: bytes, entry: bytes) -> bytes:
    """The nonce of one worker's step: the order's nonce and the entry of the worker's admission.

    An identity that is made to suit a known nonce thus draws from random bytes that it learns only
    with its admission. A trusted peer has no entry."""
    return digest("swarm/1/entered", nonce, entry) if entry else nonce


def submission_seed(run: str, nonce: bytes, worker: str, number: int) -> bytes:
    """The 32-byte seed of a worker's submission `number` under a step order's nonce."""
    return digest(
        "swarm/1/submission", run.encode(), nonce, worker.encode(), number.to_bytes(8, "big")
    )


def task_seed(seed: bytes, group: int) -> bytes:
    """The 32-byte seed from which the environment draws the task of one group."""
    return digest("swarm/1/task", seed, group.to_bytes(4, "big"))


def environment_of_group(seed: bytes, group: int, weights: Sequence[float]) -> int:
    """The index of the environment of a group's task, drawn in proportion to `weights`.

    Raises `ValueError` unless the weights are finite and not negative and their sum is positive."""
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0 or min(weights) < 0:
        raise ValueError(f"the environments' weights {list(weights)} are no shares of a whole")
    return index_by_weight(digest("swarm/1/environment", seed, group.to_bytes(4, "big")), weights)


def index_by_weight(raw: bytes, weights: Sequence[float]) -> int:
    """An index drawn in proportion to `weights`, shares of a whole, by the first six bytes."""
    total = math.fsum(weights)
    point = int.from_bytes(raw[:6], "big") / 2**48 * total  # in [0, total): 48 bits are exact
    reached = 0.0
    for index, weight in enumerate(weights):
        reached += weight
        if point < reached:
            return index
    # Rounding may leave the running sum a little below the total.
    return max(index for index, weight in enumerate(weights) if weight > 0)


def noise_key(seed: bytes) -> tuple[int, int]:
    """The Philox4x32 key (two 32-bit words): the first 64 bits of BLAKE3(submission seed)."""
    raw = blake3.blake3(seed).digest()
    return int.from_bytes(raw[0:4], "little"), int.from_bytes(raw[4:8], "little")


def rendezvous(candidates: Sequence[str], *fields: bytes) -> list[str]:
    """`candidates` ordered by rendezvous hash of (fields, candidate): rank 0 is in charge."""
    return sorted(
        candidates, key=lambda name: (digest("swarm/1/rendezvous", *fields, name.encode()), name)
    )
