"""Make traces of captures: the calls of a session, merged where one goes on from another.

    {"session_id": "s", "calls": [CALL, ..]}             a record has all calls of a session
    {"session_id": "s", "prompt_token_ids": [..], ..}    or one call, as with Switchyard
    {"run_id": .., "traj_idx": .., "prompt_tokens": ..}  one call of tinker-cookbook
    {"schema_version": .., "steps": [..]}                a trajectory in ATIF, which Harbor writes
    {"responses_create_params": .., "response": ..}      a rollout of NeMo Gym

A call has the ids of its prompt, which is all that the model saw, the ids that were sampled, and
values of these. Records of one call become records of a session first.
"""

from __future__ import annotations

import hashlib
from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import compress, pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from packer_cli.chat.trace_fields import (
    Fields,
    Ids,
    Mask,
    TraceError,
    first_field,
    is_null,
    number_lists,
    object_of,
    objects,
    plain,
    typed,
)
from packer_cli.errors import DataError
from packer_cli.inputs.formats import reader_for
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.shapes import TRACE, TRAJECTORY, Shape, names_in_traces
from packer_cli.options.value_columns import SAMPLED
from packer_cli.records import InputFile, Records, Slice, UInt32, offsets_of

_Names = Mapping[str, Sequence[str]]  # as `names_in_traces` returns them
_CALLS = "\0calls"  # of joined records; no field is called so
_BEGINS = {"calls": "[", "steps": "[", "response": "{"}  # what fields with all calls begin with
_NO_IDS: Fields = {}  # a call without token ids
_IDS = ("prompt_ids", "completion_ids")
_OF_MODELS = ("reasoning", "function_call")  # types of items that have no role
_STEP = 1 << 16  # bytes
_Streams = dict[str, list[float] | None]


# -- The calls of a record


def sessions_of(record: Fields, names: _Names) -> Iterator[tuple[str, Fields, list[Any]]]:
    """Yield (its name for people, its fields, its calls) for each session of a record; nothing if
    the record is not a capture. Raises TraceError.
    """
    form, value = _form_of(record, names)
    if form == "calls":
        yield "the session", record, objects(value, "calls")
    elif form == "steps":
        yield from _trajectories("the trajectory", record, value)
    elif form == "response":
        output = object_of(value, "response").get("output")
        yield "the rollout", record, _calls_of_items(objects(output, "response.output"))


def _form_of(record: Fields, names: _Names) -> tuple[str, Any]:
    """Return the field with all calls of a record, and its value; "" if it has none, or is one."""
    if _CALLS in record:
        return "calls", record[_CALLS]
    is_call = all(_begin_of(first_field(record, names.get(name, ()))) == "[" for name in _IDS)
    for form, begin in _BEGINS.items() if not is_call else ():
        if _begin_of(value := first_field(record, names.get(form, ()))) == begin:
            return form, value
    return "", None


def _begin_of(value: Any) -> str:
    """Return the character that begins JSON of a list or an object."""
    if isinstance(value, msgspec.Raw):
        return chr(memoryview(value)[0])
    return "[" if isinstance(value, list) else "{" * isinstance(value, dict)


def _trajectories(where: str, fields: Fields, steps: Any) -> Iterator[tuple[str, Fields, Any]]:
    """Yield the session of a trajectory in ATIF, then of its sub-agents."""
    calls = list[Fields]()
    for step in objects(steps, f"{where}: steps"):
        is_of_agent, count = plain(step.get("source")) == "agent", plain(step.get("llm_call_count"))
        if is_of_agent and count != 0 and not plain(step.get("is_copied_context")):
            is_one = count in (None, 1) and not is_null(metrics := step.get("metrics"))
            calls.append(object_of(metrics, f"{where}: metrics") if is_one else _NO_IDS)
    yield where, fields, calls
    agents = fields.get("subagent_trajectories")
    agents = [] if is_null(agents) else objects(agents, f"{where}: subagent_trajectories")
    for number, agent in enumerate(agents):
        yield from _trajectories(f"{where}, sub-agent {number}", agent, agent.get("steps"))


def _calls_of_items(items: list[dict[str, Any]]) -> list[Fields]:
    """Return the calls of a rollout of NeMo Gym: the last item of each has the ids."""
    calls, is_open = list[Fields](), False
    for item in items:
        has_ids = not is_null(item.get("generation_token_ids"))
        is_answer = plain(item.get("role")) == "assistant" or plain(item.get("type")) in _OF_MODELS
        if has_ids or (is_open and not is_answer):
            calls.append(item if has_ids else _NO_IDS)
        is_open = is_answer and not has_ids
    return calls + [_NO_IDS] * is_open


# -- Calls to nodes


def merge(
    calls: Sequence[Fields], names: _Names, columns: Sequence[str], where: str
) -> tuple[list[Any], list[int], list[int]]:
    """Merge the calls of a session, in any order, to nodes that have each sampled token once, and
    its values in `columns`.

    Returns the nodes, the numbers of the calls that have token ids, and of those that drifted: see
    `_forks`. Raises TraceError.
    """
    lists, numbers = list[Any](), list[int]()
    for number, call in enumerate(calls):
        own = [first_field(call, names.get(name, ())) for name in _IDS]
        if all(_begin_of(value) == "[" for value in own):  # not a number of tokens
            lists += own
            numbers.append(number)
    places = [f"{where}, call {number}" for number in numbers]
    ids, sizes = number_lists(lists, Ids, lambda index: f"{places[index // 2]}: {_IDS[index % 2]}")
    tokens = [ids[begin:end] for begin, end in pairwise(offsets_of(sizes)[::2].tolist())]
    prompts = sizes[::2].tolist()
    forks, drifted = _forks(tokens, prompts)
    stops = [{prompt, len(own)} for own, prompt in zip(tokens, prompts, strict=True)]
    for parent, at in forks.values():
        stops[parent].add(at)
    nodes, ending = list[Any](), dict[tuple[int, int], int]()  # nodes by call and where they end
    for index, (parent, at) in forks.items():
        node, call = ending.get((parent, at)), calls[numbers[index]]
        edges = [at, *sorted(stop for stop in stops[index] if stop > at)]
        parts = _parts_of(call, names, columns, tokens[index], prompts[index], edges, places[index])
        for part, stop in zip(parts, edges[1:], strict=True):
            part.parent, node = node, len(nodes)
            ending[index, stop] = node
            nodes.append(part)
    return nodes, numbers, sorted(numbers[index] for index in drifted)


def _parts_of(
    call: Fields, names: _Names, columns: Sequence[str], ids: UInt32, prompt: int,
    edges: Sequence[int], place: str,
) -> Iterator[Any]:  # fmt: skip
    """Yield the tokens of a call between edges as nodes, which have no parents yet."""

    def given(name: str, kind: Any, size: int) -> Any:
        value = first_field(call, names.get(name, ()))
        values = None if value is None else typed(value, kind, f"{place}: {name}")
        for each in values.values() if isinstance(values, dict) else (values,):
            if isinstance(each, list) and len(each) != size:
                raise TraceError(f"{place}: {name} has {len(each)} values, expected {size}")
        return [values] * size if isinstance(values, float) else values

    sampled = len(ids) - prompt
    mask = np.repeat(np.array([0, 1], np.uint32), (prompt, sampled))
    for name, part in (("prompt_mask", mask[:prompt]), ("completion_mask", mask[prompt:])):
        flags = given(name, Mask, len(part))
        part[:] = part if flags is None else flags
    values = {name: given(name, list[float] | float, sampled) for name in columns}
    weights = given("loss_weights", _Streams | list[float], sampled)
    weights = {"": weights} if isinstance(weights, list) else weights
    for start, stop in pairwise(edges):
        node = SimpleNamespace(token_ids=ids[start:stop], mask=mask[start:stop], place=place)
        vars(node).update(dict.fromkeys((*columns, "loss_weights")), sampled=True)
        if start >= prompt:
            own = slice(start - prompt, stop - prompt)
            for name, each in values.items():
                setattr(node, name, each and [*compress(each[own], node.mask.tolist())])
            node.loss_weights = weights and {n: each and each[own] for n, each in weights.items()}
        yield node


def _forks(
    tokens: Sequence[UInt32], prompts: Sequence[int]
) -> tuple[dict[int, tuple[int, int]], set[int]]:
    """Return, for each call, another one that it follows (-1: none), and how many of its tokens are
    the same; and which calls drifted: their prompt begins with the prompt of another one, but goes
    on with other tokens than those that were sampled.

    tokens   of each call, its prompt and what was sampled
    prompts  their sizes. Only prompts follow: what a call sampled is its own, even if another call
             sampled the same. Shorter ones come first: what they hold of other calls is theirs
    """
    forks, drifted = dict[int, tuple[int, int]](), set[int]()
    longest, prompt_ends = list[int](), set[tuple[int, int]]()  # calls by their size, and places
    ending = defaultdict[int, list[int]](list)  # calls by their exact size
    for call in sorted(range(len(tokens)), key=prompts.__getitem__):
        own, prompt, parent, at = tokens[call], prompts[call], -1, 0
        for other in reversed(longest):
            size = min(prompt, len(tokens[other]))
            if size <= at:  # no other call has more of the prompt
                break
            if own[at] == tokens[other][at]:
                differ = own[:size] != tokens[other][:size]
                common = int(differ.argmax()) if differ.any() else size
                parent, at = (other, common) if common > at else (parent, at)
        # a call that ends there, if another one has sampled the same and more
        parent = next((one for one in ending[at] if np.array_equal(tokens[one], own[:at])), parent)
        while parent >= 0 and at <= forks[parent][1]:  # what it has of an earlier one
            parent = forks[parent][0]
        forks[call] = parent, at
        has_parted = at < prompt and (parent, at) in prompt_ends
        if parent >= 0 and at <= prompts[parent]:
            has_parted |= parent in drifted
        elif parent >= 0:
            has_parted |= at < prompt and at < len(tokens[parent])
        if has_parted:
            drifted.add(call)
        if prompt < len(own):
            prompt_ends.add((parent, at) if at == prompt else (call, prompt))
        insort(longest, call, key=lambda call: len(tokens[call]))
        ending[len(own)].append(call)
    return forks, drifted


# -- Records of one call to records of a session


class SessionReader:
    """Reads records of a file, with those that are calls of a session as one record."""

    def __init__(self, file: InputFile, shape: Shape, config: DocumentConfig) -> None:
        self._reader, self._names = reader_for(file.format), names_in_traces(shape)
        self._file, self._shape, self._config = file, shape, config
        groups = self._reader.groups(file)
        # in what slices count: where the file ends, and how much is read beyond a slice at first
        self._end, self._step = (file.size, _STEP) if groups is None else (len(groups), 1)

    def read(self, part: Slice) -> Iterator[Records]:
        """Yield the records of a slice. A session belongs to the slice in which it begins.

        Raises DataError for a call of a session that had ended.
        """
        session: bytes | None = None
        begin, calls = 0, list[dict[str, Any]]()  # of the session that is read
        seen, is_own = set[bytes](), part.start == 0
        session_before = cache(partial(self._session_before, part.start))
        for records in self._reader.read(self._file, part, self._shape, self._config):
            done = dict[int, dict[str, Any]]()
            positions = records.positions.tolist()
            for position, record in zip(positions, records.fields or (), strict=True):
                key = self._session_of(record)
                is_own = is_own or key is None or key != session_before()
                if not is_own:  # the slice before has it
                    continue
                if calls and key != session:
                    done[begin] = _joined(calls)
                    calls = []
                if key is None:
                    done[position] = record
                elif calls:
                    calls.append(record)
                elif key in seen:
                    raise self._scattered(position, key)
                else:
                    seen.add(key)
                    session, begin, calls = key, position, [record]
            yield replace(records, positions=np.array([*done], np.int64), fields=[*done.values()])
        if calls and part.stop is not None:
            self._read_on(session, calls, part.stop)
        if seen:
            last = {begin: _joined(calls)} if calls else {}
            digests = (hashlib.blake2b(key, digest_size=8).digest() for key in seen)
            sessions = sorted(int.from_bytes(digest, "little") for digest in digests)
            yield Records(np.array([*last], np.int64), fields=[*last.values()], sessions=sessions)

    def _session_of(self, record: Fields) -> bytes | None:
        """Return the session that a record is one call of, as JSON; None if it is not a call."""
        names = self._names
        session = first_field(record, names.get("session_id", ()))
        if session is None:
            place = [plain(record.get(name)) for name in TRAJECTORY]
            session = None if None in (place[0], place[-1]) else place
        traces = (first_field(record, names.get(own, ())) for own in ("traces", "nodes"))
        is_trace = any(one is not None for one in traces) or _form_of(record, names)[0]
        return None if session is None or is_trace else msgspec.json.encode(session)

    def _session_before(self, end: int) -> bytes | None:
        """Return the session of the record before a slice; None if that is not a call."""
        large = (*_IDS, *SAMPLED)
        columns = {own: name for own, name in self._shape.columns.items() if own not in large}
        record = self._record_before(end, Shape(TRACE, columns))
        if record is not None and _form_of(record, self._names)[0]:  # unless it has ids, too
            record = self._record_before(end, self._shape)
        return None if record is None else self._session_of(record)

    def _record_before(self, end: int, shape: Shape) -> dict[str, Any] | None:
        begin, size, record = end, self._step, None
        while begin and record is None:
            begin, size = max(end - size, 0), 4 * size
            for _, record in self._keyed(begin, end, shape):  # noqa: B007 the last one
                pass
        return record

    def _read_on(self, session: bytes | None, calls: list[dict[str, Any]], end: int) -> None:
        """Add the calls of a session that stand behind a slice. INOUT calls."""
        size = self._step
        while end < self._end:
            for key, record in self._keyed(end, end + size, self._shape):
                if key != session:
                    return
                calls.append(record)
            end, size = end + size, 2 * size

    def _keyed(self, begin: int, end: int, shape: Shape) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield the session of each record in a part of the file, and the record."""
        part = Slice(self._file.index, begin, end, 0)
        for records in self._reader.read(self._file, part, shape, self._config):
            yield from ((self._session_of(record), record) for record in records.fields or ())

    def _scattered(self, position: int, key: bytes) -> DataError:
        """Return the error for a call of a session that had ended."""
        names = TRAJECTORY if key.startswith(b"[") else self._names["session_id"][:1]
        by, place = ", .".join(names), self._reader.describe(self._file, position)
        return DataError(
            f"{self._file.path}, {place}: a call of session {key.decode()}, which has others "
            "elsewhere, expected the calls of a session one after another",
            f"sort the file by session; JSON lines: jq -sc 'sort_by(.{by})[]' FILE > SORTED.jsonl",
        )


def _joined(calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of all calls, with the last values that these have."""
    fields = {name: value for call in calls for name, value in call.items() if not is_null(value)}
    return fields | {_CALLS: calls}
