"""Chat templates: messages to text, and where in the text each message is.

They run in the environment of transformers, made lean: jinja2's immutable sandbox with trim_blocks,
loop controls and `{% generation %}`, but for two differences. `strftime_now` gives a fixed date, so
that the same input makes the same bytes every day; and every loop of a template notes where each of
its turns begins, so that one rendering tells which characters belong to which message.

The sandbox asks for every attribute, item and call. Here jinja2's compiler writes out the answer
for the plain values of JSON, with the sandbox's own way beside it for all others, which takes a
third of the time:

    message.role            an item of a dict, whatever name of no method of dicts it has
    messages[0]             an item of a list
    content.strip('\\n')     methods of strings and dicts that the sandbox lets through
    message.x is defined    whether a dict has an item
    loop.first, ns.found    what loops and namespaces hold

And pieces of the text are put into a list, instead of handed out one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from packer_cli._kernels.texts import ends_at
from packer_cli.chat.messages import RefusedError
from packer_cli.errors import UsageError, cut

FIXED_DATE = datetime(2024, 1, 1)
# Names that no template can write: of a function that loops call, and of the text's pieces. A call
# is the end of a turn. Another one begins with its second argument, if that is a message, or its
# index in the third, a list of them.
MARK, _PIECES = "0_mark", "0_pieces"
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
    """What a template makes of a conversation: its `text`, and what was noted while it was made."""

    def __init__(self, pieces: list[str], marks: list[_Mark]) -> None:
        """`pieces` of the text. Raises TypeError when one is no text, and UnicodeEncodeError when
        one has half a surrogate pair, which UTF-8 cannot write.
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
    rendering. `special_tokens`: bos_token and the like, as templates know them;
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
        with refusing_to_compile():
            self.compiled = compiler.from_string(source)
            self.tree = compiler.parse(source)
        self.known = {
            **self.compiled.globals, **special_tokens, "documents": None, **(arguments or {})
        }  # fmt: skip
        self.marks_generation = marks_generation(self.tree)

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """A template of the same source, with other values of some variables."""
        other = copy(self)
        other.known = {**self.known, **arguments}
        return other

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Raises RefusedError when the template does not accept the messages, whatever it fails
        with, and UsageError when it needs a token that the tokenizer has not.
        """
        template, pieces, marks = self.compiled, list[str](), list[_Mark]()
        variables = {
            **self.known,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            MARK: marks,
            _PIECES: pieces,
        }
        context = Context(template.environment, variables, template.name, template.blocks)
        try:
            for piece in template.root_render_func(context):  # those that it does not put there
                pieces.append(piece)
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


# -- What templates run in


def environment(kind: type[Environment] | None = None) -> jinja2.Environment:
    """What templates are compiled in."""
    made = (kind or Environment)(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception, "strftime_now": FIXED_DATE.strftime, "dict": _Dict(),
    }  # fmt: skip
    # random: other text every time, and as much of it as the template asks for
    del made.globals["lipsum"], made.filters["random"]
    return made


@contextmanager
def refusing_to_compile() -> Iterator[None]:
    """UsageError for whatever a template's source fails with: brackets and blocks that Python finds
    nested too deeply, `break` outside a loop, a constant too long to be written.
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
_NO_VALUES = (nodes.Const(None), nodes.Const(None))
_METHODS = dict.fromkeys(_PLAIN[str], "str") | dict.fromkeys(
    ("get", "items", "keys", "values"), "dict"
)


class Generator(CodeGenerator):
    """jinja2's compiler, with the shortcuts of the module's docstring.

    `_namespaces`: names of variables that hold one; `_asked`: nodes that are only asked whether
    they are true.
    """

    written_twice: tuple[type[nodes.Expr], ...] = (nodes.Const, nodes.Name)

    def write_commons(self) -> None:
        super().write_commons()
        self.writeline(f"marks, pieces = resolve({MARK!r}), resolve({_PIECES!r})")
        self.writeline("attributes, nothing = object.__getattribute__, undefined()")

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        self._namespaces = {
            getattr(one.target, "name", None)
            for one in node.find_all(nodes.Assign)
            if isinstance(one.node, nodes.Call) and getattr(one.node.node, "name", 0) == "namespace"
        }
        choices: list[Any] = [*node.find_all((nodes.If, nodes.CondExpr))]
        asked = [one.test for one in choices]
        for one in asked:  # and what they are made of
            if isinstance(one, nodes.And | nodes.Or):
                asked += [one.left, one.right]
            elif isinstance(one, nodes.Not):
                asked.append(one.node)
        self._asked = {id(one) for one in asked}
        super().visit_Template(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802 jinja2's name
        buffer = frame.buffer
        if buffer is None and not self.blocks:  # which may be written in another order
            frame.buffer = "pieces"
        super().visit_Output(node, frame)
        frame.buffer = buffer

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        if not _is_mark(node.node):
            super().visit_ExprStmt(node, frame)
            return
        call: Any = node.node
        number, *values = call.args
        self.writeline(f"marks.append(({number.value}, len(pieces), ", node)
        for value in (*values, *_NO_VALUES[len(values) :]):
            self.visit(value, frame)
            self.write(", ")
        self.write("))")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        of, value, name = getattr(node.node, "name", None), self.temporary_identifier(), node.attr
        if of == "loop" and name in _PLAIN[LoopContext]:
            self._either(node, frame, value, f"{value}.{name}", "LoopContext")
        elif of in self._namespaces and not name.startswith("_"):
            all_of_it = f"attributes({value}, '_Namespace__attrs')"
            values = self.temporary_identifier()
            has_it = f"Namespace and {name!r} in ({values} := {all_of_it})"
            self._either(node, frame, value, f"{values}[{name!r}]", has_it)
        elif name in OF_DICTS:
            super().visit_Getattr(node, frame)
        elif id(node) in self._asked:
            self._either(node, frame, value, f"{value}.get({name!r})", "dict")
        else:
            item, has_it = f"{value}[{name!r}]", f"dict and {name!r} in {value}"
            self._either(node, frame, value, item, has_it)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        value = self.temporary_identifier()
        if type(key) is str:
            has_it = f"dict and {key!r} in {value}"
        elif type(key) is int and key >= 0:
            has_it = f"list and len({value}) > {key}"
        else:
            super().visit_Getitem(node, frame)
            return
        self._either(node, frame, value, f"{value}[{key!r}]", has_it)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802
        of, value = node.node, self.temporary_identifier()
        if node.name != "defined" or not isinstance(of, nodes.Getattr) or of.attr in OF_DICTS:
            super().visit_Test(node, frame)
            return
        self.write("(not isinstance(")
        self._either(of, frame, value, f"{value}.get({of.attr!r}, nothing)", "dict")
        self.write(", Undefined))")

    def _either(self, node: Any, frame: Frame, value: str, short: str, is_plain: str) -> None:
        """Write `short` for a `value` whose type `is_plain`, and the sandbox's way for others."""
        self.write(f"({short} if type({value} := ")
        self.visit(node.node, frame)
        if isinstance(node, nodes.Getattr):
            asked = f"environment.getattr({value}, {node.attr!r})"
        else:
            asked = f"environment.getitem({value}, {node.arg.value!r})"
        self.write(f") is {is_plain} else {asked})")

    def visit_Call(  # noqa: N802
        self, node: nodes.Call, frame: Frame, forward_caller: bool = False
    ) -> None:
        method: Any = node.node
        is_plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller)
        kind = _METHODS.get(getattr(method, "attr", ""))
        # arguments are written twice
        if not (is_plain and all(isinstance(one, self.written_twice) for one in node.args)) or (
            kind is None
        ):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        value = self.temporary_identifier()
        self.write(f"({value}.{method.attr}(")
        self._arguments(node, frame)
        self.write(f") if type({value} := ")
        self.visit(method.node, frame)
        self.write(f") is {kind} else environment.call(context, ")
        self.write(f"environment.getattr({value}, {method.attr!r}), ")
        self._arguments(node, frame)
        self.write("))")

    def _arguments(self, node: Any, frame: Frame) -> None:
        for number, argument in enumerate(node.args):
            self.write(", " if number else "")
            self.visit(argument, frame)


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with shortcuts where the compiler has none. They give what it gives itself."""

    code_generator_class = Generator

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
    """Have every loop announce its turns.

    What is written inside macros and the like is put into the text later, so positions mean
    nothing there.
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
    """[the list] that a loop over indices takes its messages from, [] when there is none."""
    index = getattr(loop.target, "name", None)
    for item in loop.find_all(nodes.Getitem):
        is_index = isinstance(item.arg, nodes.Name) and item.arg.name == index
        if is_index and isinstance(item.node, nodes.Name):
            return [nodes.Name(item.node.name, "load")]
    return []


def marks_generation(node: nodes.Node) -> bool:
    """Whether a template, or a part of one, has `{% generation %}` tags."""
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
