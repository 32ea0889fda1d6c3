"""Rollouts as one HTML file, without outside resources.

All text of a rollout is escaped, and the page's content security policy allows its own script and
style only, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path

from swarm.errors import UserError
from swarm.look.rollouts.screen import figures, text_of, visible_lines, worker_end
from swarm.look.rollouts.seen import SeenRollout, Turn
from swarm.terminal.untrusted import printable

TURN_CHARACTERS_MAX = 20_000
"""Longest text of a turn on the page; exports hold all of it."""

PAGE_CHARACTERS_MAX = 64_000_000
"""The page ends after the group that exceeds this: browsers become slow with more."""


def write_page(rollouts: Iterable[SeenRollout], title: str, to: Path) -> tuple[int, bool]:
    """Write the page; return how many rollouts it shows, and whether some had no room."""
    body: list[str] = []
    environments: set[str] = set()
    count = size = 0
    full = False
    for _, group in itertools.groupby(rollouts, lambda seen: seen.group_key):
        full = size > PAGE_CHARACTERS_MAX
        if full:
            break
        section = list(group)
        body.append(_section(section))
        size += len(body[-1])
        count += len(section)
        environments.add(section[0].environment)
    try:
        partial = to.with_name(to.name + ".partial")
        partial.write_text(_page(title, body, sorted(environments)), encoding="utf-8")
        partial.replace(to)
    except OSError as error:
        raise UserError(f"--html {to} cannot be written ({error.strerror})") from error
    return count, full


def _page(title: str, body: list[str], environments: list[str]) -> str:
    style, script = (files(__package__).joinpath(name).read_text() for name in _PARTS)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    options = "".join(f"<option>{_line(each)}</option>" for each in environments)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_line(title)}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{_line(title)}</h1>
<form hidden>
<label>environment<select name="environment"><option value="">all</option>{options}</select></label>
<label>verdict<select name="verdict"><option value="">all</option><option>accepted</option>\
<option>quarantined</option><option>refused</option></select></label>
<label>reward from<input type="number" step="any" name="low"></label>
<label>to<input type="number" step="any" name="high"></label>
<label>step from<input type="number" name="first"></label>
<label>to<input type="number" name="last"></label>
<label>worker<input type="search" name="worker" placeholder="part of a peer id"></label>
<label>text of the group<input type="search" name="text"></label>
<button type="reset">clear</button>
</form>
<p id="count" role="status"></p>
</header>
<main>
<footer><p>Shaded text is outside the loss; a green edge marks text in it. Keys: j and k move \
between rollouts, / searches, Esc clears the filters.</p></footer>
{"".join(body)}</main>
<script>{script}</script>
</body>
</html>
"""


_PARTS = "page.css", "page.js"


def _hash(part: str) -> str:
    digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _line(text: str) -> str:
    return escape(printable(text))


def _section(group: list[SeenRollout]) -> str:
    seen = group[0]
    origin = seen.submission
    environment = _line(f"{seen.environment} {seen.environment_version}".rstrip())
    fate = f' <span class="{_line(origin.verdict)}">{_line(seen.fate)}</span>' if seen.fate else ""
    detail = f'<p class="prompt refused">{_line(origin.detail)}</p>' if origin.detail else ""
    return (
        f"<section>\n<h2>step {origin.step} · policy {origin.policy} · {environment} "
        f'<span title="{_line(origin.worker)}, submission {_line(origin.digest)}">group '
        f"{seen.group} of number {origin.number} by {_line(worker_end(origin.worker))}</span>"
        f'{fate}</h2>\n{detail}<div class="prompt">{_turn(seen.turns[0])}</div>\n'
        + "".join(map(_article, group))
        + "</section>\n"
    )


def _article(seen: SeenRollout) -> str:
    reward = "" if seen.reward is None else f"{seen.reward:.9g}"
    origin = seen.submission
    told = " · ".join(map(_line, figures(seen)))
    return (
        f'<article tabindex="0" data-step="{origin.step}" data-reward="{reward}" '
        f'data-worker="{_line(origin.worker)}" data-environment="{_line(seen.environment)}" '
        f'data-verdict="{_line(origin.verdict)}">\n'
        f'<div class="figures"><b>sample {seen.sample}</b> · {told}</div>\n'
        + "".join(map(_turn, seen.turns[1:]))
        + "</article>\n"
    )


def _turn(turn: Turn) -> str:
    text = "\n".join(visible_lines(text_of(turn), TURN_CHARACTERS_MAX))
    state = "inside" if turn.in_loss else "outside"
    # An HTML parser drops one line end after <pre>.
    return (
        f'<div class="turn {state}"><div class="kind">{turn.kind}</div>'
        f'<pre dir="auto">\n{escape(text)}</pre></div>\n'
    )
