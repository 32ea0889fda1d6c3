"""The dashboard's figures, sentences, feed and server, without a browser."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peers.trainer.training import logged_figures
from swarm.ledger.entries import (
    CheckpointPublished,
    Consumed,
    RoundFigures,
    TrainingFigures,
    decode,
)
from swarm.look.dashboard.history import AHEAD_MAX, STEPS_KEPT, WORKERS_MAX, History
from swarm.look.dashboard.idle import why_trainer, why_worker
from swarm.look.dashboard.server import PARTS
from swarm.look.dashboard.snapshot import snapshot_of
from swarm.look.dashboard.watch import Feed, Watcher, first_look
from swarm.run.run import Run
from swarm.wire.manifest import Outer
from swarm.wire.messages import CheckpointReference
from tests.commands.harness import complaint
from tests.dashboard.harness import (
    HOSTILE,
    REFUSED,
    TOKEN,
    arrival,
    example,
    order,
    present,
    published,
    serving,
    status_with,
    verdict,
)
from tests.ledger.harness import (
    ALICE,
    BOB,
    OWNER,
    TRAINER,
    WORKER,
    Swarm,
    identity,
    manifest,
    verdict_at,
)
from tests.network.harness import sealed_manifest

# --- figures -------------------------------------------------------------------------------------


async def test_a_page_waits_for_the_first_trusted_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Swarm(tmp_path)
    async with lab.apart(identity(50)) as onlooker, trio.open_nursery() as nursery:
        watcher = Watcher(onlooker.node, Run(onlooker.run_node.run.manifest_envelope))
        found: list[int | None] = []

        async def look() -> None:
            found.append((await first_look(watcher)).head.step)

        nursery.start_soon(look)
        await trio.sleep(60)
        assert not found and capsys.readouterr().err.count("no trusted peer") == 1
        async with lab.peer(TRAINER) as trainer:
            await trainer.run_node.announce(order(3), 600)
            await trio.sleep(60)
            assert found == [3]


async def test_figures_come_from_receipts_proven_to_be_in_the_logs(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with (
        lab.peer(TRAINER) as trainer,
        lab.peer(ALICE) as alice,
        lab.peer(BOB) as bob,
        lab.apart(identity(50)) as onlooker,
    ):
        await trainer.run_node.announce(order(3), 600)
        for number in range(70):
            await alice.trusted.append_verdict(verdict_at(number, step=2))
        await bob.trusted.append_verdict(verdict_at(5, step=2))
        await trio.sleep(11)
        watcher = Watcher(onlooker.node, Run(onlooker.run_node.run.manifest_envelope))
        found = await watcher.look()
        assert found.head.step == 3 and not found.head.problems
        assert found.steps[2].accepted == 70, "one submission counts once"
        assert (found.steps[2].reward, found.steps[2].length) == (0.25, 10.0)
        await alice.trusted.append_verdict(verdict_at(80, step=3, **REFUSED, detail="bad proofs"))
        found = await watcher.look()
        assert (found.steps[2].accepted, found.steps[3].refused) == (70, 1)
        assert [each.detail for each in found.refusals] == ["bad proofs"]
        assert found.head.counted_from == 2, "where the reading of the logs began"


async def test_the_trainers_figures_come_from_its_log(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    async with (
        lab.peer(TRAINER) as trainer,
        lab.peer(ALICE),
        lab.peer(BOB),
        lab.apart(identity(50)) as onlooker,
    ):
        await trainer.run_node.announce(order(3), 600)
        consumed = [Consumed(step=0, submission=bytes(32), outcomes=["consumed"])] * 700
        await trainer.trusted.append([*consumed, published(1), published(2, entropy=0.75)])
        await trio.sleep(11)
        watcher = Watcher(onlooker.node, Run(onlooker.run_node.run.manifest_envelope))
        found = await watcher.look()
        assert not found.head.problems
        told = {step: (row.entropy, row.batch_reward) for step, row in found.steps.items()}
        assert told == {0: (1.25, 0.5), 1: (0.75, 0.5)}
        await trainer.trusted.append([published(3, entropy=0.5)])
        assert (await watcher.look()).steps[2].entropy == 0.5


def test_a_trainer_changes_no_others_figures_and_fills_no_memory() -> None:
    history = History()
    history.learn_training(published(3), order(5))
    history.learn_training(published(3, entropy=9.0), order(5))
    for policy in (0, 5 + AHEAD_MAX + 2, 2**53):
        history.learn_training(published(policy), order(5))
    history.learn_training(msgspec.structs.replace(published(4), figures=None), order(5))
    again = msgspec.structs.replace(published(3, entropy=2.0), lineage=1)
    history.learn_training(again, order(5))
    assert {step: told.entropy for step, (_, told) in history.trained.items()} == {2: 1.25}
    checkpoint = CheckpointReference(lineage=1, step=4, digest=bytes(32), size_bytes=1)
    history.learn_training(again, order(5, checkpoint=checkpoint))
    assert history.trained[2][1].entropy == 2.0, "the newer lineage counts"
    for step in range(3 * STEPS_KEPT):
        history.learn_training(published(step + 1), order(step))
    assert len(history.trained) <= STEPS_KEPT


def contributed(round: int, **figures: Any) -> CheckpointPublished:
    """The entry of one of several trainers for a round."""
    told = RoundFigures(**figures)
    return CheckpointPublished(lineage=round - 1, step=7, manifest=bytes(32), round=told)


async def test_rounds_of_several_trainers_come_from_their_logs(tmp_path: Path) -> None:
    lab = Swarm(tmp_path)
    several = manifest([TRAINER, ALICE], [ALICE, BOB])
    lab.manifest = sealed_manifest(OWNER, msgspec.structs.replace(several, outer=Outer(rounds=3)))
    async with (
        lab.peer(TRAINER) as one,
        lab.peer(ALICE) as two,
        lab.peer(BOB),
        lab.apart(identity(50)) as onlooker,
    ):
        one.run_node.status.doing = two.run_node.status.doing = "round 3: inner steps"
        await one.trusted.append([contributed(1, loss=3.0, trainers_present=2)])
        lost = contributed(2, loss=2.0, rounds_lost=2, tokens_lost=1500)
        await two.trusted.append([contributed(1, loss=1.0, trainers_present=2), lost])
        await two.trusted.append([contributed(2, loss=9.0), contributed(4, loss=9.0)])
        await trio.sleep(11)
        watcher = Watcher(onlooker.node, Run(onlooker.run_node.run.manifest_envelope))
        found = await watcher.look()
        assert (found.head.step, found.head.round, found.head.rounds) == (None, 1, 3)
        assert {round: row["loss"] for round, row in found.rounds.items()} == {1: 2.0, 2: 2.0}, (
            "the first entry of a round counts"
        )
        each = {row["round"]: (row["loss"], row["rounds_lost"]) for row in found.trainers.values()}
        assert each == {1: (3.0, 0), 2: (2.0, 2)}, "each trainer's own newest round"
        assert found.rounds[1]["trainers_present"] == 2 and "utilisation" not in found.rounds[1]
        assert found.head.trainer == "2 of 2 trainers are live: round 3: inner steps (2)."
        assert [line for line in found.head.problems if "its 2 rounds with 1,500 tokens" in line]


def test_a_trainer_that_lies_about_its_rounds_moves_none_of_the_others() -> None:
    history = History()
    for round in range(1, 2 * STEPS_KEPT):
        for trainer in ("one", "two"):
            history.learn_round(trainer, round, RoundFigures(loss=1.0, tokens_merged=round))
        history.learn_round("liar", round * 1000, RoundFigures(loss=-9.0, tokens_merged=2**53))
    assert history.round() == 2 * STEPS_KEPT - 1
    assert max(map(len, history.rounds.values())) == STEPS_KEPT
    rows = snapshot_of(status_with([], None), history, []).rounds
    assert len(rows) == STEPS_KEPT and {row["loss"] for row in rows.values()} == {1.0}


def test_figures_of_a_log_are_finite() -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="malformed log entry"):
            decode(msgspec.msgpack.encode(published(1, entropy=value)))
    figures = {
        "reward": 1.0,
        "gradient_norm": float("inf"),
        "clipped_low": 0.1,
        "clipped_high": 0.2,
    }
    assert logged_figures(figures) == TrainingFigures(reward=1.0, clipped=0.1 + 0.2)
    of_each = {"a": {"reward": 0.5, "entropy": 1.0}, "b": {}}
    told = logged_figures({"repetition": 0.25, "truncated": 0.5}, of_each)
    assert (told.repetition, told.truncated) == (0.25, 0.5)
    assert told.of_each == [[0.5, None, 1.0, None, None, None], [None] * 6]
    assert logged_figures({}, {"a": {"reward": 0.5}}).of_each == [], "the batch is all of it"


def test_the_page_is_told_of_each_environment_and_of_a_rollback() -> None:
    history = History()
    told = published(2, repetition=0.25, truncated=0.5, of_each=[[0.5, 8.0, 1.25, None, 0.0, 1.0]])
    history.learn_training(told, order(2))
    back = CheckpointReference(lineage=1, step=1, digest=bytes(32), size_bytes=1)
    began = msgspec.structs.replace(published(1), figures=None, lineage=1)
    history.learn_training(began, order(2))
    assert history.begun == {}, "no order of that lineage has come"
    history.learn_training(began, order(2, checkpoint=back))
    shown = snapshot_of(status_with([], order(2, checkpoint=back)), history, [])
    assert shown.head.begun == {1: 1} and shown.head.environments == ["sort-digits"]
    row = shown.steps[1]
    assert (row.repetition, row.truncated) == (0.25, 0.5)
    assert row.of_each == [[0.5, 8.0, 1.25, None, 0.0, 1.0]]


def test_what_a_refused_submission_names_moves_no_chart() -> None:
    history = History()
    history.learn(verdict(1, step=3), ALICE.peer_id, order(3))
    for number, claim in enumerate(({"step": 2**53}, {"step": 3, "lineage": 2**53}), 10):
        history.learn(verdict(number, **{**REFUSED, **claim}), ALICE.peer_id, order(3))
    history.learn(verdict(2, step=3), ALICE.peer_id, order(3))
    assert list(history.steps) == [3] and history.steps[3].accepted == 2
    assert len(history.refusals) == 2, "they are listed all the same"


def test_a_rollback_begins_its_steps_anew() -> None:
    history = History()
    history.learn(verdict(1, step=3), ALICE.peer_id, order(4))
    history.learn(verdict(2, step=3, lineage=1, rewards=[[1.0]]), ALICE.peer_id, order(3))
    history.learn(verdict(3, step=3), ALICE.peer_id, order(3))
    assert (history.steps[3].accepted, history.steps[3].reward_sum) == (1, 1.0)


def test_memory_is_bounded() -> None:
    history = History()
    for step in range(3 * STEPS_KEPT):
        history.learn(verdict(step, step=step), ALICE.peer_id, order(step))
    assert len(history.steps) == STEPS_KEPT
    for number in range(WORKERS_MAX + 10):
        refused = msgspec.structs.replace(verdict(number, **REFUSED), worker=f"worker {number}")
        history.learn(refused, ALICE.peer_id, order(0))
    assert len(history.workers) == WORKERS_MAX and len(history.refusals) == 50
    assert f"worker {WORKERS_MAX + 9}" in history.workers, "who came once makes way for newcomers"


# --- sentences -----------------------------------------------------------------------------------


def test_why_the_trainer_is_idle() -> None:
    holder = present(WORKER.peer_id, "inference", policy=2, tokens_per_second=100.0)
    behind = present(WORKER.peer_id, "inference", policy=1)
    fetching = present(BOB.peer_id, "inference", policy=1, arrival=arrival(ALICE.peer_id))
    other = present("another", "inference", policy=1)
    mute = present(ALICE.peer_id, "validator", standing="gone", age_seconds=70.0)
    silent = present(TRAINER.peer_id, "trainer", standing="gone", age_seconds=61.0)
    trainer = present(TRAINER.peer_id, "trainer", doing="waiting for rollouts of step 3")
    busy = present(TRAINER.peer_id, "trainer", doing="training step 2")
    refusing = History()
    for number in range(4):
        refused = REFUSED if number else {}
        refusing.learn(verdict(number, step=3, **refused), ALICE.peer_id, order(3))
    cases: list[tuple[Any, Any, History, str]] = [
        ([trainer], None, History(), "No step has begun"),
        ([trainer], order(3, final=True), History(), "The run is over: step 3"),
        ([silent, holder], order(3), History(), "silent: the last heartbeat came 61 s ago"),
        ([trainer], order(3, groups=0), History(), "has all groups of step 3"),
        ([busy, holder], order(3), History(), "busy: training step 2"),
        ([trainer], order(3), History(), "waits for 8 groups of step 3, and no inference worker"),
        ([trainer, behind], order(3), History(), "and no worker holds policy 2 yet"),
        ([trainer, fetching], order(3), History(), "and no worker holds policy 2 yet"),
        ([trainer, holder, fetching, other], order(3), History(), "2 of 3 live workers still"),
        ([trainer, holder, mute], order(3), History(), "no validator is live"),
        ([trainer, holder], order(3), refusing, "3 of 4 submissions were refused"),
        ([trainer, holder], order(3), History(), "live workers that generate them: 1."),
    ]
    for entries, step_order, history, words in cases:
        assert words in why_trainer(status_with(entries, step_order), history)


def test_why_a_worker_is_idle() -> None:
    def why(step_order: Any = order(3), **changes: Any) -> str:  # noqa: B008
        return why_worker(present(WORKER.peer_id, "inference", **changes), step_order)

    assert why(policy=2) == ""
    assert why(policy=1, tokens_per_second=10.0) == ""
    assert why(policy=1) == "step 3 needs policy 2, which it does not hold yet"
    assert why(policy=1, arrival=arrival(ALICE.peer_id)) == (
        "step 3 needs policy 2, of which it has 43 %, from 3 sources"
    )
    assert why(policy=2, standing="evicted") == "it was evicted: its work counts no more"
    assert why(policy=2, standing="gone", age_seconds=90.0) == "its last heartbeat came 90 s ago"
    assert why(order(3, groups=0), policy=2) == "step 3 wants no more groups"
    assert why(None) == "no step has begun"
    assert why_worker(present(ALICE.peer_id, "validator"), order(3)) == ""


# --- the feed ------------------------------------------------------------------------------------


# --- the server ----------------------------------------------------------------------------------


@pytest.mark.wall_clock
async def test_the_page_is_whole_read_only_and_names_no_other_site() -> None:
    async with serving(Feed(example())) as http:
        for path in PARTS:
            answer = await http.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            text = answer.text.replace("https://github.com/leeoniya/uPlot", "")
            assert "://" not in text and "innerHTML" not in text and " style=" not in text
            assert (await http.post(path)).status_code == 405
        assert (await http.get("/page.css/../../etc/passwd")).status_code == 404
        told = (await http.get("/snapshot.json")).json()
        assert told["head"]["step"] == 3
        assert "\x1b" not in str(told) and "\u202e" not in str(told)


@pytest.mark.wall_clock
async def test_a_page_that_asks_again_gets_only_what_is_new() -> None:
    feed = Feed(example())
    async with serving(feed) as http:
        first = await http.get("/snapshot.json")
        assert first.headers["content-encoding"] == "gzip"
        assert HOSTILE[:28] in str(first.json()), "as text: the page never parses it"
        known = {"if-none-match": first.headers["etag"]}
        feed.publish(example())
        again = await http.get("/snapshot.json", headers=known)
        assert (again.status_code, again.content) == (304, b"")
        feed.publish(example(4))
        plain = {"accept-encoding": "identity"}
        newer = await http.get("/snapshot.json", headers={**known, **plain})
        assert newer.json()["head"]["step"] == 4


@pytest.mark.wall_clock
async def test_only_this_machines_names_are_answered_to_without_a_token() -> None:
    async with serving(Feed(example())) as http:
        for host, status in (("localhost:1", 200), ("[::1]", 200), ("evil.example", 403)):
            for path in ("/", "/other", "/snapshot.json"):
                answer = await http.get(path, headers={"host": host})
                assert answer.status_code in (status, 404 if status == 200 else 403)


@pytest.mark.parametrize("tokens", [frozenset[str](), frozenset({TOKEN})])
@pytest.mark.wall_clock
async def test_a_page_of_another_site_asks_nothing_by_the_browser(tokens: frozenset[str]) -> None:
    """It could not read an answer, but could ask for rollouts on and on."""
    async with serving(Feed(example()), tokens) as http:

        async def status(site: str, destination: str, path: str) -> int:
            headers = {"sec-fetch-site": site, "sec-fetch-dest": destination}
            headers["authorization"] = f"Bearer {TOKEN}"
            return (await http.get(path, headers=headers)).status_code

        for site in ("cross-site", "same-site"):
            for destination in ("empty", "iframe", "image", "script", ""):
                for path in ("/", "/rollouts.json", "/snapshot.json"):
                    assert await status(site, destination, path) == 403
            assert await status(site, "document", "/") == 200, "a link"
        for site in ("same-origin", "none"):
            assert await status(site, "empty", "/snapshot.json") == 200


@pytest.mark.wall_clock
async def test_a_token_opens_every_path_and_nothing_else_does() -> None:
    async with serving(Feed(example()), frozenset({TOKEN})) as http:

        async def status(authorization: str | None, path: str = "/snapshot.json") -> int:
            headers = {"host": "lab.example"}
            headers |= {} if authorization is None else {"authorization": authorization}
            return (await http.get(path, headers=headers)).status_code

        basic = base64.b64encode(f"me:{TOKEN}".encode()).decode()
        for good in (f"Bearer {TOKEN}", f"Basic {basic}"):
            assert await status(good) == 200
        wrong = base64.b64encode(b"me:wrong").decode()
        for bad in (None, "", "Bearer", "Bearer x", f"Basic {wrong}", "Basic %%", f"No {TOKEN}"):
            for path in (*PARTS, "/snapshot.json", "/other"):
                assert await status(bad, path) == 401
        asked = await http.get("/")
        assert asked.headers["www-authenticate"].startswith("Basic ")


@pytest.mark.wall_clock
async def test_a_public_page_is_read_by_anybody_and_may_stand_in_a_frame() -> None:
    async with serving(Feed(example()), public=True) as http:
        cross = {"sec-fetch-site": "cross-site", "sec-fetch-dest": "iframe"}
        for path in (*PARTS, "/snapshot.json"):
            answer = await http.get(path, headers={"host": "run.example", **cross})
            assert answer.status_code == 200
            assert "frame-ancestors *" in answer.headers["content-security-policy"]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["access-control-allow-origin"] == "*"
            assert answer.headers["cache-control"] == "public, max-age=2"
            for method in ("POST", "PUT", "DELETE"):
                assert (await http.request(method, path)).status_code == 405
        assert (await http.get("/rollouts.json")).status_code == 404, "it was given no home"


@pytest.mark.wall_clock
async def test_a_token_may_have_any_characters() -> None:
    token = "zwölf Bären und vier"
    async with serving(Feed(example()), frozenset({token})) as http:
        basic = base64.b64encode(f"me:{token}".encode()).decode()
        for given in (f"Bearer {token}", f"Basic {basic}"):
            headers = {b"authorization": given.encode()}
            assert (await http.get("/", headers=headers)).status_code == 200, given


def test_wrong_options_are_sentences(tmp_path: Path) -> None:
    said = complaint("dashboard", "--listen", "0.0.0.0:8080")
    assert "so a key is needed" in said and "--key-file" in said
    assert "no host:port" in complaint("dashboard", "--listen", "8080")
    assert "so leave --key-file out" in complaint(
        "dashboard", "--public", "--key-file", str(tmp_path / "none")
    )
    nothing = complaint("dashboard", "--key-file", str(tmp_path / "none"))
    assert "none cannot be read (No such file or directory)" in nothing
    short = tmp_path / "token"
    short.write_text("short\n")
    assert "at least 16 characters" in complaint("dashboard", "--key-file", str(short))
