"""How a template uses the words of a conversation.

Most templates only write words: then a conversation of marks in their place (probe.py) is rendered
alike. Others look for something: `/no_think` in a system message, the length of a question. So the
words and objects of a probe note how they are used (watching.py renders it), unless that is one of

* the uses that do not matter: written out whole, trimmed, in another case, put together with other
  text, and asked whether there are any, or for their type;
* the uses that matter only in records which hold a literal: whether words hold it, begin or end
  with it or are equal to it, where it is, and what is left when it is cut out.

After any other use, the words of any record may decide what the template makes of it. The second
list is for words that nothing has changed: in what is made of them a literal may be none of theirs.

Whether a field is there or is empty, how long a list is, roles and types, numbers and the fields
that a template names are structure: a probe has them as its record has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

from packer_cli._kernels.texts import may_hold
from packer_cli.chat.messages import ASSISTANT
from packer_cli.chat.probe import PROBED, RESULT, RESULT_END, STRUCTURE, THOUGHT, has_words

_OPEN = "<think>"
_THOUGHT_PROBED = f"{_OPEN}\n{THOUGHT}\n\n"
_Message = dict[str, Any]


class Uses:
    """The `literals` that a template looks for in words, those of them that words may begin or end
    with or be, and whether it uses words otherwise.

    `known`: the names of fields that are structure
    """

    def __init__(self, known: Collection[str] = ()) -> None:
        self.known = known
        self.literals, self.edges, self.deep = set[str](), set[str](), False

    def watch(self, value: Any, key: str = "") -> Any:
        """A value of JSON whose use is noted; `key`: the field that it is in."""
        if isinstance(value, str):
            return Words._of(value, self) if key not in STRUCTURE and has_words(value) else value
        if isinstance(value, list | tuple):
            return [self.watch(one, key) for one in value]
        if isinstance(value, dict):
            watched = Fields({name: self.watch(one, name) for name, one in value.items()})
            watched._uses = self
            return watched
        return value

    def seek(self, literal: Any, *, at_edge: bool = False) -> None:
        """Note that a template looks for a text, or for several. Marks have digits, too."""
        for one in literal if isinstance(literal, tuple) else (literal,):
            if type(one) is str and not any(map(str.isdigit, one)):
                self.literals.add(one)
                self.edges.update([one] * at_edge)
            else:
                self.deep = True

    def watch_messages(self, messages: list[_Message]) -> list[Any]:
        """Messages, where texts of the assistant's own fields, such as a name, are structure."""
        watched = self.watch(messages)
        for message, fields in zip(messages, watched, strict=True):
            if message.get("role") == ASSISTANT:
                own = {k: v for k, v in message.items() if type(v) is str and k not in PROBED}
                dict.update(fields, own)
        return watched  # type: ignore[no-any-return]

    def find(self, messages: list[_Message], tools: list[Any] | None) -> bool:
        """Whether the words of a conversation may matter."""
        if self.deep or not self.literals:
            return self.deep
        if tools and any(may_hold(tools, one) for one in self.literals):
            return True
        # most conversations have none of them, and nothing like a tag
        some = may_hold(messages, self._sign) and any(
            may_hold(messages, one) for one in (*self.literals, THOUGHT)
        )
        return some and any(map(self._has, messages))

    @cached_property
    def _sign(self) -> str:
        """A character of all texts that are looked for; "" for none. Signs come before letters."""
        return min(set(THOUGHT).intersection(*self.literals), default="")

    def _has(self, message: _Message) -> bool:
        content = message.get("content")
        if type(content) is str:
            if self._in_words(message.get("role"), content):
                return True
        elif content is not None and any(may_hold(content, one) for one in self.literals):
            return True
        if len(message) < 3:
            return False
        rest = {key: value for key, value in message.items() if key not in ("content", "role")}
        return any(may_hold(rest, literal) for literal in self.literals)

    def _in_words(self, role: Any, content: str) -> bool:
        """Whether content has what is looked for otherwise than its probe, which has the edges of
        the assistant's thought, and those of the result of a tool, just as the content.
        """
        known = set[str]()
        if role == ASSISTANT:
            if content.count(THOUGHT) == 1 >= content.count(_OPEN):
                known = {_OPEN, THOUGHT} - self.edges
        elif content.startswith(RESULT) and content.endswith(RESULT_END):
            known = {RESULT, RESULT_END}
        around = _THOUGHT_PROBED if THOUGHT in content else ""
        others = self.literals.difference(known)
        return any(one in content or one in around for one in others)


class Words(str):  # noqa: PLW1641 it is below
    """Words of a probe, `made` of them and other text or as they are."""

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


def _trimmed(method: Callable[..., str]) -> Callable[..., Any]:
    def trimmed(self: Words, chars: str | None = None) -> str:
        if chars is not None and has_words(chars):
            self._uses.deep = True
        return self._like(method(self, chars))

    return trimmed


def _made(method: Callable[..., str]) -> Callable[..., Any]:
    return lambda self: self._like(method(self), made=True)


def _sought(method: Callable[..., Any]) -> Callable[..., Any]:
    def sought(self: Words, literal: Any = None, *more: Any) -> Any:
        self._seek(literal, at_edge=method.__name__ in ("startswith", "endswith"))
        found = method(self, plain(literal), *map(plain, more))
        if isinstance(found, str):
            return self._like(found)
        return [self._like(one) for one in found] if isinstance(found, list | tuple) else found

    return sought


def _looked_up(method: Callable[..., Any]) -> Callable[..., Any]:
    def looked_up(self: Fields, key: Any, *default: Any) -> Any:
        if type(key) is Words or key not in self._uses.known:
            self._uses.deep = True
        return method(self, plain(key), *default)

    return looked_up


def _noted(method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._uses.deep = True
        return method(plain(self), *map(plain, args), **kwargs)

    return noted


_LISTED: dict[Callable[..., Any], tuple[str, ...]] = {
    _trimmed: ("strip", "lstrip", "rstrip"),
    _made: ("upper", "lower", "title", "capitalize", "swapcase", "casefold"),
    _sought: (
        "__contains__", "startswith", "endswith", "find", "rfind", "index", "rindex", "count",
        "split", "rsplit", "partition", "rpartition", "replace", "removeprefix", "removesuffix",
    ),
}  # fmt: skip
_OF_OBJECTS = {*dir(object), "__getnewargs__", "__class_getitem__"} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__format__",
}  # fmt: skip


def _note_the_rest(kind: Any, listed: dict[Callable[..., Any], tuple[str, ...]]) -> None:
    """Note how methods that a class inherits are used, unless they are listed otherwise."""
    ways = {name: way for way, names in listed.items() for name in names}
    for name in {*dir(kind.__base__)} - {*vars(kind), *_OF_OBJECTS} | {"__hash__"}:
        note: Callable[[Any], Any] = ways.get(name, _noted)
        if callable(getattr(kind.__base__, name)):
            setattr(kind, name, note(getattr(kind.__base__, name)))


_note_the_rest(Words, _LISTED)
_note_the_rest(Fields, {_looked_up: ("__getitem__", "__contains__", "get")})


def plain(value: Any) -> Any:
    """The value as it is without being watched."""
    if isinstance(value, Words):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in dict.items(value)}
    return value
