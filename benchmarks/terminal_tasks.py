"""Tasks of Terminal-Bench (`task.yaml`) and Harbor (`task.toml`) as a file for `terminal`.

    python -m benchmarks.terminal_tasks FOLDER --to tasks.jsonl
    python -m benchmarks.terminal_tasks --generate 1000 --seed 0 --to tasks.jsonl

The first prints one JSON object: how many tasks below the folder need no image, and so are in the
file, and how many others were refused for which reason (`--each`: every task with its reason;
`--without-packages`: packages of Python's are passed over). The second makes small tasks (count a
word, write a script; `--bare`: `417 c>`) from a seed.

A task's Dockerfile may have a plain base, folders and files; packages that a terminal has anyway
are passed over. Its tests must be pytest's and look at files or start programs: tests that import
what the model wrote would let it decide what they find. Everything else is refused with a reason.

Sources: https://github.com/laude-institute/terminal-bench (task.yaml, Dockerfile, run-tests.sh) and
https://github.com/laude-institute/harbor (task.toml, instruction.md, environment/, tests/test.sh).
"""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from peers.environments.terminal.problem import Check, Problem
from swarm.errors import UserError
from swarm.rollouts.seeds import Draws
from swarm.terminal.output import print_json
from swarm.terminal.tables import read_toml

BYTES_MAX = 8 << 20
"""Of all files of a task."""
FILES_MAX = 1000
PLAIN_IMAGES = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?:ubuntu|debian|python)(?::[\w.-]+)?(?:@sha256:\w+)?"
    r"|ghcr\.io/laude-institute/t-bench/(?:ubuntu|python|debian)[\w.-]*(?::[\w.-]+)?(?:@\S+)?"
)
HAS = frozenset(
    {
        "asciinema", "bash", "bc", "bsdutils", "ca-certificates", "coreutils", "curl",
        "diffutils", "dos2unix", "file", "findutils", "gawk", "grep", "gzip", "jq", "less",
        "locales", "mawk", "moreutils", "nano", "pip", "procps", "pytest", "python-is-python3",
        "python3", "python3-dev", "python3-minimal", "python3-pip", "python3-pytest",
        "python3-venv", "sed", "setuptools", "tar", "tmux", "tree", "util-linux", "uv", "vim",
        "wget", "wheel",
    }
)  # fmt: skip
"""Packages that a terminal has, or that only fetch or record."""
SETUP = frozenset(
    ("mkdir", "chmod", "touch", "cp", "mv", "ln", "echo", "printf", "export", "cd", "true", "rm")
)
"""Commands of a Dockerfile that a terminal runs before the model's first."""
QUIET = frozenset(
    ("LABEL", "MAINTAINER", "EXPOSE", "CMD", "ENTRYPOINT", "ARG", "SHELL", "STOPSIGNAL")
)
"""Instructions that say nothing about files."""
RUNS_PYTEST = re.compile(
    r"(?:#.*|set [-+]\w+.*|(?:sudo )?apt(?:-get)? .*|curl .*astral\.sh/uv.*|source .*env|"
    r"uv (?:init|venv|add|pip install|python).*|.*pytest .*|"
    r"(?:python3? -m )?pip3? install .*|if .*|then|else|fi|elif .*|exit .*|echo .*|cd .*|export .*|"
    r"mkdir -p /logs\S*|\w+=.*|-\S+ .*|--\S+.*|\S+ *\\|)"
)
"""The lines of a test script that does no more than install and run pytest."""
STARTS = frozenset({"subprocess", "os", "pty", "asyncio", "multiprocessing"})
LOADS = frozenset(
    {
        *("importlib", "runpy", "pickle", "marshal", "shelve", "ctypes", "code", "imp", "pkgutil"),
        *("zipimport", "site"),
    }
)
"""Modules by which a test runs what the model wrote in its own process."""


class _RefusedError(Exception):
    """A task that no terminal of ours can play; the message says why."""


def read_folder(
    path: Path, without_packages: bool = False
) -> tuple[dict[str, Problem], dict[str, str]]:
    """The tasks below a folder by name, and why others are refused.

    `without_packages`: packages of Python's are passed over, which a model may miss."""
    found: dict[str, Problem] = {}
    refused: dict[str, str] = {}
    marks = [*path.glob("**/task.toml"), *path.glob("**/task.yaml")]
    for folder in sorted({each.parent for each in marks}):
        name = str(folder.relative_to(path)) if folder != path else folder.name
        try:
            found[name] = _read(folder, without_packages)
            found[name].check()
        except (_RefusedError, UserError) as error:
            found.pop(name, None)
            refused[name] = str(error)
        except (OSError, ValueError, RecursionError) as error:
            refused[name] = f"it cannot be read ({error})"
    return found, refused


def _read(folder: Path, without_packages: bool) -> Problem:
    """The task of a folder; raises `_RefusedError`, `UserError`, `OSError` and `ValueError`."""
    if (folder / "task.toml").exists():
        table = read_toml(folder / "task.toml", str(folder))
        environment = table.get("environment", {})
        if environment.get("gpus") or environment.get("mcp_servers"):
            raise _RefusedError("it needs a GPU or a server of tools")
        instruction = (folder / "instruction.md").read_text("utf-8")
        built, script = folder / "environment", folder / "tests" / "test.sh"
        solution = folder / "solution" / "solve.sh"
    else:
        instruction = _instruction(folder / "task.yaml")
        built, script, solution = folder, folder / "run-tests.sh", folder / "solution.sh"
    compose = [*built.glob("docker-compose.y*ml")]
    if compose and len(re.findall(r"^  [\w-]+:\s*$", _services(compose[0]), re.MULTILINE)) > 1:
        raise _RefusedError("it needs several containers")
    image = _Image(built, without_packages)
    image.read()
    commands = _demonstration(solution)
    return Problem(
        instruction=instruction.strip(),
        folder=image.folder,
        files=image.texts,
        binary=image.binary,
        executable=image.executable,
        made=image.made,
        setup=image.setup,
        pytest=_tests(folder / "tests", script),
        demonstration=commands,
    )


def _services(path: Path) -> str:
    """The services of a compose file."""
    text = path.read_text("utf-8")
    found = re.search(r"^services:[^\n]*\n((?:[ \t#].*\n?|\n)*)", text, re.MULTILINE)
    return found[1] if found else ""


def _instruction(path: Path) -> str:
    try:
        import yaml
    except ImportError as error:
        raise _RefusedError("a task.yaml needs PyYAML; type: pip install pyyaml") from error
    try:
        table = yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise _RefusedError(f"its task.yaml is no YAML ({str(error)[:100]!r})") from error
    text = table.get("instruction") if isinstance(table, dict) else None
    if not isinstance(text, str):
        raise _RefusedError("its task.yaml has no instruction")
    return text


def _demonstration(path: Path) -> list[str]:
    """The solution as a command, if there is one and it fetches nothing."""
    with suppress(OSError, UnicodeDecodeError):
        text = path.read_text("utf-8")
        lines = [line for line in text.split("\n") if not line.startswith("#")]
        if not re.search(r"\b(?:apt-get|apt|pip3?|uv|curl|wget|git clone)\b", text):
            return ["\n".join(lines).strip()]
    return []


class _Image:
    """What a Dockerfile puts into its image."""

    def __init__(self, folder: Path, without_packages: bool) -> None:
        self.context, self.folder = folder, "/"
        self._without_packages = without_packages
        self.texts: dict[str, str] = {}
        self.binary: dict[str, bytes] = {}
        self.executable: list[str] = []
        self.made: list[str] = []
        self.setup: list[str] = []
        self._left = BYTES_MAX

    def read(self) -> None:
        """Follow the Dockerfile; raises `_RefusedError`."""
        path = self.context / "Dockerfile"
        if not path.exists():
            raise _RefusedError("it has no Dockerfile")
        text = re.sub(r"^\s*#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE)
        if "<<" in text:
            raise _RefusedError("its Dockerfile has a here-document")
        bases = 0
        for line in re.sub(r"\\[ \t]*\n", " ", text).split("\n"):
            word, _, rest = line.strip().partition(" ")
            bases += word.upper() == "FROM"
            if bases > 1:
                raise _RefusedError("its Dockerfile has several stages")
            if word:
                self._follow(word.upper(), rest.strip())
        if self.folder == "/":
            self.folder = "/app"

    def _follow(self, word: str, rest: str) -> None:
        if word == "FROM":
            base = re.sub(r"--platform=\S+\s+", "", rest).split()[0]
            if not PLAIN_IMAGES.fullmatch(base):
                raise _RefusedError(f"its image is made from {base[:60]}")
        elif word == "WORKDIR":
            self.folder = self._absolute(rest.strip("\"'"))
            self.made.append(self.folder)
        elif word in ("COPY", "ADD"):
            self._copy(rest)
        elif word == "ENV":
            self.setup.append(
                f"export {rest}" if "=" in rest else f"export {rest.replace(' ', '=', 1)}"
            )
        elif word == "RUN":
            self._run(rest)
        elif word == "USER" and rest in ("root", "0"):
            pass
        elif word not in QUIET:
            raise _RefusedError(f"its Dockerfile has {word[:20]}")

    def _absolute(self, path: str) -> str:
        if "$" in path:
            raise _RefusedError(f"its Dockerfile has a variable in the path {path[:60]!r}")
        return str(PurePosixPath(self.folder, path))

    def _copy(self, rest: str) -> None:
        words = shlex.split(rest)
        flags = [each for each in words if each.startswith("--")]
        if any(not each.startswith(("--chown=", "--chmod=")) for each in flags):
            raise _RefusedError(f"its Dockerfile copies with {flags[0][:40]}")
        *sources, target = [each for each in words if not each.startswith("--")]
        whole = self._absolute(target)
        into = target.endswith("/") or target in (".", "./") or len(sources) > 1
        for source in sources:
            if "://" in source:
                raise _RefusedError("its Dockerfile fetches a file")
            there = sorted(self.context.glob(source.strip("/") or "."))
            if source.rstrip("/") in (".", ""):
                there = [self.context]
            if not there:
                raise _RefusedError(f"its Dockerfile copies {source[:60]!r}, which is not there")
            for each in there:
                if each.is_dir():
                    self._copy_folder(each, whole)
                else:
                    inside = into or len(there) > 1 or whole in (self.folder, *self.made)
                    self._add(each, f"{whole}/{each.name}" if inside else whole, flags)

    def _copy_folder(self, folder: Path, whole: str) -> None:
        self.made.append(whole)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._add(path, f"{whole}/{path.relative_to(folder)}", ())

    def _add(self, path: Path, name: str, flags: Any) -> None:
        if path.is_symlink() or not path.resolve().is_relative_to(self.context.resolve()):
            raise _RefusedError(f"its file {path.name[:60]!r} is a link")
        self._left -= path.stat().st_size
        if self._left < 0 or len(self.texts) + len(self.binary) >= FILES_MAX:
            raise _RefusedError(f"its files have more than {BYTES_MAX >> 20} MiB, or are too many")
        content = path.read_bytes()
        try:
            self.texts[name] = content.decode("utf-8")
        except UnicodeDecodeError:
            self.binary[name] = content
        if path.stat().st_mode & 0o100 or any("--chmod=7" in each for each in flags):
            self.executable.append(name)

    def _run(self, rest: str) -> None:
        if re.search(r"[|`<]|\$\(|\|\|", rest):
            raise _RefusedError(f"its Dockerfile runs {rest[:60]!r}")
        for command in re.split(r"&&|;", rest):
            words = shlex.split(command)
            if not words or (words[:2] == ["rm", "-rf"] and "/var/lib/apt" in command):
                continue
            if words[0] in ("apt-get", "apt", "pip", "pip3") or words[:3] == [
                "python3",
                "-m",
                "pip",
            ]:
                self._installs(words)
            elif words[0] in SETUP and "/usr/" not in command:
                self.setup.append(" ".join(command.split()))
            elif words[0] != "chown" and "/usr/bin/python" not in command:
                raise _RefusedError(f"its Dockerfile runs {words[0][:40]!r}")

    def _installs(self, words: list[str]) -> None:
        of_python = not words[0].startswith("apt")
        if "install" not in words or (of_python and self._without_packages):
            return
        names = [each for each in words[words.index("install") + 1 :] if not each.startswith("-")]
        lacks = [each for each in names if re.split(r"[=<>~\[]", each)[0] not in HAS]
        if lacks:
            raise _RefusedError(f"its image installs {', '.join(lacks)[:80]}")


def _tests(folder: Path, script: Path) -> dict[str, str]:
    """The tests for pytest by name; raises `_RefusedError`."""
    for line in script.read_text("utf-8").split("\n") if script.exists() else ():
        if not RUNS_PYTEST.fullmatch(line.strip()):
            raise _RefusedError(
                f"its test script does more than run pytest ({line.strip()[:60]!r})"
            )
    found: dict[str, str] = {}
    others: list[str] = []
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.suffix == ".py":
            found[name] = path.read_text("utf-8")
        elif path.is_file() and path != script:
            others.append(name)
    if not any(PurePosixPath(name).name.startswith("test_") for name in found):
        raise _RefusedError("it has no test_*.py for pytest")
    starts = False
    own = {PurePosixPath(name).stem for name in found}
    for name, text in found.items():
        try:
            starts |= _checked(name, ast.parse(text), own)
        except SyntaxError as error:
            raise _RefusedError(f"its {name} is no Python ({error.msg})") from error
    if others and starts:
        raise _RefusedError(
            f"its tests start programs, which could read what they expect in {others[0][:60]}"
        )
    for name in others:
        found[name] = (folder / name).read_text("utf-8")
    return found


def _checked(name: str, tree: ast.Module, own: set[str]) -> bool:
    """Whether tests start programs; raises `_RefusedError` for those that run others' code in their
    own process, or need a package."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Name) and node.id in ("exec", "eval", "compile", "__import__"):
            raise _RefusedError(f"its {name} runs code in its own process ({node.id})")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.path", "sys.modules"):
            raise _RefusedError(f"its {name} imports what the model wrote ({ast.unparse(node)})")
    loads = sorted(modules & LOADS)
    if loads:
        raise _RefusedError(
            f"its {name} may run what the model wrote in its own process ({loads[0]})"
        )
    foreign = sorted(modules - own - sys.stdlib_module_names - {"pytest", ""})
    if foreign:
        raise _RefusedError(f"its {name} imports {', '.join(foreign)[:60]}")
    return bool(modules & STARTS)


WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "yew")


def _word(draws: Draws) -> str:
    return WORDS[draws.below(len(WORDS))]


def _number(draws: Draws) -> int:
    return 100 + draws.below(900)


def _bare(draws: Draws) -> Problem:
    """For a policy of characters: `417 c>` asks for a file c with the number."""
    number, file = _number(draws), "abcdefgh"[draws.below(8)]
    return Problem(
        instruction=f"{number} {file}>",
        checks=[Check(file=f"/app/{file}", text=f"{number}")],
        demonstration=[f"echo {number} >{file}"],
    )


def _count(draws: Draws) -> Problem:
    word, file = _word(draws), f"{_word(draws)}-{_number(draws)}.log"
    lines = [f"{index} {_word(draws)} {_word(draws)}" for index in range(8 + draws.below(24))]
    count = sum(word in line.split() for line in lines)
    return Problem(
        instruction=f"How many lines of {file} have the word {word}? Write it to count.txt.",
        files={f"/app/{file}": "\n".join(lines) + "\n"},
        checks=[Check(file="/app/count.txt", text=f"{count}")],
        demonstration=[f"grep -cw {word} {file} > count.txt"],
    )


def _script(draws: Draws) -> Problem:
    name, factor = f"{_word(draws)}-{_number(draws)}.sh", 2 + draws.below(90)
    inputs = [_number(draws) for _ in range(3)]
    return Problem(
        instruction=f"Write a bash script {name} that prints its first argument times {factor}.",
        checks=[Check(run=f"bash {name} {given}", prints=f"{given * factor}") for given in inputs],
        demonstration=[f"echo 'echo $(($1*{factor}))' > {name}"],
    )


def generated(count: int, seed: int, bare: bool = False) -> list[Problem]:
    """Different small tasks, equal for equal arguments on every machine."""
    draws = Draws("swarm/1/terminal", seed.to_bytes(8, "big"))
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = _bare(draws) if bare else (_count, _script)[draws.below(2)](draws)
        found[problem.instruction] = problem
    return list(found.values())


def lines_of(problems: Iterable[Problem]) -> bytes:
    """Tasks as the environment reads them."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in problems)


KIND = re.compile(r"'.*|\(.*| (?:installs|imports|from|in|copies) .*|\btest_\S+|\S+\.py\b")
"""What differs from task to task in a reason."""


def _shortened(found: re.Match[str]) -> str:
    return f" {found[0].split()[0]}" if found[0].startswith(" ") else "…"


def main() -> None:
    """Read the tasks, write those that can be played, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--generate", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--without-packages", action="store_true")
    parser.add_argument("--each", action="store_true")
    asked = parser.parse_args()
    if bool(asked.generate) == (asked.folder is not None):
        parser.error("give either a folder of tasks or --generate N")
    made = generated(asked.generate, asked.seed, asked.bare) if asked.generate else []
    found, refused = dict[str, Problem](), dict[str, str]()
    if asked.folder is not None:
        found, refused = read_folder(asked.folder, asked.without_packages)
    if asked.to is not None:
        asked.to.write_bytes(lines_of([*found.values(), *made]))
    if made:
        print_json({"generated": len(made)})
        return
    reasons = Counter(KIND.sub(_shortened, reason) for reason in refused.values())
    print_json(
        {
            "tasks": len(found) + len(refused),
            "played": sorted(found) if asked.each else len(found),
            "refused": refused if asked.each else dict(reasons.most_common()),
        }
    )


if __name__ == "__main__":
    main()
