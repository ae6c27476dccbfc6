"""The reference engine in a process of its own, so that checking the fast one is free.

Both engines hold the GIL while they load (a third of a second each for 128k tokens), and the
reference encodes tens of times slower. Beside the run, on another core, it costs no time: it
loads while the fast engine loads, and each sample is compared while the next batch is encoded.

Messages are pickles over the child's stdin and stdout, length first. The child ends when its
stdin does, so it cannot outlive the run, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

from packer_cli.errors import InternalError, PackerError
from packer_cli.records import Int64, UInt32
from packer_cli.tokenization.engines import Description, ReferenceEngine


class ReferenceProcess:
    """`ReferenceEngine` behind a pipe; `check` does not wait for the answer. Thread-safe."""

    name = ReferenceEngine.name

    def __init__(self, tokenizer_json: bytes) -> None:
        """Start loading; errors of loading come out of the first call."""
        self._lock = threading.Lock()
        self._pending: str | None = None
        # Our own path: -c alone would import modules that lie in the current directory. A session
        # of its own: Ctrl-C reaches the run only, which then ends the child.
        # The tokenizer goes through a file: a pipe would hold us up until the child reads.
        with tempfile.TemporaryFile() as file:
            file.write(tokenizer_json)
            file.seek(0)
            # Above 2: those are the child's own, whatever of ours was closed.
            descriptor = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)
            start = (
                f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as me; "
                f"me.serve({descriptor})"
            )
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", start],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=[descriptor],
                )
            finally:
                os.close(descriptor)

    def describe(self, tokens: list[str]) -> Description:
        description: Description = self._ask("describe", tokens)
        return description

    def encode(self, texts: list[str]) -> tuple[UInt32, Int64]:
        ids, offsets = self._ask("encode", texts)
        return ids, offsets

    def check(self, text: str, ids: UInt32) -> None:
        """Have `ids` compared; a difference is raised by a later `check`, or by `finish`."""
        with self._lock:
            self._settle()
            self._send(("encode", [text]))
            self._pending = text
            self._expected = ids

    def finish(self) -> None:
        """Wait for the last comparison. Raises InternalError when it found a difference."""
        with self._lock:
            self._settle()

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _settle(self) -> None:
        text, self._pending = self._pending, None
        if text is None:
            return
        ids, _ = self._receive()
        if ids.tobytes() != self._expected.tobytes():
            raise InternalError(
                f"the engines gigatoken and tokenizers differ on the text {text[:80]!r}",
                "run again with --tokenizer-backend tokenizers, and please report the text",
            )

    def _ask(self, name: str, argument: object) -> Any:
        with self._lock:
            self._settle()
            self._send((name, argument))
            return self._receive()

    def _send(self, message: object) -> None:
        try:
            _write(self._child.stdin, message)
        except OSError as error:
            raise InternalError(f"the reference tokenizer's process ended: {error}") from error

    def _receive(self) -> Any:
        try:
            answer = _read(self._child.stdout)
        except (OSError, EOFError) as error:
            code = self._child.poll()
            raise InternalError(f"the reference tokenizer's process ended, code {code}") from error
        if isinstance(answer, PackerError):
            raise answer
        return answer


def _write(pipe: IO[bytes] | None, message: object) -> None:
    if pipe is None:
        raise OSError("no pipe")
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(struct.pack("<q", len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> Any:
    header = pipe.read(8) if pipe else b""
    if len(header) < 8 or pipe is None:
        raise EOFError
    data = pipe.read(struct.unpack("<q", header)[0])
    return pickle.loads(data)  # noqa: S301 both ends are this file


def serve(tokenizer_json: int) -> None:
    """The child: load the file of that descriptor, then answer until stdin ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever a library prints must not get among the answers
    engine: ReferenceEngine | None = None
    problem: PackerError | None = None
    try:
        with open(tokenizer_json, "rb") as file:
            engine = ReferenceEngine(file.read())
    except PackerError as error:
        problem = error
    while True:
        try:
            name, argument = _read(requests)
        except EOFError:
            return
        answer: object = problem
        if engine is not None:
            try:
                answer = getattr(engine, name)(argument)
            except PackerError as error:
                answer = error
            except Exception as error:  # to where it can be reported
                answer = InternalError(f"the reference tokenizer: {type(error).__name__}: {error}")
        _write(answers, answer)
