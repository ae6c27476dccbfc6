"""Chat templates: messages to text, and where in the text each message is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import jinja2
from jinja2.runtime import Context

from packer_cli._kernels.texts import ends_at
from packer_cli.chat.messages import RefusedError
from packer_cli.chat.sandbox import (
    BEGIN,
    MARK,
    environment,
    marks_generation,
    refusing_to_compile,
)
from packer_cli.chat.syntax import TwoLooks, is_constant_prompt, looks_of, mentions_in
from packer_cli.errors import UsageError, cut

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
            if type(value) is dict and "role" in value:
                begun[loop] = (position, value)
        return turns


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
        with refusing_to_compile():
            self._template = compiler.from_string(source)
            tree = compiler.parse(source)
        self._known = {
            **self._template.globals, **special_tokens, "documents": None, **(arguments or {})
        }  # fmt: skip
        self.marks_generation = marks_generation(tree)
        self.prompt_is_constant = is_constant_prompt(tree)
        self._tree = tree

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """A template of the same source, with other values of some variables."""
        other = copy(self)
        other._known = {**self._known, **arguments}
        other.__dict__.pop("looks", None)
        return other

    @cached_property
    def looks(self) -> TwoLooks:
        """What it looks for in the words of messages and of tools."""
        return looks_of(self._tree, self._known)

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
        """Raises RefusedError when the template does not accept the messages, whatever it fails
        with, and UsageError when it needs a token that the tokenizer has not.
        """
        template, pieces, marks = self._template, list[str](), list[_Mark]()

        def mark(number: int, value: object = None, of: object = None) -> None:
            marks.append((number, len(pieces), value, of))

        variables = {
            **self._known,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            MARK: mark,
        }
        context = Context(template.environment, variables, template.name, template.blocks)
        try:
            for piece in template.root_render_func(context):
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
