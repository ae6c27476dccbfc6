"""What the syntax tree of a chat template tells, without running any of it.

Which variables it reads that packer does not pass by itself, the arguments of templates:

    --template-arg enable_thinking=false          for all records
    {"chat_template_kwargs": {"thinking": true}}  for one record, which wins over the option

Where it only asks whether one is true, texts and numbers would count as true, or as nothing,
without a word: they are refused.

And what it looks for in the words of a conversation. Most templates only write words: then a
conversation of marks in their place (probe.py) is rendered alike. Others look for something:
`/no_think` in a system message, the length of a question. Followed are values that come from
messages (or tools), through variables, namespaces and macros, in whatever order these are set.
Roles and types are structure, and so is whether a field is there or is empty. What asks for more is
either a text that is looked for, or it may be anything.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import nodes

from packer_cli._kernels.texts import may_hold
from packer_cli.chat.chat_template import MARK, environment, refusing_to_compile
from packer_cli.chat.messages import ASSISTANT, MalformedError, kind_of, parse_json
from packer_cli.chat.probe import RESULT, RESULT_END, STRUCTURE, THOUGHT
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


# -- Words that matter

_OPEN = "<think>"
_THOUGHT_PROBED = f"{_OPEN}\n{THOUGHT}\n\n"
_Message = dict[str, Any]


@dataclass(frozen=True)
class Looks:
    """`literals`: texts that are looked for; `deep`: whether anything else of the words decides."""

    literals: frozenset[str]
    deep: bool

    @property
    def asks(self) -> bool:
        """Whether it looks for anything."""
        return self.deep or bool(self.literals)

    def find(self, messages: list[_Message]) -> bool:
        """Whether the words of a conversation may matter."""
        if self.deep or not self.literals:
            return self.deep
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
        known: tuple[str, ...] = ()
        if role == ASSISTANT:
            if content.count(THOUGHT) == 1 >= content.count(_OPEN):
                known = (_OPEN, THOUGHT)
        elif content.startswith(RESULT) and content.endswith(RESULT_END):
            known = (RESULT, RESULT_END)
        around = _THOUGHT_PROBED if THOUGHT in content else ""
        others = self.literals.difference(known)
        return any(one in content or one in around for one in others)


def looks_of(tree: nodes.Template, given: str, arguments: Collection[str]) -> Looks:
    """What a template looks for in what is `given`, "messages" or "tools". `arguments`: names of
    what else it is given.
    """
    return _Analysis(tree, given).looks(arguments)


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


class _Value(IntFlag):
    """What a value may be.

    WORDS    it has words of the record in it
    ALTERED  in another case, or joined: a text in them may not be in the record
    BUILT    put together with others: as a whole they are not in the record
    RECORD   a message, a call or a tool: what is looked for in it is a field
    RECORDS  a list of these
    PIECES   pieces of a text, which one looks for
    """

    WORDS = 1
    ALTERED = 2
    BUILT = 4
    RECORD = 8
    RECORDS = 16
    PIECES = 32


_WORDS, _ALTERED, _BUILT, _RECORD, _RECORDS, _PIECES = _Value
_NOTHING = _Value(0)
_TEXT, _LIST = _WORDS | _ALTERED | _BUILT, _RECORDS | _PIECES
# Methods of words, and filters: that look for their first argument; those of them that tell no more
# than that; that give other words; those of them that are not in the record; and filters whose
# result depends on the words.
_SEEKING = ("find", "rfind", "index", "rindex", "count", "startswith", "endswith", "split",
            "rsplit", "partition", "rpartition", "replace", "removeprefix",
            "removesuffix")  # fmt: skip
_TELLING = _SEEKING[:7]
_SPLITTING = _SEEKING[7:11]
_ALTERING = ("upper", "lower", "title", "capitalize", "swapcase", "casefold", "join", "format")
_WRITING = (*_ALTERING, "items", "keys", "values", "append")
_TRIMMING = ("strip", "lstrip", "rstrip")
_LENGTHS = ("length", "count")
_CHOOSING = ("selectattr", "rejectattr")
_DECIDING = ("select", "reject", "sort", "unique", "groupby", "min", "max", "sum", "wordcount",
             "truncate", "batch", "slice", "int", "float")  # fmt: skip
_TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean",
          "true", "false", "number", "integer", "float", "callable", "sameas")  # fmt: skip
_EQUAL = ("equalto", "eq", "==", "ne", "!=")
_COUNTED = ("index", "index0", "revindex", "revindex0", "length")  # of loops


class _Analysis:
    """Passes over a template until nothing changes.

    values   of variables and of what namespaces hold ("ns.name")
    outside  variables that words are compared with, and that the template does not set
    constants  texts of those that it sets to nothing else
    """

    def __init__(self, tree: nodes.Template, given: str) -> None:
        self._set_here = {one.name for one in tree.find_all(nodes.Name) if one.ctx != "load"}
        self._values = defaultdict[str, _Value](lambda: _NOTHING)
        self._values |= {"messages": _RECORDS, "tools": _RECORDS}
        self._values[given] |= _WORDS
        self._outside, self._constants = set[str](), _constants_in(tree)
        self._macros = {one.name: one for one in tree.find_all(nodes.Macro)}
        self._literals, self._deep = set[str](), False
        before: dict[str, _Value] = {}
        while before != self._values:  # values flow through variables that are set further down
            before = dict(self._values)
            self._run(tree.body)

    def looks(self, arguments: Collection[str]) -> Looks:
        """What is looked for by a template that is given these."""
        literals = frozenset(filter(None, self._literals))
        deep = self._deep or not self._outside.isdisjoint(arguments)
        return Looks(literals, deep or any(one.isdigit() for one in literals))  # as marks are

    # -- Statements

    def _run(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self._step(node)

    def _step(self, node: nodes.Node) -> None:
        match node:
            case nodes.If():
                self._of(node.test)
                self._run([*node.body, *node.elif_, *node.else_])
            case nodes.For():
                self._loop(node)
                self._run([*node.body, *node.else_])
            case nodes.Assign():
                self._assign(node.target, node.node)
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    self._assign(target, value)
                self._run(node.body)
            case nodes.AssignBlock():
                self._set(node.target, _WORDS)
                self._run(node.body)
            case nodes.ExprStmt():
                if _name_of(getattr(node.node, "node", None)) != MARK:
                    self._of(node.node)
            case nodes.Expr():
                self._of(node)
            case _:
                self._run(node.iter_child_nodes())

    def _loop(self, node: nodes.For) -> None:
        value = self._of(node.iter)
        if value & _WORDS and not value & _LIST:
            self._deep |= _counts_characters(node)
        is_record = value & _RECORDS and isinstance(node.target, nodes.Name)
        self._set(node.target, value & _TEXT | (_RECORD if is_record else _NOTHING))
        if node.test is not None:
            self._of(node.test)

    def _assign(self, target: nodes.Node, value: nodes.Node) -> None:
        if isinstance(value, nodes.Call) and _name_of(value.node) == "namespace":
            for one in value.kwargs:
                self._values[f"{_name_of(target)}.{one.key}"] |= self._of(one.value)
            return
        self._set(target, self._of(value))

    def _set(self, target: nodes.Node, value: _Value) -> None:
        places = [_place_of(target)] if _place_of(target) else [
            one.name for one in target.find_all(nodes.Name)
        ]  # fmt: skip
        for place in places:
            self._values[place] |= value

    # -- Expressions

    def _of(self, node: Any) -> _Value:
        match node:
            case None:
                return _NOTHING
            case nodes.Name():
                return self._values[node.name]
            case nodes.Getattr():
                return self._item(node.node, node.attr)
            case nodes.Getitem():
                return self._indexed(node)
            case nodes.Filter():
                return self._filtered(node)
            case nodes.Call():
                return self._called(node)
            case nodes.Test():
                self._tested(node)
                return _NOTHING
            case nodes.Compare():
                left = node.expr
                for operand in node.ops:
                    self._compare(operand.op, left, operand.expr)
                    left = operand.expr
                return _NOTHING
            case nodes.CondExpr():
                self._of(node.test)
                return self._of(node.expr1) | self._of(node.expr2)
        value = self._all(node.iter_child_nodes())
        if isinstance(node, nodes.Not):
            return _NOTHING
        is_built = value & _WORDS and isinstance(node, nodes.Add | nodes.Concat)
        return value | _BUILT if is_built else value

    def _all(self, parts: Iterable[nodes.Node]) -> _Value:
        value = _NOTHING
        for part in parts:
            value |= self._of(part) & _TEXT
        return value

    def _item(self, of: nodes.Expr, key: str) -> _Value:
        if key in STRUCTURE:
            return _NOTHING
        if _name_of(of) == "loop":
            return _WORDS if key in ("previtem", "nextitem", "changed") else _NOTHING
        value = self._of(of) & _TEXT | self._values[f"{_name_of(of)}.{key}"]
        return value | _RECORDS if key == "tool_calls" else value

    def _indexed(self, node: nodes.Getitem) -> _Value:
        key, name = node.arg, _constant(node.arg)
        if isinstance(name, str):
            return self._item(node.node, name)
        value, is_slice = self._of(node.node), isinstance(key, nodes.Slice)
        chosen = self._all(key.iter_child_nodes() if is_slice else [key]) & _WORDS
        within = is_slice or (isinstance(name, int) and abs(name) > 1)
        if chosen or (value & _WORDS and within and not value & _LIST):
            self._deep = True
        if is_slice:
            return value
        return value & _TEXT | (_RECORD if value & _RECORDS else _NOTHING)

    def _filtered(self, node: nodes.Filter) -> _Value:
        value = self._of(node.node)
        given = [*node.args, *(one.value for one in node.kwargs)]
        other, words = self._all(given), bool(value & _WORDS)
        if node.name in _LENGTHS:
            self._deep |= words and not value & _LIST
            return _NOTHING
        self._deep |= words and node.name in _DECIDING
        if words and node.name in _CHOOSING and _constant(*given[:1]) not in STRUCTURE:
            self._deep |= len(given) > 1 and _constant(given[1]) not in _TESTS
        if words and node.name == "replace":
            self._look_for(given[0])
        if node.name in (*_CHOOSING, "list", "reverse"):
            return value | other
        if node.name == "map":
            return value & _TEXT | (_PIECES if value & _LIST else _NOTHING)
        return value & _TEXT | other | (_ALTERED if node.name in _ALTERING else _NOTHING)

    def _tested(self, node: nodes.Test) -> None:
        if node.args and (node.name in _EQUAL or node.name == "in"):
            self._compare("in" if node.name == "in" else "eq", node.node, node.args[0])
        else:
            self._all(node.args)
            self._deep |= bool(self._of(node.node) & _WORDS) and node.name not in _TESTS

    def _compare(self, operator: str, left: Any, right: Any) -> None:
        is_length = isinstance(left, nodes.Filter) and left.name in _LENGTHS
        if is_length and _constant(right) == 0:  # whether something is empty
            self._of(left.node)
            return
        one, other = self._of(left), self._of(right)
        if not (one | other) & _WORDS:
            return
        is_whole = operator in ("eq", "ne")
        if "" not in (_constant(left), _constant(right)):
            self._deep |= _is_altered(left, one, is_whole) or _is_altered(right, other, is_whole)
        if one & other & _WORDS:
            self._deep = True
        elif is_whole:
            self._look_for(right if one & _WORDS else left)
        elif operator not in ("in", "notin"):
            self._deep = True
        elif other & _WORDS:
            if not other & _RECORD:  # else it asks whether there is a field
                self._look_for(left)
        elif isinstance(right, nodes.Name) and right.name not in self._set_here:
            self._outside.add(right.name)
        else:
            self._look_for(right)

    def _look_for(self, node: nodes.Expr) -> None:
        """A text that is looked for in words; numbers and the like are structure."""
        for one in node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]:
            if isinstance(one, nodes.Const):
                if isinstance(one.value, str):
                    self._literals.add(one.value)
            elif isinstance(one, nodes.Name) and one.name in self._constants:
                self._literals |= self._constants[one.name]
            else:
                self._deep = True

    def _called(self, node: nodes.Call) -> _Value:
        given = [*node.args, *(one.value for one in node.kwargs)]
        if not isinstance(node.node, nodes.Getattr):
            name = _name_of(node.node)
            if name in self._macros:
                for argument, given_it in zip(self._macros[name].args, node.args, strict=False):
                    self._values[argument.name] |= self._of(given_it)
                for one in node.kwargs:
                    self._values[one.key] |= self._of(one.value)
            other = self._all(given)
            self._deep |= name == "range" and bool(other & _WORDS)
            return other
        value, name = self._of(node.node.node), node.node.attr
        other = self._all(given)
        if not value & _WORDS:
            self._deep |= bool(other & _WORDS) and name not in _WRITING
            return other | (_ALTERED if name in _ALTERING else _NOTHING)
        first = _constant(*node.args[:1])
        if name == "get" and isinstance(first, str):
            return self._item(node.node.node, first) | other
        if name in _SEEKING and node.args:
            self._look_for(node.args[0])
            self._deep |= _is_altered(node.node.node, value, False)
            if name in _TELLING:
                return _NOTHING
            return value & _TEXT | (_PIECES if name in _SPLITTING else _NOTHING)
        if name in _TRIMMING:
            self._deep |= bool(node.args) and not (isinstance(first, str) and not first.strip())
        elif name not in _WRITING and name not in _SPLITTING:
            self._deep = True
        return value & _TEXT | (_ALTERED if name in _ALTERING else _NOTHING)


def _is_altered(node: nodes.Node, value: _Value, is_whole: bool) -> bool:
    """Whether a text in a value, or the value `is_whole`, may be none of the record's. What
    variables have around words, as `<think>`, makes no difference to a text that is looked for.
    """
    is_built = is_whole or isinstance(node, nodes.Add | nodes.Concat)
    return bool(value & (_ALTERED | _BUILT if is_built else _ALTERED))


def _counts_characters(node: nodes.For) -> bool:
    """Whether a loop may count the characters of a text: it asks for no field of what it goes over,
    as of a part of content, nor for names along with values, and it counts.
    """
    name = _name_of(node.target)
    fields: list[Any] = [*node.find_all((nodes.Getattr, nodes.Getitem))]
    counts = node.find(nodes.NSRef) is not None or any(
        _name_of(field.node) == "loop" and getattr(field, "attr", "") in _COUNTED
        for field in fields
    )
    return counts and name is not None and all(_name_of(field.node) != name for field in fields)


def _constants_in(tree: nodes.Template) -> dict[str, set[str]]:
    """The texts of variables that are only ever set to texts."""
    values = defaultdict[str, set[Any]](set)
    for one in tree.find_all(nodes.Assign):
        if isinstance(one.target, nodes.Name):
            text = _constant(one.node)
            values[one.target.name].add(text if isinstance(text, str) else None)
    return {name: texts for name, texts in values.items() if None not in texts}


def _name_of(node: Any) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _place_of(node: Any) -> str:
    """The name of a variable, or of what a namespace holds; "" for others."""
    return f"{node.name}.{node.attr}" if isinstance(node, nodes.NSRef) else _name_of(node) or ""


def _constant(node: Any = None) -> Any:
    """The value of a constant; None for anything else."""
    return node.value if isinstance(node, nodes.Const) else None
