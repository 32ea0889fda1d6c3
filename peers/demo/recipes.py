"""The demos' recipes: a character model of 0.23 million parameters learns a small task (measured in
docs/concepts.md and docs/environments.md), or a given model one in a chat (docs/training.md)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from peers.engines.demo import EOS_ID, LENGTH_MAX, UNKNOWN_ID
from peers.environments import Environment, Renderer, task_of
from peers.environments.episodes import demonstrate
from peers.environments.probe import PROBE_TASKS, probe_seed
from peers.environments.registry import load_any
from peers.environments.renderer import stop_ids_of
from swarm.errors import UserError
from swarm.jobs import TrainingJob
from swarm.terminal.tables import read_toml, struct_from_mapping
from swarm.wire import manifest

MODEL = "demo/qwen2-0.23m"
OBJECTIVE = manifest.Objective(epsilon=0.2, delta=4.0, kl_coefficient=0.0, entropy_coefficient=0.0)
THRESHOLDS = manifest.Thresholds(measured_tokens=2_229_646, measured_dtypes=["bfloat16", "float32"])
"""The defaults, which are this model's (docs/benchmarks.md, "Honest workers and cheats")."""


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """The supervised learning of the tasks' own answers that RL needs to begin, as measured: 51 to
    53 steps for sort-digits, about 4 s on one core."""

    learning_rate: float = 2e-3
    warmup_steps: int = 20
    batch: int = 128
    """Prompts per step; no prompt is drawn twice."""
    steps_max: int = 200
    accuracy: float = 0.15
    """Probability of the right answer at which to stop, mean over the prompts of the last `window`
    steps. Five seeds then have 0.205 to 0.223 on 4,096 held-out prompts."""
    window: int = 4


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What one demo trains on."""

    title: str
    environments: list[manifest.EnvironmentReference]
    sampling: manifest.Sampling
    schedule: manifest.Schedule
    optimiser: manifest.Optimiser
    adapter: manifest.Adapter = manifest.Adapter()
    thresholds: manifest.Thresholds = THRESHOLDS
    """Those of a model that is given are measured."""
    positions: int = LENGTH_MAX
    """The context length of a policy that is made."""
    warmup: Warmup | None = Warmup()
    """None: the environments tell no answers."""
    held_out: int = 512
    """Prompts that measure the policy before and after; 512 tell the accuracy to about 0.02."""
    system_prompt: str = ""
    """What a chat model is told of the task."""


class Prepare(TrainingJob, frozen=True, kw_only=True):
    """A part of the preparation of a demo's base policy, in a child."""

    recipe: Recipe
    folder: str
    model: str = ""
    """Folder of the model that the warm-up begins with; empty: with random weights."""
    seed: int = 0


class PreparationService(Protocol):
    """What the child does; `peers.demo.warmup` implements it."""

    async def warm_up(self, job: Prepare) -> int:
        """Write the policy to `folder`, warmed up; return the steps."""

    async def calibrate(self, job: Prepare) -> manifest.Thresholds:
        """Measure the thresholds by which validators tell honest work from fakes."""


def _filled(table: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    own = {
        key: _filled(value, other[key]) if isinstance(value, dict) and key in other else value
        for key, value in table.items()
    }
    return other | own


def _recipes() -> dict[str, Recipe]:
    where = "the demos' recipes"
    tables = read_toml(Path(__file__).with_suffix(".toml"), where)
    every = tables.pop("every")
    every["sampling"]["stop_ids"] = [EOS_ID]
    return {
        name: struct_from_mapping(Recipe, _filled(table, every), f"{where}: {name}")
        for name, table in tables.items()
    }


RECIPES = _recipes()
"""By the name that `swarm demo --environment` takes."""
OF_MODEL = RECIPES.pop("model")
SORTING = RECIPES["sort-digits"]
ENVIRONMENT, SAMPLING = SORTING.environments[0], SORTING.sampling
SCHEDULE, OPTIMISER, LORA = SORTING.schedule, SORTING.optimiser, OF_MODEL.adapter
TEMPERATURE = 0.7
"""At which a model that is given is sampled."""
TOKENS_MAX = 64
"""Most tokens of an episode whose environment tells no answers."""


def environments_of(name: str) -> list[manifest.EnvironmentReference]:
    """Those of the recipe of that name, or the one that is so called, before it is loaded."""
    known = RECIPES.get(name)
    return known.environments if known else [manifest.EnvironmentReference(name=name, version="")]


def recipe_of(
    name: str,
    options: Mapping[str, manifest.OptionValue] | None = None,
    model: Path | None = None,
    tokenizer: Path | None = None,
) -> Recipe:
    """The recipe of a demo with an environment, by name. `model`: the folder of a model that is
    given. `tokenizer`: of the policy that is made without one. Raises `UserError`."""
    known = RECIPES.get(name)
    if known is not None and model is None and not options:
        return known
    environments = environments_of(name)
    given = dict(options or {})
    if model is not None and given.get("chat") is not False:
        try:
            _ = Renderer(model).chat
        except UserError as error:
            way_out = "or let the model continue text, with --option chat=false"
            raise UserError(f"{error}; {way_out}") from error
        told = {"system_prompt": known.system_prompt} if known and known.system_prompt else {}
        given = {"chat": True, **told, **given}
    loaded = [load_any(each.name, {**each.options, **given}) for each in environments]
    begin = OF_MODEL if model is not None else known or SORTING
    recipe = replace(
        begin,
        title=known.title if known else name,
        environments=[
            replace(each, version=environment.version, options={**each.options, **given})
            for each, environment in zip(environments, loaded, strict=True)
        ],
    )
    folder = model or tokenizer
    assert folder is not None
    return _fitted(recipe, loaded, Renderer(folder), model)


def _fitted(
    recipe: Recipe, environments: list[Environment], renderer: Renderer, model: Path | None
) -> Recipe:
    prompts = completions = 0
    stops, answered = stop_ids_of(model) if model else [EOS_ID], True
    for environment in environments:
        for index in range(PROBE_TASKS):
            task = task_of(environment, probe_seed(index))
            ends = None if isinstance(task.prompt, str) else renderer.turn_end(task.prompt)
            stops += [ends] if ends is not None and ends not in stops else []
            answered = answered and any(task.own.model_turns)
            segments = demonstrate(environment, task, renderer, stops[0])[: None if answered else 1]
            tokens = [token for each in segments for token in each.tokens]
            if model is None and UNKNOWN_ID in tokens:
                raise UserError(
                    f"environment {environment.name!r} uses characters that the policy made here "
                    "does not know (small letters, digits and common signs are known); give "
                    "--model a model that does"
                )
            written = sum(len(each.tokens) for each in segments if each.kind == "model")
            prompts = max(prompts, len(tokens) - written)
            completions = max(completions, written)
    if not answered and model is None:
        raise UserError(
            f"environment {recipe.title!r} tells no answers, which a policy with random weights "
            "must learn first; give its tasks an answer or a demonstration, or give --model a "
            "model that is sometimes right"
        )
    sampling = replace(
        recipe.sampling,
        temperature=TEMPERATURE if model else recipe.sampling.temperature,
        max_new_tokens=completions + 1 if answered else TOKENS_MAX,
        stop_ids=stops,
    )
    return replace(
        recipe,
        sampling=sampling,
        positions=max(recipe.positions, prompts + 2 * sampling.max_new_tokens),
        warmup=recipe.warmup if answered else None,
    )
