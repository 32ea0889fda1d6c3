"""What the site needs beside the pages of docs/: hooks of mkdocs (mkdocs.yml, `make docs`).

The README is its first page. A page "API" lists the public names of the libraries. Links to files
that are no pages, such as tests, become their names.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TOP_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "reports.md"}
LIBRARIES = ("swarm", "peers", "simnet")
SHAPE = re.compile(r"\[(\w+)\]\[([\w ]+)\]")
"""A shape such as [names][rollouts], which Markdown would take for a link."""
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/, and the API's."""
    for source, target in TOP_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = LINK.sub(lambda link: _relinked(link, TOP_PAGES), text.replace("](docs/", "]("))
        files.append(File.generated(config, target, content=text))
    parts = [f"## {library}\n\n{_names(library)}" for library in LIBRARIES]
    files.append(File.generated(config, "api.md", content="# API\n\n" + "\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the top's pages to their pages here."""
    depth = page.file.src_uri.count("/")
    tops = {
        f"{'../' * (depth + 1)}{name}": f"{'../' * depth}{to}" for name, to in TOP_PAGES.items()
    }
    markdown = SHAPE.sub(r"\[\1\]\[\2\]", markdown)
    inside = page.file.src_uri not in TOP_PAGES.values()
    return LINK.sub(lambda link: _relinked(link, tops), markdown) if inside else markdown


def _relinked(link: re.Match[str], tops: dict[str, str]) -> str:
    text, address = link[1], link[2]
    path, _, heading = address.partition("#")
    if path in tops:
        return f"[{text}]({tops[path]}{'#' * bool(heading)}{heading})"
    leaves = path.count("../") > 0 and not path.endswith((".md", ".png", ".svg"))
    return text if leaves or path in ("LICENSE", "CONTRIBUTING.md") else link[0]


def _names(library: str) -> str:
    """The public names of a library, each documented where it is defined."""
    tree = ast.parse((ROOT / library / "__init__.py").read_text(encoding="utf-8"))
    homes = {
        name.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
        if node.module.partition(".")[0] in LIBRARIES
    }
    names = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return "\n".join(f"::: {homes[name]}.{name}\n" for name in names if not name.startswith("__"))
