"""Detect what inputs hold, from one look at the records at their beginning.

    detect_shape        the shape of each file's records, from the first one
    with_bearers        which columns are values of records, of messages or of tokens
    ignored_columns     columns that no option uses, for a warning
    unknown_speakers    speakers that need --role, for a warning

All of them read `FirstRecords`: at most 64 records, and of JSON those that begin in 64 KiB. Memory
does not depend on the number of files, except for the fields of each kind of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from packer_cli import storage
from packer_cli.errors import DamagedInputError, DataError, UsageError, named
from packer_cli.inputs.byte_streams import peeking
from packer_cli.inputs.formats import FirstRecords, reader_for
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.preference import is_of_preference, names_answer, refuse_preference
from packer_cli.options.shape_rules import (
    by_file_shape,
    is_known_value,
    known_texts,
    used_columns,
)
from packer_cli.options.shapes import (
    ANSWERS,
    MASKS,
    MESSAGE_KEYS,
    ONLY_IN_CHATS,
    OPTIONAL,
    TRACE,
    Shape,
    Suggested,
    find_shape,
    fits_a_shape,
    joined,
    kinds_of,
    lacks_answer,
    may_hold,
    messages_in,
    options_for,
    roles_for,
)
from packer_cli.options.value_columns import (
    LOSS_WEIGHTS,
    MESSAGE,
    RECORD,
    SAMPLED,
    TOKEN,
    ValueColumn,
    is_of_loss,
)
from packer_cli.records import InputFile
from packer_cli.result.columns import check_defaults

_REQUESTS = 16  # at a time, to a store that answers each after a while
_LONG = 100  # characters of a text: names, dates, languages and the like are shorter
_UNMISTAKABLE = 20  # characters that no other text has by chance
# masks of tokenizers that do not mean training
_OTHER_FLAGS = ("token_type_ids", "special_tokens_mask", "position_ids")


@dataclass(frozen=True)
class KnownShapes:
    """Shapes that need no look at records, because an earlier run has read them.

    files    by index of an input
    others   by `Shape.name`: shapes of files that are not inputs now, but stay in the result
    columns  by name: columns of values, with what has these
    """

    files: Mapping[int, Shape] = field(default_factory=dict)
    others: Mapping[str, Shape] = field(default_factory=dict)
    columns: Mapping[str, ValueColumn] = field(default_factory=dict)


NOTHING_KNOWN = KnownShapes()


class AlikeFiles(NamedTuple):
    """Files whose first records have the same shape and fields.

    fields  of the first record, without columns of values
    """

    shape: Shape
    fields: list[str]
    files: list[InputFile]


class Detected(NamedTuple):
    """Result of `detect_shape`.

    files  the inputs; each names its shape if the run has several
    shape  of all of them
    alike  the files that were looked at, by kind
    """

    files: list[InputFile]
    shape: Shape
    alike: list[AlikeFiles]


# --- shapes


def detect_shape(
    files: list[InputFile], config: DocumentConfig, known: KnownShapes = NOTHING_KNOWN
) -> Detected:
    """Detect the shape of files, from the first record of each that is not in `known`.

    Raises DataError if a file has an unknown shape, if files cannot be packed together, or if no
    file has a column that --field maps; UsageError for preference records.
    """
    detector = _Detector(config, known.files)
    shapes = detector.shapes_of(files)
    if not shapes:
        problem = f"{_named_files(files)}: no records in {len(files)} input file"
        problem += "s" * (len(files) != 1)
        if config.on_error == "skip":
            tip = "leave out --on-error skip to see what is wrong with the first record"
            raise DataError(f"{problem} that can be read", tip)
        raise DataError(problem, "check the paths; the files are empty or hold only blank lines")
    all_shapes = (*shapes.values(), *known.others.values())
    for field_name, error in detector.lacking.items():
        column = config.renamed[field_name]
        if not any(shape.columns.get(field_name) == column for shape in all_shapes):
            raise error
    by_name = {shape.described(): shape for shape in shapes.values()}
    first = next(iter(by_name))
    # fields of the others may have other names: they are not read
    if set(known.others) <= {by_name[first].name} and len(by_name) == 1:
        return Detected(files, by_name[first], [*detector.alike.values()])
    # files without records go with the first shape
    labels = {index: shape.described() for index, shape in shapes.items()}
    labelled = [replace(file, shape=labels.get(file.index, first)) for file in files]
    shape = joined({**known.others, **by_name})
    return Detected(labelled, shape, [*detector.alike.values()])


def shapes_of(files: list[InputFile], config: DocumentConfig) -> dict[int, Shape]:
    """Return the shape of each file that has a record, by index. Raises as `detect_shape`."""
    return _Detector(config, {}).shapes_of(files)


def _named_files(files: Sequence[InputFile], between: str = "{} to {}") -> str:
    return files[0].path if len(files) == 1 else between.format(files[0].path, files[-1].path)


class _Detector:
    """Detects shapes of files.

    alike    by shape and fields
    lacking  by field that --field maps: the errors of files that lack the column and have a shape
             without it
    """

    def __init__(self, config: DocumentConfig, known: Mapping[int, Shape]) -> None:
        self._config, self._known = config, known
        self.alike, self.lacking = dict[str, AlikeFiles](), dict[str, DataError]()

    def shapes_of(self, files: list[InputFile]) -> dict[int, Shape]:
        """Return the shapes of the files that have a record, by index."""
        shapes, threads = dict[int, Shape](), ThreadPoolExecutor(_REQUESTS)
        look_at_all = threads.map if any(storage.is_url(file.path) for file in files) else map
        try:
            with peeking():
                for file, look in zip(files, look_at_all(self._look_at, files), strict=True):
                    if look is None:
                        continue
                    shape, fields = look
                    shapes[file.index] = shape
                    if fields is not None:
                        alike = AlikeFiles(shape, fields, [])
                        kind = repr((shape.described(), fields))
                        self.alike.setdefault(kind, alike).files.append(file)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no server
        with_records = [file for file in files if file.index in shapes]
        for file in with_records:
            shape, first = shapes[file.index], shapes[with_records[0].index]
            # what the tokens of traces are trained with is not known of others
            if shape.kind != first.kind and (shape.is_of_tokens or first.is_of_tokens):
                problem = f"holds {shape.kind}, {with_records[0].path} holds {first.kind}"
                raise DataError(f"{file.path}: {problem}", "pack them with two commands")
        return shapes

    def _look_at(self, file: InputFile) -> tuple[Shape, list[str] | None] | None:
        """Return the shape and the fields of first records, no fields if another run has read them;
        None if no record can be read.
        """
        if file.index in self._known:
            return self._known[file.index], None
        try:
            first = reader_for(file.format).first(file, self._config)
        except DamagedInputError:
            if self._config.on_error == "fail":
                raise
            return None  # the unit that reads it leaves it out
        if first is None:
            return None
        fields = [*first.names, *self._fields_of_later_records(first)]
        self._refuse_preference(file, first, fields)
        shape = self._shape_despite_lacking(file, first, fields)
        self._refuse_questions(file, first, fields, shape)
        beside = self._config.beside
        fields = [name for name in fields if not any(may_hold((name,), one) for one in beside)]
        return self._with_kind_of_prompt(first, shape), fields

    def _fields_of_later_records(self, first: FirstRecords) -> list[str]:
        """Return columns of optional fields that a later record has, but not the first."""
        columns = [
            name
            for field_name, name in self._config.renamed.items()
            if field_name in OPTIONAL and may_hold(first.later, name)
            if not may_hold(first.names, name)
        ]
        rows = first.rows(columns, most=None)
        return sorted(name for name in columns if any(row[name] is not None for row in rows))

    def _refuse_preference(self, file: InputFile, first: FirstRecords, fields: list[str]) -> None:
        """Raise UsageError for preference records, unless --field names the answer."""
        later = [name for name in first.later if is_of_preference(name) and name not in fields]
        columns = [*fields, *later]
        if not any(map(is_of_preference, columns)):
            return  # most files: the values of all fields may take ten times their size
        rows = first.rows(columns, most=None)
        record = {
            name: next((row[name] for row in rows if row[name] is not None), None)
            for name in columns
        }
        refuse_preference(file.path, record, fields, self._config)

    def _refuse_questions(
        self, file: InputFile, first: FirstRecords, fields: list[str], shape: Shape
    ) -> None:
        """Raise DataError for messages whose answer is in another column."""
        config, answers = self._config, [name for name in fields if name in ANSWERS]
        is_free = config.shape is None and not config.fields and config.train_on != "all"
        if not (shape.is_chat and answers and is_free):
            return
        column = shape.columns[shape.required[0]]
        record = first.record([column, *answers])
        for name in answers if lacks_answer(record.get(column)) else ():
            value = record[name]
            if value and (isinstance(value, str) or messages_in(value)):
                raise DataError(
                    f"{file.path}: the assistant says nothing in {column!r}, and {name!r} seems to "
                    "be its answer",
                    f"add {Suggested({'prompt': column, 'completion': name})}",
                )

    def _shape_despite_lacking(
        self, file: InputFile, first: FirstRecords, fields: list[str]
    ) -> Shape:
        """Return the shape by all columns of --field, or else by those that the file has."""
        renamed = self._config.renamed
        present = {name: column for name, column in renamed.items() if may_hold(fields, column)}
        try:
            return self._find(file, first, fields, renamed)
        except DataError as error:
            if present == renamed:
                raise
            with suppress(DataError):
                shape = self._find(file, first, fields, present)
                for field_name in renamed.keys() - present.keys():
                    self.lacking.setdefault(field_name, error)
                return shape
            raise

    def _find(
        self, file: InputFile, first: FirstRecords, fields: list[str], renamed: dict[str, str]
    ) -> Shape:
        """Return the shape of records with these fields. Raises DataError, with a tip."""
        wanted = self._config.shape
        find = partial(
            find_shape, fields, wanted, where=file.path,
            tokens=reader_for(file.format).holds_tokens,
        )  # fmt: skip
        try:
            return find(renamed)
        except DataError as error:
            record = first.record(fields)
            options = options_for(record, wanted)
            if options is None:
                for path, inner in _records_in(record):
                    is_record = fits_a_shape([*inner], wanted, renamed) or options_for(
                        inner, wanted
                    )
                    if is_record and not messages_in([inner]):
                        raise DataError(
                            f"{file.path}: an object that holds the records in {path}, expected "
                            "one record per line",
                            f"convert it: jq -c {shlex.quote(path)} FILE > FILE.jsonl",
                        ) from None
                raise
            columns = {n: c for n, c in options.fields.items() if n not in MESSAGE_KEYS}
            tip = error.tip
            with suppress(DataError):
                find(renamed | columns)
                tip = f"add {options}"
            raise DataError(error.message, tip) from None

    def _with_kind_of_prompt(self, first: FirstRecords, shape: Shape) -> Shape:
        """Return the shape; of prompts, with whether they are messages."""
        if shape.kind != "prompt-completion":
            return shape
        columns = [shape.columns[name] for name in shape.required]
        record = first.record(columns)
        keys, prompt = self._config.message_keys.values(), record.get(columns[0])
        of_messages = isinstance(prompt, str) and bool(messages_in(prompt, *keys, certain=True))
        of_messages |= any(
            isinstance(value, list) or (isinstance(value, dict) and bool(messages_in(value, *keys)))
            for value in record.values()
        )
        return replace(shape, of_messages=of_messages)


def _beginning_of(file: InputFile, config: DocumentConfig) -> FirstRecords:
    """Return the first records of a file; none if they cannot be read: its unit reports that."""
    records = None
    with suppress(DataError, UsageError), peeking():
        records = reader_for(file.format).first(file, config)
    return records or FirstRecords([])


def _records_in(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the `jq` path to the members of each list of objects, and object of objects, in a
    record, and the first member.
    """
    for name, inner in value.items():
        key = name if name.isascii() and name.isidentifier() else json.dumps(name)
        if isinstance(inner, dict):
            yield from _records_in(inner, f"{path}.{key}")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield f"{path}.{key}[]", inner[0]
    if len(value) > 1 and all(isinstance(inner, dict) for inner in value.values()):
        yield f"{path or '.'}[]", next(iter(value.values()))


# --- columns of values


def with_bearers(
    detected: Detected, shape: Shape, config: DocumentConfig, known: KnownShapes = NOTHING_KNOWN
) -> DocumentConfig:
    """Return options in which --carry says what has the values: tokens, messages or records.

    The user says it, or the first records of a file show it, or else `known` has it. Raises
    UsageError for values of tokens if records are not token ids, and for a column that no file has
    at its beginning, unless it has a default.
    """
    if shape.kind == TRACE:
        return replace(config, carry=_carry_of_traces(config))
    files, columns = detected.files, config.value_columns
    check_defaults(columns, config)
    has_messages = any(member.is_chat or member.of_messages for member in shape.each)
    for name in columns:
        if any(name in member.columns.values() for member in shape.each) or name in MESSAGE_KEYS:
            raise UsageError(
                f"--carry: {name!r} is what documents are made of", "leave it out, or rename it"
            )
    bearers = {name: column.of for name, column in known.columns.items()}
    bearers |= _bearers(detected, shape, config)
    for name, column in columns.items():
        of = column.of or bearers.get(name)
        if of == MESSAGE and not has_messages:
            raise UsageError(
                f"--carry: {column} is of messages, and the records are {kinds_of(shape)}",
                f"leave {MESSAGE} out, or write {name}:{column.type}/{RECORD}",
            )
        if of is None and (has_messages or column.default is None):
            where = _named_files(files, f"any of {len(files)} files")
            raise UsageError(
                f"--carry: no record at the beginning of {where} has {name!r}",
                f"name a field of records; or say what has it, and its value in those without: "
                f"--carry {name}:{column.type}/{RECORD} --carry-default {name}=0",
            )
        if of == TOKEN and any(member.kind != "tokens" for member in shape.each):
            raise UsageError(
                f"--carry: {name} is a list, and the records are {kinds_of(shape)}: lists with a "
                "value for each token go with token ids only",
                f"give one value a record, or --carry {name}:{column.type}[K] for K values",
            )
    resolved = [
        replace(column, of=column.of or bearers.get(name, RECORD))
        for name, column in columns.items()
    ]
    return replace(config, carry=tuple(map(str, resolved)))


def _bearers(detected: Detected, shape: Shape, config: DocumentConfig) -> dict[str, str]:
    """Find what has the values of columns, by name, in the first records of files."""
    bearers = dict[str, str]()
    for file in detected.files:
        missing = [
            name
            for name, column in config.value_columns.items()
            if not (column.of or name in bearers)
        ]
        if not missing:
            break
        member = shape.of(file.shape)
        required = [member.columns[name] for name in member.required if member.kind != "tokens"]
        for row in _beginning_of(file, config).rows([*required, *missing]):
            messages = [message for column in required for message in messages_in(row.get(column))]
            for name in missing:
                if any(name in message for message in messages):
                    bearers[name] = MESSAGE
                elif row[name] is not None:
                    bearers.setdefault(name, _bearer_of(config.value_columns[name], row[name]))
    return bearers


def _bearer_of(column: ValueColumn, value: Any) -> str:
    """Return what has such a value: a token, or the record."""
    if column.count is not None and isinstance(value, list) and len(value) == column.count:
        return TOKEN if any(isinstance(item, list) for item in value) else RECORD
    return TOKEN if isinstance(value, list) else RECORD


def _carry_of_traces(config: DocumentConfig) -> tuple[str, ...]:
    """Return --carry for traces, with weights of the loss: tokens of several branches need one."""
    columns = dict(config.value_columns)
    if not any(is_of_loss(name) for name in columns):
        columns[LOSS_WEIGHTS] = ValueColumn(LOSS_WEIGHTS, "float32")
    check_defaults(columns, config)
    for name, column in columns.items():
        of = TOKEN if name in SAMPLED or is_of_loss(name) else RECORD
        if column.of not in ("", of) or (of == TOKEN and column.count is not None):
            raise UsageError(
                f"--carry: {column}: in traces, {name} is a value of each {of}",
                f"write {name}:{column.type}",
            )
        if of == TOKEN and not column.is_float:
            raise UsageError(
                f"--carry: {column}: in traces, {name} has floats",
                f"write {name}:float32, or float16 or bfloat16",
            )
        columns[name] = replace(column, of=of)
    return tuple(map(str, columns.values()))


# --- warnings


def ignored_columns(
    detected: Detected, shape: Shape, config: DocumentConfig
) -> Iterator[tuple[str, bool]]:
    """Yield a line on columns that no option uses, for each kind of files, and whether it is a
    warning. `shape` and `config` are those of the run.

    Plain text often has other columns: only those with texts are named.
    """
    options_of_shape = by_file_shape(config, shape)
    for found_shape, fields, files in detected.alike:
        member, options = options_of_shape[found_shape.described() if shape.members else None]
        used, if_known = used_columns(member, options), _used_if_known(member, options)
        others = [name for name in fields if not any(may_hold((name,), column) for column in used)]
        names = [name for name in fields if name in others or name in if_known]
        if member.kind == TRACE or not (names or member.kind == "tokens"):
            continue
        first, where = _beginning_of(files[0], config), named([file.path for file in files], 1)
        if member.kind == "tokens":
            unknown = {*first.later}.difference(used, config.beside)
            if masks := _masks_in(first, member, [*others, *sorted(unknown)]):
                hint = f"--field {MASKS[0]}={masks[0]} trains on the tokens where it is 1"
                yield f"{where}: ignored columns that look like masks: {named(masks)}; {hint}", True
            continue
        with_text = _with_unused_text(first, member, options, names)
        others = [name for name in others if name not in with_text] if member.is_composed else []
        only_in_chats = ONLY_IN_CHATS.issuperset([*with_text, *others])
        hint = "--prompt-template chat uses it" if only_in_chats else "see --field"
        if with_text:
            yield f"{where}: ignored text in {named(with_text)}; {hint}", True
        if others:
            line = f"{where}: ignored column{'s' * (len(others) > 1)}: {named(others)}; {hint}"
            may_be_bad = "label" in others and not names_answer(config)
            note = ". If label marks bad answers, leave those records out"
            yield line + note * may_be_bad, may_be_bad


def unknown_speakers(
    detected: Detected, shape: Shape, config: DocumentConfig, template: str
) -> dict[str, dict[str, str]]:
    """Return the roles that --role may give to unknown speakers, by one file of each shape."""
    role_key, unknown, seen = (
        config.message_keys.get("role", ""),
        dict[str, dict[str, str]](),
        set(),
    )
    for member, _, files in detected.alike:
        if member.described() in seen or not (member.is_chat or member.of_messages):
            continue
        seen.add(member.described())
        roles, columns = dict[str, str](), [member.columns[name] for name in member.required]
        for row in _beginning_of(files[0], config).rows(columns):
            messages = [message for column in columns
                        for message in messages_in(row[column], role_key)]  # fmt: skip
            speakers = [
                message.get(role_key, message.get("role", message.get("from")))
                for message in messages
            ]
            roles = roles_for(speakers, template) | roles
        known = dict(config.roles)
        if roles := {name: role for name, role in roles.items() if name not in known}:
            unknown[files[0].path] = roles
    return unknown


def _used_if_known(shape: Shape, config: DocumentConfig) -> dict[str, str]:
    """Return columns with well-known names that are used if they hold what such fields hold."""
    used = used_columns(shape, config)
    columns = {shape.columns[name]: name for name in known_texts(shape, config)}
    return {column: name for column, name in columns.items() if column in used}


def _masks_in(first: FirstRecords, shape: Shape, names: list[str]) -> list[str]:
    """Return the columns that seem to be masks: lists with mask in their name, or of 0 and 1 for
    each token id.
    """
    names = [name for name in names if name not in _OTHER_FLAGS]
    if first.are_long or not names:
        return []
    ids, are_masks = shape.columns["input_ids"], dict[str, bool]()
    for row in first.rows([ids, *names], most=None):
        for name in names if isinstance(row[ids], list) else ():
            if (values := row[name]) is not None:
                is_list = isinstance(values, list) and bool(values)
                is_mask = is_list and (
                    "mask" in name.lower()
                    or (len(values) == len(row[ids]) and all(flag in (0, 1) for flag in values))
                )
                are_masks[name] = is_mask and are_masks.get(name, True)
    return [name for name in names if are_masks.get(name)]


def _with_unused_text(
    first: FirstRecords, shape: Shape, config: DocumentConfig, names: list[str]
) -> list[str]:
    """Return the columns in which the first records have texts that no used column has.

    Only texts with words count, not a URL, a digest or a picture; not all languages have spaces. A
    text that repeats what is used, or is a rendering of it, is not a loss.
    """
    used, if_known = used_columns(shape, config), _used_if_known(shape, config)
    if first.are_long:
        return []
    unused = set[str]()
    for row in first.rows([*dict.fromkeys([*sorted(used), *names])]):
        used_texts = list[str]()
        for column in used:
            if column not in if_known or is_known_value(if_known[column], row[column]):
                used_texts += _texts(row[column])
        all_used, longest = "\n".join(used_texts), max(used_texts, key=len, default="").strip()
        for name in names:
            if name in if_known and is_known_value(if_known[name], row[name]):
                continue
            for text in _texts(row[name]):
                is_short = len(text) < _LONG or (" " not in text and text.isascii())
                repeats = len(longest) >= _UNMISTAKABLE and longest in text
                if not (is_short or repeats or text.strip() in all_used):
                    unused.add(name)
    return [name for name in names if name in unused]


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    open_values: list[Iterator[Any]] = [iter([value])]  # lists may be long: they are not copied
    while open_values:
        for inner in open_values[-1]:
            if isinstance(inner, str):
                yield inner
            elif isinstance(inner, dict | list):
                open_values.append(iter(inner.values() if isinstance(inner, dict) else inner))
                break
        else:
            open_values.pop()
