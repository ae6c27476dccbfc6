"""What the syntax tree of a chat template tells, without running any of it.

Which variables it reads that packer does not pass by itself, the arguments of templates:

    --template-arg enable_thinking=false          for all records
    {"chat_template_kwargs": {"thinking": true}}  for one record, which wins over the option

Where it only asks whether one is true, texts and numbers would count as true, or as nothing,
without a word: they are refused.

And the names of fields that it mentions, and whether the prompt for an answer is a constant.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import nodes

from packer_cli.chat.chat_template import MARK, environment, refusing_to_compile
from packer_cli.chat.messages import MalformedError, kind_of, parse_json
from packer_cli.errors import UsageError, nearest

PASSED = ("messages", "tools", "add_generation_prompt")
_OPTION = "--template-arg"

# -- Arguments: variables from outside


@dataclass(frozen=True)
class Reads:
    """What a template reads: `names` of variables, and which of them are `flags`: it only asks
    whether they are true.
    """

    names: frozenset[str]
    flags: frozenset[str]

    def wrong_flag(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with a value in the place of a flag; "" for nothing."""
        for name, value in arguments.items():
            if name in self.flags and not isinstance(value, bool):
                shown = json.dumps(value, ensure_ascii=False, default=str)
                return (
                    f"{name}: found {shown}, expected true or false: the chat template only asks "
                    "whether it is true"
                )
        return ""


def arguments_of(sources: Iterable[str], special_tokens: Collection[str]) -> list[str]:
    """What templates read that neither packer nor the tokenizer, by `special_tokens`, gives."""
    read = frozenset[str]().union(*(reads_of(source).names for source in sources))
    return sorted(read - {*PASSED, *special_tokens})


def check_arguments(
    arguments: Mapping[str, Any], sources: Sequence[str], special_tokens: Collection[str]
) -> None:
    """UsageError for arguments of the command line that none of the templates reads, or not as
    what they are. `special_tokens`: names of variables that the tokenizer gives.
    """
    for name in arguments:
        if name in PASSED:
            raise UsageError(
                f"{_OPTION}: {name}: packer passes it to the chat template itself",
                "leave it out: it comes from the records",
            )
        if name not in arguments_of(sources, ()):
            own = arguments_of(sources, special_tokens)
            near = nearest(name, own)
            raise UsageError(
                f"{_OPTION}: {name}: the chat template never reads it; it reads "
                f"{', '.join(own) or 'no arguments'}",
                f"did you mean {near}?" if near else "leave it out, or use another template",
            )
    for source in sources:
        if wrong := reads_of(source).wrong_flag(arguments):
            raise UsageError(f"{_OPTION}: {wrong}", "write NAME=true or NAME=false")


def parse_arguments(value: Any, field: str) -> dict[str, Any] | None:
    """A record's own arguments: an object, or JSON text of one; None when there are none. As in
    messages, what is null is left out. Raises MalformedError.
    """
    if isinstance(value, str) and value.strip():
        value = parse_json(value, field)
    if value is None or value == "":
        return None
    if not isinstance(value, dict):
        raise MalformedError(f"field '{field}' is {kind_of(value)}, expected an object")
    for name in PASSED:
        if name in value:
            raise MalformedError(f"{field}.{name}: packer passes it to the chat template itself")
    return {name: one for name, one in value.items() if one is not None} or None


@lru_cache(maxsize=8)
def reads_of(source: str) -> Reads:
    """The variables that a template reads. UsageError when it does not compile."""
    compiler = environment()
    uses: dict[bool, set[str]] = {True: set(), False: set()}
    with refusing_to_compile():
        tree = compiler.parse(source)
        own = {*compiler.globals, MARK, "loop", "caller", "self", "varargs", "kwargs"}
        own |= {one.name for one in tree.find_all(nodes.Macro)}
        read = frozenset(_read(tree.body, own))
        for name, is_asked in _uses(tree, asked=False):
            uses[is_asked].add(name)
    return Reads(read, read & (uses[True] - uses[False]))


def _read(parts: Iterable[nodes.Node | None], known: set[str]) -> Iterator[str]:
    """Names that parts which follow one another read though some way to them does not set them.

    INOUT known: what is surely set by then. (For jinja2, a name that only some branches of an `if`
    set is set, or is not, by what follows.)
    """
    for part in parts:
        if part is not None:
            yield from _read_by(part, known)


def _read_by(node: nodes.Node, known: set[str]) -> Iterator[str]:
    match node:
        case nodes.Name(ctx="load"):
            if node.name not in known:
                yield node.name
        case nodes.Name():
            known.add(node.name)
        case nodes.If():
            ways = list[set[str]]()
            for one in (node, *node.elif_):
                yield from _read_by(one.test, known)
                ways.append(set(known))
                yield from _read(one.body, ways[-1])
            ways.append(set(known))
            yield from _read(node.else_, ways[-1])
            known |= set.intersection(*ways)
        case nodes.For():
            yield from _read_by(node.iter, known)
            yield from _read([node.target, node.test, *node.body], set(known))
            yield from _read(node.else_, set(known))
        case nodes.Assign():
            yield from _read([node.node, node.target], known)
        case nodes.AssignBlock():
            yield from _read([node.filter, *node.body], set(known))
            yield from _read_by(node.target, known)
        case nodes.With():
            yield from _read([*node.values, *node.targets, *node.body], set(known))
        case nodes.Macro() | nodes.CallBlock() | nodes.FilterBlock() | nodes.Block():
            yield from _read(node.iter_child_nodes(), set(known))
        case _:
            yield from _read(node.iter_child_nodes(), known)


def _uses(node: nodes.Node, *, asked: bool) -> Iterator[tuple[str, bool]]:
    """(name, whether it is only asked whether it is true) of each use of a variable; uses that ask
    only whether it is there are left out. `asked`: the same of the whole of `node`.
    """
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            yield node.name, asked
        return
    for part, value in node.iter_fields():
        for child in value if isinstance(value, list) else [value]:
            is_there = isinstance(node, nodes.Test) and node.name in _PRESENCE
            if isinstance(child, nodes.Node) and not (is_there and isinstance(child, nodes.Name)):
                yield from _uses(child, asked=_is_asked(node, part, asked=asked))


_PRESENCE = ("defined", "undefined", "none")  # tests that any value answers


def _is_asked(node: nodes.Node, part: str, *, asked: bool) -> bool:
    """Whether a part of a node is only asked whether it is true; `asked`: the same of the node."""
    match node:
        case nodes.If() | nodes.CondExpr() if part == "test":
            return True
        case nodes.Not():
            return True
        case nodes.Test() if part == "node":
            is_same = node.name == "sameas" and _are_truths(node.args)
            return node.name in ("true", "false", "boolean") or is_same
        case nodes.Compare() if part == "expr":
            return _are_truths([operand.expr for operand in node.ops])
        case nodes.And() | nodes.Or() | nodes.CondExpr():
            return asked
        case nodes.Filter() if part == "node":
            return asked and node.name in ("default", "d")
    return False


def _are_truths(compared: list[Any]) -> bool:
    return all(isinstance(_constant(one), bool) for one in compared)


# -- Fields, and the prompt for an answer


@lru_cache(maxsize=8)
def mentions_in(tree: nodes.Template) -> frozenset[str]:
    """All names of attributes and all texts in a template: it reads no key but these."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return frozenset(names.union(texts))


def is_constant_prompt(tree: nodes.Template) -> bool:
    """Whether the prompt for an answer is the same text whatever the conversation is: an `if` at
    the end of the template asks for it alone, and writes what no loop or message changes.
    """
    name = PASSED[-1]
    names = list(tree.find_all(nodes.Name))
    rest = [one for one in tree.body if not isinstance(one, nodes.ExprStmt)]
    last = rest[-1] if rest else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_ or _name_of(last.test) != name:
        return False
    own = {"messages", "tools", *(one.name for one in names if one.ctx != "load")}
    within = [part for one in last.body for part in (one, *one.find_all(nodes.Node))]
    return sum(one.name == name for one in names) == 1 and all(
        isinstance(part, _CONSTANT) and _name_of(part) not in own for part in within
    )


_CONSTANT = (nodes.If, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Test,
             nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand)  # fmt: skip


def _name_of(node: Any) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _constant(node: Any = None) -> Any:
    """The value of a constant; None for anything else."""
    return node.value if isinstance(node, nodes.Const) else None
