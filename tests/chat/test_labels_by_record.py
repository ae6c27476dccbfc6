"""What is trained on is a function of the record, the template and the options alone.

Templates have modes by a word, a number, a length or a distance, and write them into the prompt for
an answer. Conversations are packed in random orders, by runs of one unit and of many, with one
worker and with two: each of them has the same tokens and labels every time. They are those of a
slow oracle, which renders the real prompt for each turn.
"""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from chats import CALLS, Json, assistant, chat, pack_marked, system, user
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packer_cli.chat.chat_template import ChatTemplate
from packer_cli.chat.messages import Conversation
from packer_cli.chat.renderer import Renderer
from packer_cli.options.options import PackConfig

# What begins an answer follows the mode, in turns and in prompts: `{mode}`, of message `i`.
_TURNS = (
    "{% for m in messages %}{% set i = loop.index0 %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}MODE{% endif %}{{ m.content }}" + CALLS + "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{% set i = messages | length %}<|assistant|>MODE{% endif %}"
)
_SMOLLM3 = (  # as that of SmolLM3
    "{% set ns = namespace(mode='/think') %}{% if messages[0].role == 'system' %}"
    "{% set said = messages[0].content %}{% if '/no_think' in said %}"
    "{% set ns.mode = '/no_think' %}{% elif '/think' in said %}{% set ns.mode = '/think' %}"
    "{% endif %}"
    "<|im_start|>system\n{{ said.replace('/no_think', '').replace('/think', '').rstrip() }}"
    "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|im_start|>user\n{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    "<|im_start|>assistant\n{% if ns.mode == '/no_think' %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content.lstrip('\n') }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if ns.mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


def _mode(when: str, text: str = "<brief>") -> str:
    return _TURNS.replace("MODE", "{% if " + when + " %}" + text + "{% endif %}")


TEMPLATES = {
    "by number": _mode("i >= 4"),
    "by number, in prompts alone": _mode("i >= 4").replace("{% if i >= 4 %}", "{% if true %}", 1),
    "by a word of the system": _SMOLLM3,
    "by a word at its beginning": _mode("messages[0].content.startswith('Be')"),
    "by a word of a question": _mode("'ja' in messages[i - 1].content"),
    "by a variable": "{% set word = '/no' %}{% set ns = namespace(on=false) %}"
    "{% for m in messages[:1] %}"
    "{% set text = m.content %}{% if word in text %}{% set ns.on = true %}{% endif %}{% endfor %}"
    + _mode("ns.on"),
    "by the same words twice": _mode("messages[0].content == messages[i - 1].content"),
    "by a field": _mode("messages[0].name == 'ann'"),
    "by a name in the header": _mode("messages[0].name", "<{{ messages[0].name }}>"),
    "by a weight, the message left out": _mode("false").replace(
        "<|{{ m.role }}|>", "{% if m.role == 'system' and m.weight %}{{ m.name }}{% continue %}"
        "{% endif %}<|{{ m.role }}|>", 1,
    ),
    "by the number of tools": _mode("tools and tools | length > 1"),
    "by the type of a tool": _mode("tools and tools[0].function.parameters.type == 'object'"),
    "by an argument of a call": _mode(
        "i > 2 and messages[i - 2].tool_calls "
        "and messages[i - 2].tool_calls[0].function.arguments.hide"
    ),
    "by reasoning far away": _mode(
        "messages[:i] | selectattr('reasoning_content') | list | length"
    ),
    "by calls far away": _mode("messages[:i] | selectattr('tool_calls') | list | length"),
    "by what changed": "{% set ns = namespace(same=false) %}{% for m in messages[:2] %}"
    "{% if not loop.changed(m.content) %}{% set ns.same = true %}{% endif %}{% endfor %}"
    + _mode("ns.same and i > 1"),
    "by distance": "{% set ns = namespace(last=-9) %}" + _mode("i - ns.last > 2").replace(
        "<|{{ m", "{% if 'ja' in m.content %}{% set ns.last = i %}{% endif %}<|{{ m", 1
    ),
}  # fmt: skip


# Each way in which Jinja can use content, as a condition or as a set of the variable `on`, by what
# tells of it: nothing, a literal in the record, or only the real prompt. T is the first content.
UNUSED = (
    "T is string", "T is none", "T is not mapping", "T is iterable", "T is sequence", "T", "not T",
    "T | trim", "T.strip('\\n ')", "T | upper", "T ~ 'x'", "'x' + T", "T | tojson", "T == ''",
    "T | default('x')", "messages[:1] | length > 3", "T is sameas none", "messages[0].brief",
    "messages[:2] | map(attribute='content') | list | length > 3", "messages[0].get('content')",
    "messages[:1] | selectattr('role', 'equalto', 'user') | list", "[T] | length > 1",
    "messages[:1] | selectattr('content') | list", "messages[:1][::-1][0].role == 'user'",
    "{% macro f(x) %}<{{ x | upper }}>{% endmacro %}{% set on = f(T) %}",
    "{% set on %}{% for m in messages %}{{ m.content | trim }},{% endfor %}{% endset %}",
    "{% set ns = namespace(t=T) %}{% set on = ns.t is number %}",
)  # fmt: skip
SOUGHT = (
    "'ja' in T", "'ja' not in T", "T.startswith('Be')", "T.endswith(('ja', 'no'))", "T == 'ja'",
    "'ja' == T", "T != 'ja'", "T is eq 'ja'", "T in ['ja', 'no']",
    "messages[0]['con' ~ 'tent'] == 'ja'",
    "'ja' is in T", "T.find('ja') > 0", "T.count('ja') > 1", "T.split('/')[1] is defined",
    "T.partition('ja')[2]", "T.rsplit(' ja', 1) | length > 1", "T | replace('ja', '') | trim == ''",
    "T.removeprefix('ja') == ''", "'ja' in T.strip()", "(T | trim).startswith('ja')",
    "messages[:1] | selectattr('content', 'equalto', 'ja') | list", "[T] == ['ja']",
    "messages[:1] | map(attribute='content') | select('in', ['ja', 'no']) | list", "T is ne 'ja'",
    "{% macro f(x='no') %}{% if 'ja' in x %}+{% endif %}{% endmacro %}{% set on = f(T) %}",
    "{% set word = 'ja' %}{% set ns = namespace(t=T) %}{% set on = word in ns.t %}",
    "{% macro f(n) %}{{ caller(n) }}{% endmacro %}{% set on %}{% call(t) f(T) %}"
    "{% if 'ja' in t %}+{% endif %}{% endcall %}{% endset %}",
    "{% set ns = namespace() %}{% with t = T %}{% set ns.on = 'ja' in t %}{% endwith %}"
    "{% set on = ns.on %}",
    "{% macro f() %}{{ varargs[0] }}{% endmacro %}{% set on = f(T) == 'ja' %}",
    "{% macro f(x=messages[0].content) %}{{ x }}{% endmacro %}{% set on = f() == 'ja' %}",
    "{% macro f(x) %}{{ x }}{% endmacro %}{% set g = f %}{% set on = g(T) == 'ja' %}",
    "{% set t %}{{ T }}{% endset %}{% set on = t == 'ja' %}",
    "{% block b %}{% set t = T %}{% endblock %}{% set on = self.b() ~ T == 'ja' %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}{% set t %}{% call f() %}{{ T }}{% endcall %}"
    "{% endset %}{% set on = 'ja' in t %}",
)  # fmt: skip
DEEP = (
    "{% macro f() %}{{ varargs[0] }}!{% endmacro %}{% set on = f(T) == 'ja!' %}",
    "{% set t %}<{{ T }}{% endset %}{% set on = '<ja' in t %}",
    "{% block b %}{{ T }}.{% endblock %}{% set on = self.b() == 'ja.' %}",
    "T | length > 12", "T | length is gt 12", "T | length is divisibleby 2", "T | count is odd",
    "T[0] in 'AEIOUj'", "T[0] > 'k'", "T[:2] == 'ja'", "T[-1] == 'a'", "T | first == 'j'",
    "T | last == 'a'", "T > 'k'", "T is gt 'k'", "'k' < T",
    "T in 'no ja, yes'", "T is in 'no ja'", "'a' < 'ja' in T | lower",
    "T | upper == 'JA'", "T.upper() == 'JA'", "'be kind' in T | lower", "T | title == 'Ja'",
    "T | capitalize in ['Ja', 'No']", "T is lower", "T.islower()", "T.isalpha()", "T.istitle()",
    "T | reverse == 'aj'", "T[::-1] == 'aj'", "T | striptags == 'ja'", "T | urlencode == 'ja'",
    "T | escape == 'ja'", "T | e == 'ja'", "T | forceescape == 'ja'", "T | tojson == '\"ja\"'",
    "T | string | length > 5", "T | safe == 'ja'", "T | wordcount > 2", "T | pprint | length > 5",
    "T.split() | length > 2", "T.split(None) | length > 2", "T | list | length > 5",
    "T | int(3) > 3",
    "T.splitlines()[0] | length > 5", "T | center(4) == ' ja '", "T | truncate(5) == 'ja'",
    "T | trim('j') == 'a'", "T.strip('j') == 'a'", "T | indent(2, true) == '  ja'",
    "T | wordwrap(5) == 'ja'", "T | batch(2) | list | length > 2", "T.zfill(3) == '0ja'",
    "T.encode() | length > 5", "T.join(['a', 'b']) == 'ajab'", "T * 2 == 'jaja'", "T % () == 'ja'",
    "'%s' % T == 'ja'", "'%s!' % (T,) == 'ja!'", "'%s!' | format(T) == 'ja!'", "T.format() == 'ja'",
    "'{}!'.format(T) == 'ja!'", "'{!s}'.format(T) == 'ja'", "'{a}'.format(a=T) == 'ja'",
    "'ja' | replace(T, '') == ''", "'ja' | trim(T) == ''", "'x'.replace('x', T) == 'ja'",
    "'ja!'.startswith(T)", "''.join([T, '!']) == 'ja!'",
    "[T, 'b'] | join('-') == 'ja-b'", "('x' ~ T) == 'xja'", "'xj' in 'x' ~ T", "'xj' in 'x' + T",
    "T.startswith(T[:1] ~ 'a')", "T.find(T) == 0 and T > 'k'",
    "[T] | string == \"['ja']\"",
    "T | map('upper') | join == 'JA'", "T | attr('upper')() == 'JA'", "T['upper']() == 'JA'",
    "messages[:1] | map(attribute='content') | join == 'ja'", "dict(a=T).a | length > 5",
    "messages | map(attribute='content') | map('length') | first > 5", "{'ja': 1}[T] is defined",
    "messages | map(attribute='content') | map('upper') | first == 'JA'", "{'ja': 1}.get(T)",
    "messages[:1] | rejectattr('content', 'lt', 'k') | list", "{T: 1}['ja'] is defined",
    "messages[:1] | map(attribute='content') | unique | first | length > 5",
    "namespace(a=T).a | length > 5",
    "messages[:1] | groupby('content') | first | first > 'k'",
    "messages[0].values() | list | last == 'ja'",
    "messages[:1] | map(attribute='content') | max > 'k'", "messages[0] | dictsort | length > 2",
    "messages[:1] | sort(attribute='content') | first | length > 2", "messages[0] | length > 2",
    "messages[0].items() | list | length > 2", "messages[0] | string | length > 45",
    "messages[0] == {'role': 'user', 'content': 'ja'}",
    "{% macro f(x) %}{{ x | upper }}{% endmacro %}{% set on = f(T) == 'JA' %}",
    "{% macro f(x, y=x | length) %}{{ y }}{% endmacro %}{% set on = f(T) == '2' %}",
    "{% macro f() %}{{ kwargs.x | length }}{% endmacro %}{% set on = f(x=T) == '2' %}",
    "{% macro f() %}{{ caller(T) }}{% endmacro %}{% set t %}{% call(x) f() %}{{ x | length }}"
    "{% endcall %}{% endset %}{% set on = t == '2' %}",
    "{% set t = T | upper %}{% set on = t == 'JA' %}",
    "{% set t | upper %}{{ T }}{% endset %}{% set on = 'JA' in t %}",
    "{% set t | length %}{{ T }}{% endset %}{% set on = t == 2 %}",
    "{% set t %}{% filter upper %}{{ T }}{% endfilter %}{% endset %}{% set on = 'JA' in t %}",
    "{% set t %}{{ [T] }}{% endset %}{% set on = 'ja' in t %}",
    "{% set t %}{{ messages[0] }}{% endset %}{% set on = 'ja' in t %}",
    "{% set a, b = 'x', T %}{% set on = b | length > 5 %}",
    "{% set t = [T] + ['x'] %}{% set on = t | join == 'jax' %}",
    "{% set ns = namespace(n=0) %}{% for c in T %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{% set on = ns.n > 5 %}",
    "{% set ns = namespace() %}{% for c in T if c == 'j' %}{% set ns.on = true %}{% endfor %}"
    "{% set on = ns.on %}",
    "{% set ns = namespace(on=false) %}{% for c in T recursive %}{% if loop.length > 5 %}"
    "{% set ns.on = true %}{% endif %}{% endfor %}{% set on = ns.on %}",
    "{% set ns = namespace() %}{% for m in messages[:1] * 2 %}{% if loop.changed(m.content) %}"
    "{% set ns.on = m.content > 'k' %}{% endif %}{% endfor %}{% set on = ns.on %}",
    "{% set ns = namespace(on=false) %}{% for k in messages[0] %}{% if loop.index > 2 %}"
    "{% set ns.on = true %}{% endif %}{% endfor %}{% set on = ns.on %}",
    "{% set c = cycler(T, 'x') %}{% set on = c.next() | length > 5 %}",
    "{% set j = joiner(T) %}{% set x = j() %}{% set on = j() | length > 5 %}",
)  # fmt: skip


def _form(form: str) -> str:
    """A template that has a mode by a form."""
    code = form if form.startswith("{%") else "{% set on = " + form + " %}"
    return code.replace("T", "messages[0].content") + _mode("on")


# The same of content in parts, of which there are two.
PARTS = {
    "T | length > 1": 0, "T[0].text is string": 0, "T[1].text | trim": 0, "T[0].image": 0,
    "T | selectattr('type', 'equalto', 'text') | list | length > 1": 0, "T[-1].text": 0,
    "{% set ns = namespace(n=0) %}{% for p in T if p.type == 'text' %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{% set on = ns.n > 1 %}": 0,
    "'ja' in T[0].text": 1, "T | selectattr('text', 'equalto', 'ja') | list": 1,
    "{% set ns = namespace() %}{% for p in T %}{% if p.text.startswith('Be') %}"
    "{% set ns.on = true %}{% endif %}{% endfor %}{% set on = ns.on %}": 1,
    "T[0].text | length > 5": 2, "T | map(attribute='text') | join == 'jaz'": 2,
    "T[0].text ~ T[1].text == 'jaz'": 2, "T[0] | string | length > 55": 2,
    "(T[0].url or 'x')[-1] == 'a'": 2,
    "{% set t %}{% for p in T %}{{ p.text }}{% endfor %}{% endset %}{% set on = t == 'jaz' %}": 2,
}  # fmt: skip
# The same of tools: what a template asks them for may stand in any record.
OF_TOOLS = {
    "tools | length > 1": 0, "tools | tojson": 0, "tools[0].function.name is string": 0,
    "tools[0].function.parameters.type == 'object'": 0, "tools[0].function.parameters.required": 0,
    "'ja' in tools[0].function.description": 1, "tools[0].function.name == 'ja'": 1,
    "tools[0].function.name == T": 2, "(tools[0].function.name ~ T) | length > 5": 2,
    "T in tools[0].function.description": 2, "tools[0].function.name | length > 5": 2,
    "{% set ns = namespace() %}{% for p in tools[0].function.parameters.properties %}"
    "{% if p | length > 5 %}{% set ns.on = true %}{% endif %}{% endfor %}{% set on = ns.on %}": 2,
}  # fmt: skip
TEXTS = ("ja", "Ja", " ja", "jaja", "ja no", "no ja", "ja/ja", "no", "yes", "5", "A", "Be kind",
         "a long sentence of words", "one\ntwo lines")  # fmt: skip


def _beginning(text: Any) -> list[Json]:
    """Records that begin with a text, or with parts."""
    talk = [assistant("Yes"), user("And?"), assistant("No")]
    system_message = {"role": "system", "content": text, "brief": True}
    return [chat(user(text), *talk), chat(system_message, user("Hi"), *talk[:1])]


_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": kind, "most": most}}}
    for kind in ("object", "string") for most in (2, 3)
]  # fmt: skip


def talks(count: int, seed: int) -> list[Json]:
    """Random conversations, many of them alike but for a word or a length."""
    rng = random.Random(seed)
    words = [
        "Be kind",
        "ja",
        "no",
        "yes",
        "a long sentence of words",
        "/no_think",
        "x/no y",
        "/think",
    ]

    def text() -> str:
        return " ".join(rng.choices(words, k=rng.choice((1, 1, 2))))

    made = list[Json]()
    for _ in range(count):
        messages: list[Json] = [system(text())] if rng.random() < 0.5 else []
        for _ in range(rng.randint(1, 4)):
            more: Json = {}
            if rng.random() < 0.2:
                more["reasoning_content"] = text()
            if rng.random() < 0.2:
                arguments = rng.choice(({}, {"hide": True}, {"hide": False}))
                more["tool_calls"] = [
                    {"type": "function", "function": {"name": "f", "arguments": arguments}}
                ]
            messages += [user(text()), assistant(text(), **more)]
        if rng.random() < 0.3:
            messages[0]["name"] = rng.choice(("ann", "anna", "bob"))
        if rng.random() < 0.3:
            messages[0]["brief"] = rng.random() < 0.5
        if rng.random() < 0.3:
            messages[0]["weight"] = rng.choice((0, 1))
        made.append(chat(*messages))
        if rng.random() < 0.3:
            made[-1]["tools"] = rng.choices(_TOOLS, k=rng.choice((1, 2)))
    return made


@cache
def _compiled(template: str) -> Any:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = json.dumps
    return environment.from_string(template)


def oracle(template: str, record: Json) -> str:
    """The text, with ⟦⟧ from where the real prompt for each turn ends to where the turn does."""

    def text(count: int, *, prompt: bool = False) -> str:
        messages = record["messages"][:count]
        given = {"messages": messages, "tools": record.get("tools")}
        return str(_compiled(template).render(**given, add_generation_prompt=prompt))

    shown, at = "", 0
    whole = text(len(record["messages"]))
    for i, message in enumerate(record["messages"]):
        if message["role"] == "assistant":
            prompt, after = text(i, prompt=True), text(i + 1)
            plain = text(i)
            assert whole.startswith(plain)
            assert whole.startswith(after)
            start = len(prompt) if whole.startswith(prompt) else len(plain) + len("<|assistant|>")
            shown += f"{whole[at:start]}⟦{whole[start : len(after)]}⟧"
            at = len(after)
    return shown + whole[at:]


def renderer_of(template: str) -> Renderer:
    config = PackConfig(max_length=4096, train_on="assistant")
    return Renderer(ChatTemplate(template, {}), config, ends_matter=False)


def shown(renderer: Renderer, record: Json) -> str:
    """The text of a record, what is trained on in ⟦⟧."""
    document = renderer.render(Conversation(record["messages"], record.get("tools")))
    text, at, spans = "", 0, document.spans or []
    for start, stop in spans:
        text, at = f"{text}{document.text[at:start]}⟦{document.text[start:stop]}⟧", stop
    return text + document.text[at:]


def way_of(renderer: Renderer, record: Json) -> int:
    """Whether nothing of content matters (0), a literal in it (1), or more (2)."""
    conversation = Conversation(record["messages"], record.get("tools"))
    uses = renderer.structures.of_structure(conversation).uses
    return 2 if uses.deep else int(bool(uses.literals))


def by_record(records: list[Json], template: str, *options: Any) -> dict[str, str]:
    """What is trained on, by record."""
    texts = pack_marked(records, "-l", 4096, *options, template=template)
    keys = [json.dumps(record, sort_keys=True) for record in records]
    return dict(zip(keys, texts, strict=True))


@pytest.mark.parametrize("name", TEMPLATES)
def test_labels_depend_on_the_record_alone(folder: Any, name: str) -> None:
    template, records = TEMPLATES[name], talks(40, seed=len(name))
    told = {json.dumps(one, sort_keys=True): oracle(template, one) for one in records}
    for seed, options in enumerate((["--workers", 1], ["--workers", 2, "--unit-bytes", "2K"])):
        random.Random(seed).shuffle(records)
        assert by_record(records, template, *options) == told


@pytest.mark.parametrize("form", [*UNUSED, *SOUGHT, *DEEP])
def test_each_use_of_content_has_its_way(form: str) -> None:
    records = [one for text in TEXTS for one in _beginning(text)]
    check_way(_form(form), records, (form in SOUGHT) + 2 * (form in DEEP))


@pytest.mark.parametrize("form", PARTS)
def test_each_use_of_parts_has_its_way(form: str) -> None:
    text = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    )
    template = _form(form).replace("{{ m.content }}", text + "{% endfor %}{% endif %}")
    more = {"type": "text", "text": "z"}
    records = [
        one
        for text in TEXTS
        for one in _beginning([{"type": "text", "text": text, "url": f"x{text}"}, more])
    ]
    check_way(template, records, PARTS[form])


@pytest.mark.parametrize("form", ["startswith('<think>')", "endswith('</think>')", "strip() == X"])
def test_the_edges_of_a_thought(form: str) -> None:
    """A probe has thoughts as records have them, but for white space and what they begin with."""
    thought = "<think>a</think>"
    said = f"messages[i - 2].content.{form}".replace("X", repr(thought))
    contents = (thought, f"{thought}b", f"\n{thought}b", f"b{thought}", f"b{thought}b", "b")
    records = [chat(user("A"), assistant(one), user("B"), assistant("C")) for one in contents]
    check_way(_mode(f"i > 2 and {said}"), records, 1)


@pytest.mark.parametrize("form", OF_TOOLS)
def test_each_use_of_tools_has_its_way(form: str) -> None:
    records = list[Json]()
    for number, text in enumerate(TEXTS):
        parameters = {
            "type": "object",
            "properties": {text: {"type": "string"}},
            "required": [text],
        }
        function = {"name": text, "description": f"It {text}", "parameters": parameters}
        talk = [user(TEXTS[number // 2 * 2]), assistant("Yes"), user("And?"), assistant("No")]
        records.append(chat(*talk, tools=[{"type": "function", "function": function}]))
    check_way(_form(form), records, OF_TOOLS[form])


def check_way(template: str, records: list[Json], way: int) -> None:
    """Labels are those of the oracle, and found in a way, in both modes of the template."""
    renderer, modes, ways = renderer_of(template), set[bool](), set[int]()
    for record in records:
        expected = oracle(template, record)
        assert shown(renderer, record) == expected
        modes.add("<brief>" in expected)
        ways.add(way_of(renderer, record))
    assert ways == {way}
    assert not way or modes == {False, True}


WHOLE_MESSAGES = "{% for m in messages %}<|{{ m.role }}|>{{ m | tojson }}<|end|>{% endfor %}" + (
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_ASKED, _SAID = user("Hi"), assistant("Yes")
_AGAIN = [_ASKED, assistant("No"), user("Bye"), _SAID]


def test_a_template_gets_the_flags_of_records(folder: Any) -> None:
    record = {"messages": [_ASKED, assistant("No", train=True), _SAID]}
    [text] = pack_marked([record], "--train-on", "final", template=WHOLE_MESSAGES)
    assert '{"role": "assistant", "content": "No", "train": true}' in text


@pytest.mark.parametrize(
    ("record", "options"),
    [
        ({"prompt": _AGAIN[:3], "completion": [_SAID]}, []),
        ({"messages": [_ASKED, assistant("No"), _SAID]}, ["--train-on", "final"]),
        (chat(_ASKED, assistant([{"type": "text", "text": "Yes", "weight": 0},
                                 {"type": "text", "text": "!"}])), []),
    ],
)  # fmt: skip
def test_a_template_gets_messages_without_notes(
    folder: Any, record: Json, options: list[str]
) -> None:
    for text in pack_marked([record], *options, template=WHOLE_MESSAGES):
        plain = text.replace("⟦", "").replace("⟧", "")
        assert '"train"' not in plain
        assert "train_detail" not in plain
        assert '{"role": "user", "content": "Hi"}' in plain


# As Gemma 4 has it: a thought stands in the text only where a call follows.
_THOUGHT_WITH_CALL = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls and m.reasoning_content %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}" + CALLS + "{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_thought_before_a_call_is_not_part_of_it(folder: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = assistant("So.", reasoning_content="ask", tool_calls=[call])
    record = chat(user("Rain?"), said, {"role": "tool", "content": "wet"}, assistant("Yes."))
    [text] = pack_marked([record], "--no-train-tool-calls", template=_THOUGHT_WITH_CALL)
    assert text == (
        '<|user|>Rain?<|end|><|assistant|>⟦<think>ask</think>⟧<call>{"name": "f", "arguments": {}}'
        "</call>⟦So.<|end|>⟧<|tool|>wet<|end|><|assistant|>⟦Yes.<|end|>⟧"
    )
