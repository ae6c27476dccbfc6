"""The compiled template and jinja2: the same text and the same errors, or jinja2 alone."""

# ruff: noqa: E501 templates are easier to read whole
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altered_templates
import pytest
from altered_templates import TRIGGER
from chats import CALLS, CHATML, REWRITTEN, TAGS, assistant, chat, user, write
from conversations import STRUCTURES, with_text_arguments
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_error, contents, packer

from packer_cli.errors import UsageError
from packer_cli.supervised import processes
from packer_cli.supervised.chat_template import ChatTemplate, RefusedError, Rendering

Json = dict[str, Any]
SHARED = Path(__file__).resolve().parents[2].parent / "shared"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def real_templates() -> dict[str, str]:
    found = {path.stem: path.read_text() for path in SHARED.glob("chat_templates/*.jinja")}
    for path in SHARED.glob("tokenizers/*/chat_template.jinja"):
        found[path.parent.name] = path.read_text()
    for path in SHARED.glob("tokenizers/*/tokenizer_config.json"):
        if isinstance(template := json.loads(path.read_text()).get("chat_template"), str):
            found[path.parent.name] = template
    return dict(sorted(found.items()))


REAL = real_templates()
shared = pytest.mark.skipif(not REAL, reason="needs ../shared")


def outcome(template: ChatTemplate, *talk: Any, prompt: bool = False) -> Rendering | str:
    try:
        return template.render(*talk, add_generation_prompt=prompt)
    except (RefusedError, UsageError) as error:
        return str(error)


def both(source: str) -> tuple[ChatTemplate, ChatTemplate]:
    return ChatTemplate(source, TOKENS, engine="compiled"), ChatTemplate(source, TOKENS)


def check_equal(source: str, messages: list[Json], tools: list[Json] | None = None) -> None:
    compiled, jinja2 = both(source)
    for prompt in (False, True):
        expected = outcome(jinja2, messages, tools, prompt=prompt)
        given = outcome(compiled, messages, tools, prompt=prompt)
        by_code = compiled._by_code((messages, tools, prompt), bytearray(compiled._branches))
        if isinstance(expected, str):
            assert given == expected
            assert by_code is None
        else:
            assert isinstance(given, Rendering)
            assert expected.is_like(given)
            assert by_code is not None
            assert by_code.is_like(expected)


def varied(record: Json) -> list[list[Json]]:
    """Conversations like one: with other fields, and without some."""
    messages = record["messages"]
    talks = [messages, messages[:-1] or messages, with_text_arguments(record)["messages"]]
    more: list[Json] = [
        {"reasoning_content": "ä?"},
        {"content": None},
        {"name": "<ñ>"},
        {"content": ""},
    ]
    talks += ([message | fields for message in messages] for fields in more)
    talks.append([{k: v for k, v in m.items() if k != "content"} for m in messages])
    talks.append([m | {"content": f"<think>\nhm\n</think>\n\n{m['content']}\n"} for m in messages])
    return talks


@shared
@pytest.mark.parametrize("structure", STRUCTURES)
def test_real_templates_are_rendered_alike(structure: str) -> None:
    record = STRUCTURES[structure]
    for source in REAL.values():
        compiled, jinja2 = both(source)
        for messages in varied(record):
            for prompt in (False, True):
                talk = messages, record.get("tools")
                expected = outcome(jinja2, *talk, prompt=prompt)
                by_code = compiled._by_code((*talk, prompt), bytearray(compiled._branches))
                if isinstance(expected, str):
                    assert by_code is None
                    assert outcome(compiled, *talk, prompt=prompt) == expected
                else:
                    assert by_code is not None
                    assert by_code.is_like(expected)


@shared
def test_no_real_template_is_left_to_jinja2() -> None:
    assert {
        name: ChatTemplate(source, TOKENS, engine="auto").notice for name, source in REAL.items()
    } == (dict.fromkeys(REAL, ""))


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
    "a namespace that is none": "{% set ns.x = 1 %}",
    "tests": "{% for m in messages %}{% for v in [m.content, m.x, m['y'], none, 1, 1.5, true, [], {}] %}"
    "{{ v is string }}{{ v is defined }}{{ v is none }}{{ v is mapping }}{{ v is iterable }}"
    "{{ v is sequence }}{{ v is true }}{{ v is false }}{{ v is number }}{{ v is not string }}|{% endfor %}"
    "{{ m.x is defined }}{{ m.content is defined }}{{ m['x'] is defined }}{{ m.keys is defined }}"
    "{{ m.x is string }}{{ m['content'] is string }}{{ absent is none }}{{ absent is string }}{% endfor %}",
    "truth": "{% for m in messages %}{% if m.tool_calls %}c{% endif %}{% if not m.x %}n{% endif %}"
    "{% if m['content'] and m.role or absent %}y{% endif %}{{ m.x and 1 }}{{ m.x or 2 }}{{ not absent }}"
    "{{ 'a' if m.x else 'b' }}{{ 'a' if m.x }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m.role.upper() }}{{ m.role.split('e')[-1] }}{{ m.get('x', 4) }}"
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
    "blocks": "{% block a %}{{ messages[0].role }}{% endblock %}",
    "an import": "{% import 'x' as y %}",
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
    "{{ _packer_mark.__self__ }}", "{{ environment }}{{ context }}{{ tracker }}{{ pieces }}{{ ways }}",
    "{% set append = 1 %}{% set pieces = 2 %}{{ append }}{{ pieces }}{{ mark }}{{ missing }}",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in ODD if name not in ("blocks", "an import")])
@pytest.mark.parametrize("structure", ["parallel calls", "three turns, a system message"])
def test_odd_templates_are_rendered_alike(name: str, structure: str) -> None:
    record = STRUCTURES[structure]
    compiled, jinja2 = both_or_skip(ODD[name])
    more = [{"role": "user", "content": "x", "number": 5, "parts": [{"role": "p"}]}]
    for messages in ([*more, *record["messages"]], record["messages"], more):
        for prompt in (False, True):
            expected = outcome(jinja2, messages, None, prompt=prompt)
            actual = outcome(compiled, messages, None, prompt=prompt)
            if isinstance(expected, Rendering):
                assert isinstance(actual, Rendering)
                assert expected.is_like(actual)
            else:
                assert actual == expected


def both_or_skip(source: str) -> tuple[ChatTemplate, ChatTemplate]:
    try:
        return both(source)
    except UsageError as error:  # jinja2 itself refuses it
        pytest.skip(str(error))


@pytest.mark.parametrize("source", UNSAFE)
def test_the_sandbox_holds(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    compiled, jinja2 = both(source)
    expected, actual = outcome(jinja2, messages), outcome(compiled, messages)
    if isinstance(expected, Rendering):
        assert isinstance(actual, Rendering)
        assert expected.is_like(actual)
        assert "class '" not in actual.text
        assert "object at" not in actual.text
    else:
        assert actual == expected
    assert messages == [{"role": "user", "content": "x"}]


NAMES = ("m", "n", "x", "messages", "tools", "ns", "absent")
KEYS = ("role", "content", "tool_calls", "name", "x", "items", "0")
_names = st.sampled_from(NAMES)
_expressions = st.recursive(
    st.one_of(
        _names,
        st.sampled_from(("'a'", "''", "'role'", "0", "1", "none", "true", "[]", "loop.index0", "'é'")),
        st.sampled_from(("loop.first", "loop.last", "loop.length", "m.role", "m.content", "m['x']")),
    ),
    lambda inner: st.one_of(
        st.builds("{}.{}".format, _names, st.sampled_from(KEYS[:-1])),
        st.builds("{}[{!r}]".format, _names, st.sampled_from(KEYS)),
        st.builds("{}[{}]".format, _names, st.sampled_from(("0", "-1", "1:", "::-1", "loop.index0"))),
        st.builds("({} {} {})".format, inner, st.sampled_from(
            ("+", "~", "==", "!=", "and", "or", "in", "<")), inner),
        st.builds("(not {})".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
        st.builds("({} if {})".format, inner, inner),
        st.builds("({} is {})".format, inner, st.sampled_from(
            ("string", "defined", "undefined", "none", "mapping", "iterable", "sequence", "true",
             "not defined", "not string", "false", "number"))),
        st.builds("({} | {})".format, inner, st.sampled_from(
            ("trim", "length", "tojson", "upper", "default('d')", "list", "first", "string",
             "join(',')", "trim('a')"))),
        st.builds("{}.{}".format, inner, st.sampled_from(
            ("strip()", "split('a')", "startswith('a')", "get('role')", "items()", "upper()",
             "replace('a', x)", "lstrip(m)", "role", "x"))),
        st.builds("say({})".format, inner),
    ),
    max_leaves=5,
)  # fmt: skip
_statements = st.recursive(
    st.one_of(
        st.builds("{{{{ {} }}}}".format, _expressions),
        st.builds("{{% set {} = {} %}}".format, st.sampled_from(("x", "n", "ns", "m")), _expressions),
        st.builds("{{% set ns.x = {} %}}".format, _expressions),
        st.sampled_from(("text", "{% set ns = namespace(x=1) %}", "{% set x = 'set' %}")),
    ),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, _expressions, inner),
        st.builds("{{% if {} %}}{}{{% elif {} %}}{}{{% else %}}{}{{% endif %}}".format,
                  _expressions, inner, _expressions, inner, inner),
        st.builds("{{% for {} in {} %}}{}{{% endfor %}}".format, st.sampled_from(("m", "n", "x")),
                  st.one_of(st.just("messages"), _expressions), inner),
        st.builds("{{% for m in messages if {} %}}{}{{% endfor %}}".format, _expressions, inner),
        st.builds("{{% for n in m.tool_calls or [] %}}{}{{% else %}}{}{{% endfor %}}".format, inner, inner),
        st.builds("{{% set x %}}{}{{% endset %}}".format, inner),
        st.builds("{{% with x = {} %}}{}{{% endwith %}}".format, _expressions, inner),
        st.builds("{{% for m in messages %}}{}{{% if {} %}}{{% break %}}{{% endif %}}{{% endfor %}}".format,
                  inner, _expressions),
        st.builds("{{% macro say(x) %}}{}{{% endmacro %}}".format, inner),
    ),
    max_leaves=8,
)  # fmt: skip
_values = st.one_of(
    st.sampled_from(("user", "assistant", "", " a\n", "é", "<b>")), st.none(), st.booleans(), st.integers(-2, 9),
    st.lists(st.sampled_from(("a", {"type": "text", "text": "p"})), max_size=2),
    st.just([{"function": {"name": "f", "arguments": {"a": 1}}}]),
)  # fmt: skip
_messages = st.lists(st.dictionaries(st.sampled_from(KEYS[:-1]), _values, max_size=4), max_size=3)


@settings(max_examples=400, deadline=None)
@given(_statements, _messages)
def test_any_template_is_rendered_as_by_jinja2(source: str, messages: list[Json]) -> None:
    try:
        jinja2 = ChatTemplate(source, TOKENS)
    except UsageError:
        return
    compiled = ChatTemplate(source, TOKENS, engine="auto")
    assert not compiled.notice, f"{compiled.notice}: {source}"
    talk = messages, [{"name": "t"}], False
    expected, by_code = jinja2._by_jinja2_or_none(talk), compiled._by_code(
        talk, bytearray(compiled._branches)
    )  # fmt: skip
    assert by_code is None or by_code.is_like(expected), source


@pytest.mark.parametrize("template", [TAGS, CHATML, REWRITTEN, TAGS.replace("</", CALLS + "</")])
def test_the_engine_changes_no_byte(folder: Path, template: str) -> None:
    write([chat(user(f"é {i}"), assistant("!" * (i % 7 + 1))) for i in range(300)])
    results = []
    for engine in ("auto", "compiled", "jinja2"):
        packed(template, engine, "--template-engine", engine)
        results.append(contents(engine))
    assert results[0] == results[1] == results[2]


def packed(template: str, output: str, *options: str) -> str:
    """What packing data.jsonl prints on stderr."""
    result = pack(template, output, *options)
    assert result.exit_code == 0, result.stderr
    return str(result.stderr)


def pack(template: str, output: str, *options: str) -> Any:
    Path("t.jinja").write_text(template)
    how = ("-l", "512", "-t", "bytes", "--chat-template", "t.jinja", "--workers", "1")
    return packer("pack", "data.jsonl", *how, "-o", output, *options)


@pytest.mark.parametrize("engine", ["auto", "compiled", "jinja2"])
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no ' + m.role) }}", "the chat template refuses it: no user"),
        (
            "{{ m.content + 1 }}",
            'the chat template fails on it: can only concatenate str (not "int")',
        ),
        ("{{ 'a' + m.nothing }}", "the chat template refuses it: 'dict object' has no attribute"),
        (
            "{{ m.content[0][1][2].x.y }}",
            "the chat template refuses it: str object has no element 1",
        ),
    ],
)
def test_bad_records_are_the_same(folder: Path, engine: str, template: str, reason: str) -> None:
    bad = "{% if m.content == 'bad' %}" + template + "{% endif %}"
    write([chat(user("good"), assistant("yes")), chat(user("bad"), assistant("no"))])
    source = TAGS.replace("</{{ m.role }}>", bad + "</{{ m.role }}>")
    result = pack(source, engine, "-q", "--template-engine", engine)
    assert_error(result, 1, "data.jsonl, line 2", reason)
    result = pack(source, engine, "--template-engine", engine, "--on-error", "skip")
    assert result.exit_code == 0, result.stderr
    rejected = json.loads(Path(engine, "rejected.jsonl").read_text())
    assert rejected["reason"].startswith(reason)


FAULTY = f"{altered_templates.__name__}:"


@pytest.mark.parametrize(
    ("fault", "why"),
    [("differs", "compiled, it renders [{"), ("fails", "it cannot be compiled (AttributeError")],
)
def test_an_engine_that_is_wrong_at_the_start_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, why: str
) -> None:
    write([chat(user("Hi"), assistant("Yes?"))] * 3)
    packed(TAGS, "a", "--template-engine", "jinja2")
    monkeypatch.setattr(processes, "_MAKE", FAULTY + fault)
    told = packed(TAGS, "b")
    assert told.count("using the slower jinja2 for the chat template: ") == 1
    assert why in told
    assert contents("a") == contents("b")
    refused = pack(TAGS, "c", "-q", "--template-engine", "compiled")
    assert_error(refused, 2, "the chat template: " + why)
    assert "using the slower" not in packed(TAGS, "d", "--template-engine", "jinja2")


def test_an_engine_that_differs_later_stops_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        [
            *[chat(user("Hi"), assistant("Yes?"))] * 40,
            chat(user("Hi", **{TRIGGER: 1}), assistant("!")),
        ]
    )
    monkeypatch.setattr(processes, "_MAKE", FAULTY + "differs_on_trigger")
    result = pack(TAGS, "out", "-q")
    assert_error(
        result, 3, "the chat template, compiled, renders", "otherwise than jinja2", kind="bug"
    )
    assert "--template-engine jinja2" in result.stderr
    assert not Path("out/manifest.json").exists()
    assert not list(Path("out").glob("*.arrow"))
    assert packed(TAGS, "out", "--template-engine", "jinja2")


def test_a_template_with_blocks_is_left_to_jinja2(folder: Path) -> None:
    write([chat(user("Hi"), assistant("Yes?"))])
    template = "{% block a %}" + TAGS + "{% endblock %}"
    assert "using the slower jinja2 for the chat template: it cannot be compiled" in packed(
        template, "a", "--train-on", "all"
    )
