"""Checks of a run manifest before it is signed: can the run work at all?

Every problem is a `UserError` that names the field, its value and a remedy."""

from swarm.errors import UserError
from swarm.wire.identity import InvalidPeerId, public_key_of
from swarm.wire.manifest import RunManifest

SUBMISSION_ROWS_MAX = 4096
"""Largest number of completions in a submission. Their rewards, 9 bytes each, must fit the
verdict's envelope, together with two more figures per group."""

TOKEN_BYTES = 8
"""Bytes of a completion token and its log-probability in a submission's file."""
PROOF_BYTES, PROOF_TOKENS = 258, 32
"""Bytes of a proof, and most completion tokens that it covers (fewer at a swap of weights)."""


def check_manifest_numbers(manifest: RunManifest, where: str) -> None:
    """Raise `UserError` for a manifest that cannot work with any model."""
    _check_trusted(manifest, where)
    _check_admissions(manifest, where)
    problem = (
        manifest.objective.problem(manifest.schedule)
        or manifest.adapter.problem()
        or manifest.values.problem(manifest.sampling, manifest.schedule, manifest.objective)
        or manifest.outer.problem()
    )
    if problem is not None:
        raise UserError(f"{where}: {problem}")
    _check_environments(manifest, where)
    _check_submissions(manifest, where)
    if manifest.objective.overlong_tokens > manifest.sampling.max_new_tokens:
        raise UserError(
            f"{where}: objective.overlong_tokens is {manifest.objective.overlong_tokens}; it must "
            f"be at most sampling.max_new_tokens ({manifest.sampling.max_new_tokens})"
        )
    if manifest.schedule.max_staleness < manifest.schedule.asynchrony:
        raise UserError(
            f"{where}: schedule.max_staleness is {manifest.schedule.max_staleness}, less than "
            f"schedule.asynchrony ({manifest.schedule.asynchrony}), so nothing could be trained on"
        )
    check_batch(manifest, where)
    steps = manifest.schedule.steps * manifest.optimiser.optimiser_steps
    if manifest.objective.learns and manifest.optimiser.warmup_steps > steps:
        raise UserError(
            f"{where}: optimiser.warmup_steps is {manifest.optimiser.warmup_steps}, but the whole "
            f"run has {steps} optimiser steps, so its learning rate would never be reached; warm "
            "up for fewer, or make schedule.steps larger"
        )


def check_batch(manifest: RunManifest, where: str) -> None:
    """Raise `UserError` if no batch of this run could have a learning signal or be cut evenly."""
    size, groups = manifest.sampling.group_size, manifest.schedule.groups_per_step
    if size < 2:
        raise UserError(
            f"{where}: sampling.group_size is {size}; a group needs at least 2 completions, "
            "because a lone one has nothing to be better than"
        )
    if groups % manifest.optimiser.optimiser_steps:
        raise UserError(
            f"{where}: schedule.groups_per_step is {groups}, which optimiser.optimiser_steps "
            f"({manifest.optimiser.optimiser_steps}) does not divide"
        )


def _check_environments(manifest: RunManifest, where: str) -> None:
    if not sum(environment.weight for environment in manifest.environments) > 0:
        raise UserError(
            f"{where}: every environment's weight is 0, so none would give a task; give one a "
            "weight above 0"
        )
    for index, environment in enumerate(manifest.environments):
        name = f"{where}: environments[{index}]"
        if environment.where == "served" and not manifest.environment_ids():
            raise UserError(
                f'{name}.where is "served", but environment_peers names nobody in version '
                f"{manifest.version}; list the id of at least one peer that is to serve it "
                '(`swarm id --home HOME` prints it), or make it "local"'
            )
        low, high = environment.accuracy_min, environment.accuracy_max
        if not 0 <= low < high <= 1:
            raise UserError(
                f"{name}.accuracy_min is {low:g} and accuracy_max {high:g}, so nothing could be "
                "trained on; they must lie between 0 and 1, the first below the second"
            )


def _check_trusted(manifest: RunManifest, where: str) -> None:
    for field, keys in (
        ("trainers", manifest.trainers),
        ("validators", manifest.validators),
        ("environment_peers", manifest.environment_peers),
        ("standbys", manifest.standbys),
    ):
        needed = field in ("trainers", "validators")
        if needed and not any(key.from_version <= manifest.version for key in keys):
            raise UserError(
                f"{where}: {field} names nobody in version {manifest.version}; list the id of at "
                f"least one peer that is to be a {field[:-1]} (`swarm id --home HOME` prints it)"
            )
        seen = set()
        for key in keys:
            check_peer_id(key.peer, f"{where}: {field}")
            if key.peer in seen:
                raise UserError(f"{where}: {field} names {key.peer} twice; list each peer once")
            seen.add(key.peer)
    for key in manifest.standbys:
        if key.peer in [trainer.peer for trainer in manifest.trainers]:
            raise UserError(
                f"{where}: standbys names {key.peer}, which is a trainer; name another peer, on "
                "another machine"
            )
    for successor in manifest.successors:
        check_peer_id(successor, f"{where}: successors")
    if manifest.delegation:
        raise UserError(f"{where}: delegation is not for this file; swarm run update fills it in")


def _check_admissions(manifest: RunManifest, where: str) -> None:
    admissions = manifest.admissions
    for peer in admissions.allowed:
        check_peer_id(peer, f"{where}: admissions.allowed")
    if admissions.policy != "allow-list" and admissions.unproven_max == 0:
        raise UserError(
            f"{where}: admissions.unproven_max is 0, so nobody new could ever take part; make it "
            'at least 1, or admissions.policy "allow-list"'
        )
    if admissions.policy == "allow-list" and not admissions.allowed:
        raise UserError(
            f'{where}: admissions.policy is "allow-list" and admissions.allowed is empty, so '
            'nobody could take part; list peer ids, or make the policy "open"'
        )


def check_peer_id(text: str, where: str) -> None:
    """Raise a `UserError` that begins with `where` unless the text is a peer id."""
    try:
        public_key_of(text)
    except InvalidPeerId as error:
        raise UserError(f"{where}: {error}") from error


def _check_submissions(manifest: RunManifest, where: str) -> None:
    """Raise `UserError` if a full submission exceeds what a verdict can hold or its own limit."""
    sampling = manifest.sampling
    groups = sampling.groups_per_submission
    rows = groups * sampling.group_size
    if rows > SUBMISSION_ROWS_MAX:
        raise UserError(
            f"{where}: sampling.groups_per_submission times sampling.group_size is {rows}; a "
            f"submission has at most {SUBMISSION_ROWS_MAX} completions, so that its verdict with "
            "all rewards fits an envelope"
        )
    tokens = sampling.max_new_tokens
    proofs = min(tokens, -(-tokens // PROOF_TOKENS) + sampling.swaps_max)
    largest = rows * (tokens * TOKEN_BYTES + proofs * PROOF_BYTES)
    if largest > manifest.limits.submission_bytes_max:
        raise UserError(
            f"{where}: limits.submission_bytes_max is {manifest.limits.submission_bytes_max}, but "
            f"{rows} completions of {tokens} tokens take {largest} bytes; raise it, or make "
            "sampling.groups_per_submission smaller"
        )
