"""One of something is written in the singular, in every sentence and error."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.sentences import numbered, sentence
from tests.commands.harness import swarm
from tests.docs.pages import ROOT

VERBS = {"begins", "does", "follows", "goes", "has", "includes", "is", "makes", "refuses", "this"}
VERBS |= {"waits", "was"}
"""What follows a value in the sentences of events and is no noun."""


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1 receipts, every inclusion proof verified", "1 receipt, every inclusion proof verified"),
        ("in 0.1 s from 1 peers", "in 0.1 s from 1 peer"),
        ("21 peers, 1,001 steps, 0.1 seconds", "21 peers, 1,001 steps, 0.1 seconds"),
        ("1 connections were dropped; 1 entries", "1 connection was dropped; 1 entry"),
        ("2 of 1 tasks; 1 other trainers have it", "2 of 1 task; 1 other trainer has it"),
        ("1 of 1 inference workers are live", "1 of 1 inference worker is live"),
        ("1 training tasks, 1 different prompts", "1 training task, 1 different prompt"),
        ("1 policies, 1 processes", "1 policy, 1 process"),
    ],
)
def test_one_is_singular(text: str, written: str) -> None:
    assert numbered(text) == written


@given(st.integers().filter(lambda number: number != 1), st.sampled_from(["peers", "entries"]))
def test_any_other_number_is_plural(number: int, noun: str) -> None:
    for text in (f"{number} {noun}", f"{number:,} {noun}", f"x1 {noun}", f"{number}.1 {noun}"):
        assert numbered(text) == text


def test_events_are_written_so() -> None:
    fields = {"name": "policy 3", "bytes_fetched": 9e5, "seconds": 0.1, "by_source": ["a"]}
    assert (sentence("shardcast.checkpoint_complete", fields) or "").endswith("from 1 peer")


def test_every_noun_that_an_event_counts_is_known() -> None:
    files = (ROOT / f"swarm/sentences.{suffix}" for suffix in ("py", "txt"))
    source = "".join(path.read_text(encoding="utf-8").replace("\n    ", " ") for path in files)
    counted = set(re.findall(r"\{(?!\w+:peer)[^{}]*\} ([a-z]+s)\b", source)) - VERBS
    assert counted > {"peers", "submissions", "entries"}
    assert [noun for noun in sorted(counted) if numbered(f"1 {noun}") == f"1 {noun}"] == []


def test_errors_are_written_so() -> None:
    assert "1 characters" not in swarm("why", "abcd", "--bootstrap", "1").errors
