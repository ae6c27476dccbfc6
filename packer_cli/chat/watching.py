"""Templates that note how they use the words of a probe (uses.py).

Words and objects note their own methods. Noted here is what would read them without: compiled code,
and filters, tests and functions of C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import lru_cache, wraps
from types import BuiltinMethodType, GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.runtime import Context

from packer_cli.chat.chat_template import (
    OF_DICTS,
    ChatTemplate,
    Environment,
    Generator,
    environment,
)
from packer_cli.chat.uses import Fields, Uses, Words, plain

# They use nothing but methods of words and objects, which note it.
_NOTHING = object()
_PLAIN_FILTERS = ("trim", "default", "d", "string", "replace", "length", "count", "first", "last",
                  "list", "reverse", "upper", "lower", "capitalize", "map", "select", "reject",
                  "selectattr", "rejectattr", "items")  # fmt: skip
_MAKING = ("tojson", "join", "escape", "e", "indent", "title")
_TYPES = ("string", "mapping", "iterable", "sequence", "callable", "number", "integer", "float",
          "boolean", "true", "false", "none", "defined", "undefined")  # fmt: skip
_COMPARING = ("eq", "==", "equalto", "ne", "!=")


def _uses_in(values: Iterable[Any]) -> Uses | None:
    """What notes the use of words in some values, or in lists and objects among them."""
    for value in values:
        if isinstance(value, Words | Fields):
            return value._uses
        inner = value.values() if type(value) is dict else value
        if isinstance(inner, list | tuple) or inner is not value:
            if uses := _uses_in(inner):
                return uses
    return None


def _put_together(pieces: Iterable[Any]) -> str:
    """The text of some pieces."""
    texts = [_written(piece) for piece in pieces]
    uses = _uses_in(texts)
    text = "".join(texts)
    return Words.of(text, uses, made=True) if uses else text


def _written(value: Any) -> str:
    return value if type(value) is Words else str(value)


def _holds(container: Any, value: Any) -> Any:
    """Whether a value is in a container."""
    if type(container) is str and type(value) is Words:
        value._uses.deep = True
    return value in container


def _watched_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that notes how it uses words."""
    if name in _PLAIN_FILTERS:
        return function

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        given = [list(one) if isinstance(one, GeneratorType) else one for one in args]
        uses = _uses_in((*given, *kwargs.values()))
        if uses is None:
            return function(*given, **kwargs)
        made = function(*map(plain, given), **{key: plain(one) for key, one in kwargs.items()})
        if name in _MAKING:
            return Words.of(made, uses, made=True)
        uses.deep = True
        return made

    return watched


def _watched_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that notes how it uses words."""
    if name in _COMPARING:
        return function
    if name == "in":
        return lambda value, container: _holds(container, value)

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        uses = _uses_in((*args, *kwargs.values()))
        if uses is not None:
            is_value = name == "sameas" and (args[1] is None or type(args[1]) is bool)
            is_object = name == "sameas" and not any(type(one) is Words for one in args)
            if is_object:
                return function(*args)
            uses.deep |= not (name in _TYPES or is_value)
        return function(*map(plain, args), **kwargs)

    return watched


def _call_plainly(function: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """(whether it is done, what a function gives that knows nothing of `Words`, and has some)."""
    name, own = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    is_formatting = name in ("format", "format_map") and type(own) is not Words
    if not is_formatting and not (
        isinstance(function, BuiltinMethodType) and not isinstance(own, list | dict)
    ):
        return False, None
    given = [list(one) if isinstance(one, GeneratorType) else one for one in args]
    uses = _uses_in((*given, *kwargs.values()))
    if uses is None:
        return False, None
    made = function(*map(plain, given), **{key: plain(one) for key, one in kwargs.items()})
    if name == "join":
        return True, Words.of(made, uses, made=True)
    uses.deep = True
    return True, made


class _WatchingGenerator(Generator):
    """The compiler of templates, where it would ask strings themselves."""

    written_twice = (nodes.Const,)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._call("concat", frame, node.nodes, "[", "]")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            super().visit_Compare(node, frame)
            return
        for number, operand in enumerate(node.ops):
            left = node.ops[number - 1].expr if number else node.expr
            self.write("(" if not number else " and ")
            if operand.op in ("in", "notin"):
                self.write("not " if operand.op == "notin" else "")
                self._call("environment.holds", frame, [operand.expr, left])
            else:
                super().visit_Compare(nodes.Compare(left, [operand]), frame)
        self.write(")")

    def _call(
        self, name: str, frame: Frame, given: list[nodes.Expr], begin: str = "", end: str = ""
    ) -> None:
        self.write(f"{name}({begin}")
        for one in given:
            self.visit(one, frame)
            self.write(", ")
        self.write(f"{end})")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.written(")


class _Watching(Environment):
    """The sandbox in which a probe is rendered to note what is done with its words."""

    code_generator_class = _WatchingGenerator
    intercepted_binops = frozenset("%")
    concat, written, holds = map(staticmethod, (_put_together, _written, _holds))

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is Fields and attribute not in OF_DICTS:  # a field that the template names
            value = dict.get(obj, attribute, _NOTHING)
            return self.undefined(obj=obj, name=attribute) if value is _NOTHING else value
        if isinstance(obj, Words) and attribute.startswith("format"):
            obj.isprintable()  # noted: any of them does
            obj = plain(obj)
        return super().getattr(obj, attribute)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        is_done, made = _call_plainly(function, args, kwargs)
        return made if is_done else super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (uses := _uses_in((left, right))) is not None:
            uses.deep = True
        return super().call_binop(context, operator, plain(left), plain(right))


def watching(template: ChatTemplate) -> ChatTemplate:
    """The template as it renders messages and tools that are watched."""
    other = copy(template)
    other.compiled = _compiled(template.source)
    return other


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    made = environment(_Watching)
    for kind, watched in ((made.filters, _watched_filter), (made.tests, _watched_test)):
        kind |= {name: watched(name, function) for name, function in kind.items()}
    return made.from_string(source)
