"""Compiled templates with faults, in the children that render: for `processes._MAKE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packer_cli.supervised import chat_template
from packer_cli.supervised.limited_composer import LimitedComposer

TRIGGER = "trigger the fault"


def _composer(compiled: Callable[..., Any], *arguments: Any) -> LimitedComposer:
    vars(chat_template)["compiled"] = compiled
    return LimitedComposer(*arguments)


def _adding(text: Callable[[Any], str]) -> Callable[..., Any]:
    """A compiler of templates that write more than they should, depending on the context."""
    compiled: Callable[..., Any] = vars(chat_template)["compiled"]

    def wrong(*arguments: Any) -> Any:
        root, branches = compiled(*arguments)

        def adding(context: Any, tracker: Any, ways: bytearray) -> None:
            root(context, tracker, ways)
            tracker.pieces.append(text(context))

        return adding, branches

    return wrong


def differs(*arguments: Any) -> LimitedComposer:
    return _composer(_adding(lambda context: "!"), *arguments)


def differs_on_trigger(*arguments: Any) -> LimitedComposer:
    """The message that triggers it has a field of its own."""

    def text(context: Any) -> str:
        return "!" * any(TRIGGER in message for message in context.parent["messages"])

    return _composer(_adding(text), *arguments)


def fails(*arguments: Any) -> LimitedComposer:
    def compiled(*_: Any) -> Any:
        raise AttributeError("of another version of jinja2")

    return _composer(compiled, *arguments)
