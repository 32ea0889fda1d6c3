"""A judge's file: what it is, which the hash covers, and how this machine reaches it.

```toml
kind = "openai"
model = "judge-7b"
prompt = "Rate the answer from 0 to 10.\nTask: {task}\nAnswer: {completion}\nEnd with: Score: N"
pattern = 'Score: (\\d+)'
high = 10

[access]
url = "https://judges.example/v1"
key_file = "/etc/swarm/judge.key"
```"""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

import blake3
import msgspec
from msgspec import Meta

from peers.environments.judges import JUDGE_NAME
from swarm.errors import UserError
from swarm.terminal.tables import read_toml, struct_from_mapping

FOLDER_VARIABLE = "SWARM_JUDGES"
DEFAULT_FOLDER = "~/.swarm/judges"

DEADLINE_SECONDS_MAX = 300.0
"""Below `CALL_SECONDS`."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How this machine reaches the judge; no part of its identity."""

    url: Annotated[str, Meta(max_length=1000)] = ""
    """The base URL, such as http://127.0.0.1:8000/v1."""
    key_file: Annotated[str, Meta(max_length=1000)] = ""
    deadline_seconds: Annotated[float, Meta(gt=0, le=DEADLINE_SECONDS_MAX)] = 60.0
    """For one answer, retries included."""
    retries: Annotated[int, Meta(ge=0, le=10)] = 2
    """Further attempts after a refused connection, status 429 or a status from 500 on."""
    cache: Annotated[str, Meta(max_length=1000)] = ""
    """File of known scores; default: NAME.sqlite beside the judge's file."""


class Definition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a judge is: equal definitions should give equal scores.

    Its hash leaves out fields with their defaults, so that a new field changes no hash."""

    kind: Literal["openai"]
    model: Annotated[str, Meta(min_length=1, max_length=200)]
    """The model's name there."""
    prompt: Annotated[str, Meta(min_length=1, max_length=1 << 18)]
    """Text for the judge, with {task}, {answer}, {completion} (the last turn of the model) or
    {transcript} (all turns)."""
    system: Annotated[str, Meta(max_length=1 << 18)] = ""
    """A system message before it."""
    pattern: Annotated[str, Meta(max_length=1000)]
    """Regular expression whose first group is the score in the judge's answer."""
    low: float = 0.0
    high: float = 1.0
    """Scores that stand for the rewards 0 and 1."""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    seed: Annotated[int, Meta(ge=-1, le=1 << 62)] = 0
    """Sent with each question; -1: none is sent."""

    def digest(self) -> bytes:
        """BLAKE3-256 of the definition."""
        return blake3.blake3(b"swarm/1/judge" + msgspec.json.encode(self, order="sorted")).digest()


def read_definition(name: str) -> tuple[Definition, Access, Path]:
    """The judge NAME of this machine, and its file; raises `UserError`."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER).expanduser()
    path = folder / f"{name}.toml"
    where = f"judge {name!r}: {path}"
    if not re.fullmatch(JUDGE_NAME, name):
        raise UserError(f"judge {name[:80]!r} is no name; use letters, digits and hyphens")
    if not path.exists():
        raise UserError(
            f"judge {name!r} is not known on this machine: {path} does not exist; write it there, "
            f"or set {FOLDER_VARIABLE} to the folder that has it"
        )
    table = read_toml(path, where)
    access = struct_from_mapping(Access, table.pop("access", {}), f"{where}: access")
    definition = struct_from_mapping(Definition, table, where)
    _check(definition, access, where)
    return definition, access, path


def _check(definition: Definition, access: Access, where: str) -> None:
    """Raise `UserError` for fields that do not fit together."""
    if not definition.low < definition.high:
        raise UserError(
            f"{where}: low is {definition.low:g} and high {definition.high:g}; high must be above"
        )
    if "{completion}" not in definition.prompt and "{transcript}" not in definition.prompt:
        raise UserError(
            f"{where}: prompt has neither {{completion}} nor {{transcript}}, so the judge would "
            "not see the answer; add one"
        )
    if not access.url.startswith(("http://", "https://")):
        raise UserError(
            f"{where}: access: url is {access.url!r}; write it as http://host:port/v1 or https://…"
        )
    try:
        groups = re.compile(definition.pattern).groups
    except re.error as error:
        raise UserError(
            f"{where}: pattern is no regular expression ({error}); repair it"
        ) from error
    if groups < 1:
        raise UserError(
            f"{where}: pattern {definition.pattern!r} has no group; put parentheses around the "
            r"score, as in Score: (\d+)"
        )
