"""What an update knows of the shapes of inputs from the earlier result, without reading them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.run_options import RunOptions
from packer_cli.config.shapes import Shape, shape_again, shape_named
from packer_cli.errors import DataError
from packer_cli.inputs.detection import NOTHING_KNOWN, KnownShapes
from packer_cli.records import InputFile
from packer_cli.result.manifest import Manifest, Result
from packer_cli.result.manifest_check import shape_of
from packer_cli.result.manifest_file import load_any
from packer_cli.result.tokenized import open_tokenized
from packer_cli.run.replacing import holds_result
from packer_cli.run.unnamed import find_unnamed
from packer_cli.run.update import usable_identities


def known_shapes(
    directory: Path, current: list[InputFile], config: DocumentConfig, options: RunOptions
) -> KnownShapes:
    """What an earlier result says of the shapes of inputs that have not changed, and of those that
    an update keeps without their being named. Raises DataError as `load_any`, for an update.
    """
    if options.overwrite or not holds_result(directory):
        return NOTHING_KNOWN
    try:
        manifest = load_any(directory, incomplete_too=True, half_too=True)
    except DataError:
        if options.update:
            raise
        return NOTHING_KNOWN
    then = shape_of(manifest)
    if config.prompt_template == "chat":  # as was asked for, not because prompts are messages
        then = replace(then, of_messages=False)
    unnamed = find_unnamed(manifest, current).values() if options.add else ()
    names = dict.fromkeys(one.shape or then.name for one in unnamed)
    others = {name: _with_form(shape_named(name), directory, manifest) for name in names}
    files = {} if options.checksum else _unchanged_shapes(directory, manifest, current, config)
    return KnownShapes(files, others)


def _with_form(shape: Shape, directory: Path, manifest: Result) -> Shape:
    """Of preference: with the field `label` where its records have one."""
    if not shape.has_pairs:
        return shape
    if isinstance(manifest, Manifest):
        has_labels = manifest.segments == manifest.documents
    else:
        has_labels = open_tokenized(directory).has_labels == {True}
    return replace(shape, columns={"label": "label"} if has_labels else {})


def _unchanged_shapes(
    directory: Path, manifest: Result, current: list[InputFile], config: DocumentConfig
) -> dict[int, Shape]:
    """By index among `current`: of the files that need not be read to see that they are the same.
    None with another --field, which `plan_update` refuses.
    """
    if dict(config.fields) != dict(manifest.config.fields):
        return {}
    again = cache(partial(shape_again, renamed=config.renamed))
    then = {one.path: one for one in usable_identities(directory, manifest.inputs)}
    shapes = {}
    for file in current:
        before = then.get(file.path)
        if before is None or not before.is_surely(file):
            continue
        name = manifest.inputs[before.index].shape or manifest.config.shape
        shape = again(name)
        if shape is not None and config.shape in (None, name):
            shapes[file.index] = shape
    return shapes
