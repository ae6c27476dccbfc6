"""The files of a result: none missing, none changed, none unknown."""

from __future__ import annotations

import json

from packer_cli.errors import PackerError
from packer_cli.ownership import is_leftover
from packer_cli.records import Notify
from packer_cli.result.layout import (
    INCOMPLETE,
    INDEX,
    INFO,
    INPUT_TIMES,
    MANIFEST,
    REJECTED,
    SIDE_FILES,
    SQUARED_LENGTHS,
    STATE,
    TOKENIZER,
    UNITS,
    WORK,
    kind_of,
)
from packer_cli.result.manifest import Manifest, Result
from packer_cli.result.saved_dataset import saved_dataset
from packer_cli.verify.findings import FOREIGN, Findings
from packer_cli.verify.reading import (
    Stored,
    content_of,
    digest_of,
    is_file,
    lines_of,
    names_in,
    path_of,
)


def check_files(stored: Stored, findings: Findings, notify: Notify) -> None:
    """Check the names and digests of side files against the manifest."""
    facts = stored.facts
    digests = _side_files(facts, findings)
    names = names_in(stored)
    for name, sha256 in digests.items():
        if name in names and is_file(stored, name):
            _check_digest(stored, name, sha256, findings)
        else:
            findings.add(name, "is missing")
    known = {MANIFEST, INPUT_TIMES, *digests, *(shard.file for shard in facts.shards)}
    if facts.incomplete:
        known = known - {MANIFEST} | {INCOMPLETE}
    leftovers = {name for name in names if name == WORK or is_leftover(name, WORK)}
    for name in sorted(names - known - leftovers):
        findings.add(name, "a foreign file: the manifest does not list it", remedy=FOREIGN)
    for name in sorted(leftovers):
        notify(
            f"{path_of(stored, name)}: belongs to a run that is writing here, or that ended "
            "before it could remove it; the next packer pack to this directory removes it"
        )


def check_contents(stored: Stored, findings: Findings) -> None:
    """Check the contents of side files, whose digests are right, against the manifest."""
    _check_saved_dataset(stored, findings)
    if REJECTED in stored.facts.side_files:
        _check_rejected(stored, findings)


def _side_files(manifest: Result, findings: Findings) -> dict[str, str]:
    """Name -> sha256 of every file but shards and manifest."""
    digests = dict(manifest.side_files)
    never = {INPUT_TIMES} if isinstance(manifest, Manifest) else {INPUT_TIMES, SQUARED_LENGTHS}
    for name in sorted(digests.keys() - SIDE_FILES | digests.keys() & never):
        findings.add(MANIFEST, f"lists {name} as a side file, which packer does not write")
    for name in (STATE, INFO, UNITS):
        if name not in digests:
            findings.add(MANIFEST, f"does not list {name}, which every result has")
    if manifest.tokenizer and manifest.tokenizer.sha256:
        sha256 = manifest.tokenizer.sha256
        if digests.setdefault(TOKENIZER, sha256) != sha256:
            findings.add(MANIFEST, f"gives {TOKENIZER} two digests")
    if (REJECTED in digests) != bool(manifest.rejected_records):
        listed = "lists" if REJECTED in digests else "does not list"
        findings.add(
            MANIFEST, f"{listed} {REJECTED}, rejected_records is {manifest.rejected_records}"
        )
    return digests


def _check_digest(stored: Stored, name: str, expected: str, findings: Findings) -> None:
    try:
        digest = digest_of(stored, name)[1]
    except PackerError as error:
        findings.add(name, error.message.removeprefix(f"{path_of(stored, name)}: "))
        return
    if digest != expected:
        findings.add(name, f"its sha256 is {digest}, the manifest says {expected}")


def _check_saved_dataset(stored: Stored, findings: Findings) -> None:
    """`datasets` must open all shards in order, and tell this result from any other."""
    shards = stored.facts.shards
    identity = "".join(shard.sha256 for shard in shards)
    files = [shard.file for shard in shards if kind_of(shard.file) != INDEX]
    for name, data in saved_dataset(files, identity).items():
        try:
            content, expected = json.loads(content_of(stored, name)), json.loads(data)
        except (ValueError, RecursionError) as error:
            findings.add(name, f"not valid JSON: {error}")
            continue
        if not isinstance(content, dict):
            findings.add(name, f"holds a {type(content).__name__}, not a JSON object")
            continue
        for key in sorted(content.keys() | expected.keys()):
            if key in content and key in expected and content[key] == expected[key]:
                continue
            text = f"its {key} is not that of the shards in the manifest"
            if key == "_data_files":
                listed = content.get(key)
                count = len(listed) if isinstance(listed, list) else 0
                text += f": it lists {count} files, {len(files)} expected"
            findings.add(name, text)


def _check_rejected(stored: Stored, findings: Findings) -> None:
    """Each rejected record has a line, and each input as many as its figure says."""
    inputs = stored.facts.inputs
    counts = dict.fromkeys((one.path for one in inputs), 0)
    for number, line in enumerate(lines_of(stored, REJECTED), 1):
        try:
            record = json.loads(line)
            path, place = record["file"], record["position"]
            is_place = place is None or (type(place) is int and place >= 0)
            if path not in counts or not is_place:
                raise ValueError(f"{path!r} at {place!r} is not a record of an input")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            findings.add(REJECTED, f"line {number} is not a rejected record: {error}")
            return
        counts[path] += 1
    for one in inputs:
        if counts[one.path] != one.rejected_records:
            findings.add(
                REJECTED,
                f"has {counts[one.path]} records of {one.path}, the manifest says "
                f"{one.rejected_records}",
            )
