"""A chat template's syntax tree as plain Python: what jinja2 renders, in a sixth of the time.

jinja2's own compiler asks the sandbox for every attribute, item and call, and makes an object for
every loop. This one is that compiler with shortcuts written out where the answer is known, each
for plain values of the types that JSON has and with jinja2's way beside it for all others:

    message.role                     an item of a dict, whatever name of no method of dicts it has
    content.strip('\n'), x.items()   methods of strings and dicts that the sandbox lets through
    loop.first, loop.index0          comparisons of a counter
    x is string, x is defined        their definitions
    {{ a + b }}                      a piece of a list, without `str` where it is one already

Scopes, conditions, macros, filters and all else are jinja2's own. So is the sandbox: what is
written out are items of dicts and lists by constant keys and the named methods, never another
attribute or call. Who uses it compares it with jinja2 (engine_check.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from typing import Any, Protocol

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef, find_undeclared
from jinja2.environment import Environment
from jinja2.idtracking import (
    VAR_LOAD_ALIAS,
    VAR_LOAD_PARAMETER,
    VAR_LOAD_RESOLVE,
    VAR_LOAD_UNDEFINED,
)
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace

# number, how many pieces of text there are, the two other arguments of the call
Mark = tuple[int, int, Any, Any]
Root = Callable[[Context, "Tracker", bytearray], None]
# Each also runs in a context of blocks, loops or files of its own.
_NOT_COVERED: Any = (
    nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport,
    nodes.EvalContextModifier, nodes.ScopedEvalContextModifier,
)  # fmt: skip
_DICT_ATTRIBUTES = frozenset(dir(dict))
_METHODS = dict.fromkeys(("get", "items", "keys", "values"), "dict") | {
    name: "str" for name in dir(str) if not name.startswith(("_", "format"))
}
_LOOP = frozenset(
    ("index0", "index", "first", "last", "length", "revindex", "revindex0", "previtem", "nextitem")
)
_TEXT_FILTERS = frozenset(("tojson", "trim", "upper", "lower", "string"))  # they give strings
_SEQUENCES: tuple[type, ...] = (
    list,
    str,
    tuple,
    dict,
    type({}.items()),
    type({}.keys()),
    type({}.values()),
    range,
)
_COMMONS = {
    "resolve": "context.resolve_or_missing", "pieces": "tracker.pieces",
    "append": "pieces.append", "mark": "tracker.marks.append",
    "generation": "tracker.generation.extend",
    "undefined": "environment.undefined", "cond_expr_undefined": "undefined",
    "concat": "environment.concat",
}  # fmt: skip
_RESOLVED = "# what the context knows"
_IDENTITIES = {"none": "None", "true": "True", "false": "False"}


class Tracker(Protocol):
    """What a rendering adds to: pieces of text, the marks of loops, and those of generation
    blocks, each of these as a number and how many pieces there are.
    """

    pieces: list[str]
    marks: list[Mark]
    generation: list[int]


class NotCoveredError(Exception):
    """The template, or a value in it, is left to jinja2."""


def compiled(
    environment: Environment, tree: nodes.Template, given: Iterable[str], mark: str
) -> tuple[Root, int]:
    """A function that renders the template in a context: it adds to what a tracker holds,
    and sets a byte for every branch that it takes. The number is that of branches.

    given  variables that every context has
    mark   the function among them that is called as a statement: with a number, below 0 for
           generation blocks, and perhaps a value and a list of messages

    The function raises what jinja2 raises, and NotCoveredError for values that it cannot
    handle as jinja2 does. Raises NotCoveredError for a template with inheritance or imports.
    """
    if tree.find(_NOT_COVERED) is not None:
        raise NotCoveredError("blocks and imports")
    generator = _Generator(environment, frozenset(given), mark)
    generator.visit(tree)
    names: dict[str, Any] = {
        "environment": environment, "sequence": _sequence, "Undefined": Undefined,
        "Mapping": Mapping, "SEQUENCES": frozenset(_SEQUENCES),
        "of_namespace": _of_namespace(environment),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # templates may ask whether 'a' is none
        code = compile(generator.source, "<chat template>", "exec")
    exec(code, names)  # noqa: S102 it is sandboxed
    root: Root = names["root"]
    return root, generator.branches


def _sequence(values: Any) -> list[Any]:
    """The values as a list, where that cannot change what the template does."""
    if type(values) in _SEQUENCES or isinstance(values, Undefined):
        return list(values)
    raise NotCoveredError(f"a loop over {type(values).__name__}")  # generators are lazy


def _of_namespace(environment: Environment) -> Callable[[Any, str], Any]:
    """`values.name` in a template, quickly where that is a namespace."""
    attributes = object.__getattribute__  # a namespace's own is slow

    def of_namespace(values: Any, name: str) -> Any:
        if type(values) is Namespace:
            items = attributes(values, "_Namespace__attrs")
            if name in items:
                return items[name]
        return environment.getattr(values, name)

    return of_namespace


class _Generator(CodeGenerator):
    """`_sure`: references that hold a value at this place of the code, as far as is known."""

    def __init__(self, environment: Environment, given: frozenset[str], mark: str) -> None:
        self._out = StringIO()
        super().__init__(environment, "template", "<chat template>", self._out)
        self._given, self._mark = given, mark
        self._namespaces = set[str]()
        self._sure, self._ended = set[str](), set[str]()
        self._resolved = set[str]()
        self.branches = 0
        self._loops: dict[str, tuple[str, str]] = {}  # reference to loop: its counter, its list

    @property
    def source(self) -> str:
        resolved = (f"given_{name} = resolve({name!r})" for name in sorted(self._resolved))
        code = self._out.getvalue().replace(_RESOLVED, "; ".join(resolved) or "pass")
        return code.replace("def root(context,", "def root(context, tracker, ways,")

    # -- Expressions as strings

    def _expression(self, node: nodes.Node, frame: Frame) -> str:
        self.write("")  # the new line that is due
        stream, self.stream = self.stream, StringIO()
        self.visit(node, frame)
        code: str = self.stream.getvalue()
        self.stream = stream
        return code

    def _twice(self, node: nodes.Expr, frame: Frame) -> tuple[str, str]:
        """(code that evaluates the expression, code that gives its value once more)"""
        if isinstance(node, nodes.Name) and self._is_sure(node, frame):
            return (frame.symbols.ref(node.name),) * 2
        again = self.temporary_identifier()
        return f"({again} := {self._expression(node, frame)})", again

    def _is_sure(self, node: nodes.Name, frame: Frame) -> bool:
        ref = frame.symbols.ref(node.name)
        load = frame.symbols.find_load(ref)
        if ref in self._sure or load is None:
            return ref in self._sure
        if load[0] == VAR_LOAD_PARAMETER:
            return not self.parameter_is_undeclared(ref)
        return load == (VAR_LOAD_RESOLVE, node.name) and node.name in self._given

    def _truth(self, node: nodes.Node, frame: Frame) -> str:
        """An expression that is as true as `node`."""
        if isinstance(node, nodes.And | nodes.Or):
            operator = "and" if isinstance(node, nodes.And) else "or"
            return f"({self._truth(node.left, frame)} {operator} {self._truth(node.right, frame)})"
        if isinstance(node, nodes.Not):
            return f"(not {self._truth(node.node, frame)})"
        if (key := _key_of(node)) is not None and key not in _DICT_ATTRIBUTES:
            return self._item(node, key, frame)
        if isinstance(node, nodes.Name) and not self._is_sure(node, frame):
            load = self._expression(node, frame)
            ref = frame.symbols.ref(node.name)
            return load if load == ref else f"({ref} is not missing and {ref})"
        return self._expression(node, frame)

    def _item(self, node: Any, key: str, frame: Frame) -> str:
        """The value of a key, None where a dict lacks it."""
        if self._is_namespace(node.node):
            return self._expression(node, frame)
        first, again = self._twice(node.node, frame)
        asked = "getattr" if isinstance(node, nodes.Getattr) else "getitem"
        otherwise = f"environment.{asked}({again}, {key!r})"
        return f"({again}.get({key!r}) if type({first}) is dict else {otherwise})"

    def _is_namespace(self, node: nodes.Expr) -> bool:
        """Whether it is a variable that the template makes a namespace of; it may also be unset."""
        return isinstance(node, nodes.Name) and node.name in self._namespaces

    # -- Expressions

    def visit_Name(self, node: nodes.Name, frame: Frame) -> None:  # noqa: N802 jinja2's name
        if node.ctx == "load" and self._is_sure(node, frame):
            self.write(frame.symbols.ref(node.name))
        else:
            super().visit_Name(node, frame)

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.node, nodes.Name) and node.node.name == "loop":
            loop = self._loops.get(frame.symbols.ref("loop"))
            if loop is not None:
                self.write(_of_loop(node.attr, *loop))
                return
        if node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
        else:
            self._write_item(node, node.attr, "getattr", frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if type(key) is str:
            self._write_item(node, key, "getitem", frame)
        elif type(key) is int and key >= 0:
            first, again = self._twice(node.node, frame)
            self.write(f"({again}[{key}] if type({first}) is list and len({again}) > {key}")
            self.write(f" else environment.getitem({again}, {key}))")
        else:
            super().visit_Getitem(node, frame)

    def _write_item(self, node: Any, key: str, asked: str, frame: Frame) -> None:
        if asked == "getattr" and self._is_namespace(node.node):
            self.write(f"of_namespace({self._expression(node.node, frame)}, {key!r})")
            return
        first, again = self._twice(node.node, frame)
        self.write(f"({again}[{key!r}] if type({first}) is dict and {key!r} in {again}")
        self.write(f" else environment.{asked}({again}, {key!r}))")

    def visit_Call(  # noqa: N802
        self, node: nodes.Call, frame: Frame, forward_caller: bool = False
    ) -> None:
        method = node.node
        plain = not (node.kwargs or node.dyn_args or node.dyn_kwargs or forward_caller)
        if (
            not plain
            or not isinstance(method, nodes.Getattr)
            or method.attr not in _METHODS
            or not all(map(_is_short, node.args))
        ):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        first, again = self._twice(method.node, frame)
        given = ", ".join(self._expression(argument, frame) for argument in node.args)
        self.write(f"({again}.{method.attr}({given}) if type({first}) is {_METHODS[method.attr]}")
        function = f"environment.getattr({again}, {method.attr!r})"
        self.write(f" else environment.call(context, {function}, {given}))")

    def visit_Not(self, node: nodes.UnaryExpr, frame: Frame) -> None:  # noqa: N802
        self.write(self._truth(node, frame))

    def visit_CondExpr(self, node: nodes.CondExpr, frame: Frame) -> None:  # noqa: N802
        if node.expr2 is None:
            super().visit_CondExpr(node, frame)
            return
        frame = frame.soft()
        test = self._truth(node.test, frame)
        one, other = (self._expression(part, frame) for part in (node.expr1, node.expr2))
        self.write(f"({one} if {test} else {other})")

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:  # noqa: N802
        if node.name == "trim" and node.node is not None and not _has_arguments(node):
            first, again = self._twice(node.node, frame)
            self.write(f"({again}.strip() if type({first}) is str")
            self.write(f" else {self.filters[node.name]}({again}))")
        else:
            super().visit_Filter(node, frame)

    def visit_Test(self, node: nodes.Test, frame: Frame) -> None:  # noqa: N802
        code = None if _has_arguments(node) else self._test(node.name, node.node, frame)
        if code is None:
            super().visit_Test(node, frame)
        else:
            self.write(code)

    def _test(self, name: str, node: nodes.Expr, frame: Frame) -> str | None:
        key = _key_of(node)
        if name in ("defined", "undefined"):
            lacks = self._lacks(node, frame)
            return f"(not {lacks})" if name == "defined" else lacks
        if name in _IDENTITIES:
            return f"({self._expression(node, frame)} is {_IDENTITIES[name]})"
        if name == "string" and key is not None and key not in _DICT_ATTRIBUTES:
            return f"isinstance({self._item(node, key, frame)}, str)"
        if name == "string":
            return f"isinstance({self._expression(node, frame)}, str)"
        if name not in ("mapping", "sequence", "iterable"):
            return None
        first, again = self._twice(node, frame)
        if name == "mapping":
            return f"(type({first}) is dict or isinstance({again}, Mapping))"
        return f"(type({first}) in SEQUENCES or {self.tests[name]}({again}))"

    def _lacks(self, node: nodes.Expr, frame: Frame) -> str:
        """Whether there is no such value."""
        key = _key_of(node)
        if isinstance(node, nodes.Name) and not self._is_sure(node, frame):
            load, ref = self._expression(node, frame), frame.symbols.ref(node.name)
            if load != ref:
                return f"({ref} is missing or isinstance({ref}, Undefined))"
        if not isinstance(node, nodes.Getattr) or key is None or key in _DICT_ATTRIBUTES:
            return f"isinstance({self._expression(node, frame)}, Undefined)"
        first, again = self._twice(node.node, frame)
        absent = f"{key!r} not in {again} or isinstance({again}[{key!r}], Undefined)"
        otherwise = f"isinstance(environment.getattr({again}, {key!r}), Undefined)"
        return f"(({absent}) if type({first}) is dict else {otherwise})"

    # -- Statements

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        for assign in node.find_all(nodes.Assign):
            called = getattr(getattr(assign.node, "node", None), "name", None)
            if isinstance(assign.target, nodes.Name) and called == "namespace":
                self._namespaces.add(assign.target.name)
        super().visit_Template(node, frame)

    def write_commons(self) -> None:
        for name, value in _COMMONS.items():
            self.writeline(f"{name} = {value}")
        self.writeline(_RESOLVED)

    def enter_frame(self, frame: Frame) -> None:
        """As jinja2's, with all that the context knows looked up once, at the beginning."""
        absent = []
        for target, (action, name) in frame.symbols.loads.items():
            if action == VAR_LOAD_RESOLVE:
                self._resolved.add(name)
                self.writeline(f"{target} = given_{name}")
            elif action == VAR_LOAD_ALIAS:
                self.writeline(f"{target} = {name}")
            elif action == VAR_LOAD_UNDEFINED:
                absent.append(target)
        if absent:
            self.writeline(f"{' = '.join(absent)} = missing")

    def start_write(self, frame: Frame, node: nodes.Node | None = None) -> None:
        if frame.buffer is None:
            self.writeline("append(", node)
        else:
            super().start_write(frame, node)

    def end_write(self, frame: Frame) -> None:
        self.write(")")

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        before = set(self._sure)
        super().blockvisit(nodes, frame)
        self._ended, self._sure = self._sure, before

    def macro_body(
        self, node: nodes.Macro | nodes.CallBlock, frame: Frame
    ) -> tuple[Frame, MacroRef]:
        sure, self._sure = self._sure, set()  # it runs at another time
        try:
            return super().macro_body(node, frame)
        finally:
            self._sure = sure

    def pop_assign_tracking(self, frame: Frame) -> None:
        """Variables are Python's alone: only blocks and imports would ask the context for them."""
        self._assign_stack.pop()

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:  # noqa: N802
        super().visit_Assign(node, frame)
        if isinstance(node.target, nodes.Name):
            self._sure.add(frame.symbols.ref(node.target.name))

    def visit_If(self, node: nodes.If, frame: Frame) -> None:  # noqa: N802
        inner, ends = frame.soft(), []
        for word, branch in (("if", node), *(("elif", other) for other in node.elif_)):
            self.writeline(f"{word} {self._truth(branch.test, inner)}:", branch)
            ends.append(self._branch(branch.body, inner))
        if node.else_:
            self.writeline("else:")
            ends.append(self._branch(node.else_, inner))
            self._sure |= set.intersection(*ends)

    def _branch(self, body: list[nodes.Node], frame: Frame) -> set[str]:
        """The references that hold a value at its end."""
        self.indent()
        self.writeline(f"ways[{self.branches}] = 1")
        self.branches += 1
        self.blockvisit(body, frame)
        self.outdent()
        return self._ended

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        call: Any = node.node
        if getattr(getattr(call, "node", None), "name", None) != self._mark:
            super().visit_ExprStmt(node, frame)
            return
        number, *values = [self._expression(value, frame) for value in call.args]
        value, messages = [*values, "None", "None"][:2]
        if call.args[0].value < 0:
            self.writeline(f"generation(({number}, len(pieces)))", node)
        else:
            self.writeline(f"mark(({number}, len(pieces), {value}, {messages}))", node)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        sure = set(self._sure)
        loop = f"l_{frame.symbols.level + 1}_loop"
        self._loops.pop(loop, None)
        if node.recursive or node.test or node.else_ or not _uses_counters_only(node):
            super().visit_For(node, frame)
        else:
            self._write_loop(node, frame)
        self._sure = sure
        self._loops.pop(loop, None)

    def _write_loop(self, node: nodes.For, frame: Frame) -> None:
        """A loop without the object that describes it."""
        inner = frame.inner()
        inner.loop_frame = True
        counted = "loop" in find_undeclared(node.iter_child_nodes(only=("body",)), ("loop",))
        if counted:
            index, values = self.temporary_identifier(), self.temporary_identifier()
            self._loops[inner.symbols.declare_parameter("loop")] = index, values
        inner.symbols.analyze_node(node, for_branch="body")
        iterated = self._expression(node.iter, frame)
        target = self._expression(node.target, inner)
        self.writeline("_loop_vars = {}", node)  # jinja2's calls pass it on; nothing here asks
        if counted:
            if isinstance(node.iter, nodes.Filter) and node.iter.name == "items":
                iterated = f"list({iterated})"  # a generator of pairs, which nobody else has
            self.writeline(f"{values} = {iterated}")
            self.writeline(f"if type({values}) is not list: {values} = sequence({values})")
            self.writeline(f"for {index}, {target} in enumerate({values}):")
        else:
            self.writeline(f"for {target} in {iterated}:")
        self.indent()
        self.enter_frame(inner)
        self.blockvisit(node.body, inner)
        self.outdent()
        self.leave_frame(inner)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:  # noqa: N802
        append = "append" if frame.buffer is None else f"{frame.buffer}.append"
        finalize = self._make_finalize()
        constant = ""
        for child in node.nodes:
            try:
                constant += self._output_child_to_const(child, frame, finalize)
                continue
            except Exception:
                text = self._text(child, frame)  # jinja2, too, tells no kinds apart here
            if constant:
                self.writeline(f"{append}({constant!r})")
                constant = ""
            self.writeline(f"{append}({text})", child)
        if constant:
            self.writeline(f"{append}({constant!r})")

    def _text(self, node: nodes.Expr, frame: Frame) -> str:
        if _is_text(node):
            return self._expression(node, frame)
        first, again = self._twice(node, frame)
        return f"({again} if type({first}) is str else str({again}))"


def _key_of(node: nodes.Node) -> str | None:
    """The constant key of `x.key` and `x['key']`, but of the loop's own."""
    if isinstance(node, nodes.Getattr):
        return None if isinstance(node.node, nodes.Name) and node.node.name == "loop" else node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value if type(node.arg.value) is str else None
    return None


def _has_arguments(node: Any) -> bool:
    return bool(node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)


def _is_short(node: nodes.Expr) -> bool:
    """Whether an argument may be written twice."""
    return isinstance(node, nodes.Const | nodes.Name)


def _is_text(node: nodes.Expr) -> bool:
    """Whether the value is a string for sure, if there is one: only strings add to strings."""
    if isinstance(node, nodes.Const):
        return type(node.value) is str
    if isinstance(node, nodes.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, nodes.CondExpr):
        return node.expr2 is not None and _is_text(node.expr1) and _is_text(node.expr2)
    if isinstance(node, nodes.Filter):
        return node.name in _TEXT_FILTERS
    return isinstance(node, nodes.Concat)


def _uses_counters_only(loop: nodes.For) -> bool:
    """Whether nothing asks for more of a loop, or of one inside it, than counting tells."""
    asked = sum(
        isinstance(node.node, nodes.Name) and node.node.name == "loop" and node.attr in _LOOP
        for node in loop.find_all(nodes.Getattr)
    )
    return asked == sum(name.name == "loop" for name in loop.find_all(nodes.Name))


def _of_loop(attribute: str, index: str, values: str) -> str:
    return {
        "index0": index,
        "index": f"({index} + 1)",
        "first": f"({index} == 0)",
        "last": f"({index} + 1 == len({values}))",
        "length": f"len({values})",
        "revindex": f"(len({values}) - {index})",
        "revindex0": f"(len({values}) - {index} - 1)",
        "previtem": f"({values}[{index} - 1] if {index} else "
        'undefined("there is no previous item"))',
        "nextitem": f"({values}[{index} + 1] if {index} + 1 < len({values}) else "
        'undefined("there is no next item"))',
    }[attribute]
