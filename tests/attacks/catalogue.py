"""The catalogue: every attack has a docstring, that of its test or of its test's file, for its row.

A docstring has three paragraphs: the attack; its outcome, which begins with *Caught*, *Harmless* or
*Undefended*; and *Cost:*, what it costs the swarm and the attacker.

Attacks whose tests belong to one part of the program stay with its tests; `ELSEWHERE` lists them.

    python -m tests.attacks.catalogue      # write the table to docs/attacks.md
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT, Written

HERE = Path(__file__).parent
PART = Written(ROOT / "docs/attacks.md", "<!-- catalogue -->", "<!-- end of catalogue -->")
OUTCOMES = ("Caught", "Harmless", "Undefended")
GROUPS = {
    "text": "Text, tokens and weights",
    "submissions": "Files, numbers and records",
    "identities": "Identities",
    "validators": "Validators and trusted peers",
    "network": "Messages, relays and the DHT",
}


@dataclass(frozen=True)
class Attack:
    """A row of the catalogue."""

    group: str
    name: str
    attack: str
    outcome: str
    cost: str
    path: str
    """Of the test's file, from the root."""

    @property
    def row(self) -> str:
        word, _, rest = self.outcome.partition(" ")
        test = f"[`{self.name}`](../{self.path})"
        return f"| {test} | {self.attack} | **{word}** {rest} | {self.cost} |"


ELSEWHERE = [
    Attack(*row)
    for row in (
        (
            "text", "another_environments_turn", "Answers of tools that the environment did not "
            "give, or turns left out.", "Caught by `turns`, a proven fault: the validator replays "
            "the episode.", "the swarm reads one file; the cheat's identity.",
            "tests/validator/test_turns.py",
        ),
        (
            "text", "group_that_nobody_can_grade", "A text over which the grader fails, chosen so "
            "that nobody sees what it is worth.", "Harmless: a submission with such a group is "
            "always recomputed, so that only text of the seed is credited, and the group is "
            "never trained on.", "the swarm recomputes the submission.",
            "tests/trainer/test_role.py",
        ),
        (
            "text", "a_report_counts_only_near_the_trainers_own_value", "Log-probabilities that "
            "the engine did not have, where `objective.behaviour` is `engine`.",
            "Harmless: the trainer takes its own value of a token from which the report differs by "
            "more than `thresholds.log_difference_max`, so a token's importance weight moves by a "
            "factor of at most e to that power.", "none.", "tests/trainer/test_scoring.py",
        ),
        (
            "text", "spans_that_lie", "In a run with swaps in flight: another policy, or another "
            "token, than the one at which the weights were swapped.", "Caught by `proofs`: each "
            "span is recomputed with its own policy.", "the swarm recomputes the submission with "
            "each policy; the cheat's credit.", "tests/validator/test_swaps.py",
        ),
        (
            "text", "tokens_of_a_kept_cache", "Weights swapped, and keys and values of the policy "
            "before kept, to save a prefill.", "Caught by `proofs`: states differ from those of "
            "a prefill.", "the same.", "tests/validator/test_swaps.py",
        ),
        (
            "submissions", "a_wrong_turn_is_a_proven_fault", "Turns of a served environment that "
            "are forged, bent, of another row, reordered, left out or added.",
            "Caught by `signed_turns`, a proven fault, before anything is recomputed or graded.",
            "the swarm reads one file; the cheat's identity.",
            "tests/environment/test_submission.py",
        ),
        (
            "submissions", "turns_cannot_be_replayed_in_another_submission",
            "An environment peer's turns, signed for another submission, step or worker.",
            "Caught by `signed_turns`: every turn names the submission's seed.",
            "the swarm reads one file; the cheat's identity.",
            "tests/environment/test_submission.py",
        ),
        (
            "submissions", "a_thousand_policies", "Spans of as many policies as the file has rows, "
            "each of which the validator would have to load.", "Caught by `spans`, a proven fault: "
            "a submission has at most `swaps_max` + 1.", "the swarm reads one file; the cheat's "
            "identity.", "tests/validator/test_inspector.py",
        ),
        (
            "submissions", "two_puts_of_one_digest", "Other bytes put under the digest of a file "
            "that is judged honest.", "Harmless: each push has a file of its own, is hashed as it "
            "arrives, and what is trained on is hashed again.", "the push, within its quota.",
            "tests/validator/test_pushes.py",
        ),
        (
            "submissions", "a_bomb_is_refused", "A small file that unfolds to gigabytes.",
            "Caught by `schema` from the footer alone, a proven fault.",
            "a read of the footer; the cheat's identity.",
            "tests/rollouts/test_submission_file.py",
        ),
        (
            "submissions", "a_file_that_kills_the_reader", "A file that crashes its reader.",
            "Harmless: the reader is a process of its own with limits on memory and time, and is "
            "replaced.", "two starts of a reader, charged to the worker.",
            "tests/validator/test_reader.py",
        ),
        (
            "identities", "identities_that_come_and_go", "Identities by the thousand, each for a "
            "moment.", "Harmless: what is remembered of them is bounded.",
            "a few bytes for each, up to the bound.", "tests/network/test_membership.py",
        ),
        (
            "identities", "what_makes_an_admission_valid", "A stolen, forged or expired lease.",
            "Caught as it is shown: a lease names its peer, and a client proves its key.",
            "one signature check.", "tests/network/test_membership.py",
        ),
        (
            "validators", "a_rewritten_log", "A trusted peer whose disk was rolled back, or whose "
            "log was rewritten.", "Caught by its mirrors (`ledger.forked`), and by itself as it "
            "starts; a lost log is restored from them first.", "the peer stops.",
            "tests/ledger/test_trusted.py",
        ),
        (
            "validators", "who_signs_a_wrong_shard", "A trainer that merges its shard of a round "
            "wrongly, signs and serves it.", "Caught where another trainer makes the shard again "
            "(`outer.shard_wrong`): the others do too, the right one counts, and the states that "
            "had it are made again. Nobody may draw it: with 2 % and 14 trainers, 77 % of the "
            "rounds.", "one shard's merge for each trainer; the trainer's part in the run.",
            "tests/outer/test_attacked.py",
        ),
        (
            "validators", "a_trainer_that_signs_two_results", "A trainer that signs two results "
            "for one shard.", "Caught by whoever hears both (`outer.shard_wrong`).",
            "the same.", "tests/outer/test_attacked.py",
        ),
        (
            "validators", "a_false_accuser", "A trainer that disputes right shards.",
            "Harmless: each makes the shard again once, and does not hear that trainer's disputes "
            "any more.", "one shard's merge for each trainer.", "tests/outer/test_attacked.py",
        ),
        (
            "network", "a_changed_byte", "Messages of kinds that the sender may not send, "
            "with a changed byte, expired, from the future, or of another run.",
            "Caught at the gate, and dropped.", "one signature check.",
            "tests/network/test_envelope.py",
        ),
        (
            "network", "asks_for_again_and_again", "Requests for the same announcement without "
            "end, or without reading the answers.", "Harmless: answers are rationed, and a "
            "neighbour that does not read is dropped.", "the answers within the ration.",
            "tests/network/test_gossip.py",
        ),
        (
            "network", "strangers", "Connections, streams and bytes of strangers, on real sockets.",
            "Harmless: each role keeps its pace, and trusted peers keep their room.",
            "the connections within the bounds above.", "tests/end_to_end/test_strangers.py",
        ),
        (
            "network", "malformed", "Malformed messages, frames, files and proofs of every kind.",
            "Harmless: every parser lets only its documented exceptions pass.",
            "the bytes read.", "tests/fuzz/test_fuzz.py",
        ),
    )
]  # fmt: skip
"""Attacks whose tests stay with those of one part of the program. A part of the test's name is the
attack's name."""


def attacks() -> Iterator[Attack]:
    """All attacks, by group; raises `ValueError` for a docstring without its three paragraphs."""
    for group in GROUPS:
        for path, name, text in _described(group):
            parts = [" ".join(part.split()) for part in text.split("\n\n")]
            if (
                len(parts) != 3
                or not parts[1].startswith(OUTCOMES)
                or not parts[2].startswith("Cost: ")
            ):
                raise ValueError(f"{name} does not say its attack, its outcome and its cost")
            cost = parts[2].removeprefix("Cost: ")
            where = f"tests/attacks/{path.relative_to(HERE)}"
            yield Attack(group, name, parts[0], parts[1], cost, where)
    yield from ELSEWHERE


def _described(group: str) -> Iterator[tuple[Path, str, str]]:
    """File, name and docstring of a group's attacks: the files of a folder, or the tests of a
    file."""
    for path in sorted((HERE / group).glob("test_*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        yield path, path.stem.removeprefix("test_"), ast.get_docstring(module) or ""
    for path in HERE.glob(f"test_{group}.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                yield path, node.name.removeprefix("test_"), ast.get_docstring(node) or ""


def table() -> str:
    """The catalogue as Markdown."""
    lines = []
    for group, title in GROUPS.items():
        lines += ["", f"### {title}", "", "| Test | Attack | Outcome | Cost |", "|---|---|---|---|"]
        lines += [attack.row for attack in attacks() if attack.group == group]
    return "\n".join(lines) + "\n"


def on_the_page() -> str:
    """The catalogue as docs/attacks.md has it."""
    return PART.shown()


def write() -> None:
    """Put the table on the page."""
    PART.write(table())


if __name__ == "__main__":
    write()
