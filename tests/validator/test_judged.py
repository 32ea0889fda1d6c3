"""Two validators with the same judge, which our own endpoint serves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from peers.engines.demo import make_policy
from peers.environments.collection import Environments
from peers.validator.cases import Outcome
from tests.endpoint.conftest import CHATML
from tests.endpoint.harness import serving
from tests.orders import reference
from tests.validator.conftest import Stage


@pytest.fixture(autouse=True)
def this_machine_allows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_ENVIRONMENTS", "sort-digits,dataset")


JUDGE = """
kind = "openai"
model = "tiny"
prompt = "{completion}"
pattern = '^\\D*([0-9])'
high = 9
max_tokens = 20
temperature = 1.0
[access]
retries = 0
"""


@contextmanager
def endpoint(folder: Path) -> Iterator[str]:
    """The URL of an endpoint in a thread of its own."""
    scope, urls, ready = trio.CancelScope(), [], threading.Event()

    async def main() -> None:
        with scope:
            async with serving(folder) as client:
                urls.append((str(client.http.base_url), trio.lowlevel.current_trio_token()))
                ready.set()
                await trio.sleep_forever()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    assert ready.wait(60)
    url, token = urls[0]
    try:
        yield url
    finally:
        token.run_sync_soon(scope.cancel)
        thread.join()


@pytest.mark.slow
def test_validators_give_equal_rewards_or_none(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, rollouts = stage.generate()
    of_judge = reference(options={"judge": "tiny"})

    def inspect(machine: str, url: str) -> Outcome:
        (tmp_path / machine).mkdir(exist_ok=True)
        (tmp_path / machine / "tiny.toml").write_text(f"{JUDGE}url = '{url}/v1'")
        monkeypatch.setenv("SWARM_JUDGES", str(tmp_path / machine))
        stage.inspector._environments = Environments([of_judge])
        return stage.inspect(header, rollouts, environments=[of_judge])

    make_policy(tmp_path / "policy")
    (tmp_path / "policy" / "chat_template.jinja").write_text(CHATML)
    with endpoint(tmp_path / "policy") as url:
        first, second = inspect("first", url), inspect("second", url)
    assert not first.failed and not first.ungraded
    assert [len(group) for group in first.rewards] == [4] * 4
    assert first.rewards == second.rewards and first.parts == second.parts
    assert first.parts.names == ["judge"]
    again = inspect("first", url)  # the endpoint is gone, the scores are known
    assert msgspec.to_builtins(again.rewards) == first.rewards
    third = inspect("third", url)
    assert all(each.not_gradable for each in third.ungraded) and len(third.ungraded) == 4
    assert third.rewards == [] and not third.failed
    assert "cannot be reached" in third.ungraded[0].reason
