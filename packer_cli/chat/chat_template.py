"""Chat templates: messages to text, and where each message is in the text.

Templates run as in transformers, in jinja2's immutable sandbox with trim_blocks, loop controls and
`{% generation %}`, with two differences. `strftime_now` gives a fixed date, so that the same input
makes the same bytes every day. And every loop notes where each of its turns begins, so that one
rendering shows which characters belong to which message.

The sandbox checks every attribute. It passes fields of plain dicts, and methods of strings, without
its slow checks, and notes are written into the compiled code: with the template of qwen3, 174 MB of
conversations take 5 s of processor time to render, and 18 s without either (busy machine).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from datetime import datetime
from functools import cached_property
from types import BuiltinMethodType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from packer_cli._kernels.texts import ends_at
from packer_cli.chat.messages import Conversation, RefusedError
from packer_cli.errors import UsageError, cut

FIXED_DATE = datetime(2024, 1, 1)
# A name that no template can write, of a call that notes a place. It is the end of a turn. Another
# turn begins with the second argument, if that is a message, or its index in the third, a list.
MARK = "0_mark"
BEGIN, END = -1, -2  # the first argument at the edges of `{% generation %}`; loops count from 0

_NO_TOKEN = re.compile(r"^'(\w+_token)' is undefined$")
_NOTHING = (0, None)
_Span = tuple[int, int]
_Mark = tuple[int, int, Any, Any]  # number, how many pieces of text there are, value, messages


class Turn(NamedTuple):
    """One turn of a template's loop over messages: characters start..stop of the text.

    `message` is the value of the loop's variable: one of the messages, or what the template made of
    some of them.
    """

    start: int
    stop: int
    message: dict[str, Any]


class Rendering:
    """The `text` of a conversation, with the places that were noted while it was rendered."""

    def __init__(self, pieces: list[str], marks: list[_Mark]) -> None:
        """Join the `pieces` of the text. Raises TypeError if one is not a text, and
        UnicodeEncodeError if one has half a surrogate pair, which UTF-8 cannot write.
        """
        self.text = "".join(pieces)
        if not self.text.isascii():
            self.text.encode()
        self._pieces, self._marks = pieces, marks

    @cached_property
    def generated(self) -> list[_Span]:
        """The spans of `{% generation %}` blocks."""
        marks = [mark for mark in self._marks if mark[0] < 0]
        generated: list[_Span] = []
        begin = 0
        ends = ends_at(self._pieces, [count for _, count, _, _ in marks])
        for (number, _, _, _), end in zip(marks, ends, strict=True):
            if number == BEGIN:
                begin = end
            else:
                generated.append((begin, end))
        return generated

    @cached_property
    def turns(self) -> list[Turn]:
        """In the order of their ends."""
        turns: list[Turn] = []
        begun: dict[int, tuple[int, dict[str, Any] | None]] = {}
        marks = [mark for mark in self._marks if mark[0] >= 0]
        ends = ends_at(self._pieces, [count for _, count, _, _ in marks])
        for (loop, _, value, messages), position in zip(marks, ends, strict=True):
            start, message = begun.pop(loop, _NOTHING)
            if start < position and message is not None:  # many loops only look at messages
                turns.append(Turn(start, position, message))
            if type(value) is int and isinstance(messages, list) and -1 < value < len(messages):
                value = messages[value]  # noqa: PLW2901
            if isinstance(value, dict) and "role" in value:
                begun[loop] = (position, value)
        return turns


class ChatTemplate:
    """A compiled template, with its syntax `tree` and the variables `known` to it beside those of a
    rendering.

    special_tokens  bos_token and the like, as templates know them
    arguments       further variables, like `chat_template_kwargs` of transformers, which win over
                    these

    Raises UsageError if the template does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, Any],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        compiler = environment()
        self.source = source
        with refusing_to_compile():
            self.compiled = compiler.from_string(source)
            self.tree = compiler.parse(source)
        self.known = {
            **self.compiled.globals, **special_tokens, "documents": None, **(arguments or {})
        }  # fmt: skip
        self.marks_generation = marks_generation(self.tree)

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return a template of the same source, with other values of these variables."""
        other = copy(self)
        other.known = {**self.known, **arguments}
        return other

    def render(
        self, conversation: Conversation, *, add_generation_prompt: bool = False
    ) -> Rendering:
        """Render messages with tools. Raises RefusedError if the template fails on them in any
        way, and UsageError if it needs a token that the tokenizer does not have.
        """
        template, pieces, marks = self.compiled, list[str](), list[_Mark]()
        variables = {
            **self.known,
            "messages": conversation.messages,
            "tools": conversation.tools,
            "add_generation_prompt": add_generation_prompt,
            MARK: lambda number, value, among: marks.append((number, len(pieces), value, among)),
        }
        context = Context(template.environment, variables, template.name, template.blocks)
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)  # before the template goes on, which may note the place
            return Rendering(pieces, marks)
        except jinja2.TemplateError as error:
            if missing := _NO_TOKEN.search(str(error)):
                raise UsageError(
                    f"the chat template needs {missing[1]}, and the tokenizer names none",
                    "name the model's own with --tokenizer, or another --chat-template",
                ) from error
            raise RefusedError(f"the chat template refuses it: {cut(str(error))}") from error
        except RecursionError:
            raise RefusedError("the chat template fails on it: nested too deeply") from None
        except MemoryError:
            raise RefusedError("the chat template runs out of memory on it") from None
        except Exception as error:
            raise RefusedError(f"the chat template fails on it: {cut(str(error))}") from error


# -- The sandbox


def environment(kind: type[Sandbox] | None = None) -> jinja2.Environment:
    """Return the sandbox in which templates are compiled."""
    sandbox = (kind or Sandbox)(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {
        "raise_exception": _raise_exception, "strftime_now": FIXED_DATE.strftime, "dict": _Dict(),
    }  # fmt: skip
    # these are random: they give another text every time
    del sandbox.globals["lipsum"], sandbox.filters["random"]
    return sandbox


@contextmanager
def refusing_to_compile() -> Iterator[None]:
    """Raise UsageError for any failure of a template's source, such as brackets nested too deeply
    for Python, `break` outside a loop, or a constant that is too long.
    """
    try:
        yield
    except Exception as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else cut(str(error))
        raise UsageError(
            f"the chat template does not compile: {why}",
            "fix it, or name another one with --chat-template",
        ) from error


# What the sandbox allows after slow checks: all but private names, and formatting of strings,
# which it replaces by its own.
_PLAIN = {
    kind: frozenset(name for name in dir(kind) if not name.startswith(("_", "format")))
    for kind in (str, LoopContext)
}
OF_DICTS = frozenset(dir(dict))
OF_SCOPES = frozenset(("_loop_vars", "_block_vars"))  # arguments of the compiler, for macros
_NO_VALUES = (nodes.Const(None), nodes.Const(None))


class MarkingGenerator(CodeGenerator):
    """jinja2's compiler, which writes marks as plain calls: the sandbox need not check them."""

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline(f"mark = resolve({MARK!r})")

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        if not _is_mark(node.node):
            super().visit_ExprStmt(node, frame)
            return
        call: Any = node.node
        number, *values = call.args
        self.writeline(f"mark({number.value}, ", node)
        for value in (*values, *_NO_VALUES[len(values) :]):
            self.visit(value, frame)
            self.write(", ")
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with shortcuts that give what its slow checks give."""

    code_generator_class = MarkingGenerator

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in OF_DICTS:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if kind is Namespace and not attribute.startswith("_"):
            values = object.__getattribute__(obj, "_Namespace__attrs")  # its own way is slow
            if attribute in values:
                return values[attribute]
        if attribute in _PLAIN.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_of_str = type(function) is BuiltinMethodType and type(function.__self__) is str
        if is_of_str and function.__name__ in _PLAIN[str] and kwargs.keys() <= OF_SCOPES:
            return function(*args)
        return super().call(context, function, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _mark_loops(tree, iter(range(1 << 30)))
        tree.set_environment(self)
        return tree


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what is between the tags is trained on (transformers, 2024)."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        inner = nodes.Scope(body, lineno=line)  # as in the original, `set` does not leak out
        return [_mark(BEGIN, line), inner, _mark(END, line)]


def _mark(number: int, line: int, *values: nodes.Expr) -> nodes.ExprStmt:
    arguments = [nodes.Const(number), *values]
    call = nodes.Call(nodes.Name(MARK, "load"), arguments, [], None, None)
    statement = nodes.ExprStmt(call)
    statement.set_lineno(line)
    return statement


def _is_mark(node: Any) -> bool:
    return isinstance(node, nodes.Call) and getattr(node.node, "name", None) == MARK


_WRITING: Any = (nodes.Output, nodes.CallBlock, nodes.FilterBlock)


def _mark_loops(node: nodes.Node, numbers: Iterator[int]) -> None:
    """Make every loop note its turns.

    Texts of macros and the like are put into the text later, so places have no meaning there.
    """
    if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.AssignBlock):
        if marks_generation(node):
            raise jinja2.TemplateSyntaxError("{% generation %} inside a macro", node.lineno)
        return
    for name, value in node.iter_fields():
        if not isinstance(value, list):
            continue
        body: list[Any] = []
        for child in value:
            body.append(child)
            if not isinstance(child, nodes.Node):
                continue
            _mark_loops(child, numbers)
            if isinstance(child, nodes.For) and isinstance(child.target, nodes.Name):
                if child.recursive or child.find(_WRITING) is None:
                    continue
                number, line = next(numbers), child.lineno
                value_now = nodes.Name(child.target.name, "load")
                child.body.insert(0, _mark(number, line, value_now, *_indexed_list(child)))
                body.append(_mark(number, line))
        setattr(node, name, body)


def _indexed_list(loop: nodes.For) -> list[nodes.Expr]:
    """Return [the list] that a loop over indices takes its messages from; [] if there is none."""
    index = getattr(loop.target, "name", None)
    for item in loop.find_all(nodes.Getitem):
        is_index = isinstance(item.arg, nodes.Name) and item.arg.name == index
        if is_index and isinstance(item.node, nodes.Name):
            return [nodes.Name(item.node.name, "load")]
    return []


def marks_generation(node: nodes.Node) -> bool:
    """Tell whether a template, or a part of one, has `{% generation %}` tags."""
    calls: Iterator[Any] = filter(_is_mark, node.find_all(nodes.Call))
    return any(call.args[0].value == BEGIN for call in calls)


class _Dict:
    """`dict(...)` in a template, without the attributes of the real one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    """JSON as transformers writes it: without HTML escapes, unlike jinja's own."""
    if not (ensure_ascii or indent or separators or sort_keys):
        return _encode_json(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
