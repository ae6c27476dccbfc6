"""What is around each message of the assistant: where that is the same, its turn is taken to be
rendered alike.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from packer_cli.supervised.kinds import Kind, Look, kinds_of
from packer_cli.supervised.messages import ASSISTANT

_MOST_KNOWN = 128  # conversations, each of about 8 kB
_Context = tuple[Any, ...]


def contexts(messages: list[dict[str, Any]], tools: list[Any] | None) -> dict[int, _Context]:
    """What is around each message of the assistant, as far as a template is likely to look.

    That is its own look, and those of its neighbours up to the next ones that are no results of
    tools; whether a user's message follows, and whether calls went before.
    """
    return _around(kinds_of(messages), bool(tools))[0]


def distinct_contexts(
    messages: list[dict[str, Any]], tools: list[Any] | None
) -> frozenset[_Context]:
    """The different ones among `contexts`."""
    return _around(kinds_of(messages), bool(tools))[1]


@lru_cache(_MOST_KNOWN)
def _around(
    kinds: tuple[Kind, ...], tools: bool
) -> tuple[dict[int, _Context], frozenset[_Context]]:
    """Both, of the kinds of messages. Nobody may change them."""
    looks = [kind.look for kind in kinds]
    following = _following(looks)
    last_user = max((i for i, look in enumerate(looks) if look.role == "user"), default=-1)
    around: dict[int, _Context] = {}
    system, called = looks[0].role == "system", False
    results, before = 0, None
    for i, look in enumerate(looks):
        role = look.role
        if role == ASSISTANT:
            around[i] = (
                system, tools, called, results, before, look, *following[i], i > last_user,
            )  # fmt: skip
            called = called or look.calls
        if role == "tool":
            results = min(results + 1, 2)
        else:
            results, before = 0, look
    return around, frozenset(around.values())


def _following(looks: list[Look]) -> list[tuple[int, Look | None]]:
    """For each message, how many results of tools follow it, two for more, and what is behind."""
    following = list[tuple[int, Look | None]]()
    results, behind = 0, None
    for look in reversed(looks):
        following.append((results, behind))
        if look.role == "tool":
            results = min(results + 1, 2)
        else:
            results, behind = 0, look
    following.reverse()
    return following
