"""What a validator finds in rollouts of agents: its own services, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import trio
from blake3 import blake3

from peers.demo.recipes import THRESHOLDS
from peers.engines.service import EngineService
from peers.environment.service import EnvironmentPeerService
from peers.environments import Renderer
from peers.environments.episodes import EpisodeLimits
from peers.environments.prompt_room import ModelFacts
from peers.validator.cases import Outcome, quarantine_ungraded
from peers.validator.checks.base import run
from peers.validator.checks.file import CHECKS, Inspection
from peers.validator.inspector import InspectorService
from peers.validator.prefill import PrefillService
from peers.validator.reader import Contents, Reader
from swarm.jobs import Load, SubmissionOrder
from swarm.jobs.environment import EnvironmentSetup, GradeEpisode
from swarm.jobs.inference import Generated, InferenceSetup
from swarm.jobs.validation import (
    Grade,
    Graded,
    Inspect,
    InspectionSetup,
    Judge,
    Judged,
    PrefillSetup,
    Report,
)
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import ReadLimits
from swarm.wire.manifest import EnvironmentReference, Sampling
from tests.background import in_background
from tests.environment.served import LonePeer, generate, without
from tests.orders import policy, submission_order

BYTES_MAX = 1 << 24
MAX_NEW_TOKENS, TEMPERATURE = 96, 0.1
"""Of a run."""
OF_A_RUN = ("prompts", "signed_turns")
"""Checks of what a run asked for; nobody asked for what an endpoint's client wants to know."""


# --- what an endpoint recorded ------------------------------------------------------------------


def judge_session(file: Path, folder: Path, scratch: Path) -> Outcome:
    """All checks of a session's file that need no run: those of the file, each of which must pass,
    then proofs and sampling. `folder` has the policy."""
    note: dict[str, Any] = json.loads(file.with_suffix(".json").read_text())
    facts, rows = ModelFacts.read(folder), len(note["episodes"])
    positions = facts.max_position_embeddings
    limits = ReadLimits(BYTES_MAX, rows, positions, positions, positions)
    canonical, digest = scratch / "canonical", blake3(file.read_bytes()).digest()
    contents = trio.run(_read, file, digest, canonical, limits)
    header = contents.header
    assert isinstance(header.temperature, float)
    order = SubmissionOrder(
        run=note["run"],
        policy=policy(header.policy),
        step=header.step,
        nonce=bytes.fromhex(note["nonce"]),
        worker=note["worker"],
        number=note["number"],
        groups=1,
        environments=[EnvironmentReference(name="endpoint", version="1")],
        sampling=Sampling(
            temperature=header.temperature,
            max_new_tokens=header.max_new_tokens,
            stop_ids=header.stop_ids,
            group_size=rows,
            groups_per_submission=1,
        ),
    )
    inspection = Inspection(
        read=lambda: contents,
        header=order.header_fields(),
        groups=[None],
        environments=[0],
        prompts=[None],
        group_size=rows,
        renderer=Renderer(folder),
        vocabulary=facts.vocab_size,
        limits=EpisodeLimits(header.stop_ids, header.max_new_tokens, positions),
        run=order.run,
        seed=order.seed(),
    )
    report = run([each for each in CHECKS if each.name not in OF_A_RUN], inspection, Report())
    assert not report.failed, report.detail
    outcome = Outcome.of(report)
    outcome.canonical_digest = contents.canonical_digest
    outcome.rewards = [[note["reward"]] * rows]
    outcome.add(trio.run(_recomputed, folder, order, canonical, outcome))
    return outcome


async def _read(file: Path, digest: bytes, canonical: Path, limits: ReadLimits) -> Contents:
    reader = Reader()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        contents = await trio.to_thread.run_sync(reader.read, file, digest, canonical, limits)
        nursery.cancel_scope.cancel()
    return contents


# --- what a worker hands in ---------------------------------------------------------------------


def judge_in_a_run(
    served: EnvironmentReference, folder: Path, scratch: Path
) -> tuple[Outcome, Rollouts]:
    """Have a worker generate two rollouts in a served environment with the policy in `folder`, and
    a validator judge all of the submission; returns what the verdict would say, and the rollouts.
    """
    order = without(
        submission_order(
            groups=1, group_size=2, max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE
        ),
        served,
    )
    setup = EnvironmentSetup(environments=[served], folder=str(folder))
    peer = LonePeer(EnvironmentPeerService(setup))
    made = trio.run(_worked, folder, peer, order, scratch / "file")
    inspector = InspectorService(InspectionSetup(environments=[served]))
    inspect = Inspect(
        order=order,
        path=str(scratch / "file"),
        digest=made.digest,
        canonical_path=str(scratch / "canonical"),
        tokenizer_folder=str(folder),
        bytes_max=BYTES_MAX,
        environment_peers=[peer.identity.peer_id],
    )
    with in_background(inspector.run) as ask:
        outcome = Outcome.of(ask(inspector.inspect, inspect))
        assert not outcome.failed, outcome.detail
        graded: Graded = ask(inspector.grade, Grade(digest=made.digest))
    outcome.add(graded)
    assert not outcome.failed, outcome.detail
    trio.run(_grade, peer.service, order, graded)
    outcome.settle(graded)
    outcome.add(trio.run(_recomputed, folder, order, scratch / "canonical", outcome))
    if outcome.ungraded and not outcome.failed:
        quarantine_ungraded(outcome)
    return outcome, Rollouts.from_bytes((scratch / "canonical").read_bytes())


async def _worked(folder: Path, peer: LonePeer, order: SubmissionOrder, path: Path) -> Generated:
    engine = EngineService(InferenceSetup(environments=order.environments))
    await engine.load(Load(policy=order.policy, folder=str(folder)))
    return await generate(engine, peer, order, path)


async def _grade(service: EnvironmentPeerService, order: SubmissionOrder, found: Graded) -> None:
    """Add the grades of an environment peer."""
    for each in found.episodes:
        job = GradeEpisode(
            order=order, group=each.group, sample=each.sample, segments=each.segments
        )
        grade = await service.grade(job)
        assert not grade.not_gradable, grade.not_gradable
        found.graded[each.group].append(grade.reward)
        found.penalties[each.group].append(grade.penalty)
        found.parts[each.group].append(grade.parts)


async def _recomputed(
    folder: Path, order: SubmissionOrder, canonical: Path, outcome: Outcome
) -> Judged:
    """Proofs and sampling of all rows."""
    prefill = PrefillService(PrefillSetup())
    await prefill.load(Load(policy=order.policy, folder=str(folder)))
    return await prefill.judge(
        Judge(
            order=order,
            path=str(canonical),
            digest=outcome.canonical_digest,
            thresholds=THRESHOLDS,
            rewards=outcome.rewards,
        )
    )
