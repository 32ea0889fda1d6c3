"""Sandboxes of ours, for packages that want a container or a hosted service's sandbox.

A box is a shell of the environment `terminal`: each command is a program over the files that those
before left. No process outlasts its command, so the cells of a Python session run again before each
new one. There is no network, and no image but the machine's own programs."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath

from peers.environments.terminal.problem import Problem, Said, say
from peers.environments.verifiers.child.episode import Unplayable
from peers.sandbox import Limits, SandboxError
from peers.sandbox.launcher import use_inherited_launcher
from peers.sandbox.program import Tree

PLAIN_IMAGE = re.compile(r"((docker\.io/)?(library/)?(python|ubuntu|debian)(:[\w.-]+)?)?")
"""Images without anything that a package could miss here, versions apart."""
FOLDERS = ["/root", "/app", "/data", "/home", "/logs", "/mnt", "/srv", "/task", "/workspace"]
"""Folders of the root that a command finds; files may bring others, a command cannot."""
CELLS_FILE = "/tmp/.cells"
CELLS = """
import ast, io, json, random, sys, traceback
cells, names, own = json.load(sys.stdin), {"__name__": "__main__"}, sys.stdout
random.seed(0)  # what ran before comes out again
for cell in cells:
    sys.stdout = sys.stderr = said = io.StringIO()
    try:
        exec(compile(ast.Interactive(ast.parse(cell).body), "<cell>", "single"), names)
    except BaseException:
        traceback.print_exc(file=said)
own.write(said.getvalue())
"""
"""Runs the cells of a Python session; prints what the last one says, as Python's prompt would."""

made = 0
"""Boxes of this process so far."""
failed: SandboxError | None = None
"""What this machine failed to do for the request under way, whatever the library makes of it."""


def check_image(image: str) -> None:
    """Raise `Unplayable` unless a box can take the place of a container of this image."""
    if not PLAIN_IMAGE.fullmatch(image):
        raise Unplayable(f"its sandbox needs the image {image!r:.100}; Swarm starts no container")


class Box:
    """The files of one sandbox."""

    def __init__(self, folder: str = "/root", variables: Mapping[str, str] | None = None) -> None:
        """`folder`: where commands run."""
        global made
        made += 1
        use_inherited_launcher()
        self._problem = Problem(instruction="", folder=folder, made=FOLDERS)
        self._variables = dict(variables or {})
        self._tree = self._before = self._problem.tree
        self._cells: list[str] = []
        """Those of the Python session, which began with the files `_before`."""

    def run(
        self, command: str, seconds: float, variables: Mapping[str, str], folder: str = ""
    ) -> Said:
        """Run a command of bash. One that is ended changes nothing."""
        given = self._variables | dict(variables)
        exports = [f"export {name}={shlex.quote(each)}" for name, each in given.items()]
        lines = [f"cd -- {shlex.quote(folder or self._problem.folder)} || exit", *exports, command]
        return self._said(self._tree, "\n".join(lines), seconds)

    def cell(self, code: str, seconds: float) -> Said:
        """Run a Python session's next cell. One that is ended changes nothing."""
        self._before = self._before if self._cells else self._tree
        cells = [*self._cells, code]
        files = {**self._before.files, CELLS_FILE: json.dumps(cells).encode()}
        command = f"python3 -c {shlex.quote(CELLS)} <{CELLS_FILE}"
        said = self._said(replace(self._before, files=files), command, seconds)
        self._cells = self._cells if said.ended else cells
        return said

    def write(self, path: str, content: bytes) -> None:
        """Raises `UserError` for a path in a folder of the machine's own."""
        files = {**self._tree.files, str(PurePosixPath(self._problem.folder, path)): content}
        self._tree = replace(self._tree, files=files)

    def read(self, path: str) -> bytes | None:
        return self._tree.files.get(str(PurePosixPath(self._problem.folder, path)))

    def _said(self, tree: Tree, command: str, seconds: float) -> Said:
        cpu = min(seconds, 300.0)
        bounds = Limits(2 * cpu, cpu, memory_bytes=2 << 30, processes=32, files_bytes=32 << 20)
        try:
            said = say(self._problem, tree, command, bounds)
        except SandboxError as error:
            global failed
            failed = error
            raise
        if not said.ended:
            self._tree = said.tree
        return said
