"""Find how a template uses the words of a conversation, while it renders a probe.

Most templates only write words. Then the probe, which has marks in the place of words (probe.py),
is rendered like its record. Others look for something: `/no_think` in a system message, the length
of a question. So the words and objects of a probe note how they are used:

* Not noted: words written whole, trimmed, in another case or joined with other text, and checks of
  whether there are any, and of their type.
* Literals, which matter only in records that hold them: whether words hold the literal, begin or
  end with it or are equal to it, where it is, and what is left when it is cut out.
* Any other use is `deep`: the words of any record may decide what the template makes of it. So is a
  search in words that were changed or joined, because the literal may not be in the record.

Presence and emptiness of fields, lengths of lists, roles, types, numbers and the fields that a
template names are structure: a probe has them as its record has.

`Words` and `Fields` note calls of their own methods. Compiled code, filters, tests and functions of
C would read them without, so `watching` compiles the template for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import copy
from functools import cached_property, lru_cache, partial, wraps
from types import BuiltinMethodType, GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.runtime import Context

from packer_cli._kernels.texts import may_hold
from packer_cli.chat.chat_template import (
    OF_DICTS,
    OF_SCOPES,
    ChatTemplate,
    MarkingGenerator,
    Sandbox,
    environment,
)
from packer_cli.chat.messages import ASSISTANT, Conversation
from packer_cli.chat.probe import PROBED, RESULT, RESULT_END, STRUCTURE, THOUGHT, has_words

_OPEN = "<think>"
_THOUGHT_PROBED = f"{_OPEN}\n{THOUGHT}\n\n"
_NOTHING = object()
_Message = dict[str, Any]


class Uses:
    """Uses of words by a template, in conversations of one structure.

    known     names of fields that are structure
    literals  texts that it looks for in words
    edges     those of them that words may begin or end with, or be
    deep      whether it uses words in another way
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self.known = known
        self.literals, self.edges, self.deep = set[str](), set[str](), False

    def watch(self, value: Any, key: str = "") -> Any:
        """Return a JSON value whose use is noted; `key` is the field that holds it."""
        if isinstance(value, str):
            return Words._of(value, self) if key not in STRUCTURE and has_words(value) else value
        if isinstance(value, list | tuple):
            return [self.watch(item, key) for item in value]
        if isinstance(value, dict):
            watched = Fields({name: self.watch(item, name) for name, item in value.items()})
            watched._uses = self
            return watched
        return value

    def watched(self, conversation: Conversation) -> Conversation:
        """Return a conversation whose use is noted. Texts in other fields of the assistant, such as
        a name, are structure.
        """
        watched = self.watch(conversation.messages)
        for message, fields in zip(conversation.messages, watched, strict=True):
            if message.get("role") == ASSISTANT:
                texts = {k: v for k, v in message.items() if type(v) is str and k not in PROBED}
                dict.update(fields, texts)
        return Conversation(watched, self.watch(conversation.tools))

    def seek(self, literal: Any, *, at_edge: bool = False) -> None:
        """Note that a template looks for a text, or for several. Marks have digits, too."""
        for text in literal if isinstance(literal, tuple) else (literal,):
            if type(text) is str and not any(map(str.isdigit, text)):
                self.literals.add(text)
                self.edges.update([text] * at_edge)
            else:
                self.deep = True

    def find(self, conversation: Conversation) -> bool:
        """Tell whether the words of a conversation may matter."""
        if self.deep or not self.literals:
            return self.deep
        messages, tools = conversation.messages, conversation.tools
        if tools and self._may_be_in(tools):
            return True
        # most conversations have no literal, and nothing like a tag
        is_possible = may_hold(messages, self._sign) and (
            self._may_be_in(messages) or may_hold(messages, THOUGHT)
        )
        return is_possible and any(map(self._is_in, messages))

    @cached_property
    def _sign(self) -> str:
        """A character that all literals have; "" for none. Signs come before letters."""
        return min(set(THOUGHT).intersection(*self.literals), default="")

    def _may_be_in(self, value: Any) -> bool:
        return any(may_hold(value, literal) for literal in self.literals)

    def _is_in(self, message: _Message) -> bool:
        content = message.get("content")
        if type(content) is str:
            if self._is_in_words(message.get("role"), content):
                return True
        elif content is not None and self._may_be_in(content):
            return True
        others = {key: value for key, value in message.items() if key not in ("content", "role")}
        return self._may_be_in(others)

    def _is_in_words(self, role: Any, content: str) -> bool:
        """Tell whether content holds a literal that its probe lacks. A probe has the tags of the
        assistant's thought, and the edges of a tool's result, as the content has them.
        """
        probed = set[str]()
        if role == ASSISTANT:
            if content.count(THOUGHT) == 1 >= content.count(_OPEN):
                probed = {_OPEN, THOUGHT} - self.edges
        elif content.startswith(RESULT) and content.endswith(RESULT_END):
            probed = {RESULT, RESULT_END}
        around = _THOUGHT_PROBED if THOUGHT in content else ""
        others = self.literals.difference(probed)
        return any(literal in content or literal in around for literal in others)


# -- Values that note their use


class Words(str):  # noqa: PLW1641 it is below
    """Words of a probe. `_made`: changed, or joined with other text."""

    _uses: Uses
    _made: bool

    @classmethod
    def _of(cls, text: str, uses: Uses, *, made: bool = False) -> Words:
        words = cls(text)
        words._uses, words._made = uses, made
        return words

    def _like(self, text: str, *, made: bool = False) -> Words:
        return Words._of(text, self._uses, made=made or self._made)

    def __str__(self) -> str:
        return self

    def __bool__(self) -> bool:
        return str.__len__(self) > 0

    def __add__(self, other: str) -> str:
        return self._like(str.__add__(self, other), made=bool(other))

    def __radd__(self, other: str) -> str:
        return self._like(str.__add__(other, self), made=bool(other))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other:
            self._seek(other, at_edge=True)
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _seek(self, literal: Any, *, at_edge: bool) -> None:
        self._uses.deep |= self._made
        self._uses.seek(literal, at_edge=at_edge)


class Fields(dict[str, Any]):
    """An object of a probe, whose fields are looked up by name."""

    _uses: Uses

    def __bool__(self) -> bool:
        return dict.__len__(self) > 0


def plain(value: Any) -> Any:
    """Return the value as it is when it is not watched."""
    if isinstance(value, Words):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in dict.items(value)}
    return value


_Method = Callable[..., Any]


def _trimming(method: _Method) -> _Method:
    def trim(self: Words, chars: str | None = None) -> str:
        if chars is not None and has_words(chars):
            self._uses.deep = True
        return self._like(method(self, chars))

    return trim


def _changing(method: _Method) -> _Method:
    return lambda self: self._like(method(self), made=True)


def _seeking(method: _Method) -> _Method:
    def seek(self: Words, literal: Any = None, *more: Any) -> Any:
        self._seek(literal, at_edge=method.__name__ in ("startswith", "endswith"))
        result = method(self, plain(literal), *map(plain, more))
        if isinstance(result, str):
            return self._like(result)
        return [*map(self._like, result)] if isinstance(result, list | tuple) else result

    return seek


def _looking_up(method: _Method) -> _Method:
    def look_up(self: Fields, key: Any, *default: Any) -> Any:
        if type(key) is Words or key not in self._uses.known:
            self._uses.deep = True
        return method(self, plain(key), *default)

    return look_up


def _using(method: _Method) -> _Method:
    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._uses.deep = True
        return method(plain(self), *map(plain, args), **kwargs)

    return use


_OF_WORDS: dict[Callable[[_Method], _Method], tuple[str, ...]] = {
    _trimming: ("strip", "lstrip", "rstrip"),
    _changing: ("upper", "lower", "title", "capitalize", "swapcase", "casefold"),
    _seeking: (
        "__contains__", "startswith", "endswith", "find", "rfind", "index", "rindex", "count",
        "split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix",
    ),
}  # fmt: skip
_OF_OBJECTS = {*dir(object), "__getnewargs__", "__class_getitem__"} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__format__",
}  # fmt: skip


def _note_methods(kind: Any, listed: dict[Callable[[_Method], _Method], tuple[str, ...]]) -> None:
    """Make methods that a class inherits note their use, which is deep if they are not listed."""
    noting = {name: note for note, names in listed.items() for name in names}
    for name in {*dir(kind.__base__)} - {*vars(kind), *_OF_OBJECTS} | {"__hash__"}:
        method = getattr(kind.__base__, name)
        if callable(method):
            setattr(kind, name, noting.get(name, _using)(method))


_note_methods(Words, _OF_WORDS)
_note_methods(Fields, {_looking_up: ("__getitem__", "__contains__", "get")})

# -- The template that renders such values

# Filters that call nothing but methods of words and objects, which note it.
_PLAIN_FILTERS = ("default", "d", "string", "length", "count", "first", "last", "list", "reverse",
                  "upper", "lower", "capitalize", "map", "select", "reject", "selectattr",
                  "rejectattr", "items")  # fmt: skip
_PLAIN_IF_WORDS = ("trim", "replace")  # the same, if words are what they are applied to
_WRITING = ("tojson", "join", "escape", "e", "indent", "title")  # words are whole in what they give
_TYPES = ("string", "mapping", "iterable", "sequence", "callable", "number", "integer", "float",
          "boolean", "true", "false", "none", "defined", "undefined")  # fmt: skip
_COMPARING = ("eq", "==", "equalto", "ne", "!=")


def watching(template: ChatTemplate) -> ChatTemplate:
    """Return the template as it renders messages and tools that are watched."""
    other = copy(template)
    other.compiled = _compiled(template.source)
    return other


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    sandbox = environment(_WatchingSandbox)
    functions: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (sandbox.filters, _PLAIN_FILTERS), (sandbox.tests, _COMPARING)
    ]  # fmt: skip
    for by_name, left in functions:
        by_name |= {name: _watched(name, by_name[name]) for name in by_name.keys() - left}
    sandbox.tests |= {"in": lambda value, container: _holds(container, value), "sameas": _is_same}
    return sandbox.from_string(source)


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that notes how it uses words."""

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        are_words = [type(arg) is Words for arg in args if isinstance(arg, str)]
        if name in _PLAIN_IF_WORDS and are_words[:1] == [True] and not any(are_words[1:]):
            return function(*args, **kwargs)
        return _applied(name, function, args, kwargs)

    return watched


def _applied(
    name: str, function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a function that reads words without their methods, and note it."""
    listed = [list(arg) if isinstance(arg, GeneratorType) else arg for arg in args]
    uses = _uses_in((*listed, *kwargs.values()))
    if uses is None:
        return function(*listed, **kwargs)
    result = function(*map(plain, listed), **{key: plain(arg) for key, arg in kwargs.items()})
    if name in _WRITING:
        return Words._of(result, uses, made=True)
    uses.deep |= name not in _TYPES
    return result


def _uses_in(values: Iterable[Any]) -> Uses | None:
    """The `Uses` of watched values, or of those in lists and objects."""
    for value in values:
        if isinstance(value, Words | Fields):
            return value._uses
        inner = value.values() if type(value) is dict else value
        if isinstance(value, list | tuple | dict) and (uses := _uses_in(inner)):
            return uses
    return None


def _joined(pieces: Iterable[Any]) -> str:
    """Join pieces of text. One alone stays as it is: macros may only write what they get."""
    texts = [text for piece in pieces if (text := _written(piece))]
    if len(texts) == 1:
        return texts[0]
    uses, text = _uses_in(texts), "".join(texts)
    return Words._of(text, uses, made=True) if uses else text


def _written(value: Any) -> str:
    return value if type(value) is Words else str(value)


def _holds(container: Any, value: Any) -> Any:
    if type(container) is str and type(value) is Words:
        value._uses.deep = True
    return value in container


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is Words and not (other is None or type(other) is bool):
        value._uses.deep = True  # equal texts may be one object
    return value is other


class _WatchingGenerator(MarkingGenerator):
    """The compiler, with calls where compiled code would read strings itself."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("concat([")
        self._list(node.nodes, frame)
        self.write("])")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            super().visit_Compare(node, frame)
            return
        left = node.expr
        for number, operand in enumerate(node.ops):
            self.write(" and " if number else "(")
            if operand.op in ("in", "notin"):
                self.write("not " if operand.op == "notin" else "")
                self.write("environment.holds(")
                self._list([operand.expr, left], frame)
                self.write(")")
            else:
                super().visit_Compare(nodes.Compare(left, [operand]), frame)
            left = operand.expr
        self.write(")")

    def _list(self, values: list[nodes.Expr], frame: Frame) -> None:
        for value in values:
            self.visit(value, frame)
            self.write(", ")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.written(")


class _WatchingSandbox(Sandbox):
    """The sandbox that renders a probe to note the uses of its words."""

    code_generator_class = _WatchingGenerator
    intercepted_binops = frozenset("%")
    concat = staticmethod(_joined)
    written, holds = staticmethod(_written), staticmethod(_holds)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is Fields and attribute not in OF_DICTS:  # a field that the template names
            value = dict.get(obj, attribute, _NOTHING)
            return self.undefined(obj=obj, name=attribute) if value is _NOTHING else value
        if isinstance(obj, Words) and attribute.startswith("format"):
            obj._uses.deep = True
            obj = plain(obj)  # formatting is the sandbox's own
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        is_of_c = isinstance(function, BuiltinMethodType) and not isinstance(owner, list | dict)
        if name in ("format", "format_map") or is_of_c:
            named = {key: arg for key, arg in kwargs.items() if key not in OF_SCOPES}
            return _applied(name, partial(super().call, context, function), args, named)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (uses := _uses_in((left, right))) is not None:
            uses.deep = True
        return super().call_binop(context, operator, plain(left), plain(right))
