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

    def __init__(self, seconds: float, *composer: Any) -> None:
        """`composer`: the arguments of `make_composer`, which renders messages of its own."""
        self._limits = RecordLimits(seconds)
        with self._limits.held():
            self._limits.begin(TEMPLATE)
            self._composer = make_composer(*composer)

    def read(
        self, file: InputFile, part: Slice, done: int, refused: dict[int, str]
    ) -> Iterator[Records]:
        """`Composer.read` without the first `done` batches."""
        shape, config = self._composer.shape, self._composer.config
        for number, records in enumerate(reader_for(file.format).read(file, part, shape, config)):
            if number >= done:
                yield self.compose(records, refused)

    def compose(self, records: Records, refused: dict[int, str]) -> Records:
        def begin(position: int) -> None:
            if position in refused:
                raise RefusedError(refused[position])
            self._limits.begin(position)

        with self._limits.held():
            return self._composer.compose(records, begin)

    def render(self, conversation: Conversation) -> Document | str:
        """The document, or why the template refuses the conversation."""
        with self._limits.held():
            self._limits.begin(0)
            try:
                return self._composer.render(conversation)
            except RefusedError as error:
                return str(error)
