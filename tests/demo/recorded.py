"""A demo's events as the peers would say them: what view and summary are tested with."""

from __future__ import annotations

import random
from typing import Any

from peers.demo.setup import cast
from peers.demo.state import SwarmState

BOOTSTRAP = "/ip4/127.0.0.1/tcp/41230/p2p/12D3KooWKnDdG3iXw9eTFijk3EWSunZcFi54Zka4wmtqtt6rPxc8"
JOIN_LINE = f"swarm peer --role inference --bootstrap {BOOTSTRAP}"
SECONDS_PER_STEP = 0.5
TRAINING_SINCE = 10.0


def identifier(name: str) -> str:
    return "12D3KooW" + name.replace("-", "").ljust(44, "x")


def fresh(steps: int = 250, inference_peers: int = 3) -> SwarmState:
    """A demo that has only just begun, at second 0."""
    state = SwarmState(steps_wanted=steps, started=0.0, join_line=JOIN_LINE)
    state.enter("preparing", 0.0)
    for name, role in cast(inference_peers):
        state.add_peer(name, role, identifier(name))
    return state


USUAL: dict[str, dict[str, Any]] = {
    "peer.status": {
        "doing": "", "policy": -1, "step": -1, "tokens_per_second": 0.0, "bytes_sent": 0,
        "bytes_received": 0,
    },
    "trainer.run_complete": {"folder": "/somewhere", "unrewarded_steps": 0, "advice": ""},
    "validator.verdict": {
        "worker": identifier("inference-1"), "outcome": "accepted", "failed": "", "figure": 0.0,
        "threshold": 0.0, "detail": "", "step": 0, "policy": 0, "number": 0,
    },
}  # fmt: skip
"""Fields of events unless a test names others."""


def say(state: SwarmState, name: str, event: str, at: float, **fields: Any) -> None:
    head = {"event": event, "time": 1e9 + at, "peer": identifier(name)}
    state.apply({**head, **USUAL.get(event, {}), **fields}, at)


def trained(state: SwarmState, steps: int, seed: int = 0) -> SwarmState:
    """Let `steps` steps be trained; relay-2 is killed at step 5, inference-3 caught at step 3."""
    randomness = random.Random(seed)
    for peer in list(state.peers.values()):
        say(state, peer.name, "peer.listening", 1.0, roles=[peer.role], addresses=[], bulk=[])
        if peer.role != "bootstrap":
            say(state, peer.name, "peer.run_found", 2.0, run="owner/demo")
    state.accuracy["before"] = {"sampled": 0.2, "greedy": 0.5}
    state.enter("joining", 8.0)
    for peer in list(state.peers.values()):
        if peer.role in ("relay", "inference"):
            say(state, peer.name, "membership.admitted", 8.5, by=identifier("validator"))
    say(state, "trainer", "trainer.step_opened", TRAINING_SINCE, step=0, policy=0, groups_wanted=32)
    at = TRAINING_SINCE
    for step in range(steps):
        at = TRAINING_SINCE + (step + 1) * SECONDS_PER_STEP
        for worker in ("inference-1", "inference-2"):
            say(state, "validator", "validator.verdict", at, worker=identifier(worker), step=step)
        if step == 3:
            liar = identifier("inference-3")
            say(
                state, "validator", "validator.verdict", at, worker=liar, step=step,
                outcome="refused", failed="proof_exponents", figure=41.25, threshold=90.0,
            )  # fmt: skip
            reason = "pooled mismatch"
            say(state, "validator", "membership.peer_evicted", at, remote=liar, reason=reason)
        if step == 5:
            state.process_died("relay-2", -9, at)
            say(state, "relay-2", "peer.listening", at)
            say(state, "relay-2", "membership.admitted", at)
        reward = 0.9 - 0.7 * 0.98**step + randomness.gauss(0, 0.02)
        say(
            state, "trainer", "trainer.step_trained", at, step=step, reward=reward,
            gradient_norm=0.2, groups=32.0,
        )  # fmt: skip
        for name in ("inference-1", "inference-2"):
            say(state, name, "inference.submission_made", at, step=step, tokens=750)
        for name in ("inference-1", "inference-2", "trainer"):
            say(
                state, name, "peer.status", at, doing=f"generating 1 of step {step}", policy=step,
                step=step, tokens_per_second=3000.0 if name != "trainer" else 0.0,
                bytes_sent=1000 * step, bytes_received=10 * step,
            )  # fmt: skip
    return state
