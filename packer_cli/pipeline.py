"""A whole run: discover, pack every unit, finalize. Returns the manifest.

Units go to a pool of threads: everything heavy (tokenizing, planning, filling, writing,
hashing) frees the GIL. The first failure stops all; nothing that looks finished is left.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from packer_cli import manifest, output
from packer_cli.config import PackConfig, RunOptions
from packer_cli.counts import Counts
from packer_cli.discovery import check_unchanged, find_inputs, plan_units
from packer_cli.encoders import encoder_for, framing_for
from packer_cli.errors import DataError, InternalError, from_os_error
from packer_cli.progress import Progress
from packer_cli.readers import detect_shape, reader_for
from packer_cli.readers.byte_streams import STDIN, stdin_digest
from packer_cli.records import InputFile, Slice, WorkUnit
from packer_cli.shapes import Shape
from packer_cli.shard_writer import schema
from packer_cli.shards import Shard, digest
from packer_cli.threads import run_all
from packer_cli.tokenization import Tokenizer, bytes_tokenizer, load_tokenizer
from packer_cli.tokenization.agreement import FIRST_DOCUMENTS_CHARACTERS
from packer_cli.tokenization.locate import BYTES, TokenizerFiles, choose, locate
from packer_cli.unit import Job, UnitResult, pack_unit

REJECTED = "rejected.jsonl"
Notify = Callable[[str], None]


def pack(
    inputs: list[str],
    destination: Path,
    config: PackConfig,
    options: RunOptions,
    tokenizer_name: str | None = None,
    notify: Notify = lambda message: None,
) -> dict[str, Any]:
    """Pack `inputs` into the directory `destination`.

    `notify` hears one-line messages for the user. Raises PackerError: UsageError before
    anything is written, DataError for bad records or storage, Interrupted for Ctrl-C.
    """
    files = find_inputs(inputs, config)
    shape = detect_shape(files, config)
    config = config.for_shape(shape)
    if shape.is_supervised:
        notify(f"records: {shape.described()}")
    tokenizer, tokenizer_files = _tokenizer(files, shape, config, options, tokenizer_name, notify)
    pad = tokenizer.info.pad_token_id if tokenizer else 0
    with (
        closing(tokenizer) if tokenizer else nullcontext(),
        output.claimed(destination, files, overwrite=options.overwrite, notify=notify) as work,
    ):
        encode, template = encoder_for(shape, config, tokenizer, tokenizer_files, notify)
        job = Job(
            files,
            config,
            shape,
            tokenizer,
            pad,
            encode,
            schema(config, pad, tokenizer.info.sha256 if tokenizer else ""),
            work,
            Progress(sum(file.size for file in files), show=options.progress),
        )
        results, digests = _run(job, plan_units(files, config), options.workers)
        result = _finalize(job, results, digests, tokenizer_files, template)
        output.replace(destination)
    return result


def _run(
    job: Job, units: list[WorkUnit], workers: int
) -> tuple[list[UnitResult], list[tuple[int, str]]]:
    """Pack all units and hash all inputs; the shards are on the disk afterwards.

    A thread of its own brings shards to the disk and hashes them, so that workers go on.
    """
    results: dict[int, UnitResult] = {}
    digests: dict[int, tuple[int, str]] = {}
    settling: list[Future[None]] = []

    def settle(shard: Shard) -> None:
        output.sync(job.folder / shard.file)
        shard.bytes, shard.sha256 = digest(job.folder / shard.file, job.stop.is_set)

    def run_unit(unit: WorkUnit) -> None:
        results[unit.index] = pack_unit(unit, job)
        settling.extend(storage.submit(settle, shard) for shard in results[unit.index].shards)

    def run_digest(file: InputFile) -> None:
        digests[file.index] = digest(file.path, job.stop.is_set)
        check_unchanged(file)  # since it was read, too: the digest is of what was packed

    tasks: list[partial[None]] = [partial(run_unit, unit) for unit in units]
    tasks += [partial(run_digest, file) for file in job.files if file.path != STDIN]
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="packer-storage") as storage:
            run_all(tasks, workers, job.stop)
        for future in settling:
            future.result()
        if job.tokenizer is not None:
            job.tokenizer.finish()
    finally:
        job.progress.close()
    digests.update({file.index: stdin_digest() for file in job.files if file.path == STDIN})
    return [results[unit.index] for unit in units], [digests[file.index] for file in job.files]


def _tokenizer(
    files: list[InputFile],
    shape: Shape,
    config: PackConfig,
    options: RunOptions,
    name: str | None,
    notify: Notify,
) -> tuple[Tokenizer | None, TokenizerFiles | None]:
    """The tokenizer and its files; (None, None) for ids that come without one."""
    chosen, origin = choose(name)
    if shape.kind == "tokens" and origin == "default":
        notify("input_ids found: no tokenizer needed; padding is id 0")
        return None, None
    framing = framing_for(shape, config)
    if chosen == BYTES:
        if origin == "default":
            notify("no --tokenizer given: using the built-in bytes tokenizer (UTF-8 bytes as ids)")
        return bytes_tokenizer(framing), None
    located = locate(chosen)
    tokenizer = load_tokenizer(
        located,
        backend=options.tokenizer_backend,
        framing=framing,
        first_documents=_first_documents(files, shape, config),
        notify=notify,
    )
    return tokenizer, located


def _first_documents(files: list[InputFile], shape: Shape, config: PackConfig) -> list[str]:
    """Some texts from the beginning of the input, for checking the fast engine."""
    part = Slice(files[0].index, 0, FIRST_DOCUMENTS_CHARACTERS, 0)
    if shape.kind != "text":
        return []
    if files[0].format == "parquet":
        part = Slice(files[0].index, 0, None, 0)
    for records in reader_for(files[0].format).read(files[0], part, shape, config, peek=True):
        return records.texts or []
    return []


def _finalize(
    job: Job,
    results: list[UnitResult],
    digests: list[tuple[int, str]],
    tokenizer_files: TokenizerFiles | None,
    template: str | None,
) -> dict[str, Any]:
    """Write the side files and the manifest into the work folder, once every unit is done."""
    counts = Counts()
    for result in results:
        counts.add(result.counts)
    if not counts.conserved():
        raise InternalError(
            f"{counts.encoded_tokens} tokens were encoded, but {counts.tokens} placed, "
            f"{counts.truncated_tokens} truncated and {counts.dropped_tokens} dropped"
        )
    if not counts.rows:
        raise DataError(
            f"nothing to pack: {counts.empty_documents} empty, {counts.dropped_documents} dropped "
            f"and {counts.rejected_records} rejected records, no tokens",
            "check --text-field, --overlong and the input",
        )
    shards = [shard for result in results for shard in result.shards]
    rejected = [result.rejected for result in results if result.rejected]
    if rejected:
        _join(rejected, job.folder / REJECTED)
    side_files = _side_files(shards, tokenizer_files, template)
    for name, data in side_files.items():
        output.write_file(job.folder / name, data)
    info = job.tokenizer.info.as_json() if job.tokenizer else None
    units = [result.unit for result in results]
    content = manifest.build(job.config, job.shape, info, job.files, digests, units, shards, counts)
    content["side_files"] = {n: hashlib.sha256(data).hexdigest() for n, data in side_files.items()}
    if rejected:
        content["side_files"][REJECTED] = digest(job.folder / REJECTED)[1]
    output.write_file(job.folder / manifest.MANIFEST, manifest.to_bytes(content))
    return content


def _join(parts: list[Path], whole: Path) -> None:
    """Concatenate files that may be large, and remove them."""
    try:
        with open(whole, "wb") as target:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, target)
                part.unlink()
    except OSError as error:
        raise from_os_error(error, whole, "write") from error
    output.sync(whole)


def _side_files(
    shards: list[Any], tokenizer_files: TokenizerFiles | None, template: str | None
) -> dict[str, bytes]:
    """What makes the directory a `datasets.load_from_disk` directory, and the tokenizer."""
    # datasets caches what it derives from a data set under its fingerprint
    fingerprint = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    state: dict[str, object] = {
        "_data_files": [{"filename": shard.file} for shard in shards],
        "_fingerprint": fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    found = {
        "state.json": json.dumps(state, indent=1).encode(),
        "dataset_info.json": json.dumps({"description": "", "features": None}, indent=1).encode(),
    }
    if tokenizer_files is not None:
        found["tokenizer.json"] = tokenizer_files.json
        found.update(tokenizer_files.companions)
    if template is not None:
        found["chat_template.jinja"] = template.encode()
    return found
