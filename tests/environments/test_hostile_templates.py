"""Chat templates of strangers: whatever one computes, it is stopped early, everywhere alike."""

from __future__ import annotations

import resource

import pytest

from peers.environments.chat_template import CHARACTERS_MAX, ChatTemplate
from peers.environments.template_sandbox import WORK_MAX, Sandbox, limited
from swarm.errors import UserError
from tests.environments.chat_families import FAMILIES

CHAT = [{"role": "user", "content": "what is 17 + 4?"}]

CPU_SECONDS = 2.0

DOUBLED = "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = EXPRESSION %}"
END = "{% endfor %}{{ ns.x | length }}"


REFUSED = (
    r"^model: the chat template (fails|is no valid Jinja).*"
    r"(it computes|it writes|No filter named '|'lipsum' is undefined)"
)


def doubled(expression: str) -> str:
    return DOUBLED.replace("EXPRESSION", expression) + END


HOSTILE = {
    "tilde": doubled("ns.x ~ ns.x"),
    "plus": doubled("ns.x + ns.x"),
    "times": doubled("ns.x * 4"),
    "center": "{{ 'x'.center(2000000000) | length }}",
    "center filter": "{{ 'x' | center(2000000000) | length }}",
    "center of markup": "{{ ('x' | safe).center(2000000000) | length }}",
    "ljust": "{{ 'x'.ljust(width=2000000000) | length }}",
    "zfill": "{{ 'x'.zfill(2000000000) | length }}",
    "expandtabs": "{{ '\\t'.expandtabs(2000000000) | length }}",
    "expandtabs of many": "{{ ('\\t' * 1000000).expandtabs(4000) | length }}",
    "percent": "{{ '%02000000000d' % 1 }}",
    "percent precision": "{{ '%.2000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (2000000000, 1) }}",
    "percent name": "{{ '%(a(b))2000000000d' % {'a(b)': 1} }}",
    "percent repeated": doubled("'%(a)s%(a)s' % {'a': ns.x}"),
    "format filter": "{{ '%02000000000d' | format(1) }}",
    "format method": "{{ '{:02000000000d}'.format(1) }}",
    "format nested": "{{ '{:{n}d}'.format(1, n=2000000000) }}",
    "format_map": "{{ '{a:>2000000000}'.format_map({'a': 1}) }}",
    "format repeated": doubled("'{0}{0}'.format(ns.x)"),
    "replace": doubled("ns.x.replace('a', 'aaaa')"),
    "replace filter": doubled("ns.x | replace('a', 'aaaa')"),
    "replace of nothing": "{{ ('a' * 4000).replace('', 'b' * 4000000) | length }}",
    "join": doubled("[ns.x, ns.x] | join('-')"),
    "join method": doubled("ns.x.join(['a', 'b', 'c'])"),
    "indent": "{{ ('\\n' * 100000) | indent(4000, true, true) | length }}",
    "wordwrap": "{{ ('a' * 100000) | wordwrap(1, true, 'b' * 1000) | length }}",
    "batch": "{{ [1] | batch(2000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(2000000000, 0) | list | length }}",
    "tojson": "{{ {'a': [1, [2]]} | tojson(indent=2000000000) }}",
    "tojson separators": "{{ range(1000) | list | tojson(separators=('a' * 1000000, ':')) }}",
    "round": "{{ 1.5 | round(2000000000, 'ceil') }}",
    "capture": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set y %}"
    "{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% set ns.x = y %}{% endfor %}",
    "list of lists": doubled("[ns.x, ns.x]"),
    "list that is written": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "tuple as a key": "{% set ns = namespace(x=(1,)) %}{% for i in range(40) %}"
    "{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {1: 2}[ns.x] }}",
    "namespace in itself": "{% set ns = namespace() %}{% set ns.x = [ns, ns, ns] %}{{ ns.x }}",
    "sum of lists": "{% set x = [1] * 1000 %}{{ [x, x, x, x] | sum(start=[]) | length }}",
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "loops that skip": "{% for i in range(1000) %}{% for j in range(100000) if false %}"
    "{% endfor %}{% endfor %}",
    "loops of many tests": "{% for i in range(100000) %}"
    + "{% if i %}{% endif %}" * 5000
    + "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{{ f(40) }}",
    "macros too deep": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "comparisons": "{% set x = 'a' * 4000000 %}{% set y = 'a' * 4000000 %}"
    "{% for i in range(100000) %}{% if x == y %}{% endif %}{% endfor %}",
    "searches": "{% set x = 'a' * 1000000 %}{{ x.rfind('b' + 'a' * 500000) }}",
    "strip": "{{ ('a' * 1000000).strip('b' * 100000 + 'a') | length }}",
    "slices": "{% set x = 'a' * 4000000 %}{% for i in range(100000) %}{% set y = x[::-1] %}"
    "{% endfor %}",
    "slow filter": "{% set x = 'a ' * 1000000 %}{% for i in range(1000) %}{% set y = x | title %}"
    "{% endfor %}",
    "mapped filter": "{{ (['x'] * 1000) | map('center', 2000000000) | list | length }}",
    "bytes": "{{ (1).to_bytes(2000000000, 'big') | length }}",
    "powers": "{{ 10 ** 1000000000 }}",
    "products": doubled("ns.x | length * 1000000000 * 1000000000"),
    "large integers": "{% set ns = namespace(x=7) %}{% for i in range(100000) %}"
    "{% set ns.x = ns.x * 3 %}{% endfor %}",
    "dates": "{{ strftime_now('%2000000000Y') }}",
    "writes too much": "{% for i in range(2000) %}{{ 'a' * 4000 }}{% endfor %}",
    "random": "{{ [1, 2, 3] | random }}",
    "lorem ipsum": "{{ lipsum() }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_template_is_refused_after_a_bounded_amount_of_work(source: str) -> None:
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(UserError, match=REFUSED):
        ChatTemplate(source, {}, "model").render(CHAT, {"chat_date": "2026-11-23"}, True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < CPU_SECONDS


@pytest.mark.parametrize("family", FAMILIES)
def test_an_honest_template_uses_little_of_what_it_may_and_always_as_much(family: str) -> None:
    template = Sandbox().from_string(FAMILIES[family].template)
    turns = ({"role": role, "content": role * 500} for role in ("user", "assistant") * 100)
    chat = [*turns, CHAT[0]]
    used = []
    for _ in range(2):
        with limited() as budget:
            text = template.render(messages=chat, bos_token="<s>", eos_token="</s>")
        assert text.count("user" * 500) == 100
        used.append(WORK_MAX - budget.left)
    assert used[0] == used[1] < WORK_MAX / 4


@pytest.mark.parametrize("source", ["{% if a %}", "{{ [[[[", "{{ a }}"])
def test_a_template_is_compiled_with_a_bounded_amount_of_work_too(source: str) -> None:
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    for length, refused in ((CHARACTERS_MAX, source != "{{ a }}"), (CHARACTERS_MAX + 20, True)):
        try:
            ChatTemplate(source * (length // len(source)), {}, "model")
        except UserError as error:
            assert refused and str(error).startswith("model: the chat template ")
        else:
            assert not refused
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < 2 * CPU_SECONDS
