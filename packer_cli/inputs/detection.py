"""What the records of inputs are, from the first one of each file."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from packer_cli import storage
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.field_tips import options_for, role_options, written
from packer_cli.config.pair_rules import refuse_labels_among_pairs
from packer_cli.config.shapes import (
    MESSAGE_KEYS,
    OPTIONAL,
    PREFERENCE,
    Shape,
    find_shape,
    joined,
    may_hold,
)
from packer_cli.errors import DamagedInputError, DataError, PackerError
from packer_cli.inputs.formats import beginning, holds_documents, reader_for
from packer_cli.records import InputFile

_BEGINNING = 1 << 16
_REQUESTS = 16  # at a time, to a store that answers each after a while


@dataclass(frozen=True)
class KnownShapes:
    """What is known without a look at records, since an earlier run has read them.

    files   by index: of inputs
    others  by `Shape.name`: of files that are no inputs now, but stay in the result
    """

    files: Mapping[int, Shape] = field(default_factory=dict)
    others: Mapping[str, Shape] = field(default_factory=dict)


NOTHING_KNOWN = KnownShapes()


def detect_shape(
    files: list[InputFile],
    config: DocumentConfig,
    known: KnownShapes = NOTHING_KNOWN,
    unused: dict[str, list[str]] | None = None,
    lacking: dict[str, DataError] | None = None,
) -> tuple[list[InputFile], Shape]:
    """What the records are, from the first one of each file whose shape is not `known`: the files,
    which say which of several shapes they have, and their shape. DataError when the shape of a file
    is unknown, or where files cannot be packed together; UsageError for pairs beside answers with a
    label.

    OUT unused: by path, the fields of supervised records that no field of their shape is. OUT
    lacking: by own names of fields that --field maps, the errors of files that lack the column and
    have a shape without it; where no file has it, the first of these is that of the run.
    """
    damage = list[DamagedInputError]()
    shapes = shapes_of(files, config, unused, known.files, lacking, damage)
    if not shapes:
        raise damage[0] if damage else _nothing_in(files, config)
    every = (*shapes.values(), *known.others.values())
    refuse_labels_among_pairs(shape.has_labels for shape in every if shape.has_pairs)
    found = {shape.described(): shape for shape in shapes.values()}
    first = next(iter(found))
    # others' fields may have other names: they are not read
    if set(known.others) <= {found[first].name} and len(found) == 1:
        return files, found[first]
    # files without records go with the first
    labels = {index: shape.described() for index, shape in shapes.items()}
    named = [replace(file, shape=labels.get(file.index, first)) for file in files]
    return named, joined({**known.others, **found})


def shapes_of(
    files: list[InputFile],
    config: DocumentConfig,
    unused: dict[str, list[str]] | None = None,
    known: Mapping[int, Shape] | None = None,
    lacking: dict[str, DataError] | None = None,
    damage: list[DamagedInputError] | None = None,
) -> dict[int, Shape]:
    """The shape of each file that has a record, by its index. DataError, `unused` and `lacking` as
    `detect_shape`. OUT damage: of files that are left out.
    """
    find = partial(
        _shape_of, config=config, known=known or {},
        unused={} if unused is None else unused, lacking={} if lacking is None else lacking,
        damage=[] if damage is None else damage,
    )  # fmt: skip
    left = iter(files)
    for file in left:
        if (shape := find(file)) is not None:
            break
    else:
        return {}
    (_refuse_text_formats if shape.kind == "tokens" else _refuse_token_formats)(files, file)
    shapes, rest = {file.index: shape}, list(left)
    if any(storage.is_url(file.path) for file in rest):
        with ThreadPoolExecutor(_REQUESTS) as pool:
            more = list(pool.map(find, rest))
    else:
        more = [find(file) for file in rest]
    for other, one in zip(rest, more, strict=True):
        if one is not None:
            if "tokens" in (one.kind, shape.kind) and one.kind != shape.kind:
                raise _tokens_and_texts(other, one, file, shape)
            shapes[other.index] = one
    return shapes


def _shape_of(
    file: InputFile,
    config: DocumentConfig,
    unused: dict[str, list[str]],
    known: Mapping[int, Shape],
    lacking: dict[str, DataError],
    damage: list[DamagedInputError],
) -> Shape | None:
    """The shape of a file's first record; None when it has none. OUT unused, lacking, damage."""
    if file.index in known:
        return known[file.index]
    reader = reader_for(file.format)
    try:
        fields = reader.fields(file, config)
    except DamagedInputError as error:
        if config.on_error == "fail":
            raise
        damage.append(error)
        return None  # the unit that reads it leaves it out
    if fields is None:
        return None
    fields = [*fields, *_held_later(file, fields, config)]
    there = {own: name for own, name in config.renamed.items() if may_hold(fields, name)}
    try:
        shape = _found(file, fields, config, config.renamed)
    except DataError as error:
        if there == config.renamed:
            raise
        try:  # the others may be for other files
            shape = _found(file, fields, config, there)
        except DataError:
            raise error from None
        for own in config.renamed.keys() - there.keys():
            lacking.setdefault(own, error)
    if shape.is_supervised:
        used = shape.columns.values()
        unused[file.path] = [
            name for name in fields if not any(may_hold((name,), column) for column in used)
        ]
    if shape.kind in ("prompt-completion", PREFERENCE) and reader.holds_tokens:
        return replace(shape, of_messages=_pairs_messages(file, shape, config))
    return shape


def _held_later(file: InputFile, fields: list[str], config: DocumentConfig) -> list[str]:
    """Columns of optional fields, as --field maps them, that only other records at the file's
    beginning have.
    """
    columns = [name for own, name in config.renamed.items()
               if own in OPTIONAL and not may_hold(fields, name)]  # fmt: skip
    if not columns or not fields:
        return []
    own = {f"field_{number}": name for number, name in enumerate(columns)}
    every = Shape("messages", {"messages": fields[0], **own})
    found = set[str]()
    with suppress(PackerError):
        part = beginning(file, _BEGINNING)
        for records in reader_for(file.format).read(file, part, every, config, peek=True):
            for values in records.fields or []:
                found.update(own[one] for one in own if values.get(one) is not None)
    return sorted(found)


def _found(
    file: InputFile, fields: list[str], config: DocumentConfig, renamed: dict[str, str]
) -> Shape:
    """The shape of records with these fields. DataError where there is none; the tip is what the
    first record's values tell.
    """
    find = partial(
        find_shape, fields, config.shape, where=file.path,
        tokens=reader_for(file.format).holds_tokens,
    )  # fmt: skip
    try:
        return find(renamed)
    except DataError as error:
        options = options_for(_first_record(file, fields, config), config.shape)
        own = {n: c for n, c in options.get("--field", {}).items() if n not in MESSAGE_KEYS}
        try:
            find(renamed | own)
        except DataError:
            raise error from None
        raise DataError(error.message, f"add {written(options)}") from None


def _first_record(file: InputFile, fields: list[str], config: DocumentConfig) -> dict[str, object]:
    """All values of the first good record; {} where there is none at the beginning."""
    first, *others = fields
    columns = {f"field_{number}": name for number, name in enumerate(others) if name != first}
    every = Shape("messages", {"messages": first, **columns})
    try:
        part = beginning(file, _BEGINNING)
        for records in reader_for(file.format).read(file, part, every, config, peek=True):
            for values in records.fields or []:
                return {every.columns[own]: value for own, value in values.items()}
    except PackerError:  # such as for a name that cannot be read, or a cell that is too long
        pass
    return {}


def speakers_tip(file: InputFile, shape: Shape, config: DocumentConfig) -> str:
    """Which --role options the speakers of a file's first record need; "" where they are known."""
    if not shape.is_chat or config.roles:
        return ""
    part, role = beginning(file, _BEGINNING), config.message_keys.get("role")
    with suppress(PackerError):
        for records in reader_for(file.format).read(file, part, shape, config, peek=True):
            for fields in records.fields or []:
                options = role_options(fields[shape.required[0]], role)
                return f"add {written(options)}" if options else ""
    return ""


def _nothing_in(files: list[InputFile], config: DocumentConfig) -> DataError:
    where = files[0].path if len(files) == 1 else f"{files[0].path} to {files[-1].path}"
    return DataError(
        f"{where}: no records in {len(files)} input file{'s' * (len(files) != 1)}"
        + (" that can be read" if config.on_error == "skip" else ""),
        "leave out --on-error skip to see what is wrong with the first record"
        if config.on_error == "skip"
        else "check the paths; the files are empty or hold only blank lines",
    )


def _tokens_and_texts(file: InputFile, shape: Shape, other: InputFile, its: Shape) -> DataError:
    return DataError(
        f"{file.path}: holds {shape.kind}, {other.path} holds {its.kind}",
        "pack texts and token ids with two commands",
    )


def _pairs_messages(file: InputFile, shape: Shape, config: DocumentConfig) -> bool:
    """Whether the prompt or an answer of the first good record is a list of messages."""
    if "messages" in shape.columns:
        return True
    part = beginning(file, _BEGINNING)
    with suppress(DamagedInputError):  # which the unit that reads it meets, too
        for records in reader_for(file.format).read(file, part, shape, config, peek=True):
            for fields in records.fields or []:
                return any(isinstance(fields[own], list) for own in shape.required)
    return False


def _refuse_token_formats(files: list[InputFile], texts: InputFile) -> None:
    for file in files:
        if holds_documents(file):
            raise DataError(
                f"{file.path}: {file.format} files hold token ids, {texts.path} does not",
                "pack texts and token ids with two commands",
            )


def _refuse_text_formats(files: list[InputFile], tokens: InputFile) -> None:
    for file in files:
        if not reader_for(file.format).holds_tokens:
            raise DataError(
                f"{file.path}: {file.format} files hold texts, {tokens.path} holds input_ids",
                "pack texts and token ids with two commands",
            )
