"""`docs/protocol.md` says what the program does: its vectors, and every message field by field."""

from __future__ import annotations

import msgspec
import pytest

from swarm.ledger import entries
from swarm.rollouts.submission_file import Header
from swarm.wire import manifest, messages, outer
from swarm.wire.kinds import KINDS
from tests.docs.pages import field_rows, section, table, text
from tests.docs.vectors import computed

PAGE = text("docs/protocol.md")

NESTED = (
    messages.Present,
    messages.Arrival,
    messages.CheckpointReference,
    manifest.EnvironmentReference,
    manifest.Sampling,
    manifest.Schedule,
    manifest.Objective,
    manifest.ProcessRewards,
    manifest.Optimiser,
    manifest.TrustedKey,
    manifest.Admissions,
    manifest.Thresholds,
    manifest.Limits,
    manifest.Filters,
    manifest.Adapter,
    manifest.Outer,
    outer.Contribution,
    messages.Check,
    messages.Evidence,
    messages.EnvironmentEvaluation,
    entries.TrainingFigures,
    entries.RoundFigures,
    entries.SealedCapital,
    entries.SealedLog,
)

LOGGED: dict[str, type[msgspec.Struct]] = {
    "judged": entries.Judged,
    "redeemed": entries.Redeemed,
    "evicted": entries.Evicted,
    "reinstated": entries.Reinstated,
    "checkpoint": entries.CheckpointPublished,
    "consumed": entries.Consumed,
    "carried": entries.Carried,
    "sealed_worker": entries.SealedWorker,
    "sealed": entries.Sealed,
}


def printed_fields(heading: str) -> list[tuple[str, ...]]:
    return [tuple(row[:3]) for row in table(section(PAGE, heading))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_described_in_wire_order(kind: str) -> None:
    assert printed_fields(f"`{kind}`") == field_rows(KINDS[kind])


@pytest.mark.parametrize("struct", NESTED, ids=lambda struct: struct.__name__)
def test_every_part_of_a_message_is_described(struct: type[msgspec.Struct]) -> None:
    assert printed_fields(struct.__name__) == field_rows(struct)


@pytest.mark.parametrize("tag", LOGGED)
def test_every_log_entry_is_described(tag: str) -> None:
    assert printed_fields(f"Entry `{tag}`") == field_rows(LOGGED[tag])
    assert LOGGED[tag].__struct_config__.tag == tag


def test_every_log_entry_there_is_is_described() -> None:
    assert set(LOGGED.values()) == set(entries.Entry.__args__)


def test_the_header_of_a_submission_is_described() -> None:
    header = section(PAGE, "Submissions").split("exactly these fields.")[1]
    assert [tuple(row[:3]) for row in table(header)] == field_rows(Header)


def test_vectors_are_what_the_program_computes() -> None:
    printed = {name: value.strip("`") for name, value in table(section(PAGE, "Test vectors"))}
    for name, value in computed().items():
        if name.startswith("noise of "):
            assert float(printed.pop(name)) == pytest.approx(float(value), abs=2e-6)
        else:
            assert printed.pop(name) == value, name
    assert printed == {}
