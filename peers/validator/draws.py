"""What a validator draws for recomputation, with a secret that no worker knows."""

from random import Random

from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import digest


def draw_secret(peer: RunNode) -> bytes:
    """A validator's secret draw of submissions, by its key: a restart draws the same again."""
    return peer.node.identity.sign(b"swarm/1/draws\x00" + peer.run.id.encode())


def prefill_wanted(secret: bytes, submission: bytes, share: float) -> bool:
    """Whether a submission's digest is drawn for recomputation; no worker knows the secret."""
    return int.from_bytes(digest("swarm/1/prefill", secret, submission)[:8], "big") < share * 2**64


def rows_sampled(secret: bytes, submission: bytes, rows: int, count: int) -> list[int]:
    """The rows, by the digest, to recompute before grading; as `prefill_wanted`, by own draw."""
    chance = Random(digest("swarm/1/rows", secret, submission))
    return sorted(chance.sample(range(rows), min(rows, count)))
