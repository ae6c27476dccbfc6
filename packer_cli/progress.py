"""Show the progress of a run on stderr: a bar on a terminal, elsewhere a line every 30 seconds."""

from __future__ import annotations

import os
import sys
import time

from tqdm import tqdm

_EVERY_SECONDS = 30.0
_NARROW_COLUMNS = 100  # with fewer, a bar has no room beside all figures
_NARROW_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt}B [{elapsed}<{remaining}{postfix}]"


tqdm.monitor_interval = 0  # no thread of its own: workers are forked while a bar is shown
bars: list[tqdm[None]] = []  # on the screen: other output must not continue their line


def print_above(line: str) -> None:
    """Print a line on stderr, above a bar if there is one."""
    if bars:
        tqdm.write(line, file=sys.stderr)
    else:
        print(line, file=sys.stderr)  # noqa: T201


class Progress:
    """Counts what a run has done, and shows it. A context."""

    def __init__(
        self, total: int, *, show: bool, doing: str = "packing", done: float = 0.0
    ) -> None:
        """`total`: bytes of all inputs as stored, 0 if unknown (stdin). `done`: the share of them
        that was packed before.
        """
        self._doing = doing
        self._documents = self._tokens = self._slots = 0
        self._total, self._bytes = total, int(total * done)
        self._begun = self._reported = time.monotonic()
        self._show = show = show and sys.stderr is not None  # closed: print would take stdout
        self._bar, self._narrow = None, False
        if show and sys.stderr.isatty():
            self._narrow = 0 < os.get_terminal_size(sys.stderr.fileno()).columns < _NARROW_COLUMNS
            self._bar = tqdm(
                total=total or None, initial=self._bytes, desc=doing, unit="B", unit_scale=True,
                unit_divisor=1024, dynamic_ncols=True, smoothing=0.1, file=sys.stderr,
                bar_format=_NARROW_BAR if total and self._narrow else None,
            )  # fmt: skip
            bars.append(self._bar)

    def read(self, size: int, documents: int) -> None:
        """Count `size` stored bytes that were read, and the records in them."""
        if self._total:  # the lines at the edges of slices are read twice
            size = min(size, self._total - self._bytes)
        self._bytes += size
        self._documents += documents
        if self._bar is not None:
            self._bar.update(size)
        self._show_figures()

    def wrote(self, tokens: int, slots: int) -> None:
        """Count rows that were written, with `slots` places, `tokens` of them used."""
        self._tokens += tokens
        self._slots += slots
        self._show_figures()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
            bars.remove(self._bar)

    def _show_figures(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures(), refresh=False)
        elif self._show and time.monotonic() - self._reported >= _EVERY_SECONDS:
            self._reported = time.monotonic()
            share = f" of {_size(self._total)}" if self._total else ""
            print(f"{self._doing}: {_size(self._bytes)}{share}, {self._figures()}", file=sys.stderr)  # noqa: T201

    def _figures(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-9)
        documents = f"{self._documents:,} docs, " if self._documents and not self._narrow else ""
        if not self._tokens:  # reading or uploading files
            return f"{documents}{_size(self._bytes / seconds)}/s"
        figures = f"{documents}{_count(self._tokens / seconds)} tokens/s"
        if self._slots and not self._narrow:
            figures += f", {self._tokens / self._slots:.2%} used"
        return figures


def _size(count: float) -> str:
    return str(tqdm.format_sizeof(count, "B", 1024))


def _count(count: float) -> str:
    return str(tqdm.format_sizeof(count))
