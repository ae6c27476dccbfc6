"""Templates that note how they use the words of a probe (uses.py).

Words and objects note their own methods. Noted here is what would read them without: compiled code,
and filters, tests and functions of C.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from functools import lru_cache, partial, wraps
from types import BuiltinMethodType, GeneratorType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.runtime import Context

from packer_cli.chat.chat_template import (
    OF_DICTS,
    OF_SCOPES,
    ChatTemplate,
    MarkingGenerator,
    Sandbox,
    environment,
)
from packer_cli.chat.uses import Fields, Uses, Words, plain

_NOTHING = object()
# Filters that call nothing but methods of words and objects, which note it.
_PLAIN_FILTERS = ("default", "d", "string", "length", "count", "first", "last", "list", "reverse",
                  "upper", "lower", "capitalize", "map", "select", "reject", "selectattr",
                  "rejectattr", "items")  # fmt: skip
_OF_WORDS = ("trim", "replace")  # the same, if words are what they are applied to
_MAKING = ("tojson", "join", "escape", "e", "indent", "title")  # words are whole in what they give
_TYPES = ("string", "mapping", "iterable", "sequence", "callable", "number", "integer", "float",
          "boolean", "true", "false", "none", "defined", "undefined")  # fmt: skip
_COMPARING = ("eq", "==", "equalto", "ne", "!=")


def _uses_in(values: Iterable[Any]) -> Uses | None:
    """What notes the use of words in some values, or in lists and objects among them."""
    for value in values:
        if isinstance(value, Words | Fields):
            return value._uses
        inner = value.values() if type(value) is dict else value
        if isinstance(value, list | tuple | dict) and (uses := _uses_in(inner)):
            return uses
    return None


def _applied(
    function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any], name: str,
) -> Any:  # fmt: skip
    """What a function gives that reads words without their methods; `name`: of its use."""
    given = [list(one) if isinstance(one, GeneratorType) else one for one in args]
    uses = _uses_in((*given, *kwargs.values()))
    if uses is None:
        return function(*given, **kwargs)
    made = function(*map(plain, given), **{key: plain(one) for key, one in kwargs.items()})
    if name in _MAKING:
        return Words._of(made, uses, made=True)
    uses.deep |= name not in _TYPES
    return made


def _put_together(pieces: Iterable[Any]) -> str:
    """The text of some pieces. One alone stays as it is: macros may only write what they get."""
    texts = [text for piece in pieces if (text := _written(piece))]
    if len(texts) == 1:
        return texts[0]
    uses, text = _uses_in(texts), "".join(texts)
    return Words._of(text, uses, made=True) if uses else text


def _written(value: Any) -> str:
    return value if type(value) is Words else str(value)


def _holds(container: Any, value: Any) -> Any:
    """Whether a value is in a container."""
    if type(container) is str and type(value) is Words:
        value._uses.deep = True
    return value in container


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is Words and not (other is None or type(other) is bool):
        value._uses.deep = True  # equal texts may be one object
    return value is other


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test that notes how it uses words."""

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        are_words = [type(one) is Words for one in args if isinstance(one, str)]
        if name in _OF_WORDS and are_words[:1] == [True] and not any(are_words[1:]):
            return function(*args, **kwargs)
        return _applied(function, args, kwargs, name)

    return watched


class _WatchingGenerator(MarkingGenerator):
    """The compiler of templates, where it would ask strings themselves."""

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


class _Watching(Sandbox):
    """The sandbox in which a probe is rendered to note what is done with its words."""

    code_generator_class = _WatchingGenerator
    intercepted_binops = frozenset("%")
    concat = staticmethod(_put_together)
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
        name, own = getattr(function, "__name__", ""), getattr(function, "__self__", None)
        if name in ("format", "format_map") or (
            isinstance(function, BuiltinMethodType) and not isinstance(own, list | dict)
        ):
            given = {key: one for key, one in kwargs.items() if key not in OF_SCOPES}
            return _applied(partial(super().call, context, function), args, given, name)
        return super().call(context, function, *args, **kwargs)

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
    functions: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (made.filters, _PLAIN_FILTERS), (made.tests, _COMPARING)
    ]  # fmt: skip
    for by_name, plain_ones in functions:
        by_name |= {name: _watched(name, by_name[name]) for name in by_name.keys() - plain_ones}
    made.tests |= {"in": lambda value, container: _holds(container, value), "sameas": _is_same}
    return made.from_string(source)
