"""Chat templates: messages to text, and where in the text each message is.

The environment is the one of transformers (immutable sandbox, trim_blocks, loop controls,
`{% generation %}`), with two differences: `strftime_now` gives a fixed date, so that the same
input makes the same bytes every day; and every loop of the template notes where each of its
turns begins, so that one rendering tells which characters belong to which message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from types import MethodType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packer_cli.errors import UsageError

_NO_TOKEN = re.compile(r"^'(\w+_token)' is undefined$")
FIXED_DATE = datetime(2024, 1, 1)
_MARK, _CLOSE = "_packer_turn", "_packer_loop_end"
_BEGIN, _END = "_packer_generation", "_packer_generation_end"
_Span = tuple[int, int]


class RefusedError(ValueError):
    """The template cannot render these messages: they are a bad record."""


@dataclass(frozen=True)
class Turn:
    """One turn of a template's loop over messages: characters start..stop of the text.

    `message` is the value of the loop's variable: one of the messages, or what the template made of
    some of them.
    """

    start: int
    stop: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation; `generated`: the spans of its `{% generation %}` blocks."""

    text: str
    turns: list[Turn]
    generated: list[_Span]


class _Tracker:
    """What the marks in a template call while it is rendered. Lives as long as one rendering."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self.turns: list[Turn] = []
        self.generated: list[_Span] = []
        self._counted = self._length = 0
        self._open: dict[int, tuple[int, dict[str, Any]]] = {}
        self._generation = 0

    def _position(self) -> int:
        for block in self.blocks[self._counted :]:
            self._length += len(block)
        self._counted = len(self.blocks)
        return self._length

    def turn(self, loop: int, value: object, messages: object = None) -> None:
        """A turn begins, of a message, or of its index in a list of messages."""
        self.loop_end(loop)
        if type(value) is int and isinstance(messages, list) and -1 < value < len(messages):
            value = messages[value]
        if type(value) is dict and "role" in value:
            self._open[loop] = (self._position(), value)

    def loop_end(self, loop: int) -> None:
        if loop in self._open:
            start, message = self._open.pop(loop)
            if self._position() > start:  # many loops only look at the messages
                self.turns.append(Turn(start, self._length, message))

    def generation(self) -> None:
        self._generation = self._position()

    def generation_end(self) -> None:
        self.generated.append((self._generation, self._position()))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what is between the tags is trained on (transformers, 2024)."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        inner = nodes.Scope(body, lineno=line)  # as in the original, `set` does not leak out
        return [_call(_BEGIN, line), inner, _call(_END, line)]


def _call(name: str, line: int, *arguments: nodes.Expr) -> nodes.ExprStmt:
    call = nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)
    statement = nodes.ExprStmt(call)
    statement.set_lineno(line)
    return statement


# What the sandbox allows after slow checks: all but private names, and formatting of strings,
# which it replaces by its own.
_PLAIN = {
    kind: frozenset(name for name in dir(kind) if not name.startswith(("_", "format")))
    for kind in (str, LoopContext)
}
_DICT_ATTRIBUTES = frozenset(dir(dict))
_BUILTIN_METHOD = type("".split)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts for what templates do most, which halve the rendering time.

    They give what the sandbox itself gives: `message.role` of a plain dict whose class has no such
    attribute is its item, methods of plain strings are harmless, and so are our own marks.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            if attribute in obj:
                return obj[attribute]
            return self.undefined(obj=obj, name=attribute)
        if attribute in _PLAIN.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        kind = type(__obj)
        if (
            kind is _BUILTIN_METHOD
            and type(__obj.__self__) is str
            and __obj.__name__ in _PLAIN[str]
        ) or (kind is MethodType and type(__obj.__self__) is _Tracker):
            kwargs.pop("_loop_vars", None)  # of jinja's own, for those who ask for the context
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _mark_loops(tree, iter(range(1 << 30)))
        tree.set_environment(self)
        return tree


def _mark_loops(node: nodes.Node, numbers: Iterator[int]) -> None:
    """Have every loop announce its turns.

    What is written inside macros and the like is put into the text later, so positions mean
    nothing there.
    """
    if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.AssignBlock):
        if any(call.node.name == _BEGIN for call in _named_calls(node)):
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
                if child.recursive:
                    continue
                loop, line = nodes.Const(next(numbers)), child.lineno
                value_now = nodes.Name(child.target.name, "load")
                marked = [loop, value_now, *_indexed_list(child)]
                child.body.insert(0, _call(_MARK, line, *marked))
                body.append(_call(_CLOSE, line, loop))
        setattr(node, name, body)


def _indexed_list(loop: nodes.For) -> list[nodes.Expr]:
    """[the list] that a loop over indices takes its messages from, [] when there is none."""
    index = getattr(loop.target, "name", None)
    for item in loop.find_all(nodes.Getitem):
        is_index = isinstance(item.arg, nodes.Name) and item.arg.name == index
        if is_index and isinstance(item.node, nodes.Name):
            return [nodes.Name(item.node.name, "load")]
    return []


def _named_calls(node: nodes.Node) -> Iterator[Any]:
    return (call for call in node.find_all(nodes.Call) if isinstance(call.node, nodes.Name))


class _Dict:
    """`dict(...)` in a template, without the attributes of the real one."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return FIXED_DATE.strftime(pattern)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: Any = None, sort_keys: bool = False) -> str:  # fmt: skip
    """As in transformers: no HTML escapes, unlike jinja's own."""
    if not (ensure_ascii or indent or separators or sort_keys):
        return _encode_json(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@jinja2.pass_context
def _in_context(context: Any, value: Any) -> Any:
    """As it is, but only known when it is rendered."""
    return value


def environment(*, computes: bool = True) -> ImmutableSandboxedEnvironment:
    """What templates are compiled in. `computes`: whether constant parts are computed then, which
    may take all memory.
    """
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=computes,
        finalize=None if computes else _in_context,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict(),
    }  # fmt: skip
    # random: other text every time, and as much of it as the template asks for
    del made.globals["lipsum"], made.filters["random"]
    return made


class ChatTemplate:
    """A compiled template. `special_tokens`: bos_token and the like, as templates know them;
    `arguments`: further variables, as `chat_template_kwargs` of transformers, which win over these.

    Raises UsageError for a template that does not compile. Safe to share between threads.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, Any],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        compiler = environment()
        self.source = source
        self._variables = {**special_tokens, "documents": None, **(arguments or {})}
        try:
            self._template = compiler.from_string(source)
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the chat template does not compile: {error}",
                "mend it, or name another one with --chat-template",
            ) from error
        self.marks_generation = any(
            call.node.name == _BEGIN for call in _named_calls(compiler.parse(source))
        )

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """The same template with other values of some variables."""
        other = copy(self)
        other._variables = {**self._variables, **arguments}
        return other

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Raises RefusedError when the template does not accept the messages, UsageError when it
        needs a token that the tokenizer has not.
        """
        tracker = _Tracker()
        context = self._template.new_context(
            {
                **self._variables,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                _MARK: tracker.turn,
                _CLOSE: tracker.loop_end,
                _BEGIN: tracker.generation,
                _END: tracker.generation_end,
            }
        )
        blocks = tracker.blocks
        try:
            for block in self._template.root_render_func(context):
                blocks.append(block)
        except jinja2.TemplateError as error:
            if missing := _NO_TOKEN.search(str(error)):
                raise UsageError(
                    f"the chat template needs {missing[1]}, and the tokenizer names none",
                    "name the model's own with --tokenizer, or another --chat-template",
                ) from error
            raise RefusedError(f"the chat template refuses it: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RefusedError(f"the chat template fails on it: {error}") from error
        except RecursionError:
            raise RefusedError("the chat template fails on it: nested too deeply") from None
        except MemoryError:
            raise RefusedError("the chat template runs out of memory on it") from None
        return Rendering("".join(blocks), tracker.turns, tracker.generated)
