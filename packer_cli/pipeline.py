"""A whole run: discover, pack every unit, finalize. Returns the manifest.

Units go to a pool of threads: everything heavy (tokenizing, planning, filling, writing,
hashing) frees the GIL. The first failure stops all; nothing that looks finished is left.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from packer_cli import manifest, output
from packer_cli.config import PackConfig, RunOptions
from packer_cli.counts import Counts
from packer_cli.discovery import check_unchanged, find_inputs, plan_units
from packer_cli.early import EarlyReference
from packer_cli.errors import DataError, InternalError, UsageError, from_os_error
from packer_cli.progress import Progress
from packer_cli.readers import detect_shape
from packer_cli.readers.byte_streams import STDIN, begin_stdin, stdin_digest
from packer_cli.records import InputFile, WorkUnit
from packer_cli.shard_writer import schema
from packer_cli.shards import Shard, digest
from packer_cli.source import Source, prepare
from packer_cli.threads import Task, run_all
from packer_cli.tokenization.locate import choose
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
    early: EarlyReference | None = None,
) -> dict[str, Any]:
    """Pack `inputs` into the directory `destination`.

    `notify` hears one-line messages for the user. `early`: of the tokenizer, if begun. Raises
    PackerError: UsageError before anything is written, DataError for bad records or storage,
    Interrupted for Ctrl-C.
    """
    _refuse_other_than_utf8(config, tokenizer_name)
    stop = threading.Event()
    begin_stdin(stop.is_set)
    files = find_inputs(inputs, config, notify)
    shape = detect_shape(files, config)
    config = config.for_shape(shape)
    units = plan_units(files, config)
    with (
        closing(
            prepare(files, units, shape, config, options, tokenizer_name, early, notify)
        ) as source,
        output.claimed(destination, files, overwrite=options.overwrite, notify=notify) as work,
    ):
        tokenizer = source.tokenizer
        pad = tokenizer.info.pad_token_id if tokenizer else 0
        job = Job(
            files,
            config,
            shape,
            tokenizer,
            pad,
            source.read,
            source.encode,
            schema(config, pad, tokenizer.info.sha256 if tokenizer else ""),
            work,
            Progress(sum(file.size for file in files), show=options.progress),
            stop,
        )
        results, digests, counts = _run(job, units, options.workers)
        result = _finalize(job, results, digests, counts, source)
        output.replace(destination, complete="incomplete" not in result)
    return result


def _refuse_other_than_utf8(config: PackConfig, tokenizer: str | None) -> None:
    """UsageError for an option that no manifest can hold, before all the work rather than after."""
    options = config.as_json() | {"tokenizer": choose(tokenizer)[0]}
    options["field"] = options.pop("fields")
    for name, value in options.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"--{name.replace('_', '-')}: {value!r} is not UTF-8, so no manifest can hold it",
                "choose another name, or rename what it names",
            ) from None


def _run(
    job: Job, units: list[WorkUnit], workers: int
) -> tuple[list[UnitResult], list[tuple[int, str]], Counts]:
    """Pack all units and hash all inputs; the shards are on the disk afterwards.

    A thread of its own brings shards to the disk and hashes them, so that workers go on.
    """
    results: dict[int, UnitResult] = {}
    digests: dict[int, tuple[int, str]] = {}
    total, adding = Counts(), threading.Lock()  # not a Counts a unit: they are as long as rows

    def settle(shard: Shard) -> None:
        if job.stop.is_set():
            return
        output.sync(job.folder / shard.file)
        shard.bytes, shard.sha256 = digest(job.folder / shard.file, job.stop.is_set)

    def run_unit(unit: WorkUnit) -> list[Future[None]]:
        results[unit.index], counts = pack_unit(unit, job)
        with adding:
            total.add(counts)
        return [storage.submit(settle, shard) for shard in results[unit.index].shards]

    def run_digest(file: InputFile) -> list[Future[None]]:
        digests[file.index] = digest(file.path, job.stop.is_set)
        check_unchanged(file)  # since it was read, too: the digest is of what was packed
        return []

    tasks: list[Task] = [partial(run_unit, unit) for unit in units]
    tasks += [partial(run_digest, file) for file in job.files if file.path != STDIN]
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="packer-storage") as storage:
            run_all(tasks, workers, job.stop)
        if job.tokenizer is not None:
            job.tokenizer.finish()
    finally:
        job.progress.close()
    digests.update({file.index: stdin_digest() for file in job.files if file.path == STDIN})
    return (
        [results[unit.index] for unit in units],
        [digests[file.index] for file in job.files],
        total,
    )


def _finalize(
    job: Job,
    results: list[UnitResult],
    digests: list[tuple[int, str]],
    counts: Counts,
    source: Source,
) -> dict[str, Any]:
    """Write the side files and the manifest into the work folder, once every unit is done."""
    if not counts.conserved():
        raise InternalError(
            f"{counts.encoded_tokens} tokens were encoded, but {counts.tokens} placed, "
            f"{counts.truncated_tokens} truncated and {counts.dropped_tokens} dropped"
        )
    rejected = [result.rejected for result in results if result.rejected]
    if not counts.rows:
        raise DataError(_nothing(counts, rejected), "check --shape, --field, --overlong, the input")
    shards = [shard for result in results for shard in result.shards]
    if rejected:
        _join(rejected, job.folder / REJECTED)
    side_files = _side_files(shards, source)
    for name, data in side_files.items():
        output.write_file(job.folder / name, data)
    info = job.tokenizer.info.as_json() if job.tokenizer else None
    units = [result.unit for result in results]
    content = manifest.build(job.config, job.shape, info, job.files, digests, units, shards, counts)
    lost = (counts.truncated_tokens + counts.dropped_tokens) / counts.encoded_tokens
    if job.config.max_loss is not None and lost > job.config.max_loss:
        content["incomplete"] = (
            f"{lost:.4f} of the tokens were lost, {counts.truncated_tokens:,} truncated and "
            f"{counts.dropped_tokens:,} dropped; --max-loss is {job.config.max_loss}"
        )
    content["side_files"] = {n: hashlib.sha256(data).hexdigest() for n, data in side_files.items()}
    if rejected:
        content["side_files"][REJECTED] = digest(job.folder / REJECTED)[1]
    output.write_file(job.folder / manifest.MANIFEST, manifest.to_bytes(content))
    return content


def _nothing(counts: Counts, rejected: list[Path]) -> str:
    found = f"nothing to pack: {counts.empty_documents} empty, {counts.dropped_documents} dropped "
    found += f"and {counts.rejected_records} rejected records, no tokens"
    if counts.untrained_documents:
        found += f"; {counts.untrained_documents} of those dropped have nothing to train on"
    if rejected:
        with open(rejected[0], "rb") as file:
            first = json.loads(file.readline())
        found += f"; the first rejected, {first['file']} at {first['position']}: {first['reason']}"
    return found


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


def _side_files(shards: list[Any], source: Source) -> dict[str, bytes]:
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
    if source.tokenizer_files is not None:
        found["tokenizer.json"] = source.tokenizer_files.json
        found.update(source.tokenizer_files.companions)
    if source.template is not None:
        found["chat_template.jinja"] = source.template.encode()
    return found
