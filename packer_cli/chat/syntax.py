"""Read the syntax tree of a chat template, without running any of it.

It shows which variables the template reads that packer does not pass, the arguments of templates:

    --template-arg enable_thinking=false          for all records
    {"chat_template_kwargs": {"thinking": true}}  for one record, which wins over the option

Some are flags: the template only checks whether they are true. Texts and numbers would silently
count as true or false there, so they are refused.

It also shows the names of fields in the template, and whether the prompt for an answer is constant.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import nodes

from packer_cli.chat.chat_template import MARK, environment, refusing_to_compile
from packer_cli.chat.messages import PASSED
from packer_cli.errors import UsageError, nearest

_OPTION = "--template-arg"

# -- Arguments: variables from outside


@dataclass(frozen=True)
class Reads:
    """Variables that a template reads.

    names  of all of them
    flags  those that it only checks for truth
    """

    names: frozenset[str]
    flags: frozenset[str]

    def wrong_flag(self, arguments: Mapping[str, Any]) -> str:
        """Describe the first flag whose value is not true or false; "" if there is none."""
        for name, value in arguments.items():
            if name in self.flags and not isinstance(value, bool):
                shown = json.dumps(value, ensure_ascii=False, default=str)
                return (
                    f"{name}: found {shown}, expected true or false: the chat template only asks "
                    "whether it is true"
                )
        return ""


def arguments_of(sources: Iterable[str], special_tokens: Collection[str]) -> list[str]:
    """Return the variables of templates that neither packer nor the tokenizer passes."""
    read = frozenset[str]().union(*(reads_of(source).names for source in sources))
    return sorted(read - {*PASSED, *special_tokens})


def check_arguments(
    arguments: Mapping[str, Any], sources: Sequence[str], special_tokens: Collection[str]
) -> None:
    """Check arguments of the command line. `special_tokens`: as for `arguments_of`.

    Raises UsageError if no template reads one of them, or reads it as a flag that it is not.
    """
    for name in arguments:
        if name in PASSED:
            raise UsageError(
                f"{_OPTION}: {name}: packer passes it to the chat template itself",
                "leave it out: it comes from the records",
            )
        if name not in arguments_of(sources, ()):
            known = arguments_of(sources, special_tokens)
            near = nearest(name, known)
            raise UsageError(
                f"{_OPTION}: {name}: the chat template never reads it; it reads "
                f"{', '.join(known) or 'no arguments'}",
                f"did you mean {near}?" if near else "leave it out, or use another template",
            )
    for source in sources:
        if wrong := reads_of(source).wrong_flag(arguments):
            raise UsageError(f"{_OPTION}: {wrong}", "write NAME=true or NAME=false")


@lru_cache(maxsize=8)
def reads_of(source: str) -> Reads:
    """Return the variables that a template reads. Raises UsageError if it does not compile."""
    compiler = environment()
    uses: dict[bool, set[str]] = {True: set(), False: set()}
    with refusing_to_compile():
        tree = compiler.parse(source)
        known = {*compiler.globals, MARK, "loop", "caller", "self", "varargs", "kwargs"}
        known |= {macro.name for macro in tree.find_all(nodes.Macro)}
        read = frozenset(_read(tree.body, known))
        for name, is_truth in _uses(tree, truth=False):
            uses[is_truth].add(name)
    return Reads(read, read & (uses[True] - uses[False]))


def _read(parts: Iterable[nodes.Node | None], known: set[str]) -> Iterator[str]:
    """Yield the names that successive parts read, and that are not set on every way to them.

    INOUT known: names that are surely set by then. (jinja2.meta does not follow branches: for it, a
    name that only some branches of an `if` set comes from outside, or does not, by what follows.)
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
            for branch in (node, *node.elif_):
                yield from _read_by(branch.test, known)
                ways.append(set(known))
                yield from _read(branch.body, ways[-1])
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


def _uses(node: nodes.Node, *, truth: bool) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether only its truth matters) for each use of a variable, but not for checks
    of its presence. `truth`: whether only the truth of `node` matters.
    """
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            yield node.name, truth
        return
    for part, value in node.iter_fields():
        for child in value if isinstance(value, list) else [value]:
            is_there = isinstance(node, nodes.Test) and node.name in _PRESENCE
            if isinstance(child, nodes.Node) and not (is_there and isinstance(child, nodes.Name)):
                yield from _uses(child, truth=_is_truth(node, part, truth=truth))


_PRESENCE = ("defined", "undefined", "none")  # tests that any value answers


def _is_truth(node: nodes.Node, part: str, *, truth: bool) -> bool:
    """Tell whether only the truth of a part of a node matters; `truth`: of the node itself."""
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
            return truth
        case nodes.Filter() if part == "node":
            return truth and node.name in ("default", "d")
    return False


def _are_truths(compared: list[Any]) -> bool:
    return all(isinstance(value, nodes.Const) and type(value.value) is bool for value in compared)


# -- Fields, and the prompt for an answer


@lru_cache(maxsize=8)
def mentions_in(tree: nodes.Template) -> frozenset[str]:
    """Return the names of attributes and the texts in a template: it reads no other keys."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return frozenset(names.union(texts))


def is_constant_prompt(tree: nodes.Template) -> bool:
    """Tell whether the prompt for an answer is the same for all conversations: an `if` at the end
    of the template writes it, and it has nothing that a loop or a message changes.
    """
    name = PASSED[-1]
    names = list(tree.find_all(nodes.Name))
    statements = [part for part in tree.body if not isinstance(part, nodes.ExprStmt)]
    last = statements[-1] if statements else None
    if not isinstance(last, nodes.If) or last.elif_ or last.else_ or _name_of(last.test) != name:
        return False
    varying = {"messages", "tools", *(one.name for one in names if one.ctx != "load")}
    within = [
        part for statement in last.body for part in (statement, *statement.find_all(nodes.Node))
    ]
    return sum(one.name == name for one in names) == 1 and all(
        isinstance(part, _CONSTANT) and _name_of(part) not in varying for part in within
    )


_CONSTANT = (nodes.If, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Test,
             nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand)  # fmt: skip


def _name_of(node: Any) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None
