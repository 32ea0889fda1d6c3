"""`swarm environment survey`: installs packages of environments, and plays one task of each.

A package gets an environment of its own over that of its library, which is removed afterwards. One
that hangs, floods or does not install costs itself only."""

import os
import re
import signal
import subprocess
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from peers.endpoint.tools import FORMS
from peers.engines.installed import python_of, site_packages, why_unusable
from peers.environments.interface import Conversation, Task, Transcript, as_text
from peers.environments.verifiers import installed
from peers.environments.verifiers.environment import Verifiers, VerifiersOptions
from swarm.errors import DECODE_ERRORS, UserError

LISTED = Path(__file__).with_name("packages.txt")
"""The packages that a survey takes by default; docs/verifiers.md says how the list came about."""

TAIL_BYTES = 1 << 20
"""What is read of all that an installation prints."""
LOOK_SECONDS = 1.0
"""Interval at which the disk of an installation is measured."""
MODULES_MAX = 8
"""Modules of one package that are played."""
TURNS = 4
REWARD_MAX = 1024.0

PROXIES = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
PROXIES |= {"no_proxy": "127.0.0.1,localhost"}
PROXIES |= {name.upper(): value for name, value in PROXIES.items()}
"""Variables that keep a package from the network while it is loaded and played."""

Library = Literal["0.4.0", "0.3.1"]
CAUSES = {
    "needs a package": r"No module named (?!'verifiers)|Please install",
    "needs data": r"offline|Hub\b|[Dd]ataset|download|[Nn]o such file|FileNotFound|Resource",
    "needs a service": r"API_KEY|api key|_URL\b|credential|Connect(ion)?Error",
}
"""What a sentence is about that says why an environment cannot be played, by the verdict."""


class Surveyed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of a package, or of one of its modules; a line of the file of results."""

    package: str
    """As in the list: name, extras, version."""
    version: str = ""
    pinned: str = ""
    """The versions of verifiers that it asks for."""
    module: str = ""
    library: str = ""
    """The version of verifiers that played it."""
    verdict: str = "works"
    why: str = ""
    tools: int = 0
    turns: int = 0
    reward: float | None = None
    mib: float = 0.0
    """Disk that the package takes beside its library."""
    seconds: float = 0.0

    @property
    def result(self) -> str:
        if self.reward is None:
            return f"{self.verdict}: {self.why}"
        turns, tools = (
            f"{count} {name}{'' if count == 1 else 's'}"
            for count, name in ((self.turns, "turn"), (self.tools, "tool"))
        )
        offered = f" with {tools}" if self.tools else ""
        return f"{self.verdict}: {turns}{offered}, reward {self.reward:.3g}"

    @property
    def line(self) -> str:
        named = " ".join(filter(None, (self.package, self.module)))
        return f"{named} ({self.seconds:.0f} s, {self.mib:.0f} MiB): {self.result}"


class _Contents(msgspec.Struct):
    version: str
    needs: list[str]
    pinned: str
    imports: bool
    modules: dict[str, Library]


@dataclass(frozen=True)
class Limits:
    """What one package may take."""

    seconds: float
    """Deadline of its installation, of its loading, and of each call."""
    mib: int
    """Disk of its installation, downloads included."""


class _Refused(Exception):
    """Why a package is not installed."""


def listed(path: Path) -> list[str]:
    """The packages of a file, one a line, with comments after `#`; raises `UserError`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--list {path} cannot be read ({error})") from error
    found = [each for each in (line.partition("#")[0].strip() for line in lines) if each]
    if not found:
        raise UserError(f"--list {path} names no package; write one a line, like marble-v1==0.1.0")
    return found


def survey(packages: Sequence[str], home: Path, out: Path, limits: Limits) -> Iterator[Surveyed]:
    """Survey the packages whose results `out` lacks, adding them there; raises `UserError`."""
    installed.check_packages(packages)
    known = _results(out)
    bases = {}
    for version, recipe in installed.RECIPES.items():
        bases[version] = recipe.folder(home)
        if why_unusable(recipe, home):
            installed.install(recipe, (), home, print)
    for package in packages:
        found = [each for each in known if each.package == package]
        if not found:
            with TemporaryDirectory(prefix="survey-", dir=home) as folder:
                found = _surveyed(package, bases, Path(folder), limits)
            with out.open("ab") as file:
                file.write(msgspec.json.Encoder().encode_lines(found))
        yield from found


def _results(path: Path) -> list[Surveyed]:
    raw = path.read_bytes() if path.exists() else b""
    whole = raw[: raw.rfind(b"\n") + 1]  # an interruption may have cut the last line
    try:
        found = msgspec.json.Decoder(Surveyed).decode_lines(whole)
    except DECODE_ERRORS as error:
        raise UserError(
            f"{path} holds no results of a survey ({error}); give another --out"
        ) from error
    if whole != raw:
        path.write_bytes(whole)
    return found


def _surveyed(
    package: str, bases: Mapping[str, Path], folder: Path, limits: Limits
) -> list[Surveyed]:
    started, own = time.monotonic(), folder / "own"
    whole, found = Surveyed(package=package), list[Surveyed]()
    try:
        venv.create(own, with_pip=False, symlinks=True)
        has = _contents(package, bases[installed.LATEST], own, limits)
        whole.version, whole.pinned = has.version, has.pinned
        for library in sorted(set(has.modules.values())):
            (site_packages(own) / "base.pth").write_text(f"{site_packages(bases[library])}\n")
            wanted = [f"verifiers=={library}", *installed.CHILD_NEEDS, *has.needs]
            _pip(bases[library], own, wanted, limits)
            modules = [name for name, each in has.modules.items() if each == library]
            for module in modules[:MODULES_MAX]:
                found.append(msgspec.structs.replace(whole, module=module, library=library))
                _try(found[-1], python_of(own), library, limits)
        if not found:
            what = "neither load_environment nor a Taskset" if has.imports else "no import of it"
            whole.verdict, whole.why = "no environment", f"it has {what}"
    except _Refused as error:
        whole.verdict, whole.why = "not installed", str(error)
    mib, seconds = round(_bytes_in(folder) / (1 << 20), 1), round(time.monotonic() - started, 1)
    return [msgspec.structs.replace(each, mib=mib, seconds=seconds) for each in found or [whole]]


def _contents(package: str, base: Path, own: Path, limits: Limits) -> _Contents:
    """Install a package without what it needs, and read it; raises `_Refused`."""
    _pip(base, own, ["--no-deps", package], limits)
    extras = re.findall(r"[\w.-]+", "".join(re.findall(r"\[(.*?)\]", package)))
    command = [str(python_of(base)), "-P", "-m", "peers.environments.verifiers.child.contents"]
    said = _bounded([*command, str(site_packages(own)), *extras], own.parent, limits)
    try:
        return msgspec.json.decode(said.splitlines()[-1], type=_Contents)
    except (IndexError, *DECODE_ERRORS) as error:
        raise _Refused(f"its metadata cannot be read ({error})") from error


def _pip(base: Path, own: Path, wanted: Sequence[str], limits: Limits) -> None:
    """Install into an environment with the pip of `base`; raises `_Refused`."""
    pip = [str(python_of(base)), "-m", "pip", "--python", str(python_of(own)), "install"]
    quiet = ["--disable-pip-version-check", "--no-input", "--prefer-binary", "--progress-bar=off"]
    _bounded([*pip, *quiet, *wanted], own.parent, limits)


def _bounded(command: Sequence[str], folder: Path, limits: Limits) -> str:
    """The end of what a command prints; raises `_Refused` beyond the `limits` for `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    with (folder / "said").open("wb+") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(temporary)},
            start_new_session=True,
        )
        deadline = time.monotonic() + limits.seconds
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
                if time.monotonic() > deadline:
                    raise _Refused(f"its installation took more than {limits.seconds:g} s")
                if _bytes_in(folder) > limits.mib << 20:
                    raise _Refused(f"its installation took more than {limits.mib} MiB of disk")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - TAIL_BYTES))
        text = said.read().decode("utf-8", "replace")
    if process.returncode:
        raise _Refused(_complaint(text))
    return text


def _complaint(said: str) -> str:
    needs = re.search(r"(?:Requires-Python |different Python: \S+ not in ')([^;'\s]+)", said)
    if needs is not None:
        return f"it needs Python {needs[1]}"
    if "from versions: none" in said:
        return "the package index has no such package"
    lines = [line for line in said.splitlines() if line.startswith("ERROR:")] or said.splitlines()
    return f"pip: {lines[-1].removeprefix('ERROR: ')[:200]}" if lines else "pip says nothing"


def _bytes_in(folder: Path) -> int:
    total = 0
    for inside, _, names in os.walk(folder):  # which passes over what pip removes meanwhile
        for name in names:
            with suppress(OSError):
                total += Path(inside, name).lstat().st_size
    return total


@contextmanager
def _offline() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(PROXIES)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _try(found: Surveyed, python: Path, library: Library, limits: Limits) -> None:
    """Load a module, play its first task with the scripted policy, and grade it."""
    options = VerifiersOptions(
        package=found.module,
        library=library,
        tasks=4,
        reward_low=-REWARD_MAX,
        reward_high=REWARD_MAX,
        seconds=limits.seconds,
        calls="hermes",
    )
    environment = Verifiers(options, interpreter=python, open_seconds=limits.seconds)
    try:
        with _offline():
            _play(environment, found)
    except UserError as error:  # one of them is NotGradable
        found.why = " ".join(str(error.__cause__ or error).split())[:300]
        found.verdict = verdict_of(found.why)
    finally:
        environment.close()


def verdict_of(why: str) -> str:
    """What an environment lacks that cannot be played for this reason."""
    return next((each for each, cause in CAUSES.items() if re.search(cause, why)), "refused")


def _play(environment: Verifiers, found: Surveyed) -> None:
    task = environment.tasks().make(0)
    state, said = environment.start(task), list[str]()
    for text in _script(task, found):
        said.append(text)
        observation = environment.step(state, text)
        found.turns += 1
        if observation is None or found.turns == TURNS:
            break
        said.append(as_text(observation))
    reward = environment.grade(task, Transcript.of(*said)).reward
    found.reward = round((2 * reward - 1) * REWARD_MAX, 6)


def _script(task: Task, found: Surveyed) -> Iterator[str]:
    """What the scripted policy says: a call of the first tool, then the answer, if one is known."""
    given = dict(task.prompt.variables) if isinstance(task.prompt, Conversation) else {}
    tools = msgspec.json.decode(str(given.get("tools", "[]")))
    found.tools = len(tools)
    for tool in tools[:1]:
        fields = tool["function"]["parameters"].get("properties", {})
        examples = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
        made = {name: examples.get(field.get("type"), "a") for name, field in fields.items()}
        call = {"name": tool["function"]["name"], "arguments": made}
        form = FORMS["hermes"]
        yield f"{form.opening}\n{msgspec.json.encode(call).decode()}\n{form.closing}"
    while True:
        yield task.answer or "I do not know."
