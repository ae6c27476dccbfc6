"""Which variables a template reads that it does not set itself.

jinja2 finds those that *may* be unset where they are read, and takes a variable for one that
every branch of an `if` sets. Here it is followed whether any way to a place does not set it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jinja2 import Environment, meta, nodes


def read_from_outside(tree: nodes.Template, environment: Environment) -> frozenset[str]:
    """Names of variables that a template reads, at some place, without having set them before."""
    names = _Names(environment)
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
    """As `meta.find_undeclared_variables`, which computes constant parts whatever its environment
    says: `'a' * 10**10` takes 10 GB.
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.optimizer = None
