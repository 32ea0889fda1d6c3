"""Attacks by files, numbers and records."""

from __future__ import annotations

import pytest

from tests.attacks.hostile import Setting, attacked
from tests.attacks.simulated import COUNT, PACE, caught, harmless

pytestmark = pytest.mark.slow


def test_cheap_record() -> None:
    """A record earned with honest work, and cashed in: six honest steps, then nothing but fakes.

    Caught by `proofs`: the share that is recomputed follows what a fake could gain, and the
    eviction voids the credit that is held.

    Cost: the cheat's honest work and its identity; before the refusal its fakes are bounded by its
    verified tokens over `recompute_safety`.
    """
    caught("turncoat", "proofs", evicted=True, credit=0)


def test_claimed_files() -> None:
    """Another worker's file announced as one's own, and not delivered.

    Caught by `file`; the maker's file is judged and credited as usual.

    Cost: a message and a signature for each announcement.
    """
    caught("claimant", "file", credit=0)


def test_copied_files() -> None:
    """Another worker's file handed in byte for byte, while that worker delivers it.

    Caught by `header`, a proven fault, with the first submission; the maker is credited.

    Cost: the swarm reads one file; the cheat's identity.
    """
    caught("copier", "header", evicted=True)


def test_few_edits() -> None:
    """2 % of the tokens replaced by ones that suit the cheat, each within the bound on a single
    token.

    Caught by its evidence (*sampler*): evicted, though each single submission passes.

    Cost: the cheat's identity, and the credit it holds.
    """
    caught("editor", "membership.peer_evicted", evicted=True, credit=0)


def test_invented_rollouts() -> None:
    """Rollouts that the policy did not generate, by a worker that is new to the run.

    Caught by `proofs`, since everything of a new worker is recomputed; evicted within 20 s.

    Cost: the swarm recomputes one submission; the cheat's identity.
    """
    caught("wrong-weights", "proofs", evicted=True, credit=0)


def test_occasional_fakes() -> None:
    """Fakes in one of eight submissions, the others honest.

    Caught by `proofs`, as soon as one of them is recomputed; then the eviction voids the credit
    held.

    Cost: the cheat's honest work and its identity.
    """
    caught("occasional-liar", "proofs")


def test_other_seeds() -> None:
    """Rollouts of another seed than the order gives, in the simulator.

    Caught by `header`, a proven fault, with the first submission.

    Cost: the swarm reads one file; the cheat's identity.
    """
    caught("other-prompts", "header", evicted=True, credit=0)


def test_push_flood() -> None:
    """Files pushed and never announced, ten of 1 MiB at once.

    Harmless: an identity may have eight unjudged files, its network and the run have bounds in
    bytes, and a file that is not announced is removed after a minute.

    Cost: the traffic and the disk space within these bounds.
    """
    harmless("pusher")


def test_refusal_flood() -> None:
    """Announcements of invented files, twenty a second to each validator, to have refusals signed,
    logged and gossiped.

    Harmless: a refused announcement enters no log and no gossip, and answers have a quota.

    Cost: one signature check for each announcement, within the sender's rate.
    """
    harmless("verdict-flooder")


def test_repeated_announcements() -> None:
    """Every submission announced thirty times, each time signed anew.

    Harmless: a waiting submission's acknowledgement is signed and gossiped once.

    Cost: one signature check for each announcement.
    """
    harmless("reannouncer")


def test_shorter_submissions() -> None:
    """A prefix of the groups: the last ones, which the cheat does not like, are left out.

    Caught by `groups`: every submission has exactly the groups that the run asks for.

    Cost: a message for each announcement; the cheat's work.
    """
    caught("shortener", "groups", credit=0)


def test_skipped_numbers() -> None:
    """Files that the cheat does not like are kept back, and the next numbers handed in instead.

    Caught by `file`: a number without its file settles nothing, and no later number of the step
    counts.

    Cost: the cheat's own work: it is accepted up to its first number without a file in each step.
    """
    caught("number-skipper", "file")


def test_sleeping_programs() -> None:
    """Programs that sleep for 20 s each instead of rollouts, by four new identities without a
    model.

    Caught by `proofs`: a few rows of every submission are recomputed before anything of it is
    graded. What remains to be graded has a budget in seconds, and new identities never hold the
    last lane. A run that observes refuses no fakes, so there they come last and are graded for
    seconds only.

    Cost: the swarm recomputes one submission; the cheat's identity.
    """
    caught("sleepers", "proofs", evicted=True, credit=0)
    # It refuses nobody for statistics, but who hands in what no engine gives comes last.
    seconds = 90.0
    alone, beside = (
        attacked(Setting("sleepers" if count else None, count, seconds=seconds, observes=True))
        for count in (0, COUNT)
    )
    assert beside.violations == [] and not beside.evicted and not beside.honest_failed
    assert beside.honest_seconds[0] < alone.honest_seconds[0] + 15
    assert beside.policies >= PACE * alone.policies, (beside.policies, alone.policies)


def test_stalled_numbers() -> None:
    """Odd numbers only, so that they wait for numbers that never come and the trainer counts on
    them.

    Harmless: only a worker's next number is acknowledged, and the trainer counts on nothing else.

    Cost: a message for each announcement, within the sender's rate.
    """
    harmless("staller")


def test_two_files_one_number() -> None:
    """A second file under the same number, which differs in one group, for another validator.

    Harmless: one file for each number is trained on, and credited.

    Cost: the swarm recomputes some submissions twice.
    """
    harmless("double-deliverer", count=1)


def test_unordered_numbers() -> None:
    """Every file handed in again under numbers that no order asked for.

    Caught by `number`: refused, and unlogged; its quota of unjudged files bounds what is stored.

    Cost: the pushes, within the quota.
    """
    caught("submission-flooder", "number")


def test_unparsable_files() -> None:
    """Files that cannot be parsed.

    Caught by `schema`, a proven fault, with the first submission.

    Cost: the swarm reads one file; the cheat's identity.
    """
    caught("malformed-files", "schema", evicted=True, credit=0)


def test_validator_shopping() -> None:
    """Every submission shown to all validators at once, half of them fakes, in the hope that one
    does not recompute it.

    Caught by `proofs`: a refusal that rests on a recomputation beats any acceptance.

    Cost: the swarm recomputes some submissions twice; the cheat's identity and credit.
    """
    caught("validator-shopper", "proofs", evicted=True, credit=0)


def test_withheld_files() -> None:
    """Submissions announced, and their files never delivered.

    Caught by `file`: refused, unlogged, and nothing is judged or credited.

    Cost: a message and a signature for each announcement, within the sender's rate.
    """
    caught("withholder", "file", credit=0)
