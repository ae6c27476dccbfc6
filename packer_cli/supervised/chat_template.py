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
from functools import cached_property, partial
from types import MethodType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from packer_cli._kernels.looking import ends_at
from packer_cli.config.run_options import JINJA2
from packer_cli.errors import InternalError, UsageError
from packer_cli.supervised.agreement import Samples, Talk, battery, differs_at_start
from packer_cli.supervised.template_code import Mark, Root, compiled
from packer_cli.supervised.word_looks import TwoLooks, is_constant_prompt, looks_of, mentions_in

_NO_TOKEN = re.compile(r"^'(\w+_token)' is undefined$")
FIXED_DATE = datetime(2024, 1, 1)
_MARK = "_packer_mark"
_NOTHING = (0, None)
_BEGIN, _END = -1, -2  # of a `{% generation %}` block; loops count from 0
_Span = tuple[int, int]


class RefusedError(ValueError):
    """The template cannot render these messages: they are a bad record."""


class Turn(NamedTuple):
    """One turn of a template's loop over messages: characters start..stop of the text.

    `message` is the value of the loop's variable: one of the messages, or what the template made of
    some of them.
    """

    start: int
    stop: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Rendering:
    """The text of a conversation; `generated`: the spans of its `{% generation %}` blocks.

    `pieces`: those of the text; `marks`: what the loops noted.
    """

    text: str
    generated: list[_Span]
    pieces: list[str]
    marks: list[Mark]

    @cached_property
    def turns(self) -> list[Turn]:
        """In the order of their ends."""
        turns: list[Turn] = []
        begun: dict[int, tuple[int, dict[str, Any] | None]] = {}
        ends = ends_at(self.pieces, [count for _, count, _, _ in self.marks])
        for (loop, _, value, messages), position in zip(self.marks, ends, strict=True):
            start, message = begun.pop(loop, _NOTHING)
            if start < position and message is not None:  # many loops only look at messages
                turns.append(Turn(start, position, message))
            if type(value) is int and isinstance(messages, list) and -1 < value < len(messages):
                value = messages[value]  # noqa: PLW2901
            if type(value) is dict and "role" in value:
                begun[loop] = (position, value)
        return turns

    def is_like(self, other: Rendering | None) -> bool:
        """Whether they are the same to whoever reads them."""
        return other is not None and (self.text, self.generated, self.turns) == (
            other.text, other.generated, other.turns,
        )  # fmt: skip


class _Tracker:
    """The pieces of a text, and marks among them, while a template is rendered."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.marks: list[Mark] = []
        self.generation: list[int] = []

    def mark(self, number: int, value: object = None, messages: object = None) -> None:
        """The end of a turn of a loop. Another one begins with `value`, if that is a message, or
        the index of one in a list of messages. With `_BEGIN` and `_END`, of a generation block.
        """
        if number < 0:
            self.generation += number, len(self.pieces)
        else:
            self.marks.append((number, len(self.pieces), value, messages))

    def rendering(self) -> Rendering:
        """Raises TypeError when a piece is no text."""
        text = "".join(self.pieces)
        generated: list[_Span] = []
        begin = 0
        ends = ends_at(self.pieces, self.generation[1::2])
        for number, end in zip(self.generation[::2], ends, strict=True):
            if number == _BEGIN:
                begin = end
            else:
                generated.append((begin, end))
        return Rendering(text, generated, self.pieces, self.marks)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: what is between the tags is trained on (transformers, 2024)."""

    tags = {"generation"}  # noqa: RUF012 the base class declares it so

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        inner = nodes.Scope(body, lineno=line)  # as in the original, `set` does not leak out
        return [_mark(_BEGIN, line), inner, _mark(_END, line)]


def _mark(number: int, line: int, *values: nodes.Expr) -> nodes.ExprStmt:
    arguments = [nodes.Const(number), *values]
    call = nodes.Call(nodes.Name(_MARK, "load"), arguments, [], None, None)
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


_WRITING: Any = (nodes.Output, nodes.CallBlock, nodes.FilterBlock)


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
        if __obj is Namespace:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return Namespace(*args, **kwargs)
        if kind is Macro:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(__context.eval_ctx, *args, **kwargs)
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
        if _marks_generation(node):
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


def _marks_generation(node: nodes.Node) -> bool:
    calls: Iterator[Any] = node.find_all(nodes.Call)
    marks = (c for c in calls if isinstance(c.node, nodes.Name) and c.node.name == _MARK)
    return any(mark.args[0].value == _BEGIN for mark in marks)


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

    notice  why jinja2 renders although another engine could have been used, "" when it does not

    Raises UsageError for a template that does not compile. Safe to share between threads.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        engine: str = JINJA2,
    ) -> None:
        """`engine`: as --template-engine; "compiled" insists on what "auto" tries."""
        compiler = environment()
        self.source = source
        try:
            self._template = compiler.from_string(source)
            tree = compiler.parse(source)
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the chat template does not compile: {error}",
                "mend it, or name another one with --chat-template",
            ) from error
        self._known = {
            **self._template.globals, **special_tokens, "documents": None, **(arguments or {})
        }  # fmt: skip
        self.marks_generation = _marks_generation(tree)
        self.prompt_is_constant = is_constant_prompt(tree)
        self._tree = tree
        self.notice = ""
        self._code: Root | None = None
        self._branches = 0
        self._samples = Samples()
        if engine != JINJA2:
            self._take_code(compiler, tree, insist=engine != "auto")

    def _take_code(
        self, compiler: jinja2.Environment, tree: nodes.Template, *, insist: bool
    ) -> None:
        """Render by the template's code from now on, if that is the same."""
        talks = list(battery(tree))
        given = ("messages", "tools", "documents", "add_generation_prompt", _MARK)
        try:
            self._code, self._branches = compiled(compiler, tree, given, _MARK)
        except Exception as error:  # of another version of jinja2, perhaps
            problem = f"it cannot be compiled ({type(error).__name__}: {error})"
        else:
            code = partial(self._by_code, ways=bytearray(self._branches))
            difference = differs_at_start(code, self._by_jinja2_or_none, talks)
            if difference is None:
                return
            problem = f"compiled, it renders {difference} otherwise"
        self._code = None
        if insist:
            raise UsageError(
                f"the chat template: {problem}", "use --template-engine jinja2 or auto"
            )
        self.notice = f"using the slower jinja2 for the chat template: {problem}"

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """The same template with other values of some variables."""
        other = copy(self)
        other._known = {**self._known, **arguments}
        other.__dict__.pop("looks", None)
        return other

    @cached_property
    def looks(self) -> TwoLooks:
        """What it looks for in the words of messages and of tools."""
        messages, tools = (
            looks_of(self._tree, name, self._known) for name in ("messages", "tools")
        )
        return TwoLooks(messages, tools)

    @cached_property
    def mentions(self) -> frozenset[str]:
        """All names of attributes and all texts in it: it reads no key but these."""
        return mentions_in(self._tree)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Raises RefusedError when the template does not accept the messages, UsageError when it
        needs a token that the tokenizer has not, and InternalError when its code renders otherwise
        than jinja2.
        """
        talk = messages, tools, add_generation_prompt
        ways = bytearray(self._branches)
        rendering = self._by_code(talk, ways)
        if rendering is None:
            return self._by_jinja2(talk)
        wanted = self._samples.wants(messages, tools, bytes(ways))
        if wanted and not rendering.is_like(self._by_jinja2_or_none(talk)):
            raise InternalError(
                f"the chat template, compiled, renders {str(messages)[:80]} otherwise than jinja2",
                "run again with --template-engine jinja2, and please report the template",
            )
        return rendering

    def _by_code(self, talk: Talk, ways: bytearray) -> Rendering | None:
        """None for what is left to jinja2: its errors are the ones that count."""
        if self._code is None:
            return None
        tracker, context = self._context(talk)
        try:
            self._code(context, tracker, ways)
            return tracker.rendering()
        except Exception:
            return None

    def _by_jinja2_or_none(self, talk: Talk) -> Rendering | None:
        try:
            return self._by_jinja2(talk)
        except (RefusedError, UsageError):
            return None

    def _context(self, talk: Talk) -> tuple[_Tracker, Context]:
        messages, tools, add_generation_prompt = talk
        tracker = _Tracker()
        template = self._template
        variables = {
            **self._known,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _MARK: tracker.mark,
        }
        return tracker, Context(template.environment, variables, template.name, template.blocks)

    def _by_jinja2(self, talk: Talk) -> Rendering:
        tracker, context = self._context(talk)
        try:
            for piece in self._template.root_render_func(context):
                tracker.pieces.append(piece)
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
        return tracker.rendering()
