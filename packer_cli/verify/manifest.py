"""A manifest checked against itself: checksum, figures, options, slices of the inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from math import inf

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import format_named
from packer_cli.config.options import PackConfig
from packer_cli.config.shape_rules import for_shape
from packer_cli.config.shapes import KINDS, Shape
from packer_cli.errors import UsageError
from packer_cli.result.layout import INCOMPLETE, MANIFEST
from packer_cli.result.manifest import Manifest, Result
from packer_cli.result.manifest_bytes import checksum
from packer_cli.result.manifest_check import disagreements, shape_of, why_incomplete
from packer_cli.result.warnings import why_too_much_unused
from packer_cli.verify.findings import Findings
from packer_cli.verify.reading import Stored, is_file


def check_manifest(stored: Stored, config: DocumentConfig, findings: Findings) -> None:
    """Add what cannot be true, whatever the shards hold."""
    manifest = stored.facts
    digest = checksum(manifest.document)
    if digest != manifest.sha256:
        findings.add(
            MANIFEST,
            f"was edited: its contents have the sha256 {digest}, it says {manifest.sha256}",
        )
    findings.add(MANIFEST, *disagreements(manifest))
    findings.add(MANIFEST, *_impossible_options(manifest, config))
    findings.add(MANIFEST, *_marked(stored, config))
    findings.add(MANIFEST, *_wrong_tables(manifest, config))
    findings.add(MANIFEST, *uncovered(manifest, config))


def _marked(stored: Stored, config: DocumentConfig) -> list[str]:
    """Results that lost too much must be marked as incomplete, and no others."""
    facts, expected = stored.facts, None
    if isinstance(facts, Manifest) and isinstance(config, PackConfig):
        lost = facts.truncated_tokens, facts.dropped_tokens
        expected = why_incomplete(config.max_loss, facts.tokens, *lost)
    marked = facts.incomplete
    if marked != expected:
        return [f"incomplete is {marked!r}, by --max-loss and the tokens lost it is {expected!r}"]
    if (expected is not None) == is_file(stored, MANIFEST):  # the other name is not listed
        return [f"is not named {MANIFEST if expected is None else INCOMPLETE}"]
    return []


def _impossible_options(manifest: Result, config: DocumentConfig) -> list[str]:
    """Options that no finished run with such records, or bad ones, can have."""
    wrong = list[str]()
    try:
        shape = shape_of(manifest)
        wrong += _wrong_shapes(manifest, shape)
        made = for_shape(config, shape)
        wrong += [
            f"config: {name} is {value!r}, a run would have {getattr(made, name)!r}"
            for name, value in vars(config).items()
            if getattr(made, name) != value
        ]
    except UsageError as error:
        wrong.append(f"config: {error.message}")
    bad = manifest.rejected_records
    if bad and config.on_error == "fail":
        wrong.append(f"config: on_error is 'fail', but rejected_records is {bad}")
    unused = manifest.looked_at_characters, manifest.unused
    if reason := why_too_much_unused(config.max_unused, *unused):
        wrong.append(f"config: {reason}")
    return wrong


def _wrong_tables(manifest: Result, config: DocumentConfig) -> Iterator[str]:
    """Sources and stages that are not those of the options, or leave out inputs or rows."""
    if not (isinstance(manifest, Manifest) and isinstance(config, PackConfig)):
        return
    amounts = config.mixture.sources if config.mixture else ()
    edges = list(accumulate((one.inputs for one in amounts), initial=0))
    asked = [(one.name, inputs) for one, inputs in zip(amounts, pairwise(edges), strict=True)]
    if [(one.name, one.inputs) for one in manifest.sources] != asked:
        yield "sources are not those of config: mixture"
    elif amounts and edges[-1] != len(manifest.inputs):
        yield f"sources have {edges[-1]} inputs, there are {len(manifest.inputs)}"
    names = [one.name for one in (config.mixture.stages if config.mixture else ())]
    firsts = list(accumulate((one.rows for one in manifest.stages), initial=0))
    if [one.name for one in manifest.stages] != names:
        yield "stages are not those of config: mixture"
    elif [one.first_row for one in manifest.stages] != firsts[:-1]:
        yield "a stage does not begin where the one before it ends"
    elif names and firsts[-1] != manifest.rows:
        yield f"stages have {firsts[-1]} rows, rows is {manifest.rows}"


def _wrong_shapes(manifest: Result, shape: Shape) -> Iterator[str]:
    """Shapes of inputs that no run would give them."""
    if not shape.members:
        return
    kind = manifest.document["config"]["shape"]
    if kind != shape.kind:
        yield f"config: shape is {kind!r}, by the inputs it is {shape.kind!r}"
    for one in manifest.inputs_now.values():
        if one.shape is None:
            yield f"{one.path} has no shape, though other inputs have"
    for name, member in shape.members.items():
        if member.kind not in KINDS:
            yield f"{name!r} is no shape of records"


def uncovered(manifest: Result, config: DocumentConfig) -> list[str]:
    """Inputs that the slices of all units do not cover exactly once, from beginning to end.

    How many row groups or documents there are is not known here, see `left_out`. Of a source, a
    recipe may take nothing: a small one may have no document on one side of a split.
    """
    is_mixed = isinstance(config, PackConfig) and config.mixture is not None
    slices: dict[int, list[tuple[int, float]]] = {}
    for unit in manifest.units:
        for file, start, stop in unit.slices:
            slices.setdefault(file, []).append((start, inf if stop is None else stop))
    wrong = []
    for index, one in enumerate(manifest.inputs):
        parts = sorted(slices.get(index, []))
        if one.removed:
            if parts:
                wrong.append(f"a unit reads {one.path}, which is marked as removed")
            continue
        if is_mixed and not parts and not one.documents:
            continue
        format_ = format_named(one.format_then(config.input_format) or "jsonl")
        cut_by = "byte" if format_.counts_bytes or not format_.cut_by else format_.cut_by
        end = one.size if cut_by == "byte" else inf
        if text := _not_once(parts, end):
            wrong.append(f"the units' slices of {one.path} {text.format(cut_by)}")
    return wrong


def _not_once(parts: list[tuple[int, float]], end: float) -> str:
    """How slices [start, stop) fail to cover all of it once; "" if they do. `end` inf: unknown."""
    if not parts:
        return "are missing: no unit reads it"
    reached: float = 0
    for start, stop in parts:
        if start != reached:
            what = "leave out what begins" if start > reached else "read twice what begins"
            return f"{what} at {{}} {min(start, reached):.0f}"
        if stop <= start:
            return f"include one from {{}} {start} to {stop:.0f}"
        reached = stop
    if reached < end < inf:
        return f"leave out what begins at {{}} {reached:.0f}"
    if inf > reached > end:
        return f"go on to {{}} {reached:.0f}, past its end"
    return ""


def left_out(manifest: Result, index: int, count: int, what: str) -> str:
    """What the slices of a file with so many row groups, or documents, leave out; "" for nothing.

    `what`: what is counted, in the singular.
    """
    stops = [stop for unit in manifest.units for file, _, stop in unit.slices if file == index]
    last = max((stop for stop in stops if stop is not None), default=count)
    if None in stops or last == count:
        return ""
    return f"has {count} {what}s, the units' slices end after {last}"


def unshaped(config: DocumentConfig, shape: Shape) -> list[str]:
    """Options that a run with records of this shape would have set differently."""
    try:
        made = replace(for_shape(config, shape), shape=shape.kind)
    except UsageError as error:
        return [f"config: {error.message}"]
    return [
        f"config: {name} is {value!r}, for these inputs {getattr(made, name)!r}"
        for name, value in vars(config).items()
        if getattr(made, name) != value
    ]
