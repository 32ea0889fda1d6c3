"""What a validator draws for recomputation, with a secret that no worker knows."""

from random import Random

from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import digest


def draw_secret(peer: RunNode) -> bytes:
    """The secret that decides which submissions a validator draws for recomputation.

    It follows from the validator's key, so that a restart draws the same ones again."""
    return peer.node.identity.sign(b"swarm/1/draws\x00" + peer.run.id.encode())


def prefill_wanted(secret: bytes, submission: bytes, share: float) -> bool:
    """Whether a submission, by its digest, is drawn for recomputation.

    The worker does not know the validator's secret, so it cannot influence the draw."""
    drawn = int.from_bytes(digest("swarm/1/prefill", secret, submission)[:8], "big")
    return drawn < share * 2**64


def rows_sampled(secret: bytes, submission: bytes, rows: int, count: int) -> list[int]:
    """The rows of a submission, by its digest, to recompute before anything of it is graded.

    Like `prefill_wanted`, the draw is the validator's own."""
    chance = Random(digest("swarm/1/rows", secret, submission))
    return sorted(chance.sample(range(rows), min(rows, count)))
