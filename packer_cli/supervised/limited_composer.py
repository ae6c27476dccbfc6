"""The child's side of `processes.py`: a Composer with limits for each record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packer_cli.inputs.formats import reader_for
from packer_cli.records import InputFile, Records, Slice
from packer_cli.supervised.chat_template import RefusedError
from packer_cli.supervised.documents import make_composer
from packer_cli.supervised.limits import TEMPLATE, RecordLimits
from packer_cli.supervised.renderer import Conversation, Document


class LimitedComposer:
    """Made in a child. `refused`: positions of records that are known to be bad, and why."""

    def __init__(self, seconds: float, composers: dict[str | None, tuple[Any, ...]]) -> None:
        """`composers`: by `InputFile.shape`, the arguments of `make_composer`, which renders
        messages of its own.
        """
        self._limits = RecordLimits(seconds)
        with self._limits.held():
            self._limits.begin(TEMPLATE)
            self._composers = {name: make_composer(*parts) for name, parts in composers.items()}

    def read(
        self, file: InputFile, part: Slice, done: int, refused: dict[int, str]
    ) -> Iterator[Records]:
        """`Composer.read` without the first `done` batches."""
        own = self._composers[file.shape]
        reader = reader_for(file.format)
        for number, records in enumerate(reader.read(file, part, own.shape, own.config)):
            if number >= done:
                yield self.compose(file.shape, records, refused)

    def compose(self, shape: str | None, records: Records, refused: dict[int, str]) -> Records:
        """The same for records of a file of that shape."""

        def begin(position: int) -> None:
            if position in refused:
                raise RefusedError(refused[position])
            self._limits.begin(position)

        with self._limits.held():
            return self._composers[shape].compose(records, begin)

    def render(self, shape: str | None, conversation: Conversation) -> Document | str:
        """The document, or why the template refuses the conversation."""
        with self._limits.held():
            self._limits.begin(0)
            try:
                return self._composers[shape].render(conversation)
            except RefusedError as error:
                return str(error)
