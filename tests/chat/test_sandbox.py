"""The lean sandbox and jinja2's own: the same text, and the same refusals."""

# ruff: noqa: E501 templates are easier to read whole
from __future__ import annotations

from typing import Any

import pytest
from conversations import STRUCTURES, Json
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packer_cli.chat.chat_template import MARK, ChatTemplate, environment
from packer_cli.chat.messages import Conversation, RefusedError
from packer_cli.errors import UsageError

ODD = {
    "loop variables": "{% for m in messages %}{{ loop.index }}{{ loop.revindex }}{{ loop.revindex0 }}"
    "{{ loop.length }}{{ loop.previtem.role }}{{ loop.nextitem.role }}{% if loop.last %}L{% endif %}"
    "{{ loop.previtem }}{% endfor %}",
    "loop object": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}"
    "{{ loop.depth }}{% for n in messages %}{{ loop.index0 }}{% endfor %}{{ loop.index0 }}{% endfor %}",
    "loop over others": "{% for a in range(3) %}{{ loop.last }}{% endfor %}"
    "{% for c in 'abc' %}{{ loop.first }}{{ c }}{% endfor %}"
    "{% for k, v in messages[0].items() %}{{ loop.index }}{{ k }}={{ v }}{% endfor %}"
    "{% for k, v in messages[0] | items %}{{ k }}{{ loop.last }}{% endfor %}"
    "{% for k in messages[0] %}{{ loop.length }}{{ k }}{% endfor %}"
    "{% for x in nothing %}{{ loop.index }}{% else %}none{% endfor %}",
    "lazy loops": "{% for r in messages | map(attribute='role') %}{{ loop.last }}{{ r }}{% endfor %}"
    "{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content }}{% endfor %}",
    "filtered loops": "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ m.content }}"
    "{% endfor %}",
    "recursive": "{% for m in messages recursive %}{{ m.role }}{% if m.parts %}{{ loop(m.parts) }}"
    "{% endif %}{% endfor %}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "macros": "{% macro say(m, end='.') %}{% set x = m.role %}{{ x }}: {{ m.content }}{{ end }}"
    "{% for c in m.tool_calls or [] %}{{ loop.index }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{{ say(m, end='!') }}{% endfor %}{{ x is defined }}",
    "a caller": "{% macro b() %}<{{ caller() }}>{% endmacro %}{% for m in messages %}"
    "{% call b() %}{{ m.content }}{% endcall %}{% endfor %}",
    "captured": "{% set t %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ t | upper }}"
    "{% filter upper %}{{ t }}ß{% endfilter %}",
    "scopes": "{% set x = 1 %}{% for m in messages %}{{ x }}{% set x = m.role %}{{ x }}"
    "{% if x == 'user' %}{% set y = 2 %}{% else %}{% set x = 3 %}{% endif %}{{ y }}{{ x }}{% endfor %}{{ x }}"
    "{% with x = 5, z = x %}{{ x }}{{ z }}{% endwith %}{{ z is defined }}",
    "a field set on one way": "{% for m in messages %}{% if loop.first %}{% set a = 'x' %}{% endif %}"
    "[{{ a }}{{ a is defined }}{{ a is undefined }}]{% endfor %}",
    "a reused name": "{% for m in messages %}{% set m = m.content %}{{ m }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{% endfor %}{{ m is defined }}",
    "namespaces": "{% set ns = namespace(n=0, names=[]) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.names = ns.names + [m.role] %}{% endfor %}"
    "{{ ns.n }}{{ ns.names }}{{ ns.missing }}{{ ns['n'] }}{{ ns }}{% set ns = 5 %}{{ ns.n }}",
    "private names of namespaces": "{% set ns = namespace(_n=1) %}{% set other = ns %}{{ ns._n }}"
    "{{ other._n }}{{ ns._n is defined }}{{ 'a' if ns._n else 'b' }}",
    "a namespace that is none": "{% set ns.x = 1 %}",
    "tests": "{% for m in messages %}{% for v in [m.content, m.x, m['y'], none, 1, 1.5, true, [], {}] %}"
    "{{ v is string }}{{ v is defined }}{{ v is none }}{{ v is mapping }}{{ v is iterable }}"
    "{{ v is sequence }}{{ v is true }}{{ v is false }}{{ v is number }}{{ v is not string }}|{% endfor %}"
    "{{ m.x is defined }}{{ m.content is defined }}{{ m['x'] is defined }}{{ m.keys is defined }}"
    "{{ m.x is string }}{{ m['content'] is string }}{{ absent is none }}{{ absent is string }}{% endfor %}",
    "truth": "{% for m in messages %}{% if m.tool_calls %}c{% endif %}{% if not m.x %}n{% endif %}"
    "{% if m['content'] and m.role or absent %}y{% endif %}{{ m.x and 1 }}{{ m.x or 2 }}{{ not absent }}"
    "{{ 'a' if m.x else 'b' }}{{ 'a' if m.x }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m.role.upper() }}{{ m.role.split('e')[-1] }}{{ m.role.split('e', maxsplit=1) }}{{ m.get('x', 4) }}"
    "{{ m.get('role') }}{{ m.items() | list }}{{ m.role.center(9) }}{{ '{}-{}'.format(m.role, 1) }}"
    "{{ '%s' % m.role }}{{ m.role.replace(m.role, 'x') }}{{ m.items }}{% endfor %}",
    "a method of none": "{{ absent.strip() }}",
    "a method of a number": "{{ messages[0].number.strip() }}",
    "indices": "{{ messages[0].role }}{{ messages[-1].role }}{{ messages[99] }}{{ messages[99].x }}",
    "slices": "{% for m in messages[1:] %}{{ loop.index0 }}{{ m.role }}{% endfor %}{{ messages[::-1][0].role }}"
    "{{ messages[0].role[1:3] }}{{ messages[0]['role'][0] }}{{ messages[0].role[-1] }}",
    "output": "{{ none }}{{ true }}{{ 1.0 }}{{ [1, 'a'] }}{{ {'a': messages[0].x} }}{{ absent }}{{ 'a' ~ 1 ~ none }}"
    "{{ 'ä' + messages[0].role }}{{ '<b>' | e }}{{ ('<b>' | e) + '<' }}{{ '<' ~ ('<b>' | safe) }}",
    "adding a number": "{{ 'a' + 1 }}",
    "adding nothing": "{{ 'a' + messages[0].absent }}",
    "filters": "{% for m in messages %}{{ m.role | trim }}{{ m.x | trim }}{{ 5 | trim }}{{ m | length }}"
    "{{ m.x | default('d') }}{{ m | tojson }}{{ m.role | tojson(indent=2) }}{{ ' xx' | trim('x') }}"
    "{{ m | dictsort }}{{ [3, 1] | sort | join('-') }}{{ m.role | replace('u', 'U') | title }}{% endfor %}",
    "a filter that there is not": "{{ 'a' | nonesuch }}",
    "a filter that is not reached": "{% if false %}{{ 'a' | nonesuch }}{% endif %}b",
    "raising": "{% if messages[0].role != 'system' %}{{ raise_exception('no system: é') }}{% endif %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% set z = 1 %}{% endgeneration %}{{ z }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "indexed messages": "{% for i in range(messages | length) %}{{ messages[i].role }}: "
    "{{ messages[i]['content'] }}\n{% endfor %}",
    "dict names": "{% set d = {'items': 1, 'x': absent, 'keys': 2} %}{{ d['items'] }}{{ d.x is defined }}"
    "{{ d.x }}{{ d['keys'] }}{{ d.nothing }}{{ d['nothing'] is defined }}",
    "blocks": "{% block a %}{{ messages[0].role }}{% for m in messages %}{{ loop.last }}{% endfor %}{% endblock %}",
}  # fmt: skip
# Each would leave the sandbox, or change what others read.
UNSAFE = (
    "{{ messages.__class__ }}", "{{ messages[0].__class__.__mro__ }}", "{{ ''.__class__ }}",
    "{{ messages[0]['__class__'] }}", "{{ (messages | first)['__init__'] }}",
    "{{ messages.append(1) }}", "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}", "{{ messages[0].clear() }}", "{{ messages[0].setdefault('a') }}",
    "{{ '{0.__class__}'.format(messages) }}", "{{ '{m.__class__}'.format_map({'m': 1}) }}",
    "{{ messages | attr('__class__') }}", "{{ messages | map(attribute='__class__') | list }}",
    "{{ raise_exception.__globals__ }}", "{{ namespace.__init__ }}", "{{ dict.__call__ }}",
    "{% set ns = namespace() %}{{ ns.__class__ }}", "{{ self.__init__ }}", "{{ range(10**9) }}",
    "{% for m in messages %}{{ loop.__class__ }}{{ loop._iterator }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__class__ }}{{ f._func }}", "{{ lipsum() }}",
    "{{ messages[0].get.__self__ }}", "{{ 'a'.upper.__self__ }}", "{{ cycler.__init__.__globals__ }}",
    "{{ _packer_mark.__self__ }}", "{{ environment }}{{ context }}{{ mark }}{{ resolve }}",
    "{% set append = 1 %}{% set pieces = 2 %}{{ append }}{{ pieces }}{{ mark }}{{ missing }}",
)  # fmt: skip


TALK = [
    *STRUCTURES["parallel calls"]["messages"],
    *STRUCTURES["three turns, a system message"]["messages"],
]
PARTS = [{"role": "user", "content": "x", "number": 5, "parts": [{"role": "p"}]}]


def plain(source: str) -> Any:
    """The template in jinja2's own sandbox, but for what the environment adds to it."""
    lean = environment()
    own = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=list(lean.extensions)
    )
    own.filters, own.globals = lean.filters, lean.globals
    return own.from_string(source)


@pytest.mark.parametrize("messages", [TALK, [*PARTS, *TALK], PARTS])
@pytest.mark.parametrize("name", ODD)
def test_odd_templates_are_rendered_alike(name: str, messages: list[Json]) -> None:
    given = {"messages": messages, "tools": None, "documents": None, MARK: lambda *_: ""}
    try:
        lean, own = ChatTemplate(ODD[name], {}), plain(ODD[name])
    except (UsageError, TemplateError):  # jinja2 itself refuses it
        pytest.skip()
    expected, problem = "", ""
    try:
        expected = own.render(given, add_generation_prompt=True)
    except (TemplateError, TypeError) as error:
        problem = str(error)
    if not problem:
        assert lean.render(Conversation(messages), add_generation_prompt=True).text == expected
    else:
        with pytest.raises((RefusedError, UsageError)) as found:
            lean.render(Conversation(messages), add_generation_prompt=True)
        assert problem in str(found.value)


@pytest.mark.parametrize("source", UNSAFE)
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(source, {}).render(Conversation(messages)).text
    except (RefusedError, UsageError):
        text = ""
    assert "class '" not in text
    assert "object at" not in text
    assert messages == [{"role": "user", "content": "x"}]
