"""Solutions as records of genesys, in the form in which SYNTHETIC-1 is published."""

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from peers.environments import Task
from peers.environments.interface import as_text, messages_of
from swarm.data import beside
from swarm.terminal.output import to_json

MEANINGS = beside(__file__, dict[str, str])
"""The columns of PrimeIntellect/SYNTHETIC-1 in their order, and those of genesys' `Response` that
it lacks; all but `score` are text."""


def response(
    task: Task,
    environment: str,
    name: str,
    *,
    sample: str,
    text: str,
    score: float,
    parts: Mapping[str, float],
    made: Mapping[str, Any],
) -> dict[str, Any]:
    """`name`: the id of a task without one; `sample`: the answer's; `made`: the last three."""
    data = task.own.data
    asked = [each.content for each in messages_of(task.prompt) if each.role != "system"]
    return {
        "response_id": blake3(sample.encode()).hexdigest(length=16),
        "problem_id": _text(data.get("problem_id")) or name,
        "source": _text(data.get("source")) or "",
        **{key: _text(data.get(key)) for key in ("in_source_id", "hf_dataset_name")},
        "task_type": _text(data.get("task_type")) or environment,
        "prompt": asked[0] if len(asked) == 1 else as_text(task.prompt),
        "gold_standard_solution": task.own.answer or None,
        "llm_response": text,
        "verification_info": to_json(data.get("verification_info", data)),
        "score": score,
        "verification_result_info": to_json(parts),
        "metadata": to_json(data.get("metadata", {})),
        **{key: value if key == "model_name" else to_json(value) for key, value in made.items()},
    }


def _text(value: Any) -> str | None:
    """A column's value as the text that it must be; records of others hold numbers and lists."""
    return value if value is None or isinstance(value, str) else to_json(value)
