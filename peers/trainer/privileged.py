"""Privileged prompts: what only the teacher reads (on-policy self-distillation, 2601.18734)."""

from pathlib import Path

import torch

from peers.environments import Renderer, Task
from peers.environments.collection import Environments
from peers.environments.dataset import FIELD
from peers.environments.interface import Prompt, messages_of, with_text
from peers.environments.prompt_room import ModelFacts, PromptRoom
from peers.learning.batch import AcceptedGroups
from swarm.errors import UserError
from swarm.jobs.training import TrainingTerms


class PrivilegedPrompts:
    """Draws the tasks of accepted submissions again, and renders them as the template says."""

    def __init__(self, model: Path, terms: TrainingTerms) -> None:
        """Load the environments, if the run has a template; raises `UserError`."""
        self._template, self._references = terms.objective.teacher_prompt, terms.environments
        if self._template:
            self._environments = Environments()
            for each in terms.environments:
                self._environments.of(each)
            sizes = ModelFacts.read(model).max_position_embeddings, terms.sampling.max_new_tokens
            self._room = PromptRoom.of_policy(Renderer(model), *sizes)

    def give(self, given: AcceptedGroups, seed: bytes) -> None:
        """Give this rank's sequences what the teacher sees: nothing where the task is not known."""
        if given.teacher_prompts is None and self._template:
            groups = (given.rows // len(given.rewards[0])).tolist()
            known = {group: self._of(seed, group) for group in set(groups)}
            rows = torch.split(given.tokens, given.lengths.tolist())
            given.teacher_prompts = [
                known[group][1] if row[: len(known[group][0])].tolist() == known[group][0] else []
                for group, row in zip(groups, rows, strict=True)
            ]

    def _of(self, seed: bytes, group: int) -> tuple[list[int], list[int]]:
        """Token ids of a group's prompt, and of the teacher's; nothing if there is none."""
        try:
            found = self._environments.task(self._references, seed, group, self._room)
            prompt = filled(self._template, found.task)
            return found.tokens, self._room.renderer.encode_prompt(prompt) if prompt else []
        except UserError:
            return [], []


def filled(template: str, task: Task) -> Prompt | None:
    """A template with a task's prompt, answer and data; None if the task lacks what it names."""
    known = {**task.own.data, "answer": "\n".join(task.own.model_turns)}
    known["prompt"] = messages_of(task.prompt)[-1].content
    if not all(known.get(name) for name in FIELD.findall(template)):
        return None
    return with_text(task.prompt, FIELD.sub(lambda found: str(known[found[1]]), template))
