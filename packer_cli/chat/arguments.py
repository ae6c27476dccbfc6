"""Arguments of chat templates: variables that a template reads and packer does not pass by itself.

    --template-arg enable_thinking=false          for all records
    {"chat_template_kwargs": {"thinking": true}}  for one record, which wins over the option

What a template reads comes from its syntax tree. Where it only asks whether a variable is true,
texts and numbers would count as true, or as nothing, without a word: they are refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import Environment, meta, nodes

from packer_cli.chat.messages import MalformedError, kind_of
from packer_cli.chat.sandbox import MARK, environment, refusing_to_compile
from packer_cli.errors import UsageError, nearest

PASSED = ("messages", "tools", "add_generation_prompt")
_PRESENCE = ("defined", "undefined", "none")  # tests that any value answers
_TRUTH = ("true", "false", "boolean")
_OPTION = "--template-arg"


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
    return sorted(_read_by(sources) - {*PASSED, *special_tokens})


def _read_by(sources: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*(reads_of(source).names for source in sources))


def check_arguments(
    arguments: Mapping[str, Any], sources: Sequence[str], special_tokens: Collection[str]
) -> None:
    """UsageError for arguments of the command line that none of the templates reads, or not as
    what they are. `special_tokens`: names of variables that the tokenizer gives.
    """
    names = _read_by(sources)
    for name in arguments:
        if name in PASSED:
            raise UsageError(
                f"{_OPTION}: {name}: packer passes it to the chat template itself",
                "leave it out: it comes from the records",
            )
        if name not in names:
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
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            what = f"field '{field}' is text that is not valid JSON: {error}"
            raise MalformedError(what) from None
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
    """What a template reads, without running any of it. UsageError when it does not compile."""
    parser = environment(computes=False)
    asked, used = set[str](), set[str]()
    with refusing_to_compile():
        tree = parser.parse(source)
        names = _read_from_outside(tree, parser)
        for name, is_asked in _uses(tree, asked=False):
            (asked if is_asked else used).add(name)
    read = names - {MARK}
    return Reads(read, read & (asked - used))


def _uses(node: nodes.Node, *, asked: bool) -> Iterator[tuple[str, bool]]:
    """(name, whether it is only asked whether it is true) of each use of a variable; uses that ask
    only whether it is there are left out. `asked`: the same of the whole of `node`.
    """
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            yield node.name, asked
        return
    for part, child in _children(node):
        if (
            isinstance(node, nodes.Test)
            and node.name in _PRESENCE
            and isinstance(child, nodes.Name)
        ):
            continue
        yield from _uses(child, asked=_is_asked(node, part, asked=asked))


def _is_asked(node: nodes.Node, part: str, *, asked: bool) -> bool:
    """Whether a part of a node is only asked whether it is true; `asked`: the same of the node."""
    match node:
        case nodes.If() | nodes.CondExpr() if part == "test":
            return True
        case nodes.Not():
            return True
        case nodes.Test() if part == "node":
            return node.name in _TRUTH or (node.name == "sameas" and _is_truth(node.args))
        case nodes.Compare() if part == "expr":
            return _is_truth([operand.expr for operand in node.ops])
        case nodes.And() | nodes.Or() | nodes.CondExpr():
            return asked
        case nodes.Filter() if part == "node":
            return asked and node.name in ("default", "d")
    return False


def _is_truth(compared: list[Any]) -> bool:
    return all(isinstance(one, nodes.Const) and isinstance(one.value, bool) for one in compared)


def _children(node: nodes.Node) -> Iterator[tuple[str, nodes.Node]]:
    for name, value in node.iter_fields():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, nodes.Node):
                yield name, child


def _read_from_outside(tree: nodes.Template, parser: Environment) -> frozenset[str]:
    """Names of variables that a template reads, at some place, without having set them before.

    jinja2 finds those that *may* be unset where they are read, and takes a variable for one that
    every branch of an `if` sets. Here it is followed whether any way to a place does not set it.
    """
    names = _Names(parser)
    names.visit(tree)
    return frozenset(names.undeclared_identifiers & {*_reads(tree.body, set())})


def _reads(parts: Iterable[nodes.Node | None], known: set[str]) -> Iterator[str]:
    """Names that parts which follow one another read. INOUT known: what is surely set by then."""
    for part in parts:
        if part is not None:
            yield from _reads_of(part, known)


def _reads_of(node: nodes.Node, known: set[str]) -> Iterator[str]:
    match node:
        case nodes.Name(ctx="load"):
            if node.name not in known:
                yield node.name
        case nodes.Name():
            known.add(node.name)
        case nodes.If():
            ways = list[set[str]]()
            for one in (node, *node.elif_):
                yield from _reads_of(one.test, known)
                ways.append(set(known))
                yield from _reads(one.body, ways[-1])
            ways.append(set(known))
            yield from _reads(node.else_, ways[-1])
            known |= set.intersection(*ways)
        case nodes.For():
            yield from _reads_of(node.iter, known)
            yield from _reads([node.target, node.test, *node.body], set(known))
            yield from _reads(node.else_, set(known))
        case nodes.Assign():
            yield from _reads([node.node, node.target], known)
        case nodes.AssignBlock():
            yield from _reads([node.filter, *node.body], set(known))
            yield from _reads_of(node.target, known)
        case nodes.Macro() | nodes.CallBlock():
            call = [node.call] if isinstance(node, nodes.CallBlock) else []
            yield from _reads([*call, *node.defaults, *node.args, *node.body], set(known))
        case nodes.With():
            yield from _reads([*node.values, *node.targets, *node.body], set(known))
        case nodes.FilterBlock() | nodes.Block():
            yield from _reads(node.iter_child_nodes(), set(known))
        case _:
            yield from _reads(node.iter_child_nodes(), known)


class _Names(meta.TrackingCodeGenerator):
    """Names as `meta.find_undeclared_variables` finds them. That computes constant parts, whatever
    its environment says: `'a' * 10**10` takes 10 GB.
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.optimizer = None
