"""Chat templates of strangers: whatever one computes, it costs no more than its process."""

from __future__ import annotations

import resource
import time

import pytest

from peers.environments import chat_template
from peers.environments.chat_template import CHARACTERS_MAX, CPU_SECONDS, ChatTemplate
from swarm.errors import UserError
from tests.environments.chat_families import FAMILIES

CHAT = [{"role": "user", "content": "what is 17 + 4?"}]

DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = EXPRESSION %}"
END = "{% endfor %}{{ ns.x | length }}"


def doubled(expression: str) -> str:
    return DOUBLED.replace("EXPRESSION", expression) + END


COMPUTES = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(40) }}",
    "powers": "{% set x = range(9) | last %}{{ (10 + x) ** 1000000000 }}",
}

GROWS = {
    "tilde": doubled("ns.x ~ ns.x"),
    "lists": doubled("ns.x | list + ns.x | list"),
    "center": "{{ 'x'.center(2000000000) | length }}",
    "percent": "{{ '%02000000000d' % (messages | length) }}",
    "format": "{{ '{:{n}d}'.format(1, n=2000000000) }}",
    "tojson": "{{ {'a': [1, [2]]} | tojson(indent=2000000000) }}",
    "capture": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set y %}"
    "{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
}

REFUSED = {
    "macros too deep": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "writes too much": "{% for i in range(2000) %}{{ 'a' * 4000 }}{% endfor %}",
    "random": "{{ [1, 2, 3] | random }}",
    "lorem ipsum": "{{ lipsum() }}",
    "its process": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


@pytest.fixture
def impatient(monkeypatch):
    """Renderings that may take half a second."""
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.5)
    chat_template._pool.cache_clear()
    yield
    chat_template._pool().close()
    chat_template._pool.cache_clear()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("source", COMPUTES.values(), ids=COMPUTES.keys())
def test_a_template_that_computes_without_end_is_stopped(source: str) -> None:
    with pytest.raises(UserError, match=r"^model: the chat template .*0.5 s of CPU time"):
        ChatTemplate(source, {}, "model").render(CHAT, {}, True)


@pytest.mark.parametrize("source", GROWS.values(), ids=GROWS.keys())
def test_a_template_that_grows_without_end_is_stopped(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"^model: the chat template .*(MiB of memory|CPU time)"):
        ChatTemplate(source, {}, "model").render(CHAT, {}, True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_a_template_that_fails_is_refused_with_a_sentence(source: str) -> None:
    with pytest.raises(UserError, match=r"^model: the chat template (fails|is no valid Jinja)"):
        ChatTemplate(source, {}, "model").render(CHAT, {"chat_date": "2026-11-23"}, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_template_uses_little_of_what_it_may(family: str) -> None:
    template = ChatTemplate(
        FAMILIES[family].template, {"bos_token": "<s>", "eos_token": "</s>"}, "model"
    )
    turns = ({"role": role, "content": role * 500} for role in ("user", "assistant") * 100)
    began = time.monotonic()
    assert template.render([*turns, CHAT[0]], {}, True).count("user" * 500) == 100
    assert time.monotonic() - began < CPU_SECONDS / 4


@pytest.mark.parametrize("source", ["{% if a %}", "{{ [[[[", "{{ a }}"])
def test_a_template_is_compiled_there_too(source: str) -> None:
    for length, refused in ((CHARACTERS_MAX, source != "{{ a }}"), (CHARACTERS_MAX + 20, True)):
        try:
            ChatTemplate(source * (length // len(source)), {}, "model")
        except UserError as error:
            assert refused and str(error).startswith("model: the chat template ")
        else:
            assert not refused
