"""`swarm sft` and `swarm dpo`: fine-tuning on this machine, in a child process, with no network."""

import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from msgspec import to_builtins

from peers.evaluation.run import environment_named
from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.jobs import offline
from swarm.jobs.training import Export
from swarm.terminal import options as common
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import explained
from swarm.terminal.output import say_event, say_json
from swarm.world import client
from swarm.world.compute import LocalCompute

WHERE = "--where", "ability='math'"
"""The option and an example of it."""
SERVICE = "peers.tuning.service:Tuning"


async def tune(
    job: offline.StartTuning, out: Path, report_steps: int, save_steps: int, as_json: bool
) -> None:
    """Fine-tune a policy in a child process and write the result, resuming from a saved state. With
    `save_steps` 0 the state is never saved, so an interrupted tuning begins anew."""
    say = say_json if as_json else say_event
    async with LocalCompute().child(
        SERVICE, name="fine-tuning", start_deadline_seconds=offline.TUNING_START_SECONDS
    ) as child:
        service = client(offline.TuningService, child)
        print("loading the model and the examples…", file=sys.stderr, flush=True)
        started = await service.start(job)

        async def validate(step: int) -> float | None:
            found = await service.validate(offline.Validate())
            say({"event": "validated", "step": step, **to_builtins(found)})
            return found.loss

        say({"event": "started", **to_builtins(started)})
        before = await validate(started.steps_done)
        tokens, began = 0, time.monotonic()
        last = job.settings.steps
        judged_from = (started.steps_done + last) / 2
        for step in range(started.steps_done + 1, last + 1):
            made = await service.step(offline.Tune())
            tokens += made.tokens
            if step % report_steps == 0 or step == last:
                speed = tokens / max(1e-9, time.monotonic() - began)
                say({"event": "trained", **to_builtins(made), "tokens_per_second": speed})
                now = await validate(step)
                if step >= judged_from and before is not None and now is not None:
                    warn_if_stuck(step, before, now, started.learning_rate)
                    judged_from = last  # once more, at the end
                tokens, began = 0, time.monotonic()
            if save_steps and step % save_steps == 0 and step < last:
                await service.save_state(offline.SaveState(folder=_absolute(state_beside(out))))
        await service.save(Export(folder=_absolute(out)))
        shutil.rmtree(state_beside(out), ignore_errors=True)
        say({"event": "saved", "folder": str(out)})


HARDLY = 0.05
"""Share of the loss; less of a fall is hardly one."""
LEARNED = 0.05
"""Loss in nats below which there is little left to learn."""


def warn_if_stuck(step: int, before: float, now: float, rate: float) -> None:
    """Say on standard error that the loss on held-out examples hardly fell, or rose."""
    if now <= max(LEARNED, (1 - HARDLY) * before):
        return
    way_out = (
        f"give a smaller --learning-rate than {rate:.2g}"
        if now > before
        else f"give a larger --learning-rate than {rate:.2g}, or more --steps"
    )
    sentence = (
        f"warning: after step {step} the loss on held-out examples is {now:.3g}, and was "
        f"{before:.3g} at the start; {way_out}, or look whether the answers follow from the prompts"
    )
    print(sentence, file=sys.stderr, flush=True)


def state_beside(out: Path) -> Path:
    return out.with_name(out.name + ".state")


def _absolute(folder: Path) -> str:
    return str(folder.absolute())


def first_job(
    model: str,
    out: Path,
    data: Sequence[str],
    settings: offline.TuningSettings,
    reading: offline.Reading,
    weights: Sequence[float] = (),
    environment: str | None = None,
    options: dict[str, Any] | None = None,
) -> offline.StartTuning:
    """The child's first job; raises `UserError` for options that do not go together."""
    if bool(data) == (environment is not None):
        raise UserError("give either --data FILE or --environment NAME")
    if environment is not None and reading != offline.Reading():
        raise UserError(
            "--environment gives its own examples; leave out the options that read --data "
            "(--split, --subset, --where, --prompt-column, --answer-column, --chat, --reward)"
        )
    if out.exists():
        raise UserError(f"--out {out} exists already; choose another folder")
    try:  # before hours of training
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=out.absolute().parent).close()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error}); choose another") from error
    state = state_beside(out)
    return offline.StartTuning(
        model=str(find_model(model, "--model").folder.resolve()),
        settings=settings,
        data=[common.absolute(each) for each in data],
        weights=list(weights),
        reading=reading,
        environment=environment_named(environment, options or {}) if environment else None,
        state=str(state.resolve()) if state.exists() else "",
    )


@exits
@explained(__file__, FORMS=FORMS)
def sft(
    model: str,
    out: Path,
    data: list[str] | None = None,
    weight: common.Weights = None,
    environment: str | None = None,
    option: common.EnvironmentOptions = None,
    split: str | None = None,
    subset: str | None = None,
    where: list[str] | None = None,
    prompt_column: str = "prompt",
    answer_column: str = "answer",
    chat: bool = False,
    reward: str | None = None,
    steps: int = 100,
    batch: int = 32,
    learning_rate: float | None = None,
    warmup_steps: int = 10,
    validation_share: float = 0.05,
    tokens_max: int = 8192,
    seed: int = 0,
    report_steps: int = 10,
    save_steps: int = 200,
    as_json: common.AsJson = False,
) -> None:
    """Fine-tune a policy on prompts with answers. Needs no network.

    The loss is on the answers alone. The same command resumes an interrupted tuning."""
    given = locals()
    require_extra("train", "swarm sft")
    from swarm.look.rollouts.filters import parse_range

    job = first_job(
        model,
        out,
        data or (),
        weights=weight or (),
        environment=environment,
        options=common.environment_options(option),
        settings=common.filled(offline.TuningSettings, given),
        reading=common.filled(
            offline.Reading,
            given,
            where=common.toml_lines(where, *WHERE),
            reward=parse_range("--reward", reward, "1:") or (-math.inf, math.inf),
        ),
    )
    run_until_interrupted(tune, job, out, report_steps, save_steps, as_json)


@exits
@explained(__file__, FORMS=FORMS)
def dpo(
    model: str,
    out: Path,
    data: str,
    beta: float = 0.1,
    answer_weight: float = 0.0,
    split: str | None = None,
    subset: str | None = None,
    where: list[str] | None = None,
    prompt_column: str = "prompt",
    chat: bool = False,
    steps: int = 100,
    batch: int = 32,
    learning_rate: float | None = None,
    warmup_steps: int = 10,
    validation_share: float = 0.05,
    tokens_max: int = 8192,
    seed: int = 0,
    report_steps: int = 10,
    save_steps: int = 200,
    as_json: common.AsJson = False,
) -> None:
    """Teach a policy to prefer one answer to another (DPO). Needs no network.

    Of exported rollouts and of solutions, a prompt's best answer is preferred to its worst. The
    same command resumes an interrupted tuning."""
    given = locals()
    require_extra("train", "swarm dpo")
    job = first_job(
        model,
        out,
        [data],
        settings=common.filled(offline.TuningSettings, given, loss="preferences"),
        reading=common.filled(offline.Reading, given, where=common.toml_lines(where, *WHERE)),
    )
    run_until_interrupted(tune, job, out, report_steps, save_steps, as_json)
