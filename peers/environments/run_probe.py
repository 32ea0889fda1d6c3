"""A test of a run's model config and environments before its manifest is signed.

It shows that a submission can be made and graded, not that the run learns. Imports no torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from peers.engines.config import read_text_config
from peers.engines.tokenizer import check_tokenizer
from peers.environments import Environment, Renderer, Task, Transcript, grade, probe_hash, task_of
from peers.environments.chat import Chat
from peers.environments.chat_template import TURN, ChatTemplate
from peers.environments.collection import SERVED_PROMPT_TOKENS_MAX, Environments, room_for
from peers.environments.interface import Message, Prompt, Wrapper, episodes_of, messages_of
from peers.environments.play import Episode, graded_alike, indexed_tasks
from peers.environments.probe import PROBE_TASKS, probe_seed
from peers.environments.prompt_room import ModelFacts, PromptRoom
from peers.environments.renderer import variables_of
from peers.environments.row_check import read_rows
from peers.models.find import Model, find_model, is_hub_name
from swarm.errors import UserError
from swarm.jobs.evaluation import RowsRead
from swarm.run.toml import RunHashes, describe_run, manifest_from_toml, unhashed_manifest
from swarm.sentences import numbered
from swarm.terminal.progress import progress_bar
from swarm.wire.manifest import EnvironmentReference, RunManifest


@dataclass
class DataRead:
    """What `check_rows` has to say once the run is found possible."""

    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_rows(
    manifest: RunManifest, folder: Path, installed: Environments, ungradable_max: float
) -> DataRead:
    """Render every row with the tokenizer in `folder`; warnings name rows that no rollout can be
    made of. Raises `UserError` if they are more than the share `ungradable_max`."""
    room = policy_room(manifest, folder, Renderer(folder))
    read = DataRead()
    for reference in manifest.environments:
        if (tasks := indexed_tasks(installed.of(reference))) is None:
            continue
        with progress_bar(f"rendering the rows of {reference.name}", counted=True) as show:
            found = read_rows(tasks, room_for(reference, room), show)
        rate = f" ({found.seconds / found.rows * 1000:.2g} s per thousand)"
        read.lines.append(
            f"{reference.name}: {found.rows:,} rows rendered in {found.seconds:.1f} s"
            f"{rate if found.rows >= 1000 else ''}; the longest prompt has "
            f"{found.tokens_max:,} tokens"
        )
        read.warnings += _judged(found, reference, manifest, ungradable_max)
    return read


def policy_room(manifest: RunManifest, folder: Path, renderer: Renderer) -> PromptRoom:
    """Room for the prompts of a run; of any length if `folder` has no config.json."""
    if not (folder / "config.json").exists():
        return PromptRoom(renderer)
    positions = ModelFacts.read(folder).max_position_embeddings
    return PromptRoom.of_policy(renderer, positions, manifest.sampling.max_new_tokens)


def _judged(
    found: RowsRead, reference: EnvironmentReference, manifest: RunManifest, ungradable_max: float
) -> list[str]:
    bad = found.unusable_count
    if bad > ungradable_max * found.rows:
        raise UserError(
            f"{bad:,} of {found.rows:,} rows of {reference.name} cannot be used, more than the "
            f"share --ungradable-max {ungradable_max:g}. {found.unusable[0]}. Repair or remove "
            "such rows, make sampling.max_new_tokens "
            f"({manifest.sampling.max_new_tokens}) smaller if prompts are too long, or raise "
            "--ungradable-max"
        )
    return [found.listed(reference.name)] if bad else []


GRADED_TASKS = 8
"""Probe tasks that are graded: grading may be slow."""

SERVED_PROMPTS = 256
"""Prompts of a served environment that must fit a message: a few long ones among thousands only
cost the submissions that hold them."""

ODD_TEXTS = ("", " ", "\n\x00\ufffd", "0", "x" * 1000)
"""Completions that any policy may write and that an environment must handle."""


def described(file: Path, tokenizer: Path | None, ungradable_max: float) -> RunManifest:
    """Make and check the manifest that a TOML file describes; warnings go to standard error.

    `tokenizer`: its folder; None: the model's. Raises `UserError`, also as `check_rows` does."""
    description = describe_run(file)
    model = Model(tokenizer, "") if tokenizer else model_of(file, description.model)
    folder = model.folder
    installed = Environments(allowed=[each.name for each in description.environments])
    rows = check_rows(unhashed_manifest(file), folder, installed, ungradable_max)
    manifest = manifest_from_toml(file, probe_hashes(folder, description.environments, installed))
    if is_hub_name(model.name):
        manifest = msgspec.structs.replace(manifest, model=model.name)  # with its commit
    for warning in [*rows.warnings, *probe_run(manifest, folder, str(file), installed)]:
        print(numbered(f"warning: {warning}"), file=sys.stderr)
    for line in rows.lines:
        print(numbered(line))
    return manifest


def model_of(file: Path, model: str) -> Model:
    """The model that a run's file names; raises `UserError`."""
    try:
        return find_model(model, f"{file}: model")
    except UserError as error:
        raise UserError(f"{error}; or name its tokenizer's folder with --tokenizer") from error


def probe_hashes(
    folder: Path,
    environments: Sequence[EnvironmentReference],
    installed: Environments | None = None,
) -> RunHashes:
    """Hash the tokenizer in `folder` and each environment's probe tasks, perhaps a stranger's;
    raises `UserError` if the folder has no tokenizer or an environment is not installed."""
    renderer, installed = Renderer(folder), installed or Environments()
    return RunHashes(
        tokenizer=renderer.tokenizer_hash,
        probes=[probe_hash(installed.of(each), renderer) for each in environments],
        pins=[installed.of(each).pins() for each in environments],
    )


def try_grading(environments: Sequence[EnvironmentReference]) -> None:
    """Grade one answer in each environment; raises `UserError` if this machine cannot."""
    installed = Environments()
    for each in environments:
        environment = installed.of(each)
        task = task_of(environment, probe_seed(0))
        grade(environment, task, Transcript.of(task.answer, finished=True))


def probe_run(
    manifest: RunManifest, folder: Path, where: str, installed: Environments
) -> list[str]:
    """Warnings about environments and the model in `folder`; raises `UserError` with `where`."""
    renderer = Renderer(folder)
    for each in manifest.environments:
        if each.where == "local" and not installed.of(each).replayable:
            raise UserError(
                f"{where}: the observations of environment {each.name!r} may differ from machine "
                "to machine with these options, so a validator cannot replay them; set where = "
                '"served" for it'
            )
    # Rows that are too long were counted, and a worker passes over them; other prompts must fit.
    limited, unlimited = policy_room(manifest, folder, renderer), PromptRoom(renderer)
    probed = []
    for each in manifest.environments:
        environment = installed.of(each)
        has_rows = indexed_tasks(environment) is not None
        if each.where == "served" and not has_rows:
            check_prompts_fit(environment, renderer)
        room = room_for(each, limited) if has_rows else unlimited
        probed.append(_probe_environment(environment, room))
    longest, largest = (max(figures) for figures in zip(*probed, strict=True))
    warnings = [
        warning
        for each in manifest.environments
        for warning in _check_chat(installed.of(each), renderer, manifest, where)
    ]
    if not (folder / "config.json").exists():
        return [
            *warnings,
            f"{folder} has no config.json, so stop ids, lengths and the model's family were not "
            "checked; give --tokenizer the folder of the model",
        ]
    config = read_text_config(folder)
    check_tokenizer(folder, config["vocab_size"])
    _check_tokens(manifest, config, longest, largest, where)
    return warnings


def _check_tokens(
    manifest: RunManifest, config: dict[str, Any], longest: int, largest: int, where: str
) -> None:
    """Raise `UserError` if the model lacks a token or position that the run needs: `longest` counts
    the tokens of the longest prompt, `largest` is the largest token id of all prompts."""
    vocabulary, positions = config["vocab_size"], config["max_position_embeddings"]
    if outside := [token for token in manifest.sampling.stop_ids if token >= vocabulary]:
        raise UserError(
            f"{where}: sampling.stop_ids has {outside[0]}, but the model's vocabulary has "
            f"{vocabulary} tokens, so no completion would ever end there; give the id of a token "
            "that it has (eos_token_id in its config.json)"
        )
    if largest >= vocabulary:
        raise UserError(
            f"the tokenizer makes token {largest} of a prompt, but the model's vocabulary "
            f"has {vocabulary} tokens; use the tokenizer that belongs to the model"
        )
    wanted = longest + manifest.sampling.max_new_tokens
    if wanted > positions:
        raise UserError(
            f"{where}: sampling.max_new_tokens is {manifest.sampling.max_new_tokens}; with a "
            f"prompt of {longest} tokens that makes {wanted}, but the model has {positions} "
            "positions (max_position_embeddings); make it smaller"
        )


def _probe_environment(environment: Environment, room: PromptRoom) -> tuple[int, int]:
    """Draw, render and grade probe tasks: (tokens of the longest prompt, largest token id); raises
    `UserError` for a fault that would prevent every submission."""
    longest = largest = 0
    for index in range(PROBE_TASKS):
        task = task_of(environment, probe_seed(index), room=room)
        if task != task_of(environment, probe_seed(index), room=room):
            raise UserError(
                f"environment {environment.name!r} draws different tasks from one seed, so no "
                "validator could check a prompt; derive everything random from the seed"
            )
        tokens = room.encode(task.prompt)
        longest, largest = max(longest, len(tokens)), max(largest, *tokens)
        if index < GRADED_TASKS:
            _try_texts(environment, task)
    return longest, largest


def check_prompts_fit(environment: Environment, renderer: Renderer) -> None:
    """Raise `UserError` unless `SERVED_PROMPTS` of a served environment fit a message."""
    for index in range(SERVED_PROMPTS):
        length = len(renderer.encode_prompt(task_of(environment, probe_seed(index)).prompt))
        if length > SERVED_PROMPT_TOKENS_MAX:
            raise UserError(
                f"environment {environment.name!r} makes a prompt of {length} tokens, but a prompt "
                f"of a served environment has at most {SERVED_PROMPT_TOKENS_MAX}; leave such tasks "
                'out, or set where = "local" for it'
            )


def _try_texts(environment: Environment, task: Task) -> None:
    """Grade and answer a task's answer and odd texts twice; raises `UserError` if two differ."""
    for text in (task.answer, *ODD_TEXTS):
        for finished in (True, False):
            graded_alike(environment, task, Transcript.of(text, finished=finished))
        first, second = (Episode(environment, task).step(text) for _ in range(2))
        if first != second:
            raise UserError(
                f"environment {environment.name!r} gives the turn {text[:40]!r} first the answer "
                f"{first!r:.100}, then {second!r:.100}; equal turns must get equal answers"
            )


def _check_chat(
    environment: Environment, renderer: Renderer, manifest: RunManifest, where: str
) -> list[str]:
    """Warnings about the chat template, by the first probe task of messages; raises `UserError`."""
    tasks = (task_of(environment, probe_seed(index)) for index in range(GRADED_TASKS))
    task = next((each for each in tasks if not isinstance(each.prompt, str)), None)
    if task is None:
        return []
    warnings = check_stop_ids(renderer, task.prompt, manifest.sampling.stop_ids, where)
    if (answering := episodes_of(environment)) is None:
        return warnings
    answering.check_template(renderer.chat.template)
    replies = (Episode(environment, task).step(text) for text in (task.answer, *ODD_TEXTS))
    observation = next((each for each in replies if each is not None), None)
    try:
        check_history(environment, renderer, task.prompt, observation or "an observation")
    except UserError as error:
        if observation is not None:
            raise
        # None of the texts made the environment answer, so its role is unknown.
        warnings.append(f"if environment {environment.name!r} answers with text: {error}")
    return warnings


# What a chat template must do before a run relies on it: end turns, and leave earlier ones alone.
#
# In an episode of several turns the model sees its own tokens as it wrote them. A template that
# writes earlier turns otherwise, as by removing thoughts, makes a different prompt of the same
# conversation, so that the model would be trained on what nobody shows it later.

THOUGHT = "thought of the turn"


def check_stop_ids(
    renderer: Renderer, prompt: Prompt, stop_ids: Sequence[int], where: str
) -> list[str]:
    """Warnings about how completions end, by the template; raises `UserError` for wrong ids."""
    if (ends := renderer.turn_end(prompt)) is None:
        return [
            f"{renderer.chat.template.where}: the chat template ends a turn with text and no "
            "control token, so that the model must learn to end it with one of sampling.stop_ids"
        ]
    if ends not in stop_ids:
        raise UserError(
            f"{where}: sampling.stop_ids lacks {ends} ({renderer.chat.text_of(ends)}), with which "
            "the chat template ends the model's turn; add it"
        )
    return []


def check_history(
    environment: Environment,
    renderer: Renderer,
    prompt: Prompt,
    observation: str | tuple[Message, ...],
) -> None:
    """Raise `UserError` for a template that changes earlier turns, without `history = "keep"`."""
    template, variables = renderer.chat.template, variables_of(prompt)
    messages, observed = messages_of(prompt), messages_of(observation)
    changes = change_of_history(template, messages, observed, variables)
    if changes and not _keeps(environment):
        raise UserError(
            f"{template.where}: the chat template {changes} when an observation of the role "
            f"{observed[0].role} follows, so that the model would see another conversation in "
            f"training than in use; let environment {environment.name!r} answer with another role "
            '(tool), change the template, or set its option history = "keep" to train on turns as '
            "they were written"
        )


def change_of_history(
    template: ChatTemplate,
    messages: Sequence[Message],
    observed: Sequence[Message],
    variables: Mapping[str, Any],
) -> str:
    """What the template does to earlier turns; empty if it leaves them alone."""

    def written(*after: Message) -> str:
        chat = [each.fields() for each in (*messages, *after)]
        return template.render(chat, variables, prompts=True)

    prompt = written()
    turn = TURN
    if "</think>" in template.source and not prompt.rstrip().endswith("</think>"):
        begins = "" if prompt.rstrip().endswith("<think>") else "<think>\n"
        turn = f"{begins}{THOUGHT}\n</think>\n\n{TURN}"
    once = written(Message("assistant", turn), *observed)
    if not once.startswith(prompt) or not once[len(prompt) :].lstrip().startswith(turn):
        if turn != TURN and THOUGHT not in once:
            return "removes the thoughts of earlier turns"
        return "writes earlier turns otherwise than they were"
    earlier = (Message("assistant", "earlier"), *observed)
    again = written(*earlier, Message("assistant", TURN), *observed)
    if again.partition(TURN)[2] != once.partition(TURN)[2]:
        return "ends a later turn otherwise than the first"
    return ""


def _keeps(environment: Environment) -> bool:
    if isinstance(environment, Chat):
        return environment.keeps_history
    return isinstance(environment, Wrapper) and _keeps(environment.inner)
