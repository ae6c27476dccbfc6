"""From input files to work units.

The units depend on the inputs and options only, never on the machine, so that the same command
makes the same shards everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from packer_cli.config.documents import GIB, MIB, DocumentConfig
from packer_cli.config.formats import format_named
from packer_cli.errors import DamagedInputError
from packer_cli.inputs.byte_streams import STDIN
from packer_cli.inputs.formats import document_edges, documents_of, groups_of, record_edges
from packer_cli.records import Group, InputFile, Slice, WorkUnit
from packer_cli.result.manifest import TOKENIZED

# About how much text a compressed file holds; only the sizes of work units depend on it.
_COMPRESSION_RATIO = 4
_BYTES_PER_TOKEN = 4


def plan_units(files: list[InputFile], config: DocumentConfig, standing: int = 0) -> list[WorkUnit]:
    """Cut the inputs into work units of about equal weight, in input order.

    Units hold about `unit_bytes` of text. By default a thousand rows' worth, so that a unit's
    unfilled last row is noise, and more for inputs of many gigabytes, so that there are at
    most about a thousand shards. `standing`: the weight of inputs that are packed already.
    """
    weights = {file.index: _weight(file, config) for file in files}
    total = sum(weights.values())
    count = max(1, -(-total // unit_bytes_of(config, total + standing)))
    if config.documents_shuffled and files[0].format == TOKENIZED:
        from packer_cli.inputs.tokenized import shuffled_units  # noqa: PLC0415

        return shuffled_units(files, count)
    target = max(1, -(-total // count))
    units: list[WorkUnit] = []
    current: list[Slice] = []
    room = target
    for part in (
        part for file in files for part in _slices(file, weights[file.index], target, config)
    ):
        if current and part.weight > room + target // 8:
            units.append(WorkUnit(len(units), tuple(current)))
            current, room = [], target
        room -= part.weight
        if current and (current[-1].file, current[-1].stop) == (part.file, part.start):
            before = current.pop()  # row groups side by side are opened once
            part = replace(part, start=before.start, weight=before.weight + part.weight)  # noqa: PLW2901
        current.append(part)
    units.append(WorkUnit(len(units), tuple(current)))
    return units


def unit_bytes_of(config: DocumentConfig, total: int) -> int:
    """About how much a work unit reads of inputs of `total` bytes."""
    if config.unit_bytes is not None:
        return config.unit_bytes
    rows = max(16 * MIB, _BYTES_PER_TOKEN * config.least_unit_tokens)
    few = 1 << max(0, (total // 1024 - 1).bit_length())
    return min(max(rows, few), GIB)


def _groups(file: InputFile, config: DocumentConfig) -> list[Group] | None:
    """As `groups_of`; None for a damaged file that the unit which reads it is to leave out."""
    try:
        return groups_of(file)
    except DamagedInputError:
        if config.on_error == "fail":
            raise
        return None


def _weight(file: InputFile, config: DocumentConfig) -> int:
    groups = _groups(file, config)
    if groups is not None:
        return max(1, sum(group.bytes for group in groups))
    if (documents := documents_of(file)) is not None:
        return max(1, documents.bytes)
    return max(1, file.size * (_COMPRESSION_RATIO if file.compression else 1))


def _slices(file: InputFile, weight: int, target: int, config: DocumentConfig) -> list[Slice]:
    whole = [Slice(file.index, 0, None, weight)]
    if file.path == STDIN or file.compression or weight <= target + target // 8:
        return whole
    groups = _groups(file, config)
    if groups is not None:
        return [Slice(file.index, i, i + 1, one.bytes) for i, one in enumerate(groups)] or whole
    if (begins := record_edges(file, -(-weight // target))) is not None:
        stops = [*begins[1:], None]
        return [
            Slice(file.index, a, b, (file.size if b is None else b) - a)
            for a, b in zip(begins, stops, strict=True)
        ]
    edges = document_edges(file, -(-weight // target))
    if edges is not None:
        each = weight // max(len(edges) - 1, 1)
        return [Slice(file.index, a, b, each) for a, b in pairwise(edges)] or whole
    if format_named(file.format).cut_by != "byte":
        return whole
    count = -(-file.size // target)
    edges = [file.size * i // count for i in range(count + 1)]
    return [Slice(file.index, a, b, b - a) for a, b in pairwise(edges)]
