"""The killable process that renders the chat templates of strangers."""

import datetime
import json
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

TEXT_MAX = 1 << 22
"""Characters of a rendered prompt; no model reads one as long."""


class TemplateService:
    """Renders a template: a request and its reply are texts of JSON, which any text fits into."""

    def __call__(self, request: str) -> str:
        """The text of a conversation, or nothing if none is given: then only compile."""
        asked = json.loads(request)
        template = _compiled(asked["source"])
        if asked["given"] is None:
            return ""
        given = asked["given"]
        if (date := given.pop("chat_date", None)) is not None:
            given["strftime_now"] = datetime.date.fromisoformat(date).strftime
        text = template.render(given)
        if len(text) > TEXT_MAX:
            raise ValueError(f"it writes {len(text)} characters; at most {TEXT_MAX} are allowed")
        return json.dumps(text)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, which mark the model's tokens for other trainers."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    """A template in Jinja as transformers sets it up, but with nothing random and no clock."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    sandbox.globals["raise_exception"] = _raise
    sandbox.filters["tojson"] = _to_json
    return sandbox.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """The filter `tojson` of transformers, which does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
