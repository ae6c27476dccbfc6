"""What a chat template looks for in the words of a conversation, told from its syntax tree.

Most templates only write words: then a conversation of marks in their place is rendered alike, and
one of the same structure, too. Others look for something: `/no_think` in a system message, the
length of a question. Whether a record has that tells if its words may matter.

Followed are values that come from messages (or tools), through variables, namespaces and macros, in
whatever order these are set. Roles and types are structure, and so is whether a field is there or
is empty. What asks for more is either a text that is looked for, or it may be anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import nodes

from packer_cli._kernels.texts import may_hold
from packer_cli.chat.messages import ASSISTANT
from packer_cli.chat.probe import RESULT, RESULT_END, STRUCTURE, THOUGHT
from packer_cli.chat.sandbox import MARK

_SPELLED = ("find", "rfind", "index", "rindex", "count", "startswith", "endswith", "split",
            "rsplit", "partition", "rpartition", "replace", "removeprefix",
            "removesuffix")  # fmt: skip
_TOLD = ("find", "rfind", "index", "rindex", "count", "startswith", "endswith")  # are no words
_TRIMMED = ("strip", "lstrip", "rstrip")
_WRITTEN = ("upper", "lower", "title", "capitalize", "join", "items", "keys", "values", "format")
_ALTERED = ("upper", "lower", "title", "capitalize", "swapcase", "casefold", "join", "format")
_COUNTED = ("index", "index0", "revindex", "revindex0", "length")  # of loops
_LENGTHS = ("length", "count")
_CHOOSING = ("selectattr", "rejectattr")
_DEEP_FILTERS = ("select", "reject", "sort", "unique", "groupby", "min", "max", "sum", "wordcount",
                 "truncate", "batch", "slice", "int", "float")  # fmt: skip
_TESTS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean",
          "true", "false", "number", "integer", "float", "callable", "sameas")  # fmt: skip
_EQUAL = ("equalto", "eq", "==", "ne", "!=")
_OPEN = "<think>"
_THOUGHT_PROBED = f"{_OPEN}\n{THOUGHT}\n\n"
_LOOKED = ("content", "role")
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

    @cached_property
    def _around_thoughts(self) -> bool:
        """Whether a text is looked for that a probe has around each thought."""
        return any(one in _THOUGHT_PROBED for one in self.literals - {_OPEN, THOUGHT})

    def find(self, messages: Iterable[_Message]) -> bool:
        """Whether the words of a conversation may matter."""
        return self.deep or (bool(self.literals) and any(map(self._has, messages)))

    def _has(self, message: _Message) -> bool:
        content = message.get("content")
        if type(content) is str:
            has = any(literal in content for literal in self.literals) or (
                self._around_thoughts and THOUGHT in content
            )
            if has and not self._as_probed(message.get("role"), content):
                return True
        elif content is not None and any(may_hold(content, one) for one in self.literals):
            return True
        if len(message) < 3:
            return False
        rest = {key: value for key, value in message.items() if key not in _LOOKED}
        return any(may_hold(rest, literal) for literal in self.literals)

    def _as_probed(self, role: Any, content: str) -> bool:
        """Whether a probe has what is looked for just as the content has it: in a thought of the
        assistant, or around the result of a tool.
        """
        if role == ASSISTANT:
            known = (_OPEN, THOUGHT) * (content.count(THOUGHT) == 1 >= content.count(_OPEN))
        else:
            is_result = content.startswith(RESULT) and content.endswith(RESULT_END)
            known = (RESULT, RESULT_END) * is_result
        others = self.literals.difference(known)
        return not any(one in content or (known and one in _THOUGHT_PROBED) for one in others)


class TwoLooks(NamedTuple):
    """What one template looks for, in messages and in tools."""

    messages: Looks
    tools: Looks


def mentions_in(tree: nodes.Template) -> frozenset[str]:
    """All names of attributes and all texts in a template: it reads no key but these."""
    names = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
    return frozenset(names.union(texts))


def looks_of(tree: nodes.Template, given: str, arguments: Collection[str]) -> Looks:
    """What a template looks for in "messages" or in "tools". `arguments`: what else it is given."""
    analysis = _Analysis(
        given, {one.name for one in tree.find_all(nodes.Name) if one.ctx != "load"}
    )
    size = -1
    while size != analysis.size:  # values flow through variables that are set further down, too
        size = analysis.size
        analysis.visit_all(tree.body)
    literals = frozenset(filter(None, analysis.literals))
    deep = analysis.deep or not analysis.outside.isdisjoint(arguments)
    return Looks(literals, deep or any(one.isdigit() for one in literals))  # as marks are


def is_constant_prompt(tree: nodes.Template) -> bool:
    """Whether the prompt for an answer is the same text whatever the conversation is: one `if` at
    the top of the template asks for it alone, and writes what no loop or message changes.
    """
    name = "add_generation_prompt"
    asking = [one for one in tree.body if isinstance(one, nodes.If) and _name_of(one.test) == name]
    if len(asking) != 1 or asking[0].elif_ or asking[0].else_:
        return False
    if any(
        not isinstance(one, nodes.ExprStmt) for one in tree.body[tree.body.index(asking[0]) + 1 :]
    ):
        return False
    if sum(one.name == name for one in tree.find_all(nodes.Name)) != 1:
        return False
    own = {one.name for one in tree.find_all(nodes.Name) if one.ctx != "load"}
    inner: Any = (nodes.If, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.Test,
                  nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand)  # fmt: skip
    within = [part for one in asking[0].body for part in (one, *one.find_all(nodes.Node))]
    return all(
        isinstance(part, inner)
        and not (isinstance(part, nodes.Name) and part.name in {*own, "messages", "tools"})
        for part in within
    )


class _Analysis:
    """One pass after another over a template.

    words     names of variables, and of what namespaces hold, with words in them
    lists     those that are lists of messages or calls, or pieces of a text
    records   those that are messages or calls
    altered   those of words in other case, or joined
    built     those of words that are put together with others
    constants texts of variables that are only ever set to one
    outside   variables that words are compared with, and that the template does not set
    """

    def __init__(self, given: str, own: set[str]) -> None:
        self._own, self.outside = own, set[str]()
        self.words, self.lists = {given}, {"messages", "tools"}
        self.records, self.altered, self.built = set[str](), set[str](), set[str]()
        self.constants: dict[str, set[str]] = {}
        self.changing = set[str]()
        self.macros: dict[str, list[str]] = {}
        self.literals, self.deep = set[str](), False

    @property
    def size(self) -> int:
        sets = (
            self.words,
            self.lists,
            self.altered,
            self.built,
            self.macros,
            self.changing,
            self.records,
        )
        return sum(map(len, sets))

    # -- Statements

    def visit_all(self, body: Iterable[nodes.Node]) -> None:
        for node in body:
            self._visit(node)

    def _visit(self, node: nodes.Node) -> None:  # noqa: PLR0912 one case for each statement
        match node:
            case nodes.Output():
                for child in node.nodes:
                    self._of(child)
            case nodes.If():
                if not _only_refuses(node):
                    self._of(node.test)
                self.visit_all([*node.body, *node.elif_, *node.else_])
            case nodes.For():
                if self._of(node.iter):
                    self._set(node.target)
                    self.deep |= not self._is_list(node.iter) and _counts_characters(node)
                if isinstance(node.target, nodes.Name) and self._is_records(node.iter):
                    self.records.add(node.target.name)
                if node.test is not None:
                    self._of(node.test)
                self.visit_all([*node.body, *node.else_])
            case nodes.Assign():
                self._assign(node)
            case nodes.With():
                for target, value in zip(node.targets, node.values, strict=True):
                    self._assign(nodes.Assign(target, value))
                self.visit_all(node.body)
            case nodes.AssignBlock():
                self._set(node.target)
                self.visit_all(node.body)
            case nodes.Macro():
                self.macros[node.name] = [argument.name for argument in node.args]
                self.visit_all(node.body)
            case nodes.ExprStmt():
                if _name_of(getattr(node.node, "node", None)) != MARK:
                    self._of(node.node)
            case nodes.Expr():
                self._of(node)
            case _:
                self.visit_all(node.iter_child_nodes())

    def _assign(self, node: nodes.Assign) -> None:
        value, target = node.node, node.target
        if isinstance(value, nodes.Call) and _name_of(value.node) == "namespace":
            for one in value.kwargs:
                if self._of(one.value):
                    self.words.add(f"{_name_of(target)}.{one.key}")
            return
        if isinstance(target, nodes.Name):
            if isinstance(value, nodes.Const) and isinstance(value.value, str):
                self.constants.setdefault(target.name, set()).add(value.value)
            else:
                self.changing.add(target.name)
            if self._is_list(value):
                self.lists.add(target.name)
            if self._is_record(value):
                self.records.add(target.name)
        if self._of(value):
            self._set(target)
            if self._is_altered(value, built=False):
                self.altered.add(_place_of(target))
            elif self._is_altered(value, whole=True):
                self.built.add(_place_of(target))

    def _set(self, target: nodes.Node) -> None:
        if isinstance(target, nodes.NSRef):
            self.words.add(f"{target.name}.{target.attr}")
        elif isinstance(target, nodes.Name):
            self.words.add(target.name)
        else:
            for one in target.find_all(nodes.Name):
                self.words.add(one.name)

    # -- Expressions: whether the value has words in it

    def _of(self, node: Any) -> bool:
        match node:
            case None | nodes.Const() | nodes.TemplateData():
                return False
            case nodes.Name():
                return node.name in self.words
            case nodes.Getattr():
                return self._item(node.node, node.attr)
            case nodes.Getitem():
                return self._indexed(node)
            case nodes.Filter():
                return self._filtered(node)
            case nodes.Test():
                self._tested(node)
                return False
            case nodes.Compare():
                self._compared(node)
                return False
            case nodes.Not():
                self._of(node.node)
                return False
            case nodes.CondExpr():
                if not _raises(node.expr1) and not _raises(node.expr2):
                    self._of(node.test)
                one, other = self._of(node.expr1), self._of(node.expr2)
                return one or other
            case nodes.Call():
                return self._called(node)
        return self._any(node.iter_child_nodes())

    def _any(self, parts: Iterable[nodes.Node]) -> bool:
        return any([self._of(part) for part in parts])  # noqa: C419 each is to be visited

    def _item(self, value: nodes.Expr, key: str) -> bool:
        if key in STRUCTURE:
            return False
        if _name_of(value) == "loop":
            return key in ("previtem", "nextitem", "changed")
        return f"{_name_of(value)}.{key}" in self.words or self._of(value)

    def _indexed(self, node: nodes.Getitem) -> bool:
        key = node.arg
        if isinstance(key, nodes.Const) and isinstance(key.value, str):
            return self._item(node.node, key.value)
        words = self._of(node.node)
        index = key.iter_child_nodes() if isinstance(key, nodes.Slice) else [key]
        by_words = self._any(index)
        within = isinstance(key, nodes.Slice) or (
            isinstance(key, nodes.Const) and isinstance(key.value, int) and abs(key.value) > 1
        )
        if by_words or (words and within and not self._is_list(node.node)):
            self.deep = True
        return words

    def _filtered(self, node: nodes.Filter) -> bool:
        words = self._of(node.node)
        given = [*node.args, *(one.value for one in node.kwargs)]
        of_words = self._any(given)
        if node.name in _LENGTHS:
            self.deep |= words and not self._is_list(node.node)
            return False
        if words and node.name in _DEEP_FILTERS:
            self.deep = True
        if words and node.name in _CHOOSING and _constant(given[:1]) not in STRUCTURE:
            if len(given) == 3 and _constant(given[1:2]) in _EQUAL:
                self._look_for(given[2])
            elif len(given) > 1 and _constant(given[1:2]) not in _TESTS:
                self.deep = True
        if words and node.name == "replace":
            self._look_for(given[0])
        return words or of_words

    def _tested(self, node: nodes.Test) -> None:
        words = self._of(node.node)
        of_words = self._any(node.args)
        if node.name in _EQUAL and node.args and (words or of_words):
            self._look_for(node.args[0] if words else node.node)
            self.deep |= self._is_altered(node, whole=_constant(node.args) != "")
        elif node.name == "in" and node.args and (words or of_words):
            self.deep |= self._is_altered(node)
            self._look_in(node.node, node.args[0], words=words, of_words=of_words)
        elif words and node.name not in _TESTS:
            self.deep = True

    def _compared(self, node: nodes.Compare) -> None:
        left: Any = node.expr
        for operand in node.ops:
            right = operand.expr
            if isinstance(left, nodes.Filter) and left.name in _LENGTHS and _constant([right]) == 0:
                self._of(left.node)  # whether something is empty
                left = operand.expr
                continue
            words, of_words = self._of(left), self._of(right)
            if (words or of_words) and "" not in (_constant([left]), _constant([right])):
                whole = operand.op in ("eq", "ne")
                self.deep |= self._is_altered(left if words else right, whole=whole)
            if operand.op in ("in", "notin"):
                self._look_in(left, right, words=words, of_words=of_words)
            elif (words or of_words) and operand.op in ("eq", "ne"):
                if words and of_words:
                    self.deep = True
                else:
                    self._look_for(right if words else left)
            elif words or of_words:
                self.deep = True
            left = operand.expr

    def _look_in(self, left: nodes.Expr, right: nodes.Expr, *, words: bool, of_words: bool) -> None:
        if of_words and not words:
            if not self._is_record(right):  # else it asks whether there is a field
                self._look_for(left)
        elif words and isinstance(right, nodes.Name) and right.name not in self._own:
            self.outside.add(right.name)
        elif words and isinstance(right, nodes.List | nodes.Tuple) and not of_words:
            for one in right.items:
                self._look_for(one)
        elif words:
            self.deep = True

    def _look_for(self, node: nodes.Expr) -> None:
        """A text that is looked for in words; numbers and the like are structure."""
        for one in node.items if isinstance(node, nodes.List | nodes.Tuple) else [node]:
            if isinstance(one, nodes.Const):
                if isinstance(one.value, str):
                    self.literals.add(one.value)
            elif isinstance(one, nodes.Name) and one.name in self.constants.keys() - self.changing:
                self.literals |= self.constants[one.name]
            else:
                self.deep = True

    def _called(self, node: nodes.Call) -> bool:
        given = [*node.args, *(one.value for one in node.kwargs)]
        of_words = [self._of(one) for one in given]
        if not isinstance(node.node, nodes.Getattr):
            name = _name_of(node.node)
            if name in self.macros:
                self.words.update(
                    argument for argument, has in zip(self.macros[name], of_words, strict=False)
                    if has
                )  # fmt: skip
                named = {one.key for one in node.kwargs if self._of(one.value)}
                self.words |= named & set(self.macros[name])
            elif name == "range" and any(of_words):
                self.deep = True
            return any(of_words)
        words, name = self._of(node.node.node), node.node.attr
        if not words:
            self.deep |= any(of_words) and name not in (*_WRITTEN, "append")
            return any(of_words)
        if name == "get" and node.args and isinstance(key := _constant(node.args[:1]), str):
            return self._item(node.node.node, key) or any(of_words)
        if name in _SPELLED and node.args:
            self._look_for(node.args[0])
            self.deep |= self._is_altered(node.node.node)
            return name not in _TOLD
        if name in _TRIMMED:
            characters = _constant(node.args[:1]) if node.args else ""
            self.deep |= not isinstance(characters, str) or bool(characters.strip())
        elif name not in _WRITTEN and name != "append":
            self.deep = True
        return True

    def _is_altered(self, node: nodes.Node, *, whole: bool = False, built: bool = True) -> bool:
        """Whether words are not as the record has them: a text in them may not be in that.

        `whole`: whether the value is compared as a whole; if it is only looked into, what variables
        have around words makes no difference, as in `<think>` with a thought. `built`: whether
        words put together count.
        """
        match node:
            case nodes.Concat() | nodes.Add() if built:
                return True
            case nodes.Filter() if node.name in _ALTERED:
                return True
            case nodes.Call() if getattr(node.node, "attr", None) in _ALTERED:
                return True
            case nodes.Name() | nodes.Getattr():
                place = _place_of(node)
                if place in self.altered or (whole and place in self.built):
                    return True
            case nodes.Getitem():  # not its index
                return self._is_altered(node.node, whole=whole, built=built)
        return any(
            self._is_altered(one, whole=whole, built=built) for one in node.iter_child_nodes()
        )

    def _is_record(self, node: Any) -> bool:
        """Whether it is a message, a tool or a call: no text in any case."""
        if isinstance(node, nodes.Getitem):
            return not isinstance(node.arg, nodes.Slice) and self._is_records(node.node)
        return isinstance(node, nodes.Name) and node.name in self.records

    def _is_records(self, node: Any) -> bool:
        return not isinstance(node, nodes.Call) and self._is_list(node)

    def _is_list(self, node: Any) -> bool:
        """Whether it is a list of messages, calls or tools, or of the pieces of a text."""
        match node:
            case nodes.Name():
                return node.name in self.lists
            case nodes.Getattr():
                return bool(node.attr == "tool_calls")
            case nodes.Getitem():
                if isinstance(node.arg, nodes.Slice):
                    return self._is_list(node.node)
                return bool(_constant([node.arg]) == "tool_calls")
            case nodes.Filter():
                kept = (*_CHOOSING, "list", "reverse", "map")
                return node.name in kept and self._is_list(node.node)
            case nodes.Call() if isinstance(node.node, nodes.Getattr):
                return node.node.attr in ("split", "rsplit", "partition", "rpartition")
        return False


def _counts_characters(node: nodes.For) -> bool:
    """Whether a loop may count the characters of a text: it asks for no field of what it goes over,
    as of a part of content, nor for names along with values, and it counts.
    """
    name = _name_of(node.target)
    fields: Iterable[Any] = node.find_all((nodes.Getattr, nodes.Getitem))
    counts = node.find(nodes.NSRef) is not None
    for field in fields:
        if _name_of(field.node) == name:
            return False
        counts |= _name_of(field.node) == "loop" and getattr(field, "attr", "") in _COUNTED
    return name is not None and counts


def _only_refuses(node: nodes.If) -> bool:
    """Whether a condition decides whether the conversation is refused, and nothing else."""
    if node.elif_ or node.else_:
        return False
    inner = [child for one in node.body for child in getattr(one, "nodes", [one])]
    shown = [one for one in inner if not _is_blank(one)]
    return bool(shown) and all(map(_raises, shown))


def _raises(node: Any) -> bool:
    return isinstance(node, nodes.Call) and _name_of(node.node) == "raise_exception"


def _is_blank(node: Any) -> bool:
    return isinstance(node, nodes.TemplateData) and not node.data.strip()


def _name_of(node: Any) -> str | None:
    return node.name if isinstance(node, nodes.Name) else None


def _place_of(node: Any) -> str:
    """The name of a variable, or of what a namespace holds; "" for others."""
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr):
        return f"{_name_of(node.node)}.{node.attr}"
    return _name_of(node) or ""


def _constant(given: list[Any]) -> Any:
    return given[0].value if given and isinstance(given[0], nodes.Const) else None
