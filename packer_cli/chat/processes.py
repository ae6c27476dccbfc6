"""Reading and rendering conversations in processes beside the run.

Rendering holds the GIL, and is most of the work on conversations; so is loading a tokenizer, a
third of a second. Each worker has a child that reads its slices and gives texts and spans; the
first ones begin before the tokenizer is loaded.

A template is a program. The kernel limits what it may take for a record, which no template gets
around. Processor time: a timer's signal ends the child, even amid a power of huge numbers, which
would hold up Python for hours; time in which the process is paused does not count. Memory: beyond
the limit there is none, and Python raises MemoryError. A child that a record has brought down is
replaced. The new one skips that record, and what is done already.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packer_cli.chat.messages import RefusedError
from packer_cli.child_process import Child, note
from packer_cli.errors import DamagedInputError, Interrupted, LostChildError, UsageError
from packer_cli.inputs.formats import reader_for
from packer_cli.records import InputFile, Records, Slice

if TYPE_CHECKING:
    from packer_cli.chat.messages import Conversation
    from packer_cli.chat.renderer import Document

_MAKE = "packer_cli.chat.processes:LimitedComposer"
_TIME_IS_UP = signal.SIGPROF
SECONDS_PER_RECORD = 10.0  # of processor time: a conversation of 10 MB takes about one
_TEMPLATE = -1  # noted in the place of a record
# Text, spans and copies of a record take a few times its own size, which is in memory already.
_TIMES, _ROOM_BYTES = 4, 1 << 30
_Request = tuple[InputFile, Slice]


class ComposingProcesses:
    """`Composer` in children. Thread-safe; each reader has a child of its own.

    All methods raise LostChildError when a child is lost that was within its limits, UsageError
    when the template takes too long by itself, and Interrupted once `stop` was called.
    """

    def __init__(self, composers: dict[str | None, tuple[Any, ...]]) -> None:
        """`composers`: the arguments of `make_composer`, by `InputFile.shape`."""
        self._composers = composers
        self._lock = threading.Lock()
        self._stopped = False
        self._idle: list[Child] = []
        self._ahead: dict[_Request, Child] = {}
        self._all: list[Child] = []

    def start(self, file: InputFile, part: Slice) -> None:
        """Begin to read a slice that `read` will ask for."""
        child = self._begun("read", file, part, 0, {})
        with self._lock:
            self._ahead[file, part] = child

    def read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        """The records of a slice with texts and spans in the place of fields."""
        with self._lock:
            child = self._ahead.pop((file, part), None)
        done, refused = 0, dict[int, str]()
        while True:
            child = child or self._begun("read", file, part, done, refused)
            try:
                for records in child.items():
                    done += 1
                    yield records
            except LostChildError as error:
                refused |= self._too_slow(child, error)
                child = None
            except DamagedInputError:  # the last that it says of the slice
                self._release(child)
                raise
            else:
                self._release(child)
                return

    def compose(self, records: Records, shape: str | None) -> Records:
        """Compose records that were read in this process, from a file of that shape."""
        refused = dict[int, str]()
        while True:
            child = self._begun("compose", shape, records, refused)
            try:
                composed: Records = child.answer()
            except LostChildError as error:
                refused |= self._too_slow(child, error)
            else:
                self._release(child)
                return composed

    def render(self, shape: str | None, conversation: Conversation) -> Document:
        """The document of one conversation from a file of that shape. Raises RefusedError."""
        child = self._begun("render", shape, conversation)
        try:
            document: Document | str = child.answer()
        except LostChildError as error:
            [document] = self._too_slow(child, error).values()
        else:
            self._release(child)
        if isinstance(document, str):
            raise RefusedError(document)
        return document

    def stop(self) -> None:
        """End all children now and for good, even if threads wait for them."""
        with self._lock:
            self._stopped = True
            for child in self._all:
                child.kill()

    def close(self) -> None:
        """End all children, when no thread waits for them any more."""
        self.stop()
        for child in self._all:
            child.close()

    def _begun(self, method: str, *arguments: Any) -> Child:
        """A child that was asked that."""
        with self._lock:
            if self._stopped:
                raise Interrupted("stopped")
            if self._idle:
                child = self._idle.pop()
            else:
                child = Child(_MAKE, SECONDS_PER_RECORD, self._composers)
                self._all.append(child)
        child.begin(method, *arguments)
        return child

    def _release(self, child: Child) -> None:
        with self._lock:  # not after a failure: it may have more to say
            self._idle.append(child)

    def _too_slow(self, child: Child, error: LostChildError) -> dict[int, str]:
        """The record whose time was up, and why it is bad; without one, raises the error."""
        noted = child.noted
        with self._lock:
            self._all.remove(child)  # there may be thousands of them, each with open pipes
        child.close()
        if error.code != -_TIME_IS_UP:
            raise error
        took = f"takes more than {SECONDS_PER_RECORD:g} s"
        if noted == _TEMPLATE:
            raise UsageError(
                f"the chat template {took} for a question and its answer",
                "fix the template, or name another one with --chat-template",
            ) from error
        return {noted: f"the chat template {took}"}


class LimitedComposer:
    """Made in a child. `refused`: positions of records that are known to be bad, and why."""

    def __init__(self, seconds: float, composers: dict[str | None, tuple[Any, ...]]) -> None:
        """`composers`: by `InputFile.shape`, the arguments of `make_composer`, which renders
        messages of its own.
        """
        from packer_cli.chat.documents import make_composer  # noqa: PLC0415 jinja2 is slow

        signal.signal(_TIME_IS_UP, signal.SIG_DFL)
        self._seconds = seconds
        with _limited_memory():
            self._begin(_TEMPLATE)
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
        """`Composer.compose` for records of a file of that shape."""

        def begin(position: int) -> None:
            if position in refused:
                raise RefusedError(refused[position])
            self._begin(position)

        with _limited_memory():
            return self._composers[shape].compose(records, begin)

    def render(self, shape: str | None, conversation: Conversation) -> Document | str:
        """The document, or why the template refuses the conversation."""
        with _limited_memory():
            self._begin(0)
            try:
                return self._composers[shape].render(conversation)
            except RefusedError as error:
                return str(error)

    def _begin(self, record: int) -> None:
        """The time of `record`, a position or any other number, runs from now on."""
        note(record)
        signal.setitimer(signal.ITIMER_PROF, self._seconds)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Limit the memory of this process, and stop the time of the last record at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm", "rb") as file:  # what RLIMIT_DATA counts, and stacks
        used = int(file.read().split()[5]) * os.sysconf("SC_PAGESIZE")
    limits = [_TIMES * used + _ROOM_BYTES, soft, hard]
    least = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
