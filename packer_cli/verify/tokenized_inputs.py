"""Rows compared with the tokenized directories that they were packed from."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from packer_cli.errors import PackerError
from packer_cli.inputs.tokenized import TokenizedInputs, shape_of
from packer_cli.mixing.units import choice_of
from packer_cli.records import InputFile, Int64
from packer_cli.result.layout import MANIFEST
from packer_cli.result.manifest import Unit
from packer_cli.result.manifest_check import config_of
from packer_cli.result.reader import PackedDirectory
from packer_cli.result.shards import digest
from packer_cli.result.tokenized import TokenizedDirectory, open_tokenized
from packer_cli.tokenization.encoding import plain_encoder
from packer_cli.verify.comparison import Comparison, slices_of
from packer_cli.verify.documents import Documents
from packer_cli.verify.drawing import Shares, are_among
from packer_cli.verify.findings import CHANGED, DIFFERENT, Findings
from packer_cli.verify.manifest import unshaped

_SAME = "sha256", "vocab_size", "pad_token_id"


class TokenizedComparison(Comparison):
    """Compares rows with documents by their numbers; nothing is encoded."""

    def __init__(
        self,
        packed: PackedDirectory,
        files: dict[int, InputFile],
        findings: Findings,
        stop: threading.Event,
    ) -> None:
        some, config = list(files.values()), config_of(packed.facts)
        seed = config.seed if config.documents_shuffled else None
        choice = choice_of(some, config)
        self._inputs = TokenizedInputs(some, seed, pools=choice.pools if choice else None)
        self._numbers: dict[int, list[Int64]] = defaultdict(list)
        shape, encode = shape_of(some), plain_encoder(None)
        super().__init__(packed, config, shape, encode, files, findings, stop)
        self._job = replace(self._job, tokenized=self._inputs)
        findings.add(MANIFEST, *unshaped(config, shape), remedy=DIFFERENT)
        for index, file in files.items():
            text = _other_tokenizer(packed, self.directory(index))
            findings.add(file.path, *([text] if text else []), remedy=DIFFERENT)

    def directory(self, file: int) -> TokenizedDirectory:
        return self._inputs.directory(file)

    def compared(self, file: int) -> Int64:
        """The numbers of the documents that the sample had of an input, ascending."""
        return np.unique(np.concatenate([np.empty(0, np.int64), *self._numbers[file]]))

    def _compare_files(self, about: Unit) -> None:
        rows, documents = self._documents(about.unit)
        for index in sorted({part[0] for part in about.slices} & self._files.keys()):
            for part in slices_of(about, index):
                self._compare_numbered(index, self._inputs.numbers(part), documents)
            documents.expect(self._files[index], rows.positions(index))
        self._findings.count("documents_compared", documents.finish())

    def _compare_some(self, about: Unit, wanted: Shares, drawn: Shares, seed: int) -> None:
        """Compare documents in the rows, and others that are drawn: dropped, or lost."""
        number, compared = about.unit, 0
        rows, documents = self._documents(number)
        for index in sorted({part[0] for part in about.slices} & self._files.keys()):
            file, positions = self._files[index], rows.positions(index)
            rng = np.random.default_rng([seed, number, index])
            count = min(wanted.get((number, index), 0), len(positions))
            chosen = np.sort(rng.choice(positions, count, replace=False))
            there = chosen[(chosen >= 0) & (chosen < len(self.directory(index)))]
            self._compare_numbered(index, there, documents)
            documents.expect(file, chosen)
            compared += count
            here = [self._inputs.numbers(part) for part in slices_of(about, index)]
            numbers = np.concatenate(here)
            count = min(drawn.get((number, index), 0), len(numbers))
            found = np.sort(rng.choice(numbers, count, replace=False))
            self._findings.count("records_drawn", count)
            unknown = found[~are_among(found, positions)]
            self._compare_numbered(index, unknown, documents)
            with self._findings.lock:
                self._numbers[index] += [there, found]
        documents.finish()
        self._findings.count("documents_compared", compared)

    def _compare_numbered(self, file: int, numbers: Int64, documents: Documents) -> None:
        for batch in self._inputs.documents(file, np.sort(numbers)):
            documents.compare(batch, self._files[file])


def _other_tokenizer(packed: PackedDirectory, tokenized: TokenizedDirectory) -> str:
    """How the tokenizer of the documents is another one than that of the rows."""
    rows, documents = (one.document["tokenizer"] or {} for one in (packed.facts, tokenized.facts))
    for name in _SAME:
        if rows.get(name) != documents.get(name):
            return (
                f"tokenizer: {name} is {documents.get(name)}, the rows' tokenizer has "
                f"{rows.get(name)}"
            )
    return ""


def changed_shards(file: InputFile, findings: Findings, stop: threading.Event) -> bool:
    """Whether shards of a tokenized directory are not as its manifest says: a problem each."""
    changed = False
    try:
        tokenized = open_tokenized(Path(file.path).parent)
        for shard in tokenized.facts.shards:
            sha256 = digest(tokenized.path / shard.file, stop.is_set)[1]
            if sha256 != shard.sha256 and not stop.is_set():
                changed = True
                text = f"its sha256 is {sha256}, {file.path} says {shard.sha256}"
                findings.add(str(tokenized.path / shard.file), text, remedy=CHANGED)
    except PackerError as error:
        changed = True
        text = error.message.removeprefix(f"{file.path}: ")
        findings.add(file.path, f"an input: {text}", remedy=CHANGED)
    return changed
