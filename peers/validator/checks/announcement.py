"""The checks of an announcement, which costs nothing to make: so a refusal enters no log, and no
verdict lists the checks that pass."""

from dataclasses import dataclass

from peers.validator.checks.base import Finding, at_most, check
from swarm.run.admission import check_admission, is_worker
from swarm.run.manifest import manifest_in
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import Admission, StepOrder, Submission


@dataclass(frozen=True)
class Announcement:
    """An announced submission, and this validator's knowledge about it."""

    worker: str
    submission: Submission
    admission: Envelope | None
    """The admission that the worker presents."""
    run: Run
    manifest: RunManifest
    """The version of the manifest that the submission's step follows."""
    order: StepOrder | None
    """The order of the submission's step; None if the step is unknown."""
    newest_order: StepOrder | None
    slot_taken_by: bytes | None
    """Digest of the file that was delivered first under the worker's submission number."""
    is_next: bool
    """Whether the worker's preceding number of this step was acknowledged or judged."""
    on_trial: bool
    """Whether no work of the worker was verified yet."""
    unjudged: int
    """Number of the worker's other submissions that wait for a verdict, as far as is known."""
    pushed_bytes: int | None
    """Size of the file that the worker pushed; None if it pushed none."""
    wall_time: float

    @property
    def step_order(self) -> StepOrder:
        """The order of the submission's step, for checks that run after the check `step`."""
        assert self.order is not None
        return self.order


@check("admission")
def admitted(evidence: Announcement) -> Finding:
    """The worker is a trusted peer or has a valid admission as a worker (1, else 0).

    Admissions in other roles have slots of their own, more of them than workers, and no entry."""
    if evidence.worker in evidence.run.manifest.trusted_ids():
        return Finding(1, 1, passed=True)
    shown, problem = evidence.admission, "none was shown"
    if shown is not None:
        refused = check_admission(shown, evidence.run, evidence.worker, evidence.wall_time)
        if refused is None and is_worker(shown.expect(Admission).roles):
            return Finding(1, 1, passed=True)
        problem = refused or "it is not for the role inference"
    return Finding(0, 1, passed=False, detail=f"no valid admission: {problem}")


@check("entry")
def entry(evidence: Announcement) -> Finding:
    """The submission was drawn with the entry of the worker's admission (1, else 0): an identity
    made after the nonce is known cannot be chosen by its prompts and noise."""
    drawn = b""
    if evidence.worker not in evidence.run.manifest.trusted_ids():
        assert evidence.admission is not None
        drawn = evidence.admission.expect(Admission).entry
    return Finding(
        figure=int(evidence.submission.entry == drawn),
        threshold=1,
        passed=evidence.submission.entry == drawn,
        detail="it was drawn with another entry than that of its worker's admission; the next "
        "submission must use the one of the admission that is shown with it",
    )


@check("step")
def step(evidence: Announcement) -> Finding:
    """The step is known, not rolled back, and not older than the oldest that is trained on."""
    step, order = evidence.submission.step, evidence.order
    if order is None:
        return Finding(step, 0, passed=False, detail="no such step is known")
    newest_order = evidence.newest_order
    newest = newest_order.step if newest_order else 0
    if newest_order is not None and order.lineage < newest_order.lineage:
        detail = "the trainer went back to an earlier policy and abandoned that step"
        return Finding(step, newest, passed=False, detail=detail)
    oldest = max(0, newest - evidence.manifest.schedule.max_staleness)
    return Finding(step, oldest, step >= oldest, "that step is too old to be trained on")


@check("version")
def version(evidence: Announcement) -> Finding:
    """The manifest's version (0: unknown) is that of the step order."""
    submission, order = evidence.submission, evidence.step_order
    made_under = evidence.run.version(submission.run_digest)
    return Finding(
        figure=manifest_in(made_under).version if made_under else 0,
        threshold=order.run_version,
        passed=submission.run_digest == order.run_digest,
        detail="the step order names another version of the run",
    )


@check("policy")
def policy(evidence: Announcement) -> Finding:
    """The policy is that of the step order."""
    used, ordered = evidence.submission.policy, evidence.step_order.policy
    return Finding(used, ordered, used == ordered, "the step order names another policy")


@check("number")
def number(evidence: Announcement) -> Finding:
    """The submission number is at most the highest that the step order allows."""
    return at_most(
        evidence.submission.number,
        evidence.step_order.submissions_max - 1,
        "more submissions than the step order allows one worker",
    )


@check("groups")
def groups(evidence: Announcement) -> Finding:
    """The submission has as many groups as the manifest says: none can be left out."""
    groups = evidence.submission.groups
    wanted = evidence.manifest.sampling.groups_per_submission
    detail = "another number of groups than the manifest says"
    return Finding(groups, wanted, groups == wanted, detail)


@check("number")
def free_slot(evidence: Announcement) -> Finding:
    """The worker delivered no other file under this number of this step."""
    submission = evidence.submission
    free = evidence.slot_taken_by in (None, submission.digest)
    return Finding(submission.number, 1, free, "another file was delivered under this number")


@check("number")
def in_turn(evidence: Announcement) -> Finding:
    """The number before it is taken, so that a worker cannot skip a number it dislikes."""
    number = evidence.submission.number
    detail = f"submission {number - 1} of this step was not delivered yet"
    return Finding(number, number - 1, evidence.is_next, detail)


@check("trial")
def trial(evidence: Announcement) -> Finding:
    """A worker without verified work has no other unjudged submission beside this trial."""
    detail = "until work of this worker is verified, each submission waits for the last verdict"
    passed = not (evidence.on_trial and evidence.unjudged)
    return Finding(evidence.unjudged, 0, passed, detail)


@check("file")
def pushed(evidence: Announcement) -> Finding:
    """The worker pushed the file (1, else 0) before it announced the submission."""
    pushed = evidence.pushed_bytes is not None
    return Finding(int(pushed), 1, pushed, "the file was not pushed before it was announced")


@check("size")
def size(evidence: Announcement) -> Finding:
    """The pushed file has the announced size. Figure: bytes announced; threshold: bytes pushed."""
    announced, pushed = evidence.submission.size_bytes, evidence.pushed_bytes
    if pushed is None:
        return Finding(announced, announced, passed=True)
    return Finding(announced, pushed, announced == pushed, "the announced size is not the file's")


CHECKS = (admitted, entry, step, version, policy, number, groups, free_slot, size)
PENDING = (in_turn, trial, pushed)
"""Conditions that the worker may still fulfil: a failure is answered "not yet"."""
