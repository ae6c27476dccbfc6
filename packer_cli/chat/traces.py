"""Make documents of agent traces: one for each branch, of the token ids that the model saw.

    {"traces": [TRACE, ..]}                            an episode of the verifiers package
    {"nodes": [{"parent": 0, "token_ids": [..]}, ..]}  one of its traces: a graph of messages
    {"prompt_ids": [..], "completion_ids": [..]}       the flat form of other frameworks

A branch is the way from a root to a leaf, in the order of leaves; its document is the ids of its
nodes, end to end. What comes before a token is the same in all branches that share it, and so is
its loss: it is trained on in the first of them alone, and has the weight 0 in the others.

Other records are captures, calls that become such nodes: see `captures.py`. Records are decoded
one by one; the tokens of a batch of them are moved together.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from packer_cli.chat.captures import merge, sessions_of
from packer_cli.chat.messages import (
    Conversation,
    RefusedError,
    UndecidableError,
    conversation_of,
    parse_json,
)
from packer_cli.chat.trace_fields import (
    FIX,
    Fields,
    Ids,
    Mask,
    TraceError,
    field_at,
    first_field,
    length_of,
    number_lists,
    objects,
    plain,
    typed,
)
from packer_cli.errors import named
from packer_cli.inputs.record_columns import value_of
from packer_cli.inputs.selection import FITS, Selection
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import IN_TRACES, Shape, names_in_traces
from packer_cli.options.value_columns import (
    LOSS_WEIGHTS,
    RECORD,
    SAMPLED,
    ValueColumn,
    is_of_loss,
)
from packer_cli.records import (
    MOST_TURNS,
    POSITION,
    BadRecord,
    Documents,
    Filtered,
    InputFile,
    Int64,
    Records,
    UInt32,
    offsets_of,
    turn_position,
)
from packer_cli.result.columns import default_of, stored
from packer_cli.result.counts import Counts
from packer_cli.tokenization.encoding import Encode, Encoded
from packer_cli.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from packer_cli.chat.renderer import Document

_COMPARED_BYTES = 4 << 20  # of a file, about, whose branches are compared with the chat template
_UNKNOWN_BYTES = 1 << 28  # of stdin
_Array = npt.NDArray[Any]
_Streams = dict[str, list[float] | None]
_NOTHING = msgspec.Raw(b"[]")
_ROOTED = "expected a way to a root"
_Talk = tuple[list[Any], Any]  # messages and tools


_REASONS = (ValueError, msgspec.MsgspecError, RecursionError)  # why a record is bad


@dataclass
class _Branches:
    """Branches of records; each becomes a document.

    names, firsts   for each trace, its name for people, and the number of its first node
    entries, sizes  numbers of nodes, branch after branch, and how many each branch has
    record, number  for each branch, the index of its record, and its number there
    values, fits    for each branch, the values of its record, and what conditions that fits
    talks           by the number of a branch, messages that must have the same ids
    read            index of the record that is read
    """

    nodes: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    record: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    values: list[dict[str, _Array]] = field(default_factory=list)
    fits: list[int] = field(default_factory=list)
    talks: dict[int, _Talk] = field(default_factory=dict)
    read: int = 0
    counts: Counts = field(default_factory=Counts)

    def place(self, node: int) -> str:
        """Describe the place of a node."""
        trace = bisect_right(self.firsts, node) - 1
        place = f"{self.names[trace]}, node {node - self.firsts[trace]}"
        return str(getattr(self.nodes[node], "place", place))


class TraceEncoder:
    """Encoder of traces, an `encoding.Encode`."""

    def __init__(
        self,
        shape: Shape,
        config: DocumentConfig,
        encode: Encode,
        render: Callable[[Conversation], Document] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Set up the encoder.

        config     as `for_shape` returns it
        encode     encodes token ids
        render, tokenizer  make ids of a chat template, which are compared with some branches
        """
        self._columns, self._config, self._encode = shape.columns, config, encode
        self._names = names_in_traces(shape)
        self._render, self._tokenizer = render, tokenizer
        columns = config.value_columns
        self._sampled = [one for name, one in columns.items() if name in SAMPLED]
        self._weights = [one for name, one in columns.items() if is_of_loss(name)]
        self._of_records = [one for one in columns.values() if one.of == RECORD]
        self._selection = Selection.of(config)

    def __call__(self, records: Records, file: InputFile) -> Encoded:
        """Return the branches of a batch of records; those that are not traces join `bad`."""
        fields, bad = records.fields or [], list(records.bad)
        share = 0.0
        if self._render is not None:
            share = min(1.0, _COMPARED_BYTES / (file.size or _UNKNOWN_BYTES))
        compared = [_hashed(position) < share for position in records.positions.tolist()]
        kept = np.arange(len(fields))
        try:
            branches, documents = self._documents(fields, compared)
        except _REASONS:
            faults = [self._fault(record) for record in fields]
            kept = np.flatnonzero([fault is None for fault in faults])
            bad += [BadRecord(int(records.positions[at]), str(fault), getattr(fault, "tip", FIX))
                    for at, fault in enumerate(faults) if fault is not None]  # fmt: skip
            bad.sort(key=lambda one: one.position)
            branches, documents = self._documents(
                [fields[at] for at in kept], [compared[at] for at in kept]
            )
        if first := branches.counts.first_drifted:
            first[:] = file.index, int(records.positions[kept[first[0]]]), first[1]
        positions = records.positions[kept[branches.record]]
        records = replace(records, positions=positions, fields=None, documents=documents, bad=bad)
        batch, bad, counts = self._encode(records, file)
        counts.add(branches.counts)
        counts.compared_branches = len(branches.talks)
        counts.drifted_branches = sum(
            not self._gives(
                batch.token_ids[batch.offsets[number] : batch.offsets[number + 1]], talk
            )
            for number, talk in branches.talks.items()
        )
        position = turn_position(batch.position, np.array(branches.number, np.int64))
        return Encoded(batch.beside({}, {POSITION: position}), bad, counts)

    def _fault(self, record: Fields) -> Exception | None:
        """Return what is wrong with a record, if anything is."""
        try:
            self._documents([record], [False])
        except _REASONS as error:
            return error
        return None

    def _gives(self, ids: UInt32, talk: _Talk) -> bool:
        """Tell whether the chat template gives these ids. It may end the last turn, which the model
        did not.
        """
        if self._render is None or self._tokenizer is None:
            return True
        shape = Shape("messages", {name: name for name in ("messages", "tools")})
        try:
            fields = {"messages": [*map(_with_calls, talk[0])], "tools": _tools(talk[1])}
            conversation = conversation_of(fields, shape, "chat", lambda *of: False)
            text = self._render(conversation).text if conversation else ""
        except (RefusedError, UndecidableError, ValueError):
            return False
        rendered = self._tokenizer.encode_bare([text])[0]
        return np.array_equal(rendered[: len(ids)], ids)

    # -- A record to its branches

    def _documents(
        self, fields: Sequence[Fields], compared: Sequence[bool]
    ) -> tuple[_Branches, Documents]:
        """Return the branches of records, and their tokens with values. Raises _REASONS."""
        branches = _Branches()
        for index, (record, is_compared) in enumerate(zip(fields, compared, strict=True)):
            number, branches.read = 0, index
            for where, trace, nodes in self._traces(record, is_compared, branches):
                paths = _paths([node.parent for node in nodes], where)
                first, number = number, number + len(paths)
                if number > MOST_TURNS:
                    raise TraceError(f"{number:,} branches, expected at most {MOST_TURNS:,}")
                if not (fits := self._fits(trace, record, nodes, paths, branches.counts)):
                    branches.counts.filtered_traces += 1
                    continue
                values = {
                    one.name: self._value(one, trace, record, where) for one in self._of_records
                }
                base = len(branches.nodes)
                branches.names.append(where)
                branches.firsts.append(base)
                branches.nodes += nodes
                for at, path in enumerate(paths):
                    talk = [getattr(nodes[node], "message", None) for node in path]
                    if is_compared and None not in talk:
                        branches.talks[len(branches.number)] = (
                            talk,
                            self._found("tools", trace, record),
                        )
                    branches.entries += [base + node for node in path]
                    branches.sizes.append(len(path))
                    branches.record.append(index)
                    branches.number.append(first + at)
                    branches.values.append(values)
                    branches.fits.append(fits)
                branches.counts.traces += 1
                branches.counts.branches += len(paths)
        return branches, self._tokens(branches)

    def _traces(
        self, record: Fields, with_messages: bool, branches: _Branches
    ) -> Iterator[tuple[str, Fields, Any]]:
        """Yield (its name for people, the trace, its nodes) for all traces of a record."""
        names = *(one.name for one in self._sampled), *["message"] * with_messages
        episode, nodes = (
            first_field(record, self._names.get(own, ())) for own in ("traces", "nodes")
        )
        if episode is not None:
            for number, trace in enumerate(objects(episode, "traces")):
                where = f"trace {number}"
                yield where, trace, _nodes(trace.get("nodes"), names, where)
        elif nodes is not None:
            yield "the trace", record, _nodes(nodes, names, "the trace")
        else:
            yield from self._sessions(record, branches)

    def _sessions(self, record: Fields, branches: _Branches) -> Iterator[tuple[str, Fields, Any]]:
        """Yield the sessions of a record as `_traces` does; a prompt and its completion are one."""
        names, counts, has_ids = [one.name for one in self._sampled], branches.counts, False
        sessions = [*sessions_of(record, self._names)]
        for where, fields, calls in sessions or [("the trace", record, [record])]:
            nodes, merged, drifted = merge(calls, self._names, names, where)
            has_ids |= len(nodes) > 0
            if sessions:
                counts.sessions += len(nodes) > 0
                counts.calls += len(merged)
                counts.calls_without_ids += len(calls) - len(merged)
                counts.drifted_calls += len(drifted)
                if drifted and not counts.first_drifted:
                    counts.first_drifted = [branches.read, drifted[0]]
            if nodes:
                yield where, fields, nodes
        if not has_ids:
            raise TraceError("no lists of token ids, expected a prompt and what was sampled")

    def _fits(
        self,
        trace: Fields,
        record: Fields,
        nodes: Sequence[Any],
        paths: list[list[int]],
        counts: Counts,
    ) -> int:
        """Return what conditions a trace fits, as in FITS; 0 if it is left out. OUT counts."""
        if self._found("agent.trainable", trace, record) is False:
            return 0
        if self._selection is None:
            return 1
        judged = self._selection.records(1, lambda name: [self._found(name, trace, record)])
        if not judged.fits[0]:
            lengths, each = [length_of(node.token_ids) for node in nodes], len(paths)
            tokens = sum(lengths[node] for path in paths for node in path)
            lacks, differs = (each * int(said[0]) for said in (judged.lacks, judged.differs))
            counts.add_filtered(Filtered(each, tokens, lacks, differs))
        return int(judged.fits[0])

    def _found(self, name: str, trace: Fields, record: Fields) -> Any:
        """Return a value of a trace, or else of its episode; None if neither has it."""
        column = self._columns.get(name, name) if name in IN_TRACES else name
        for one in (trace, record):
            if (value := plain(field_at(one, column))) is not None:
                is_reward = isinstance(value, dict) and "score" in value
                return _worth(value) if is_reward else value
        if name == "reward":
            rewards = plain(trace.get("rewards"))
            rewards = rewards.values() if isinstance(rewards, dict) else []
            parts = [one for one in rewards if one is not None]
            return sum(map(_worth, parts)) if parts else None
        span = plain(field_at(record, "run.work.policy")) if name == "age" else None
        span = span if isinstance(span, dict) else {}
        edges: list[Any] = [span.get(edge) for edge in ("start", "end")]
        return edges[1] - edges[0] if [*map(type, edges)] == [int, int] else None

    def _value(self, column: ValueColumn, trace: Fields, record: Fields, where: str) -> _Array:
        value = self._found(column.name, trace, record)
        if value is None and column.default is not None:
            return np.asarray(default_of(column))
        try:
            return value_of(column, value, column.dtype.shape)
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from error

    def _stream(self, name: str, streams: list[str], where: str) -> str | None:
        """Return the stream of weights for a column; None for the mask's own."""
        if name != LOSS_WEIGHTS:
            return name.partition(".")[2]
        if len(streams) > 1:
            raise TraceError(
                f"{where} has several loss_weights: {named(streams)}",
                f"name one: --carry {LOSS_WEIGHTS}.{streams[0]}:float32",
            )
        return streams[0] if streams else None

    def _missing(self, name: str, count: int, place: str) -> list[float]:
        """Return default values for the sampled tokens of a node without values."""
        default = self._config.value_columns[name].default
        if count and default is None:
            raise TraceError(
                f"{place} has no {name}, expected {count}, one for each sampled token",
                f"fix the record, or give --carry-default {name}=0, or use --on-error skip",
            )
        return [json.loads(default or "")] * count if count else []

    # -- Branches to tokens

    def _tokens(self, branches: _Branches) -> Documents:
        """Return the tokens of all branches, with values. Raises _REASONS. OUT branches.counts."""
        entries = np.array(branches.entries, np.int64)
        ids, mask, sizes = _ids_of(branches)
        starts, lengths = offsets_of(sizes), sizes[entries]
        ends = offsets_of(lengths)
        index = np.repeat(starts[entries] - ends[:-1], lengths) + np.arange(ends[-1])
        is_first = np.zeros(len(entries), bool)
        is_first[np.unique(entries, return_index=True)[1]] = True
        own = np.repeat(is_first, lengths)
        branches.counts.shared_tokens = int(lengths[~is_first].sum())
        offsets = ends[offsets_of(branches.sizes)]
        of_tokens, of_branches = dict[str, _Array](), dict[str, _Array]()
        trained = np.zeros(len(ids), bool)
        for one in self._weights:
            weights = self._weights_of(one.name, branches, mask, starts)
            trained |= weights != 0
            of_tokens[one.name] = np.where(own, stored(one, weights)[index], one.dtype.type(0))
        for one in self._sampled:
            spread = np.zeros(len(ids), one.dtype)
            spread[mask] = stored(one, self._spread(one.name, branches, mask, starts))
            of_tokens[one.name] = spread[index]
        for one in self._of_records:
            of_branches[one.name] = np.empty(
                (len(branches.values), *one.dtype.shape), one.dtype.base
            )
            for branch, values in enumerate(branches.values):
                of_branches[one.name][branch] = values[one.name]
        if self._selection is not None:
            of_branches[FITS] = np.array(branches.fits, np.uint64)
        flags = (trained[index] & own).astype(np.uint8)
        return Documents.of(ids[index], offsets, flags).beside(of_tokens, of_branches)

    def _spread(self, name: str, branches: _Branches, mask: _Array, starts: Int64) -> _Array:
        """Return the values of all sampled tokens, float64."""
        values = [getattr(node, name) or () for node in branches.nodes]
        counts = np.diff(offsets_of(mask)[starts])
        for node in np.flatnonzero(counts != [*map(len, values)]).tolist():
            place, count = branches.place(node), int(counts[node])
            values[node] = values[node] or self._missing(name, count, place)
            what = "mask, of those that are true,"
            _check_length(place, name, len(values[node]), count, what)
        return np.fromiter(chain.from_iterable(values), np.float64, int(counts.sum()))

    def _weights_of(self, name: str, branches: _Branches, mask: _Array, starts: Int64) -> _Array:
        """Return the weights of all tokens of nodes, float64."""
        weights = mask.astype(np.float64)
        edges = pairwise([*branches.firsts, len(branches.nodes)])
        for where, (begin, end) in zip(branches.names, edges, strict=True):
            by_node = (node.loss_weights or {} for node in branches.nodes[begin:end])
            streams = {
                name
                for of_node in by_node
                for name, values in of_node.items()
                if values is not None
            }
            stream = self._stream(name, sorted(streams), where)
            for node in range(begin, end) if stream is not None else ():
                masked = weights[starts[node] : starts[node + 1]]
                values = (branches.nodes[node].loss_weights or {}).get(stream)
                if values is not None:
                    _check_length(branches.place(node), name, len(values), len(masked), "token_ids")
                    masked[:] = values
                elif masked.any():
                    masked *= self._missing(name, int(masked.sum()), branches.place(node))[0]
        return weights


# -- What a record holds


def _nodes(value: Any, names: Sequence[str], where: str) -> list[Any]:
    """Return the nodes of a trace with the further fields `names`. Raises ValueError."""
    kind = _node_type(tuple(names), msgspec.Raw if isinstance(value, msgspec.Raw) else Any)
    return typed(value, kind, f"{where}: nodes")  # type: ignore[no-any-return]


@lru_cache  # a class takes longer to make than a small file to read
def _node_type(names: tuple[str, ...], lists: Any) -> Any:
    """Return the type of lists of nodes.

    token_ids     n ids, of type `lists`
    mask          n flags, of type `lists`: 1 if the model sampled the token; may be empty for none
    loss_weights  by stream, float[n]
    names         those of `SAMPLED`, float[m], one for each sampled token; `message` as it is
    """
    fields: list[Any] = [
        ("parent", Any, None),
        ("token_ids", lists, _NOTHING),
        ("mask", lists, _NOTHING),
        ("sampled", bool | None, False),
        ("loss_weights", _Streams | None, None),
        *((name, Any if name == "message" else list[float] | None, None) for name in names),
    ]
    node: Any = msgspec.defstruct("Node", fields)
    return list[node]


def _ids_of(branches: _Branches) -> tuple[UInt32, npt.NDArray[np.bool_], Int64]:
    """Return ids and sampled flags of all nodes, and sizes of nodes. Raises ValueError."""
    lists = [node.token_ids for node in branches.nodes]
    ids, sizes = number_lists(lists, Ids, lambda node: f"{branches.place(node)}: token_ids")
    lists = [node.mask for node in branches.nodes]
    marks, marked = number_lists(lists, Mask, lambda node: f"{branches.place(node)}: mask")
    has_mask = marked > 0
    has_mask |= np.fromiter((node.sampled for node in branches.nodes), bool, len(branches.nodes))
    for node in np.flatnonzero((sizes == 0) | (has_mask & (marked != sizes))).tolist():
        place = branches.place(node)
        if not sizes[node]:
            raise TraceError(f"{place} has no token_ids, expected those that the model saw")
        _check_length(place, "mask", int(marked[node]), int(sizes[node]), "token_ids")
    mask = np.zeros(len(ids), bool)
    mask[np.repeat(has_mask, sizes)] = marks
    return ids, mask, sizes


def _paths(parents: Sequence[Any], where: str) -> list[list[int]]:
    """Return the nodes of each branch, from its root on. Raises ValueError."""
    for number, parent in enumerate(parents):
        if isinstance(parent, list):
            raise TraceError(f"{where}, node {number} has {len(parent)} parents, expected one")
        is_node = type(parent) is int and 0 <= parent < len(parents)
        if parent is not None and not is_node:
            raise TraceError(
                f"{where}, node {number}: parent is {parent!r}, expected the number of a node, "
                f"0 to {len(parents) - 1}"
            )
    inner, paths, reached = {*parents}, list[list[int]](), set[int]()
    for leaf in (node for node in range(len(parents)) if node not in inner):
        path, at = list[int](), leaf
        while at is not None and len(path) <= len(parents):
            path.append(at)
            at = parents[at]
        if at is not None:
            raise TraceError(f"{where}, node {leaf} leads into a cycle, {_ROOTED}")
        paths.append(path[::-1])
        reached.update(path)
    if unreached := {*range(len(parents))} - reached:
        raise TraceError(f"{where}, node {min(unreached)} is in a cycle, {_ROOTED}")
    return paths


def _check_length(place: str, name: str, found: int, size: int, other: str) -> None:
    if found != size:
        raise TraceError(f"{place}: {name} has {found} values, {other} {size}")


def _worth(reward: Any) -> float:
    """Return a reward times its weight. Raises ValueError."""
    scored = reward if isinstance(reward, dict) else {"score": reward}
    score, weight = scored.get("score"), scored.get("weight", 1.0)
    if not isinstance(score, int | float) or not isinstance(weight, int | float):
        raise TraceError(f"a reward is {score!r} times {weight!r}, expected two numbers")
    return score * weight


def _hashed(position: int) -> float:
    """Return a nearly random number from 0 to 1."""
    return (position * 0x9E3779B97F4A7C15 % (1 << 64)) / (1 << 64)


# -- Messages as verifiers has them, for chat templates


def _tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return None
    return [
        {"type": "function", "function": one} if isinstance(one, dict) and "name" in one else one
        for one in tools
    ]


def _with_calls(message: Any) -> Any:
    """Return a message whose tool calls, and their arguments, are objects."""
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [*map(_call, calls)]}


def _call(call: Any) -> Any:
    if not isinstance(call, dict) or "function" in call:
        return call
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = parse_json(arguments, "arguments")
    return {"type": "function", "function": {"name": call.get("name"), "arguments": arguments}}
