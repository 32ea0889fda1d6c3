"""The values that `docs/protocol.md` prints, computed by the program itself."""

from __future__ import annotations

from collections.abc import Mapping

import blake3
import msgspec
import torch

from peers.engines.noise import gumbel_noise, philox
from peers.environments import task_of
from peers.environments.interface import as_text
from peers.environments.sort_digits import SortDigits
from swarm.ledger import entries, merkle
from swarm.rollouts import seeds
from swarm.run.manifest import content_digest
from swarm.run.records import checkpoint_key, peer_key, run_key
from swarm.shardcast.manifest import CheckpointManifest, ManifestFile, ManifestPiece, piece_size_for
from swarm.transport.framing import encode_frame
from swarm.transport.http.messages import Ask, proof_message
from swarm.wire.envelope import Envelope, seal
from swarm.wire.identity import Identity, peer_id_bytes
from swarm.wire.messages import Check, LogHead, Verdict

OWNER = Identity(bytes(32))
WORKER = Identity(bytes(range(32)))
RUN = f"{OWNER.peer_id}/demo"
NONCE = bytes([7]) * 32
SEED = seeds.submission_seed(RUN, NONCE, WORKER.peer_id, 3)


def envelope() -> Envelope:
    """A log head of the empty log, sealed by the owner."""
    return seal(
        OWNER,
        LogHead(size=0, root=merkle.EMPTY_ROOT),
        run=RUN,
        sequence=1_800_000_000_000,
        wall_time=1_800_000_000.0,
        lifetime_seconds=3600.0,
    )


def verdict() -> Verdict:
    return Verdict(
        submission=bytes([1]) * 32,
        size_bytes=4096,
        worker=WORKER.peer_id,
        lineage=0,
        step=5,
        policy=3,
        number=0,
        outcome="accepted",
        checks=[Check(name="schema", figure=0.0, threshold=0.0, passed=True)],
        rewards=[[1.0, 0.0]],
        log_index=9,
    )


def _checkpoint_manifest() -> CheckpointManifest:
    return CheckpointManifest(
        run=RUN,
        lineage=0,
        step=0,
        piece_size=262144,
        files=[ManifestFile("a", 1, bytes([2]) * 32)],
        pieces=[ManifestPiece(0, 0, 1, blake3.blake3(b"x").digest())],
    )


def _noise(token: int, position: int, row: int) -> str:
    values = gumbel_noise(
        seeds.noise_key(SEED), torch.tensor([row]), torch.tensor([position]), token + 1
    )
    return f"{float(values[0, token]):.6f}"


def _philox() -> str:
    words = philox((0, 0), tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4)))  # type: ignore[arg-type]
    return " ".join(f"{int(word[0]):08x}" for word in words)


def _two_leaves() -> bytes:
    return merkle.node_hash(merkle.leaf_hash(b"a"), merkle.leaf_hash(b"b"))


def _group_digest() -> bytes:
    parts = [[1, 2], [3], [4, 5]]
    return blake3.blake3(
        b"".join(number.to_bytes(4, "little") for part in parts for number in (len(part), *part))
    ).digest()


def computed() -> Mapping[str, str]:
    """Every vector by its name in the page's table."""
    sealed = envelope()
    challenge = bytes([9]) * 32
    return {
        "peer id of seed 00…00": OWNER.peer_id,
        "peer id of seed 00 01 02 … 1f": WORKER.peer_id,
        "multihash bytes of the first peer id": peer_id_bytes(OWNER.peer_id).hex(),
        "frame of `hello`": encode_frame(b"hello").hex(),
        "frame of 300 zero bytes, first 4 bytes": encode_frame(bytes(300))[:4].hex(),
        "envelope": sealed.raw.hex(),
        "envelope digest": sealed.digest.hex(),
        "content digest": content_digest(sealed).hex(),
        "DHT key of the run": run_key(RUN).decode(),
        "DHT key of the worker's record": peer_key(WORKER.peer_id).decode(),
        "DHT provider key of manifest digest 01…01": checkpoint_key(bytes([1]) * 32).hex(),
        "bulk proof signature": WORKER.sign(proof_message(OWNER.peer_id, challenge)).hex(),
        "Ask frame of a get": msgspec.msgpack.encode(Ask(False, bytes([1]) * 32, 5, b"")).hex(),
        "piece size of 1 byte": str(piece_size_for(1)),
        "piece size of 1 GiB": str(piece_size_for(1 << 30)),
        "piece size of 62 GB": str(piece_size_for(62_000_000_000)),
        "checkpoint manifest": _checkpoint_manifest().encode().hex(),
        "submission seed": SEED.hex(),
        "task seed of group 1": seeds.task_seed(SEED, 1).hex(),
        "prompt of group 1 (sort-digits 1)": as_text(
            task_of(SortDigits(), seeds.task_seed(SEED, 1)).prompt
        ),
        "noise key": " ".join(f"{word:08x}" for word in seeds.noise_key(SEED)),
        "Philox of key 0 0, counter 0 0 0 0": _philox(),
        "noise of token 5, position 0, row 0": _noise(5, 0, 0),
        "noise of token 63, position 7, row 31": _noise(63, 7, 31),
        "candidates a, b, c in rank": ", ".join(
            seeds.rendezvous(["a", "b", "c"], NONCE, WORKER.peer_id.encode(), bytes(8))
        ),
        "duplicate digest of prompt 1 2, completions 3 and 4 5": _group_digest().hex(),
        "rewards digest of [[1.0, 0.0]]": entries.rewards_digest([[1.0, 0.0]]).hex(),
        "log entry of the verdict below": entries.encode(entries.judged(verdict())).hex(),
        "empty root": merkle.EMPTY_ROOT.hex(),
        "root of leaves `a`, `b`": _two_leaves().hex(),
    }
