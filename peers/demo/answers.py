"""What the swarm's model answers while it learns, from the work in the validator's home."""

from __future__ import annotations

from pathlib import Path

from peers.demo.recipes import Recipe
from peers.environments import Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.interface import messages_of
from peers.environments.probe import probe_seed
from swarm.errors import UserError
from swarm.jobs.evaluation import Answer
from swarm.look.rollouts.filters import Filters
from swarm.look.rollouts.seen import SeenRollout
from swarm.look.rollouts.sources import open_source
from swarm.look.rollouts.text import Decoder


class Reader:
    """Finds one answer at a time, of the newest submission that was accepted."""

    def __init__(self, home: Path, policy: Path, recipe: Recipe) -> None:
        """`home`: the validator's. `policy`: a folder with the tokenizer."""
        self._home, self._policy = home, policy
        self._decoder = Decoder(policy)
        self._stops = recipe.sampling.stop_ids
        environment = Environments(recipe.environments).of(recipe.environments[0])
        prompt = task_of(environment, probe_seed(0)).prompt
        text = self._decoder.decode(Renderer(policy).encode_prompt(prompt))
        # What the chat template writes around every question.
        self._before, _, self._after = text.rpartition(messages_of(prompt)[-1].content)
        self._shown: set[Path] = set()

    def newest(self) -> tuple[int, Answer] | None:
        """(the step that the answer is for, the answer); None if there is no new one."""
        try:
            source = open_source(self._home, tokenizer=self._policy)
        except UserError:  # the home holds none at this moment
            return None
        for found in reversed(source.files):
            if found.path in self._shown:
                return None
            source.files = [found]
            accepted = [each for each in source.rollouts(Filters()) if each.reward is not None]
            if accepted:
                self._shown.add(found.path)
                return found.step, self._answer(accepted[len(self._shown) % len(accepted)])
        return None

    def _answer(self, seen: SeenRollout) -> Answer:
        prompt, *turns = seen.turns
        question = (prompt.text or "").removeprefix(self._before).removesuffix(self._after)
        written = [
            self._decoder.decode([token for token in turn.tokens if token not in self._stops])
            for turn in turns
            if turn.kind == "model"
        ]
        return Answer(question, " ⏎ ".join(written), seen.reward or 0.0)
