"""nanotron: tokens as datatrove's `TokenizedFile` writes them, for a `dataset_folder`.

`00000_tokens.ds` has the token ids end to end, `.ds.index` each document's end in tokens as uint64
(datatrove/pipeline/tokens/tokenizer.py). nanotron's `NanosetDatasetsArgs` takes tokenizer and token
size from the first line of `.ds.metadata`, "name|4", and loads that tokenizer. It cuts the stream
itself and has no loss mask; with positions from the index, no document sees another.
"""

from __future__ import annotations

from pathlib import Path

from packer_cli.export.rows import Rows
from packer_cli.export.writing import Files
from packer_cli.result.reader import PackedDirectory

_TOKEN_BYTES = 4


class Nanotron(Files):
    """Token ids uint32; documents in the order of the inputs."""

    takes = "documents"
    needs = ("segments",)
    keeps_mask = False

    def __init__(self, folder: Path, packed: PackedDirectory) -> None:
        super().__init__(folder, packed)
        self._tokens = self._open("00000_tokens.ds")
        self._index = self._open("00000_tokens.ds.index")
        tokenizer, tokens = packed.facts.tokenizer, packed.facts.tokens
        if tokenizer and tokenizer.source != "bytes":  # which transformers does not know
            lines = f"{tokenizer.source}|{_TOKEN_BYTES}", str(tokens), f"{tokens / 1e6:.3g} MT"
            (folder / "00000_tokens.ds.metadata").write_text("\n".join(lines))

    def write(self, part: Rows) -> None:
        before = self._tokens.tell() // _TOKEN_BYTES
        self._index.write((part.offsets[1:] + before).astype("<u8").tobytes())
        self._tokens.write(part.ids.astype("<u4").tobytes())
