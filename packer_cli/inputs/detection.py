"""The shapes of inputs' records, from the first one of each file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from packer_cli import storage
from packer_cli.errors import DamagedInputError, DataError, PackerError, UsageError
from packer_cli.inputs.byte_streams import open_source, peeking
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.options.carried import (
    LOSS_WEIGHTS,
    MESSAGE,
    RECORD,
    SAMPLED,
    TOKEN,
    Carried,
    is_of_loss,
)
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import format_named
from packer_cli.options.preference import (
    WELL_KNOWN,
    may_be_preference,
    preference_error,
    preference_fields,
)
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
    Shape,
    Suggested,
    find_shape,
    fits_a_shape,
    joined,
    kinds_of,
    may_hold,
    messages_in,
    options_for,
    role_of,
    roles_for,
    talk_in,
)
from packer_cli.records import InputFile
from packer_cli.result.carried import check_defaults

_BEGINNING = 1 << 16
_MOST_LOOKED_AT = 1 << 20  # bytes in which the records that begin in these must end
_ENDS = {"jsonl": b"\n", "json": b"},"}  # of records whose values become objects
_FIRST = 64  # records
_LONG = 100  # characters of a text: names, dates, languages and the like are shorter
# masks of tokenizers that say nothing of training
_OTHER_FLAGS = frozenset(("token_type_ids", "special_tokens_mask", "position_ids"))
_TELLING = 20  # characters that no other text has by chance
_REQUESTS = 16  # at a time, to a store that answers each after a while


@dataclass(frozen=True)
class KnownShapes:
    """Shapes that are known without a look at records, since an earlier run has read them.

    files    by index: of inputs
    others   by `Shape.name`: of files that are no inputs now, but stay in the result
    carried  by name: columns that have told what has their values
    """

    files: Mapping[int, Shape] = field(default_factory=dict)
    others: Mapping[str, Shape] = field(default_factory=dict)
    carried: Mapping[str, Carried] = field(default_factory=dict)


NOTHING_KNOWN = KnownShapes()


class Detected(NamedTuple):
    """What the records of a run's files are.

    files   say which of several shapes they have
    shape   of all of them
    fields  of the first record of each file that was read, by path, without carried columns
    """

    files: list[InputFile]
    shape: Shape
    fields: dict[str, list[str]]


class IgnoredColumns(NamedTuple):
    """Columns of some files that no option uses.

    with_text  those in which the first records have longer texts
    others     the rest; empty for plain text, which often has such
    hint       the option that uses them
    masks      those beside token ids that seem to say what is trained on
    """

    paths: list[str]
    with_text: list[str]
    others: list[str]
    hint: str
    masks: Sequence[str] = ()


def detect_shape(
    files: list[InputFile], config: DocumentConfig, known: KnownShapes = NOTHING_KNOWN
) -> Detected:
    """The shape of files, from the first record of each whose shape is not `known`. DataError when
    that of a file is unknown, where files cannot be packed together, and where no file has a column
    that --field maps; UsageError for preference records.
    """
    look = _Look(config, known.files)
    shapes = look.into(files)
    if not shapes:
        where = files[0].path if len(files) == 1 else f"{files[0].path} to {files[-1].path}"
        problem = f"{where}: no records in {len(files)} input file{'s' * (len(files) != 1)}"
        if config.on_error == "skip":
            tip = "leave out --on-error skip to see what is wrong with the first record"
            raise DataError(f"{problem} that can be read", tip)
        raise DataError(problem, "check the paths; the files are empty or hold only blank lines")
    every = (*shapes.values(), *known.others.values())
    for own, error in look.lacking.items():
        if not any(shape.columns.get(own) == config.renamed[own] for shape in every):
            raise error
    found = {shape.described(): shape for shape in shapes.values()}
    first = next(iter(found))
    # others' fields may have other names: they are not read
    if set(known.others) <= {found[first].name} and len(found) == 1:
        return Detected(files, found[first], look.fields)
    # files without records go with the first
    labels = {index: shape.described() for index, shape in shapes.items()}
    named = [replace(file, shape=labels.get(file.index, first)) for file in files]
    return Detected(named, joined({**known.others, **found}), look.fields)


def carried_by(
    files: list[InputFile],
    shape: Shape,
    config: DocumentConfig,
    known: KnownShapes = NOTHING_KNOWN,
) -> tuple[str, ...]:
    """--carry, with what has the values: tokens, messages or records, as the first records of files
    tell, or else what is `known`. UsageError for values of tokens where records are no token ids,
    and for a column that no file has at its beginning, unless it has a default.
    """
    columns, found, bare = config.carried, dict[str, str](), _bare(config)
    check_defaults(columns, config.carry_default)
    has_messages = any(its.is_chat or its.of_messages for its in shape.each)
    for name in columns:
        if any(name in its.columns.values() for its in shape.each) or name in MESSAGE_KEYS:
            raise UsageError(
                f"--carry: {name!r} is what documents are made of", "leave it out, or rename it"
            )
    for file in files:
        own = shape.of(file.shape)
        required = [own.columns[name] for name in own.required if own.kind != "tokens"]
        left = [name for name, one in columns.items() if not (one.of or name in found)]
        if not left:
            break
        with suppress(PackerError), peeking():  # the unit that reads it meets the same
            for values in islice(_first_columns(file, [*required, *left], bare), _FIRST):
                messages = [
                    message for column in required for message in messages_in(values.get(column))
                ]
                for name in left:
                    if any(name in message for message in messages):
                        found[name] = MESSAGE
                    elif values.get(name) is not None:
                        found.setdefault(name, _bearer(columns[name], values[name]))
    found = {name: one.of for name, one in known.carried.items()} | found
    for name, one in columns.items():
        of = one.of or found.get(name)
        is_default = name in dict(config.carry_default)
        if of == MESSAGE and not has_messages:
            raise UsageError(
                f"--carry: {one} is of messages, and the records are {kinds_of(shape)}",
                f"leave {MESSAGE} out, or write {name}:{one.type}/{RECORD}",
            )
        if of is None and (has_messages or not is_default):
            where = files[0].path if len(files) == 1 else f"any of {len(files)} files"
            raise UsageError(
                f"--carry: no record at the beginning of {where} has {name!r}",
                f"say what has it: --carry {name}:{one.type}/{RECORD} or /{MESSAGE}"
                if is_default
                else f"name a field of records, or say what it is: --carry-default {name}=0",
            )
        if of == TOKEN and any(its.kind != "tokens" for its in shape.each):
            raise UsageError(
                f"--carry: {name} is a list, and the records are {kinds_of(shape)}: only of token "
                "ids is it known which token each value is of",
                f"give a value for the record, or --carry {name}:{one.type}[K] for K values of it",
            )
    return tuple(str(replace(one, of=one.of or found.get(name, RECORD)))
                 for name, one in columns.items())  # fmt: skip


def carried_by_traces(config: DocumentConfig) -> tuple[str, ...]:
    """--carry with what has the values in traces, and the weights of the loss, without which a
    token of several branches has none. UsageError as `carried_by`.
    """
    columns = dict(config.carried)
    if not any(is_of_loss(name) for name in columns):
        columns[LOSS_WEIGHTS] = Carried(LOSS_WEIGHTS, "float32")
    check_defaults(columns, config.carry_default)
    for name, one in columns.items():
        of = TOKEN if name in SAMPLED or is_of_loss(name) else RECORD
        if one.of not in ("", of) or (of == TOKEN and one.count is not None):
            raise UsageError(
                f"--carry: {one}: in traces, {name} is a value of each {of}",
                f"write {name}:{one.type}",
            )
        if of == TOKEN and not one.is_float:
            raise UsageError(
                f"--carry: {one}: in traces, {name} has floats",
                f"write {name}:float32, or float16 or bfloat16",
            )
        columns[name] = replace(one, of=of)
    return tuple(map(str, columns.values()))


def _bare(config: DocumentConfig) -> DocumentConfig:
    """The options without what is carried, which need not be told yet to look at records."""
    plain = {one.name: getattr(config, one.name) for one in fields(DocumentConfig)}
    return DocumentConfig(**plain | {"carry": (), "carry_default": ()})


def _bearer(column: Carried, value: Any) -> str:
    """What has such a value: a token, or the record."""
    if column.count is not None and isinstance(value, list) and len(value) == column.count:
        return TOKEN if any(isinstance(one, list) for one in value) else RECORD
    return TOKEN if isinstance(value, list) else RECORD


def ignored_columns(
    detected: Detected, shape: Shape, config: DocumentConfig
) -> list[IgnoredColumns]:
    """Find the columns that no option uses, from the first records of one file of each kind.

    shape, config  of the run, as `for_shape` gives them
    """
    own_options = by_file_shape(config, shape)
    alike: dict[tuple[str | None, str], list[InputFile]] = {}
    for file in detected.files:
        names = detected.fields.get(file.path)
        if names is not None:
            alike.setdefault((file.shape, repr(names)), []).append(file)
    ignored = list[IgnoredColumns]()
    for files in alike.values():
        member, options = own_options[files[0].shape]
        fields = detected.fields[files[0].path]
        used, if_known = used_columns(member, options), _used_if_known(member, options)
        others = [name for name in fields if not any(may_hold((name,), one) for one in used)]
        names = [name for name in fields if name in others or name in if_known]
        if member.kind == "tokens" and (masks := _masks_in(files[0], member, config, others)):
            hint = f"--field {MASKS[0]}={masks[0]} trains on the tokens where it is 1"
            ignored.append(IgnoredColumns([file.path for file in files], [], [], hint, masks))
        if member.is_of_tokens or not names:
            continue
        with_text = _with_unused_text(files[0], member, options, names)
        others = [name for name in others if name not in with_text] if member.is_composed else []
        if with_text or others:
            only_in_chats = ONLY_IN_CHATS.issuperset([*with_text, *others])
            hint = "--prompt-template chat uses it" if only_in_chats else "see --field"
            paths = [file.path for file in files]
            ignored.append(IgnoredColumns(paths, with_text, others, hint))
    return ignored


def unknown_speakers(
    detected: Detected, shape: Shape, config: DocumentConfig, template: str
) -> dict[str, dict[str, str]]:
    """Return the speakers of the first messages that neither packer nor the chat template knows,
    with the roles that --role may give them, by the path of one file of each shape.
    """
    key, unknown, seen = config.message_keys.get("role", ""), dict[str, dict[str, str]](), set()
    for file in detected.files:
        own = shape.of(file.shape)
        if file.shape in seen or not (own.is_chat or own.of_messages):
            continue
        if file.path not in detected.fields:
            continue
        seen.add(file.shape)
        roles, columns = dict[str, str](), [own.columns[name] for name in own.required]
        with suppress(PackerError), peeking():  # the unit that reads it meets the same
            for values in islice(_first_columns(file, columns, _bare(config)), _FIRST):
                said = [one for column in columns for one in messages_in(values.get(column), key)]
                names = [one.get(key, one.get("role", one.get("from"))) for one in said]
                roles = roles_for(names, template) | roles
        known = dict(config.roles)
        if roles := {name: role for name, role in roles.items() if name not in known}:
            unknown[file.path] = roles
    return unknown


def _used_if_known(shape: Shape, config: DocumentConfig) -> dict[str, str]:
    """Return the columns with well-known names, and these, that are used if they hold what such
    fields hold.
    """
    used = used_columns(shape, config)
    columns = {shape.columns[own]: own for own in known_texts(shape, config)}
    return {column: own for column, own in columns.items() if column in used}


def _masks_in(file: InputFile, shape: Shape, config: DocumentConfig, names: list[str]) -> list[str]:
    """Return those of the columns that seem to be masks: lists named so, or of 0 and 1 for each of
    the first token ids.
    """
    columns = [name for name in names if name not in config.carried and name not in _OTHER_FLAGS]
    ids, found = shape.columns["input_ids"], dict.fromkeys(columns, True)
    with suppress(PackerError), peeking():  # the unit that reads it meets the same
        if not columns or (file.format in _ENDS and _may_be_long(file)):
            return []
        for values in islice(_first_columns(file, [ids, *columns], _bare(config)), _FIRST):
            lists = {name: own for name, own in values.items() if isinstance(own, list)}
            size = len(lists.get(ids, []))
            for name in columns:
                own = lists.get(name)
                is_flags = own and len(own) == size and all(one in (0, 1) for one in own)
                found[name] &= own is not None and ("mask" in name.lower() or bool(is_flags))
    return [name for name in columns if found[name]]


def _with_unused_text(
    file: InputFile, shape: Shape, config: DocumentConfig, names: list[str]
) -> list[str]:
    """Return those of the columns in which the first records have texts that no used column has.

    Words count rather than a URL, a digest or a picture; not all languages have spaces. A text that
    repeats what is used, or is a rendering of it, is no loss.
    """
    used, if_known = used_columns(shape, config), _used_if_known(shape, config)
    required = [shape.columns[own] for own in shape.required]
    columns = [*dict.fromkeys([*required, *sorted(used), *names])]
    found = set[str]()
    with suppress(PackerError), peeking():  # the unit that reads it meets the same
        if file.format in _ENDS and _may_be_long(file):
            return []
        for values in islice(_first_columns(file, columns, _bare(config)), _FIRST):
            own = list[str]()
            for column in used:
                value = values.get(column)
                if column not in if_known or is_known_value(if_known[column], value):
                    own += _texts(value)
            joined_texts = "\n".join(own)
            longest = max(own, key=len, default="").strip()
            for name in names:
                if name in if_known and is_known_value(if_known[name], values.get(name)):
                    continue
                for text in _texts(values.get(name)):
                    is_short = len(text) < _LONG or (" " not in text and text.isascii())
                    repeats = len(longest) >= _TELLING and longest in text
                    if not (is_short or repeats or text.strip() in joined_texts):
                        found.add(name)
    return [name for name in names if name in found]


def _may_be_long(file: InputFile) -> bool:
    """True if one of the first records may be too long for all its values to become objects."""
    data = b""
    with open_source(file) as source:
        while len(data) < _MOST_LOOKED_AT and (more := source.read(_MOST_LOOKED_AT - len(data))):
            data += more
    return len(data) >= _MOST_LOOKED_AT and _ENDS[file.format] not in data[_BEGINNING:]


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON."""
    open_values: list[Iterator[Any]] = [iter([value])]  # lists may be long: they are not copied
    while open_values:
        for one in open_values[-1]:
            if isinstance(one, str):
                yield one
            elif isinstance(one, dict | list):
                open_values.append(iter(one.values() if isinstance(one, dict) else one))
                break
        else:
            open_values.pop()


def shapes_of(files: list[InputFile], config: DocumentConfig) -> dict[int, Shape]:
    """The shape of each file that has a record, by its index. DataError as `detect_shape`."""
    return _Look(config, {}).into(files)


class _Look:
    """A look at the first records of files.

    fields   as `Detected` has them
    lacking  by own names of fields that --field maps, the errors of files that lack the column and
             have a shape without it

    `_searched` has the fields of first records, in a file of which later ones were looked at, too.
    """

    def __init__(self, config: DocumentConfig, known: Mapping[int, Shape]) -> None:
        self._config, self._known, self._carried = _bare(config), known, {*config.carried}
        self.fields = dict[str, list[str]]()
        self.lacking = dict[str, DataError]()
        self._searched = set[tuple[str, ...]]()

    def into(self, files: list[InputFile]) -> dict[int, Shape]:
        """The shapes of the files that have a record, by index."""
        pool = ThreadPoolExecutor(_REQUESTS)
        try:
            with peeking():
                are_far = any(storage.is_url(file.path) for file in files)
                found = list((pool.map if are_far else map)(self._known_or_found, files))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no server
        shapes = [(file, shape) for file, shape in zip(files, found, strict=True) if shape]
        for file, shape in shapes:
            first, other = shapes[0]
            # what the tokens of traces are trained with is not known of others
            if shape.kind != other.kind and (shape.is_of_tokens or other.is_of_tokens):
                what = f"holds {shape.kind}, {first.path} holds {other.kind}"
                raise DataError(f"{file.path}: {what}", "pack them with two commands")
        return {file.index: shape for file, shape in shapes}

    def _known_or_found(self, file: InputFile) -> Shape | None:
        """The shape of a file's first record; None where there is none that can be read."""
        if file.index in self._known:
            return self._known[file.index]
        config, reader = self._config, reader_for(file.format)
        try:
            fields = reader.fields(file, config)
        except DamagedInputError:
            if config.on_error == "fail":
                raise
            return None  # the unit that reads it leaves it out
        if fields is None:
            return None
        fields = [*fields, *self._held_later(file, fields)]
        self._refuse_preference(file, fields)
        shape = self._found_without_lacking(file, fields)
        self.fields[file.path] = [name for name in fields if name not in self._carried]
        if not (shape.is_chat or shape.kind == "prompt-completion"):
            return shape
        columns, first = [shape.columns[own] for own in shape.required], dict[str, Any]()
        if shape.is_chat:
            columns += [name for name in fields if name in ANSWERS]
        with suppress(DamagedInputError):  # which the unit that reads it meets, too
            first = (
                next(_first_columns(file, columns, config), {}) if columns[shape.is_chat :] else {}
            )
        if shape.is_chat:
            asked = self._config
            if asked.shape is None and not asked.fields and asked.train_on != "all":
                self._refuse_questions(file, columns, first)
            return shape
        keys = self._config.message_keys.values()
        prompt = first.get(columns[0])
        of_messages = isinstance(prompt, str) and bool(talk_in(prompt, *keys))
        of_messages |= any(
            isinstance(value, list) or (isinstance(value, dict) and bool(messages_in(value, *keys)))
            for value in first.values()
        )
        return replace(shape, of_messages=of_messages)

    def _refuse_questions(self, file: InputFile, columns: list[str], record: Any) -> None:
        """Raise DataError if the assistant says nothing in the first messages, whose answer is in
        another column.
        """
        asked = columns[0]
        given = (
            name
            for name in columns[1:]
            if record.get(name) and (isinstance(record[name], str) or messages_in(record[name]))
        )
        speakers = {
            role_of(one.get("role", one.get("from"))) for one in messages_in(record.get(asked))
        }
        if (
            (answer := next(given, None))
            and speakers
            and speakers <= {"user", "system", "developer"}
        ):
            raise DataError(
                f"{file.path}: the assistant says nothing in {asked!r}, and {answer!r} seems to be "
                "its answer",
                f"add {Suggested({'prompt': asked, 'completion': answer})}",
            )

    def _refuse_preference(self, file: InputFile, fields: list[str]) -> None:
        """Raise UsageError if the records at the file's beginning, of which the first has these
        fields, are preference records.
        """
        config, wanted = self._config, fields
        if not may_be_preference(fields):
            # later records of JSON may have other fields: looked for in one file of each kind
            is_json = format_named(file.format).counted_in == "byte"
            is_json &= reader_for(file.format).holds_tokens
            if not fields or not is_json or tuple(fields) in self._searched:
                return
            self._searched.add(tuple(fields))
            wanted = [*fields, *WELL_KNOWN]
        record = dict[str, Any]()  # of each field the first value
        with suppress(PackerError):  # the unit that reads it meets the same
            for values in islice(_first_columns(file, wanted, config), _FIRST):
                record |= {
                    name: value
                    for name, value in values.items()
                    if record.get(name) is None and (value is not None or name in fields)
                }
        if names := preference_fields(record, config, self._carried):
            raise preference_error(file.path, record, names, config)

    def _held_later(self, file: InputFile, fields: list[str]) -> list[str]:
        """Columns of optional fields, as --field maps them, that only other records at the file's
        beginning have.
        """
        columns = [name for own, name in self._config.renamed.items()
                   if own in OPTIONAL and not may_hold(fields, name)]  # fmt: skip
        found = set[str]()
        if columns and fields:
            with suppress(PackerError):
                for values in _first_columns(file, [fields[0], *columns], self._config):
                    found.update(name for name in columns if values.get(name) is not None)
        return sorted(found)

    def _found_without_lacking(self, file: InputFile, fields: list[str]) -> Shape:
        """The shape of records with these fields, by what --field maps, or by those of it that the
        file has: the others may be for other files.
        """
        renamed = self._config.renamed
        there = {own: name for own, name in renamed.items() if may_hold(fields, name)}
        try:
            return self._found(file, fields, renamed)
        except DataError as error:
            if there == renamed:
                raise
            with suppress(DataError):
                shape = self._found(file, fields, there)
                for own in renamed.keys() - there.keys():
                    self.lacking.setdefault(own, error)
                return shape
            raise

    def _found(self, file: InputFile, fields: list[str], renamed: dict[str, str]) -> Shape:
        """The shape of records with these fields. DataError where there is none; the tip is what
        the first record's values tell.
        """
        find = partial(
            find_shape, fields, self._config.shape, where=file.path,
            tokens=reader_for(file.format).holds_tokens,
        )  # fmt: skip
        try:
            return find(renamed)
        except DataError as error:
            record = dict[str, object]()
            with suppress(PackerError):  # such as for a name that cannot be read, or a long cell
                record = next(_first_columns(file, fields, self._config), {})
            options = options_for(record, self._config.shape)
            if options is None:
                for way, inner in _records_in(record):
                    wanted = self._config.shape
                    is_record = fits_a_shape([*inner], wanted, renamed) or options_for(
                        inner, wanted
                    )
                    if is_record and not messages_in([inner]):
                        raise DataError(
                            f"{file.path}: an object that holds the records in {way}, expected one "
                            "record per line",
                            f"convert it: jq -c {shlex.quote(way)} FILE > FILE.jsonl",
                        ) from None
                raise
            own = {n: c for n, c in options.fields.items() if n not in MESSAGE_KEYS}
            try:
                find(renamed | own)
            except DataError:
                raise error from None
            raise DataError(error.message, f"add {options}") from None


def _records_in(value: Mapping[str, Any], way: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Find lists of objects, and objects of objects, in a record: the way of `jq` to their members,
    and the first of these.
    """
    for name, inner in value.items():
        key = name if name.isascii() and name.isidentifier() else json.dumps(name)
        if isinstance(inner, dict):
            yield from _records_in(inner, f"{way}.{key}")
        elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield f"{way}.{key}[]", inner[0]
    if len(value) > 1 and all(isinstance(inner, dict) for inner in value.values()):
        yield f"{way or '.'}[]", next(iter(value.values()))


def _first_columns(
    file: InputFile, columns: list[str], config: DocumentConfig
) -> Iterator[dict[str, Any]]:
    """Values of some columns in the records at a file's beginning. Raises PackerError as a reader
    does.
    """
    if not columns:
        return
    own = {f"field_{number}": name for number, name in enumerate(columns[1:])
           if name != columns[0]}  # fmt: skip
    shape = Shape("messages", {"messages": columns[0], **own})
    part = beginning(file, _BEGINNING)
    for records in reader_for(file.format).read(file, part, shape, config):
        for values in records.fields or []:
            yield {shape.columns[own]: value for own, value in values.items()}
