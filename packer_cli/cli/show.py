"""`packer show`: rows or documents as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from packer_cli.cli.audit import (
    SetName,
    SetOptions,
    decoder_of,
    reader_of,
    shown_rows,
    tokenizer_of,
    unreadable,
)
from packer_cli.cli.reports import (
    LOCAL_ONLY,
    check_page,
    print_note,
    show_reports,
)
from packer_cli.errors import UsageError
from packer_cli.options.option import (
    WHOLE,
    Rule,
    as_option,
    choice,
    mutually_exclusive,
    needs,
    refuse,
    whole,
)
from packer_cli.options.run_options import ReportOptions, StepOptions

if TYPE_CHECKING:
    from pathlib import Path

    from packer_cli.reports.show import Shown
    from packer_cli.tokenization.decoding import Decoder

_ON_PAGE, _AT_ONCE = 20, 64  # rows: without numbers, and that are held together


@dataclass(frozen=True)
class ShowOptions(SetOptions, StepOptions, ReportOptions):
    segment: Annotated[
        int | None, WHOLE, Option(metavar="K", help="Show only this segment of each row.")
    ] = None
    ids: Annotated[bool, Option(help="Show token ids instead of text.")] = False
    step: Annotated[
        int | None,
        whole(0, 10**12),
        Option(
            metavar="N",
            help="List the rows and documents of this step, from 0, of PackedSampler with these "
            "options. In Python, its rows_of knows all others.",
        ),
    ] = None
    seed: Annotated[int, WHOLE, Option(metavar="S", help="With --step: the sampler's.")] = 0
    balance: Annotated[
        str | None, choice(("step", "order")), Option(help="With --step: the sampler's: {}.")
    ] = None
    checkpoint: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="Of a Trainer with PackedTrainerMixin: has the seed and, if steps are balanced, "
            "the sizes. Default of --step: the last one before it.",
        ),
    ] = None

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        has_step = self.step is not None
        yield needs("--seed", self.seed, "--step", has_step)
        yield needs("--balance", self.balance, "--step", has_step)
        is_step = self.step is not None or self.checkpoint is not None
        for name in ("segment", "ids", "html", "tokenizer", "format", "max_length"):
            is_given = getattr(self, name) != getattr(ShowOptions, name)
            yield mutually_exclusive("--step", is_step, as_option(name), is_given)
        yield self.ranks is not None and not is_step, "--ranks needs --step", "add --step N"
        has_one = (self.balance is None) != (self.hidden_size is None)
        yield has_one, "--balance and --hidden-size: each needs the other", "give both or none"
        sampler = self.seed or self.balance
        yield mutually_exclusive(
            "--checkpoint", self.checkpoint is not None, "--seed or --balance", sampler
        )


def show(
    name: SetName,
    rows: Annotated[
        list[str] | None,
        Argument(
            metavar="ROW",
            help="Numbers of rows, or documents, over all shards: 7, -1 for the last, 3-5. "
            "Default: 0.",
        ),
    ] = None,
    *,
    options: ShowOptions,
) -> None:
    """Show rows as text: segments, where they came from, and which tokens are trained on.

    Of a tokenized directory, its documents. With --json, an object for each. Of a set that another
    tool has made, rows as packer audit reads them. With --step, a table of a training step.

    Trained tokens are green; without color (NO_COLOR, or no terminal) they are in brackets.

    Example: packer show documents-packed-1024 0 -1
    """
    from packer_cli.reports.page import rows_report
    from packer_cli.reports.show import Printer, numbers_of, pick
    from packer_cli.reports.show import as_json as written
    from packer_cli.storage import local

    segment, html = options.segment, options.html
    if options.step is not None or options.checkpoint is not None:
        if rows:
            raise UsageError("--step does not go with ROW", "leave one of them out")
        _show_step(local(name, LOCAL_ONLY), options)
        return
    check_page(html, as_json=options.as_json)
    not_on_page = segment is not None or options.as_json
    refuse([mutually_exclusive("--html", html is not None, "--segment and --json", not_on_page)])
    what, count, labels, read, load = _rows(local(name, LOCAL_ONLY), options)
    if what == "document" and segment is not None:
        raise UsageError("--segment: is for rows, and documents have no segments", "leave it out")
    rows = rows or (["0"] if html is None else [f"0-{min(count, _ON_PAGE) - 1}"])
    wanted = numbers_of(rows, count, what)
    decoder = "--ids" if options.ids else load()
    if html is not None:
        show_reports({name: rows_report(name, [*read(wanted)], decoder)}, as_json=False, html=html)
        return
    if isinstance(decoder, str) and not options.ids:
        print_note(f"showing token ids: {decoder}")
    texts = None if isinstance(decoder, str) else decoder
    if not labels:
        print_note("the labels column was not written: which tokens are trained on is unknown")
    printer = None
    for shown in read(wanted):
        segments = shown.segments if segment is None else pick(shown, segment)
        if options.as_json:
            print(json.dumps(written(shown, segments, texts)))
            continue
        printer = printer or Printer(count, texts, labels=labels)
        printer.print(shown, segments)


def _show_step(directory: Path, options: ShowOptions) -> None:
    """Print the rows and documents of a training step."""
    from packer_cli.reports.show import SIZES, read_checkpoint, rows_of_step, step_report
    from packer_cli.reports.terminal import print_report
    from packer_cli.result.opening import open_packed, origin_as_json

    step, state, done = options.step, None, 0
    sampler: dict[str, Any] = {"seed": options.seed}
    if options.balance:
        sampler |= {"balance": options.balance, "hidden_size": options.hidden_size}
    if options.checkpoint is not None:
        sampler, state, done = read_checkpoint(options.checkpoint)
        step = done - 1 if step is None else step
    if options.ranks is not None:
        sizes = options.ranks, options.batch_size, options.micro_batches
        sampler |= zip(SIZES, sizes, strict=True)
    if step is None or SIZES[0] not in sampler:
        raise UsageError("--step needs --ranks", "add --ranks W, and the other sizes of a step")
    packed = open_packed(directory, options.tokens)
    ranks = rows_of_step(packed, step, sampler, state, done)
    *_, read = reader_of(directory, packed.facts, options.tokens)
    rows = (
        (rank, at // sampler["batch_size"], read(number))
        for rank, numbers in enumerate(ranks)
        for at, number in enumerate(numbers.tolist())
    )
    if not options.as_json:
        print_report(step_report(step, sampler, rows))
        return
    for rank, micro_batch, row in rows:
        place = {"step": step, "rank": rank, "micro_batch": micro_batch, "row": row.index}
        documents = [origin_as_json(one.origin) | {"tokens": len(one.ids)} for one in row.segments]
        print(json.dumps(place | {"segments": documents}))


class _Rows(NamedTuple):
    """Rows or documents: `what` they are, their number, and `labels`: whether it is known what is
    trained on. `read` yields some of them, `load` returns their decoder, or why there is none.
    """

    what: str
    number: int
    labels: bool
    read: Callable[[Iterable[int]], Iterator[Shown]]
    load: Callable[[], Decoder | str]


def _rows(directory: Path, options: ShowOptions) -> _Rows:
    """Open the rows of a result of packer, or of another tool's set."""
    from packer_cli.result.layout import INCOMPLETE, WORK
    from packer_cli.result.manifest import is_manifest, is_result, load_any, splits_of
    from packer_cli.tokenization.decoding import load_decoder

    signs = is_result(str(directory)) or is_manifest(directory / INCOMPLETE)
    signs |= bool(splits_of(directory))
    if not signs and directory.exists() and not (directory / WORK).exists() and _has_set(directory):
        return _of_others(directory, options)
    refuse([
        (value is not None, f"{flag}: is for sets that packer has not made", "leave it out")
        for flag, value in (("--tokenizer", options.tokenizer), ("--format", options.format),
                            ("--max-length", options.max_length))
    ])  # fmt: skip
    manifest = load_any(directory)
    what, count, labels, read = reader_of(directory, manifest, options.tokens)
    load = partial(load_decoder, directory, manifest.tokenizer)
    return _Rows(what, count, labels, partial(map, read), load)


def _has_set(directory: Path) -> bool:
    """Tell if there is a file, or a folder that is not empty."""
    return directory.is_file() or (directory.is_dir() and any(directory.iterdir()))


def _of_others(directory: Path, options: ShowOptions) -> _Rows:
    """Open the rows of a set that another tool has made."""
    from packer_cli.audit import infer_conventions, open_set

    refuse([(options.tokens, "--tokens: is for views of packer", "leave it out")])
    with unreadable():
        set_ = open_set(str(directory), options.format, options.max_length)
        conventions = infer_conventions(set_, tokenizer_of(options.tokenizer), options.max_length)

    def read(numbers: Iterable[int]) -> Iterator[Shown]:
        left = iter(numbers)
        while chunk := [*islice(left, _AT_ONCE)]:
            with unreadable():
                rows = {row.index: row for row in shown_rows(set_, conventions, chunk)}
            yield from map(rows.__getitem__, chunk)

    load = partial(decoder_of, set_, options.tokenizer)
    return _Rows("row", set_.rows, set_.has_labels, read, load)
