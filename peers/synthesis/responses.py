"""Solutions as records of genesys, in the form in which SYNTHETIC-1 is published."""

from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from peers.environments import Task
from peers.environments.interface import as_text, messages_of
from swarm.terminal.output import to_json

MEANINGS = {
    "response_id": "identifies the answer",
    "problem_id": "identifies the problem: the record's, or of the task's seed or prompt",
    "source": "where the problem is from, as its record says",
    "in_source_id": "its id there",
    "hf_dataset_name": "the data set of the hub that had it",
    "task_type": "kind of task: the record's, or the environment's name",
    "prompt": "the problem as text",
    "gold_standard_solution": "a right answer, where one is known",
    "llm_response": "all that the model wrote; of several turns, with the environment's between",
    "verification_info": "what the verifier needs, as JSON",
    "score": "the verifier's reward",
    "verification_result_info": "what the score is made of, as JSON",
    "metadata": "what else the record says, as JSON",
    "model_name": "the model and its version",
    "generation_config": "how it was sampled, as JSON",
    "machine_info": "who generated it, as JSON",
}
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
    """The record of an answer.

    `name` is the id of a task whose record has none, `sample` that of the answer; `made` has the
    last three columns.
    """
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
