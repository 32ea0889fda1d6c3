"""A worker that draws rows of which no rollout can be made goes on, and is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peers.engines import demo
from peers.engines.service import EngineService
from peers.validator.inspector import InspectorService
from swarm.jobs.inference import InferenceSetup
from swarm.jobs.validation import InspectionSetup
from swarm.run.allowed import ALLOWED_VARIABLE
from tests.background import in_background
from tests.environments.test_unusable_rows import BAD, GOOD, TEMPLATE
from tests.orders import reference
from tests.validator.conftest import Stage, load


def test_submissions_that_draw_bad_rows_are_made_and_judged(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 groups some 15 draw a bad row first."""
    monkeypatch.setenv(ALLOWED_VARIABLE, "dataset")
    policy, data = tmp_path / "policy", tmp_path / "rows.jsonl"
    demo.make_policy(policy, seed=1)
    (policy / "chat_template.jinja").write_text(TEMPLATE)
    data.write_text("\n".join(map(json.dumps, [*GOOD, *BAD])))
    environment = reference("dataset", options={"path": str(data), "chat": True})
    engine = EngineService(InferenceSetup(environments=[environment]))
    inspector = InspectorService(InspectionSetup(environments=[environment]))
    load(engine, policy)
    with in_background(inspector.run) as ask:
        own = Stage(policy, tmp_path, engine, inspector, stage.prefill, ask)
        for number in range(15):
            header, rollouts = own.generate(environments=[environment], number=number)
            found = own.inspect(header, rollouts, environments=[environment], number=number)
            assert not found.failed, (found.failed, found.detail)
            assert len(found.rewards) == 4
