"""Starts the reference engine on another core before anything heavy is imported.

It takes a third of a second to be ready, about as long as the imports of this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packer_cli.child_process import Child

ENVIRONMENT_VARIABLE = "PACKER_TOKENIZER"
REFERENCE_ENGINE = "packer_cli.tokenization.engines:ReferenceEngine"


@dataclass
class EarlyReference:
    """A child that loads `tokenizer_json` until `take` hands it over."""

    tokenizer_json: bytes
    child: Child | None

    def take(self, tokenizer_json: bytes) -> Child | None:
        """The child, if it loads this tokenizer."""
        if tokenizer_json != self.tokenizer_json:
            return None
        child, self.child = self.child, None
        return child

    def close(self) -> None:
        if self.child is not None:
            self.child.close()


@contextmanager
def begin_reference(tokenizer: str | None, backend: str) -> Iterator[EarlyReference | None]:
    """Start if the tokenizer is a local one; problems with it are reported later."""
    name = tokenizer or os.environ.get(ENVIRONMENT_VARIABLE)
    content = b""
    if name and backend != "tokenizers":
        with suppress(OSError, RuntimeError):
            path = Path(name).expanduser()
            content = (path / "tokenizer.json" if path.is_dir() else path).read_bytes()
    early = EarlyReference(content, Child(REFERENCE_ENGINE, content)) if content else None
    try:
        yield early
    finally:
        if early is not None:
            early.close()
