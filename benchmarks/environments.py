"""Overhead of served environments against local ones, by simulation; bytes per episode.

    python -m benchmarks.environments
    python -m benchmarks.environments --turns 8 --environment-seconds 2 --seeds 3

Prints one JSON object. A simulated run of production peers whose step takes about 22 minutes of
generation (four workers, each 30 tokens per second; 64 episodes of 2,500 tokens on average) is
trained once with a local environment and once with the same one served by two environment peers
across an ocean. A step's time is that in which the workers generate a step's mean number of tokens,
pauses included, from each one's first submission to its last; `overhead` is the mean time served
over local, minus 1. A completion that waits for a turn ends later by the whole wait, and the
submission waits for its last completion.

`bytes` are those of real messages of one episode with the mean number of tokens: what the worker
sends and receives, what the file grows by, and what the validator sends for the grade.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import msgspec

from benchmarks.arguments import at_least, number_where
from simnet.clock import run_virtual
from simnet.compute.environment import model_segments, tokens_of
from simnet.compute.setting import Hardware, Workload
from simnet.lines import Line
from simnet.scenarios.parts import SERVER, start_bootstrap
from simnet.simulation import SIMULATED, Peer, Plan, Simulation
from swarm.envelope import seal
from swarm.events import Event
from swarm.identity import Identity
from swarm.manifest import Limits
from swarm.messages import Message
from swarm.terminal.output import print_json
from swarm.turns import (
    EpisodeGrade,
    EpisodeTokens,
    GradeRequest,
    Turn,
    TurnRequest,
    divided,
    pack,
    tokens_digest,
)

GROUPS, GROUP_SIZE, PER_SUBMISSION = 8, 8, 1
TOKENS_MEAN, PROMPT_TOKENS = 2500, 512
STEP_SECONDS = 22 * 60.0
WORKERS = 4


def measure_step(options: argparse.Namespace, seed: int, where: str) -> float:
    """Seconds in which all workers together generate the tokens of a step."""
    made: dict[str, list[tuple[float, int]]] = {}

    def hear(now: float, peer: Peer, event: Event) -> None:
        if event.name == "inference.submission_made":
            made.setdefault(peer.name, []).append((now, event.fields["tokens"]))

    async def main() -> None:
        workload = Workload(
            model_bytes=3_000_000,
            completion_tokens_mean=TOKENS_MEAN,
            turns=options.turns,
            prompt_tokens=PROMPT_TOKENS,
            observation_tokens=options.observation_tokens,
        )
        simulation = Simulation(seed, workload=workload)
        simulation.listeners.append(hear)
        async with simulation.running():
            served = where == "served"
            await start_bootstrap(
                simulation, trainers=["trainer"], validators=["v0"],
                steps=options.steps, groups_per_step=GROUPS, group_size=GROUP_SIZE,
                groups_per_submission=PER_SUBMISSION, max_new_tokens=16_384,
                environments=[msgspec.structs.replace(SIMULATED, where=where)],
                environment_peers=["e0", "e1"] if served else [],
                limits=Limits(verdict_seconds=300.0),
            )  # fmt: skip
            rate = GROUPS * GROUP_SIZE * TOKENS_MEAN / STEP_SECONDS / WORKERS
            machine = Hardware(tokens_per_second=rate)
            line = Line("eu-west", 12.5e6, 62.5e6)
            table = {"environment": {"children": options.children}}
            serving = Hardware(environment_seconds=options.environment_seconds)
            plans = [
                Plan("v0", ["validator"], SERVER, Hardware(prefill_tokens_per_second=40_000.0)),
                Plan("trainer", ["trainer"], SERVER, Hardware(step_seconds=60.0)),
                *[
                    Plan(name, ["environment"], SERVER, serving, tables=table)
                    for name in ("e0", "e1")
                    if served
                ],
                *[Plan(f"w{n}", ["inference"], line, machine) for n in range(WORKERS)],
            ]
            over = simulation.expect("trainer.run_complete", ["trainer"])
            for plan in plans:
                await simulation.add(plan).start()
            if not await simulation.meet(over, 4 * options.steps * STEP_SECONDS):
                raise RuntimeError(f"the {where} run of seed {seed} did not end")

    run_virtual(main, seed=seed)
    rates = []
    for submissions in made.values():
        (begun, _), (ended, _) = submissions[0], submissions[-1]
        rates.append(sum(tokens for _, tokens in submissions[1:]) / (ended - begun))
    return GROUPS * GROUP_SIZE * TOKENS_MEAN / sum(rates)


def measure_bytes(turns: int, observation_tokens: int) -> dict[str, int]:
    """Bytes of one episode's real messages. The prompt's are its group's, divided by its size."""
    identity, seed = Identity(bytes(32)), bytes(32)

    def size(message: Message) -> int:
        envelope = seal(
            identity,
            message,
            run=f"{identity.peer_id}/benchmark",
            sequence=1 << 40,
            wall_time=1.8e9,
            lifetime_seconds=60.0,
        )
        return len(envelope.raw)

    place = {"lineage": 0, "step": 100, "number": 3, "entry": bytes(16), "group": 3, "sample": 7}

    def asking(segments: list[list[int]], kind: Any, **fields: Any) -> int:
        given = segments
        if kind is TurnRequest and len(segments) > 2:  # the environment peer has the rest
            given = segments[-1:]
            fields["omitted"] = sum(map(len, segments[:-1]))
        parts = divided(pack(token for segment in given for token in segment))
        lengths = [len(segment) for segment in segments]
        request = kind(**place, **fields, lengths=lengths, tokens=parts[0])
        return size(request) + sum(size(EpisodeTokens(tokens=part)) for part in parts[1:])

    def turn(segments: list[list[int]], tokens: list[int]) -> int:
        before = tokens_digest(token for segment in segments for token in segment)
        return size(
            Turn(
                seed=seed,
                group=3,
                sample=7,
                index=len(segments) // 2,
                before=before,
                tokens=pack(tokens),
            )
        )

    prompt = tokens_of(PROMPT_TOKENS, seed, "prompt")
    sent, received = asking([], TurnRequest) / GROUP_SIZE, turn([], prompt) / GROUP_SIZE
    signed = received
    segments = [prompt]
    for index, model in enumerate(model_segments(TOKENS_MEAN, turns, seed, 0)):
        segments.append(model)
        sent += asking(segments, TurnRequest)
        observation = tokens_of(observation_tokens, seed, index) if index < turns else []
        answer = turn(segments, observation)
        received += answer
        signed += answer
        if observation:
            sent += answer  # it stands beside the next request
            segments.append(observation)
    grading = asking(segments, GradeRequest, worker=identity.peer_id)
    return {
        "worker_sends": round(sent),
        "worker_receives": round(received),
        "file_grows_by": round(signed),
        "file_without": 4 * sum(map(len, segments)) + 4 * TOKENS_MEAN + 258 * TOKENS_MEAN // 32,
        "validator_sends": grading,
        "validator_receives": size(EpisodeGrade(reward=1.0)),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=at_least(2), default=6)
    parser.add_argument("--seeds", type=at_least(1), default=2)
    parser.add_argument("--turns", type=at_least(1), default=3, help="of the environment")
    parser.add_argument("--observation-tokens", type=at_least(1), default=128)
    parser.add_argument("--children", type=at_least(1), default=2, help="of an environment peer")
    parser.add_argument(
        "--environment-seconds",
        type=number_where(lambda value: 0 <= value <= 60, "from 0 to 60"),
        default=0.2,
        help="of one call",
    )
    options = parser.parse_args()
    report: dict[str, Any] = vars(options).copy()
    means = {}
    for where in ("local", "served"):
        found = [measure_step(options, seed, where) / 60 for seed in range(options.seeds)]
        means[where] = statistics.mean(found)
        report[f"{where}_step_minutes"] = round(means[where], 3)
        report[f"{where}_step_minutes_least"] = round(min(found), 3)
        report[f"{where}_step_minutes_most"] = round(max(found), 3)
    report["overhead"] = round(means["served"] / means["local"] - 1, 5)
    report["bytes"] = measure_bytes(options.turns, options.observation_tokens)
    print_json(report)


if __name__ == "__main__":
    main()
