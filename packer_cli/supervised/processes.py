"""Reading and rendering conversations in processes beside the run.

Rendering holds the GIL, and is most of the work on conversations; so is loading a tokenizer, a
third of a second. Each worker has a child that reads its slices and gives texts and spans; the
first ones begin before the tokenizer is loaded.

A template is a program: its time and memory are limited (`limits.py`), and a child that it has
brought down is replaced. The new one skips that record, and what is done already.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from packer_cli.child_process import Child, LostChildError
from packer_cli.errors import DamagedInputError, Interrupted, UsageError
from packer_cli.records import InputFile, Notify, Records, Slice
from packer_cli.supervised.limits import TEMPLATE, TIME_IS_UP

if TYPE_CHECKING:
    from packer_cli.supervised.renderer import Conversation, Document

_MAKE = "packer_cli.supervised.limited_composer:LimitedComposer"
_Request = tuple[InputFile, Slice]


class ComposingProcesses:
    """`Composer` in children. Thread-safe; each reader has a child of its own.

    All methods raise LostChildError when a child is lost that was within its limits, UsageError
    when the template takes too long by itself, and Interrupted once `stop` was called.
    """

    def __init__(
        self,
        seconds: float,
        composers: dict[str | None, tuple[Any, ...]],
        notify: Notify = lambda message: None,
    ) -> None:
        """`seconds`: for each record; `composers`: the arguments of `make_composer`, by
        `InputFile.shape`; `notify` hears what they notice, each notice once.
        """
        self._notify, self._noticed = notify, set[str]()
        self._seconds = seconds
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
                    self._tell(records)
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
        """The same for records that were read in this process, from a file of that shape."""
        refused = dict[int, str]()
        while True:
            child = self._begun("compose", shape, records, refused)
            try:
                composed: Records = child.answer()
            except LostChildError as error:
                refused |= self._too_slow(child, error)
            else:
                self._release(child)
                self._tell(composed)
                return composed

    def render(self, shape: str | None, conversation: Conversation) -> Document:
        """The document of one conversation from a file of that shape. Raises RefusedError."""
        from packer_cli.supervised.chat_template import RefusedError  # noqa: PLC0415 jinja2 is slow

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

    def _tell(self, records: Records) -> None:
        for notice in records.notices:
            with self._lock:
                if notice in self._noticed:
                    continue
                self._noticed.add(notice)
            self._notify(notice)

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
                child = Child(_MAKE, self._seconds, self._composers)
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
        if error.code != -TIME_IS_UP:
            raise error
        took = f"takes more than {self._seconds:g} s (--max-seconds-per-record)"
        if noted == TEMPLATE:
            raise UsageError(
                f"the chat template {took} for a question and its answer",
                "mend the template, or name another one with --chat-template",
            ) from error
        return {noted: f"the chat template {took}"}
