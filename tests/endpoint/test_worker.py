"""The endpoint of an inference peer's engine, beside the submissions that it generates."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from peers.engines.demo import make_policy
from peers.engines.registry import make_engine
from peers.engines.service import EngineService
from peers.proofs import toploc
from peers.proofs.format import PROOF_BYTES
from swarm.errors import UserError
from swarm.jobs import Load
from swarm.jobs.inference import EndpointSetup, Generate, InferenceSetup
from swarm.rollouts.submission_file import ReadLimits, read
from tests.endpoint.harness import serving
from tests.endpoint.test_endpoint import GENERATE
from tests.orders import policy as policy_reference
from tests.orders import submission_order

LIMITS = ReadLimits(1 << 20, 8, 64, 64, 64)
ORDER = submission_order(groups=3, group_size=4, max_new_tokens=40, stop_ids=[2])


def setup(**fields: Any) -> InferenceSetup:
    given = {"listen": "127.0.0.1:0", "name": "run", "stop_ids": [2], **fields}
    return InferenceSetup(environments=[], endpoint=EndpointSetup(**given))


@asynccontextmanager
async def working(record: Path) -> AsyncIterator[tuple[EngineService, httpx.AsyncClient]]:
    """A service as in an inference peer's child, and a client of its endpoint."""
    service = EngineService(setup(record=str(record)))
    assert service._endpoint is not None
    url = "http://127.0.0.1:{1}".format(*service._endpoint._listener.getsockname())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
            yield service, http
        nursery.cancel_scope.cancel()


async def load(service: EngineService, folder: Path, step: int) -> None:
    await service.load(Load(policy=policy_reference(step), folder=str(folder)))


async def generate(service: EngineService, path: Path) -> bytes:
    """The digest of a submission."""
    return (await service.generate(Generate(order=ORDER, path=str(path)))).digest


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/completions", json={"prompt": "1>", "max_tokens": 30, **fields})
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()["choices"][0]
    return found


def test_agents_share_the_engine_with_submissions(policy_folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(policy_folder) as alone:
            expected = await complete(alone.http, seed=7)
        async with working(tmp_path) as (service, http):
            await load(service, policy_folder, ORDER.policy.step)
            assert await complete(http, seed=7) == expected, "no submission is made"
            quiet = await generate(service, tmp_path / "quiet")
            found: list[Any] = []
            async with trio.open_nursery() as nursery:

                async def ask() -> None:
                    found.append(await complete(http, seed=7))

                async def make() -> None:
                    found.append(await generate(service, tmp_path / "busy"))

                for act in (ask, make, ask, ask):
                    nursery.start_soon(act)
            assert sorted(found, key=str).count(expected) == 3
            assert [each for each in found if isinstance(each, bytes)] == [quiet]

    trio.run(main)


def test_an_episode_over_two_policies_is_recorded_with_the_proofs_of_both(
    policy_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_policy(other, seed=9)

    async def main() -> None:
        async with working(tmp_path / "record") as (service, http):
            tokens = [1, 4, 14]
            for step, folder in ((4, policy_folder), (5, other)):
                await load(service, folder, step)
                params = {"max_tokens": 12, "stop_token_ids": list(range(4, 34))}
                body = {"token_ids": tokens, "sampling_params": params, "user": "a"}
                reply = (await http.post(GENERATE, json=body)).json()
                tokens += [*reply["choices"][0]["token_ids"], 44]
            posted = await http.post("/v1/rollouts/a/reward", json={"reward": 1.0})
            assert posted.json()["episodes"] == 1
            files.append(Path(posted.json()["file"]))

    files: list[Path] = []
    trio.run(main)
    rollouts = read(files[0], LIMITS).rollouts
    rollout, proof = rollouts.rollout(0), rollouts.proof(0)
    assert [span.policy for span in rollout.spans] == [4, 5]
    proofs = [proof[at : at + PROOF_BYTES] for at in range(0, len(proof), PROOF_BYTES)]
    first, second = (
        rollout.sampled[: rollout.spans[0].tokens],
        rollout.sampled[rollout.spans[0].tokens :],
    )
    for folder, indices, own in ((policy_folder, first, proofs[0]), (other, second, proofs[1])):
        engine = make_engine("native", folder)
        found = engine.prefill([rollout.tokens[: indices[-1] + 1]], [indices])
        chunks = toploc.chunk_rows(found.prompt_hidden[0], found.hidden[0])
        assert [each.accepted for each in toploc.verify(chunks, [own])] == [True]


def test_wrong_settings_are_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"\[inference\] endpoint 0.* needed: .*with endpoint_key_file"
    ):
        EngineService(setup(listen="0.0.0.0:0"))
    with pytest.raises(UserError, match="'8000' is no host:port"):
        EngineService(setup(listen="8000"))
    for name in ("peers.endpoint.server", "swarm.transport.http.connections"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "hypercorn.config", None)
    with pytest.raises(UserError, match=r"hypercorn.* is not installed; type: pip install 'swarm-"):
        EngineService(setup())
