"""What a page asks for by itself, and the dashboard inside a peer."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import trio
import trio.testing

from swarm.errors import PeerError, UserError
from swarm.events import Event
from swarm.look.alarms.board import Board
from swarm.look.dashboard.feed import Feed
from swarm.look.dashboard.in_peer import PeerDashboard, dashboard_listening
from swarm.look.dashboard.reading import (
    OUTPUT_BYTES_MAX,
    ROLLOUTS_SHOWN,
    TEXT_CHARACTERS_MAX,
    TURNS_MAX,
    newest_rollouts,
    read_rollouts,
    shown_text,
)
from swarm.look.dashboard.requests import KEPT_MAX, KEPT_SECONDS, SECONDS_MAX, WAITING_MAX, Kept
from swarm.settings import PeerSettings
from tests.dashboard.harness import (
    event_stream,
    example,
    order,
    published,
    serving,
    until,
    verdict,
)
from tests.ledger.harness import ALICE, BOB, TRAINER, Swarm, in_virtual_time
from tests.rollouts.test_shown import a_header, a_submission


def test_an_answer_is_given_again_for_a_while_and_few_are_kept() -> None:
    asked: list[str] = []

    async def main() -> None:
        kept = Kept()

        async def answer() -> bytes:
            asked.append("")
            return b"%d" % len(asked)

        assert [await kept.get("one", answer) for _ in range(3)] == [b"1"] * 3
        await trio.sleep(KEPT_SECONDS + 1)
        assert await kept.get("one", answer) == b"2"
        for number in range(3 * KEPT_MAX):
            await kept.get(f"{number}", answer)
        assert len(kept._answers) == KEPT_MAX

        async def never() -> bytes:
            await trio.sleep(10 * SECONDS_MAX)
            return b""

        with pytest.raises(PeerError, match="no answer came within 75 s"):
            await kept.get("another", never)

    in_virtual_time(main)


def test_few_questions_wait_at_once() -> None:
    async def main() -> None:
        kept = Kept()

        async def slow() -> bytes:
            await trio.sleep(SECONDS_MAX / 2)
            return b""

        async with trio.open_nursery() as nursery:
            for number in range(1 + WAITING_MAX):
                nursery.start_soon(kept.get, f"{number}", slow)
                await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(PeerError, match="16 questions are waiting, the most"):
                await kept.get("one more", slow)
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


def test_the_newest_rollouts_are_few_of_each_worker(tmp_path: Path) -> None:
    for step in range(12):
        a_submission(tmp_path / f"{step}.parquet", a_header(step=step))
    shown = newest_rollouts(tmp_path, "", None)
    steps = [each.step for each in shown]
    assert steps == sorted(steps, reverse=True) and steps[0] == 11
    assert len(shown) <= ROLLOUTS_SHOWN and all(steps.count(step) <= 4 for step in steps)
    assert {each.step for each in newest_rollouts(tmp_path, "", 3)} == {3}
    assert [turn.kind for turn in shown[0].turns][:2] == ["prompt", "model"]


def test_a_text_is_shown_to_its_limit_and_no_further() -> None:
    """A line of a text may be as long as the text; escapes make a hostile one no longer."""
    words = "word " * 400
    assert shown_text(words) == words
    hostile = ("\u202e" * 49 + "\n") * 200 + "\ud800\x00\x1b[2J"
    assert len(shown_text(hostile)) == TEXT_CHARACTERS_MAX
    assert shown_text("\ud800\x00\x1b[2J<script>") == "\\ud800\\x00\\x1b[2J<script>"
    longest = 4 * TEXT_CHARACTERS_MAX * TURNS_MAX * ROLLOUTS_SHOWN
    assert longest < OUTPUT_BYTES_MAX, "nobody's texts are too long for the page"


def test_rollouts_are_read_in_a_process_of_its_own(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
        with pytest.raises(PeerError, match="is no submission"):
            await read_rollouts(tmp_path, "", None)
        a_submission(tmp_path / "good.parquet")
        assert json.loads(await read_rollouts(tmp_path, "", None))[0]["turns"]

    trio.run(main)


def test_a_page_without_a_network_is_told_so() -> None:
    async def main() -> None:
        async with serving(Feed(example())) as http:
            for path in ("/record.json?peer=evil", "/record.json", "/rollouts.json"):
                assert (await http.get(path)).status_code == 404
            assert (await http.post("/rollouts.json")).status_code == 405

    trio.run(main)


@pytest.mark.slow
def test_a_peer_shows_its_run_from_its_own_node(tmp_path: Path) -> None:
    """The trainer asks itself without a connection; the page answers what is asked besides."""
    answers: dict[str, httpx.Response] = {}

    async def main() -> None:
        lab = Swarm(tmp_path)
        (tmp_path / "home" / "incoming").mkdir(parents=True)
        a_submission(tmp_path / "home" / "incoming" / "one.parquet")
        settings = PeerSettings(
            role=["trainer"], home=str(tmp_path / "home"), dashboard="127.0.0.1:0"
        )
        async with lab.peer(TRAINER) as trainer, lab.peer(ALICE) as alice, lab.peer(BOB):
            await trainer.run_node.announce(order(3), 600)
            await trainer.trusted.append([published(1)])
            await alice.trusted.append_verdict(lambda index: verdict(index, step=2))
            with dashboard_listening(settings) as dashboard:
                assert dashboard is not None
                async with trio.open_nursery() as nursery:
                    alarms = Board(trainer.node.world.now, trainer.node.world.wall_time)
                    alarms.sign("disk_low", "1 GB is free")
                    nursery.start_soon(dashboard.serve, trainer.node, alarms)
                    await trio.testing.wait_all_tasks_blocked()
                    trainer.node.events.add_sink(notice)
                    trainer.node.events.emit("peer.run_found", run=lab.run, owner="")
                    with trio.fail_after(60):
                        await ask()
                    nursery.cancel_scope.cancel()

    def notice(event: Event) -> None:
        if event.name == "peer.dashboard":
            urls.append(event.fields["url"])
            served.set()

    async def ask() -> None:
        await served.wait()
        async with httpx.AsyncClient(base_url=urls[0], trust_env=False, timeout=60) as http:
            async with event_stream(http) as stream:
                told = await until(stream, b'"entropy":1.25')
            assert b'"rollouts":true' in told
            assert b'"name":"disk_low"' in told
            for path in (
                f"/record.json?peer={TRAINER.peer_id}",
                "/rollouts.json",
                "/rollouts.json?step=-1",
            ):
                answers[path] = await http.get(path)

    served, urls = trio.Event(), list[str]()
    trio.run(main)
    assert [answer.status_code for answer in answers.values()] == [200, 200, 400]
    record, rollouts, _ = answers.values()
    assert record.json()["final"] == 0 and not record.json()["problems"]
    assert rollouts.json()[0]["turns"]


def test_wrong_settings_of_a_peers_dashboard_are_sentences(tmp_path: Path) -> None:
    def problem(**settings: object) -> str:
        chosen = PeerSettings.model_validate({"dashboard": "127.0.0.1:0", **settings})
        with pytest.raises(UserError) as caught:
            PeerDashboard(chosen)
        return str(caught.value)

    assert "a bootstrap peer takes part in none" in problem(role=["bootstrap"])
    assert "is no host:port" in problem(dashboard="8080")
    assert "name it with --dashboard-token-file" in problem(dashboard="0.0.0.0:0")
    with dashboard_listening(PeerSettings()) as none:
        assert none is None
