"""`packer show` of a tokenized directory: its documents. Drawing: `text.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import numpy as np

from packer_cli.errors import DataError
from packer_cli.result.documents import side_name
from packer_cli.result.origins import input_origin
from packer_cli.result.tokenized import AGAIN, TokenizedDirectory
from packer_cli.result.tokenized_tokens import Tokens
from packer_cli.show.rows import Segment, content_as_json
from packer_cli.tokenization.decoding import Decoder


@dataclass(frozen=True)
class Document:
    """A document, its number over all shards and in its shard. `content`: all of it; `sides`: of a
    record of preference, each with its name.
    """

    index: int
    shard: str
    shard_document: int
    content: Segment
    sides: list[tuple[str, Segment]] = field(default_factory=list)


class DocumentReader:
    """Reads documents of a tokenized directory by their numbers."""

    def __init__(self, tokenized: TokenizedDirectory) -> None:
        self._tokenized = tokenized
        self._tokens = Tokens([tokenized])

    def read(self, index: int) -> Document:
        """A document. Raises DataError when its shard is damaged."""
        tokenized = self._tokenized
        number = int(np.searchsorted(tokenized.firsts, index, side="right")) - 1
        shard = tokenized.shards[number]
        file, position = tokenized.place(index)
        facts = tokenized.facts
        if not 0 <= file < len(facts.inputs):
            raise DataError(
                f"{tokenized.path / shard.file}: document {index} is of input {file}, the manifest "
                f"has {len(facts.inputs)}",
                AGAIN,
            )
        length = tokenized.lengths[index : index + 1]
        first = np.zeros(1, np.int32)
        piece = first, np.array([index]), first, length
        trained = self._tokens.gather_trained(*piece)
        flags = np.ones(int(length[0]), bool) if trained is None else trained.astype(bool)
        flags[:1] = False  # nothing predicts it
        origin = input_origin(facts.inputs[file], facts.config, position)
        ids = self._tokens.gather(*piece).view(np.int32)
        content = Segment(0, origin, ids, flags)
        sides = self._sides(index, content) if tokenized.has_pairs else []
        return Document(index, shard.file, index - int(tokenized.firsts[number]), content, sides)

    def _sides(self, index: int, content: Segment) -> list[tuple[str, Segment]]:
        ids, trained = content.ids, content.trained
        edge = int(self._tokenized.chosen[index])
        parts = [part for part in (slice(0, edge), slice(edge, None)) if len(ids[part])]
        return [
            (
                side_name(int(part.start < edge), paired=len(parts) == 2),
                replace(content, ids=ids[part], trained=None if trained is None else trained[part]),
            )
            for part in parts
        ]


def document_as_json(document: Document, decoder: Decoder | None) -> str:
    """One JSON object on one line; without a decoder, with ids instead of text."""
    place = {
        "document": document.index,
        "shard": document.shard,
        "shard_document": document.shard_document,
    }
    content = content_as_json(document.content, decoder)
    del content["start"]
    sides = [{"side": name} | content_as_json(side, decoder) for name, side in document.sides]
    for side in sides:
        del side["start"]
    return json.dumps(place | content | ({"sides": sides} if sides else {}))
