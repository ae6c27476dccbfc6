"""`packer stats`, and the end of a run: what the manifest of a result says, and first what it was
made of and with, since nothing in the figures shows a forgotten option.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from typing import Any

from msgspec import UNSET, to_builtins
from msgspec.structs import asdict

from packer_cli.errors import named
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import options_of
from packer_cli.options.options import (
    DEFAULT_COLUMNS,
    PADDED_BOUNDARIES,
    TRAIN,
    PackConfig,
    keeps_order,
)
from packer_cli.options.shapes import TRACE, kinds_of, prompts_described
from packer_cli.options.value_columns import value_columns_of
from packer_cli.packing.figures import cost_spread
from packer_cli.reports import (
    OF_SOURCES,
    Fact,
    Figure,
    Histogram,
    Report,
    Section,
    Table,
    Text,
    alike,
    document_lengths,
    powers,
    row_fill,
    table_of_sources,
)
from packer_cli.result.counts import SHOWN_TOTALS, mixedness
from packer_cli.result.layout import (
    DOCUMENTS,
    TEMPLATE,
    Measured,
    add_measured,
    kind_of,
    short_name,
)
from packer_cli.result.manifest import (
    DOCUMENT_TOTALS,
    TOKENIZED,
    TOTALS,
    Input,
    Manifest,
    Result,
    TokenizerInfo,
    by_source,
    shape_of,
    sources_as_json,
)
from packer_cli.result.warnings import warnings_of
from packer_cli.result.wording import (
    count,
    directories,
    percent,
    plural,
    size,
    unshown,
    value,
)

_MOST_INPUTS = 100  # that a page lists: it stays small
_OF_INPUTS = ("documents", "tokens", "empty_documents", "rejected_records", "size")
_BUILT_IN = "bytes (built in; no --tokenizer given)"
_SHOWN = ("max_length", "strategy", "overlong")
_NOT_OPTIONS = {"shape", "train_on", "prompt_template", "add_bos", "add_eos", "chat_template",
                "columns", "shuffle", "window_tokens", "mixture"}  # fmt: skip


def stats_report(
    directory: Path | str,
    manifest: Result,
    *,
    by: str | None = None,
    steps: dict[str, Any] | None = None,
    is_detailed: bool = True,
    is_recounted: bool = False,
) -> Report:
    """Report what was packed or tokenized, and how well.

    by           shard, input or source: what to list, too
    steps        how uneven training steps would be
    is_detailed  with histograms and warnings, which the end of a run says on stderr
    """
    sections = [*_histograms(manifest)] if is_detailed else []
    if isinstance(manifest, Manifest) and manifest.sources:
        sections.insert(0, _of_recipe(manifest, by))
    sections += _carried(manifest)
    sections += _listed(manifest, by)
    if is_recounted:
        agreed = Text("recounted from the shards: all figures agree", only_page=False)
        sections.append(Section("Recounted", [agreed]))
    of_rows = isinstance(manifest, Manifest)
    return Report(
        str(directory),
        list(_facts(manifest)),
        _content(directory, manifest, by, steps),
        f"{'packed' if of_rows else 'tokenized'} by packer {manifest.packer_version}",
        [
            *(headline(manifest) if isinstance(manifest, Manifest) else _of_documents(manifest)),
            *([_steps(steps)] if steps is not None else []),
        ],
        [str(one) for one in warnings_of(manifest)] if is_detailed else [],
        sections,
        f"Marked incomplete: {manifest.incomplete}" if manifest.incomplete else "",
    )


def _content(
    directory: Path | str, manifest: Result, by: str | None, steps: dict[str, Any] | None
) -> dict[str, Any]:
    """The report for programs; what newer packers add to histograms, shards and inputs is kept."""
    document = manifest.document
    content: dict[str, Any] = {"directory": str(directory)}
    if isinstance(manifest, Manifest):
        content |= _origin(manifest) | figures(manifest)
        if steps is not None:
            content["steps"] = steps
        if manifest.sources:
            content["sources"] = sources_as_json(manifest.sources)
            for name in ("missed_shares", "source_records"):
                content[name] = document.get(name, [])
        if by == "source":
            content["by_source"] = by_source(manifest)
    else:
        content |= {"kind": TOKENIZED} | _origin(manifest) | _figures_of_documents(manifest)
    if carried := _carried_figures(manifest):
        content["carried"] = carried
    content["warnings"] = [one._asdict() for one in warnings_of(manifest)]
    content["histograms"] = document["histograms"]
    if by == "shard":
        content["by_shard"] = document["shards"]
    elif by == "input":
        content["by_input"] = document["inputs"]
    return content


def figures(manifest: Manifest) -> dict[str, Any]:
    """The manifest's totals and what follows from them."""
    costs = None if manifest.attention_cost is UNSET else to_builtins(manifest.attention_cost)
    totals = asdict(manifest) | {
        "histograms": asdict(manifest.histograms), "attention_cost": costs,
    }  # fmt: skip
    return figures_of_rows(totals, manifest.config) | {
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def figures_of_rows(totals: Mapping[str, Any], config: PackConfig) -> dict[str, Any]:
    """Totals of rows, as in a manifest, and what follows from them, for programs.

    `rows_over_bound`: rows divided by the lower bound.
    """
    names = ("rows", *TOTALS, "padding_tokens", "utilization", "lower_bound_rows")
    mixed, costs = mixedness(totals, totals["histograms"]), totals.get("attention_cost") or {}
    spreads = {
        side: cost_spread(one["rows"], one["sum"], one["sum_of_squares"], one["max"])
        for side, one in costs.items()
        if one["rows"]
    }
    return {name: totals.get(name, 0) for name in names} | {
        "max_length": config.max_length,
        "strategy": config.strategy,
        "rows_over_bound": totals["rows"] / max(totals["lower_bound_rows"], 1),
        "unpacked_ratio": totals["unpacked_rows"] / max(totals["rows"], 1),
        "mixedness": mixed,
        **({"attention_cost": spreads} if spreads else {}),
    }


def _figures_of_documents(manifest: Result) -> dict[str, Any]:
    """Figures of a tokenized directory. `bytes`: of documents and indexes."""
    found = {name: getattr(manifest, name) for name in DOCUMENT_TOTALS}
    return found | {
        "tokens_per_document": manifest.tokens / max(manifest.documents, 1),
        "shards": sum(kind_of(shard.file) == DOCUMENTS for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def headline(manifest: Manifest) -> Iterator[Figure]:
    """Figures of what was packed, and how well; of what was lost, and may be wrong."""
    f = figures(manifest)
    disk = f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"
    over = f["rows"] - f["lower_bound_rows"]
    bound = f"rows (this is {over:,} above it)" if over else "rows (optimal)"
    yield Figure("utilization", percent(f["utilization"]), "of all positions hold real tokens")
    packed = f"of {f['max_length']:,} tokens, {f['strategy']}; {disk}"
    yield Figure("rows", count(f["rows"]), packed)
    yield Figure("lower bound", count(f["lower_bound_rows"]), bound)
    alone = f"fewer rows than one document per row ({f['unpacked_rows']:,})"
    yield Figure("unpadded", f"{f['unpacked_ratio']:.1f}×", alone)
    yield Figure("documents", count(f["documents"]), f"in {plural(f['segments'], 'segment')}")
    yield from _tokens(f)
    yield Figure("padding", count(f["padding_tokens"]), "positions without a token")
    if "attention_cost" in f:
        before, after = f["attention_cost"]["before"], f["attention_cost"]["after"]
        for key, meaning in (
            ("cv", "variation of cost between rows"), ("max_over_mean", "costliest row / mean")
        ):  # fmt: skip
            was = f"{meaning}; {before[key]:.3f} without --balance"
            yield Figure("attention", f"{after[key]:.3f}", was)
    for what in ("truncated", "dropped"):
        trained = f", {f[f'{what}_trained_tokens']:,} of them trained"
        f[f"trained_of_{what}"] = trained if manifest.config.train_on != "all" else ""
    yield from _unusual(f)


def _tokens(f: dict[str, Any]) -> Iterator[Figure]:
    share = percent(f["trained_tokens"] / max(f["tokens"], 1))
    trained = f"{count(f['trained_tokens'])} trained on ({share})"
    yield Figure("tokens", count(f["tokens"]), trained)
    if f["trained_turns"]:
        yield Figure("turns", count(f["trained_turns"]), "written by the assistant")
    if f["traces"]:
        shared = f"{f['shared_tokens']:,} tokens shared with an earlier one, and trained on there"
        branches = plural(f["branches"], "branch", "branches")
        yield Figure("traces", count(f["traces"]), f"with {branches}; {shared}")
    if f["compared_branches"]:
        yield Figure("drift", count(f["drifted_branches"]), f"of {f['compared_branches']:,} "
                     "branches compared, the chat template gives other ids")  # fmt: skip


class _Figure(int):
    """A total in the words of another one: 1,234, or "1 document" with the noun as format."""

    def __format__(self, noun: str) -> str:
        return plural(int(self), noun) if noun else count(int(self))


def _unusual(f: dict[str, Any]) -> Iterator[Figure]:
    """Figures of losses, and of what may be wrong: see `Total`."""
    words = {name: _Figure(value) if type(value) is int else value for name, value in f.items()}
    for name, total in SHOWN_TOTALS.items():
        if total.title and (f.get(name) or (total.is_loss and name in f)):
            meaning = total.meaning.format(**words, unshown=unshown(f))
            yield Figure(total.title, count(f[name]), meaning, is_loss=True)


def _of_documents(manifest: Result) -> Iterator[Figure]:
    """Figures of what was tokenized."""
    f = _figures_of_documents(manifest)
    disk = f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"
    mean = f"{f['tokens_per_document']:,.1f} tokens each"
    yield Figure("documents", count(f["documents"]), f"{mean}; {disk}")
    yield from _tokens(f)
    yield from _unusual(f)


def _histograms(manifest: Result) -> Iterator[Section]:
    if not isinstance(manifest, Manifest):
        yield Section("Document length", [document_lengths(manifest.histograms.document_length)])
        return
    histograms, lengths = manifest.histograms, [manifest.config.max_length]
    documents = document_lengths(histograms.document_length, lengths)
    yield Section("Row fill", [row_fill(histograms.row_fill)])
    yield Section("Document length", [documents])
    segments = powers(histograms.segments_per_row)
    titles = "segments per row (rows)", "segments", "rows"
    yield Section("Segments per row", [Histogram(*titles, segments)])
    if any(histograms.one_length):  # no row else has enough segments for that to mean anything
        charts = [alike("length", "within 5% of its median length", histograms.one_length)]
        if len(manifest.inputs) > 1:
            charts.append(alike("input", "from one input", histograms.one_input))
        yield Section("How mixed rows are", charts, only="page")


def _carried_figures(manifest: Result) -> dict[str, Any]:
    """What is known of each carried column, by name; of a view, where its values are."""
    total = dict[str, Measured]()
    for shard in manifest.shards:
        add_measured(total, shard.values)
    found = dict[str, Any]()
    for name, one in manifest.config.value_columns.items():
        found[name] = {"type": one.type, "count": one.count, "of": one.of}
        if name in total:
            number, low, high, its_sum = total[name]
            figures = {"minimum": low, "mean": its_sum / number, "maximum": high}
            found[name] |= {"values": number} | figures
        else:
            found[name]["directories"] = [one.name for one in manifest.inputs]
    return found


def _carried(manifest: Result) -> Iterator[Section]:
    found, rows, title = _carried_figures(manifest), list[list[str]](), "carried columns"
    for name, one in found.items():
        kind = one["type"] + ("" if one["count"] is None else f"[{one['count']}]")
        kind += " (as uint16)" * (one["type"] == "bfloat16")
        figures = [value(one[of]) for of in ("minimum", "mean", "maximum") if of in one]
        figures = figures and [count(one["values"]), *figures]
        rows.append([name, kind, one["of"], *figures])
        if not figures:
            title = f"carried columns, with their values in {named(one['directories'], 3)}"
    if rows:
        head = ["column", "type", "of", "values", "minimum", "mean", "maximum"][: len(rows[0])]
        table = Table(title, head, rows, text=["column", "type", "of"], names_first=True)
        yield Section("Carried values", [table])


def _listed(manifest: Result, by: str | None) -> Iterator[Section]:
    """Inputs and, in the terminal, shards, where they are asked for. A page always has inputs."""
    inputs = manifest.inputs
    if by == "shard":
        yield Section("Shards", [_shards(manifest)], only="terminal")
    elif by == "input":
        tables = [_inputs(inputs, len(inputs)), *_lost(manifest, inputs)]
        yield Section("Inputs", tables, only="terminal")
    yield Section("Inputs", [_inputs(inputs, _MOST_INPUTS)], only="page")


def _inputs(inputs: list[Input], most: int) -> Table:
    """A line for each, in their order; of more than `most`, for those with the most tokens."""
    largest = {*nlargest(most, range(len(inputs)), key=lambda place: inputs[place].tokens)}
    lines = [
        (one.name, one.shape or "", [one]) for place, one in enumerate(inputs) if place in largest
    ]
    if rest := [one for place, one in enumerate(inputs) if place not in largest]:
        lines.append((f"{count(len(rest))} other inputs", "", rest))
    shapes = any(one.shape for one in inputs)
    rows = [
        [name, *(count(sum(getattr(one, figure) for one in some)) for figure in _OF_INPUTS),
         *[shape] * shapes]
        for name, shape, some in lines
    ]  # fmt: skip
    head = ["input", "documents", "tokens", "empty", "rejected", "bytes", *["shape"] * shapes]
    return Table("", head, rows, text=["shape"])


def _lost(manifest: Result, inputs: list[Input]) -> list[Table]:
    """A table of what inputs have lost on the way to rows; [] for nothing."""
    names = [n for n in manifest.counted_by_input if n in SHOWN_TOTALS and SHOWN_TOTALS[n].is_loss]
    lines = [(one.name, {name: getattr(one, name) for name in names}) for one in inputs]
    return _nonzero("", "input", [(path, its) for path, its in lines if any(its.values())])


def _nonzero(title: str, what: str, lines: Sequence[tuple[str, dict[str, int]]]) -> list[Table]:
    """A table with the columns that are not 0 in all lines; [] where there is none."""
    names = [name for name in (lines[0][1] if lines else ()) if any(its[name] for _, its in lines)]
    rows = [[name, *(count(its[column]) for column in names)] for name, its in lines]
    columns = {name: total.column for name, total in SHOWN_TOTALS.items() if total.column}
    return [Table(title, [what, *(columns.get(n, n) for n in names)], rows)] if names else []


def _steps(found: dict[str, Any]) -> Figure:
    """How uneven steps are, in one line."""
    sizes = f"steps of {found['sizes']}, hidden size {found['hidden_size']:,}"
    if not found["steps"]:
        return Figure("slowest rank", "-", f"there are fewer rows than in {sizes}")
    even = ", ".join(f"{found[name]:.3f} with balance {name}" for name in ("step", "order"))
    text = f"times the mean rank, {even}; {sizes}"
    if found["steps_counted"] < found["steps"]:
        text += f", the first {found['steps_counted']:,} of {found['steps']:,}"
    return Figure("slowest rank", f"{found['random']:.3f}", text)


def _shards(manifest: Result) -> Table:
    if not isinstance(manifest, Manifest):
        rows = [
            [short_name(one.file),
             *map(count, (one.rows, one.tokens, one.trained_tokens, one.bytes))]
            for one in manifest.shards if kind_of(one.file) == DOCUMENTS
        ]  # fmt: skip
        return Table("", ["shard", "documents", "tokens", "trained", "bytes"], rows)
    rows = [
        [short_name(one.file), *map(count, (one.rows, one.segments, one.tokens)),
         percent(one.tokens / (one.rows * manifest.config.max_length)), count(one.bytes)]
        for one in manifest.shards
    ]  # fmt: skip
    return Table("", ["shard", "rows", "segments", "tokens", "utilization", "bytes"], rows)


def _of_recipe(manifest: Manifest, by: str | None) -> Section:
    """Shares and what is left out. `by` source: all figures of these."""
    mixture, sources = manifest.document["config"].get("mixture") or {}, manifest.sources
    counted = "trained tokens" if mixture.get("count") == "trained" else "tokens"
    holds_out = mixture.get("part", TRAIN) == TRAIN
    left_out = [
        (one.name, {"held out": one.held_out_documents * holds_out,
                    "duplicates": one.duplicate_documents})
        for one in sources
    ]  # fmt: skip
    parts = [
        table_of_sources(
            f"sources, in shares of {counted}", sources_as_json(sources), by_source(manifest)
        ),
        _missed(manifest, counted),
        *_nonzero("documents left out", "source", left_out),
        _records(manifest),
    ]
    if by == "source":
        epoch = [
            (one.name, {"documents": one.documents, counted: one.available,
                        "asked": round(one.asked), "taken": one.taken})
            for one in sources
        ]  # fmt: skip
        lost = [
            (one["name"], {name: one[name] for name in one if name not in (*OF_SOURCES, "name")})
            for one in by_source(manifest)
        ]
        title = f"one epoch of each source, and {counted} asked of it and taken"
        parts += [*_nonzero(title, "source", epoch), *_nonzero("lost", "source", lost)]
    return Section("Sources", [part for part in parts if part.rows])


def _missed(manifest: Manifest, counted: str) -> Table:
    """Shares that are off, since documents stay whole, and how long the document at the end of what
    is taken is.
    """
    rows = []
    for one in manifest.missed_shares:
        document = count(one.document) if one.document else "-"
        taken = count(round(one.asked)), count(one.taken), percent(one.off)
        rows.append([one.source, *taken, document])
    head = ["source", "asked", "got", "share off", "document at its end"]
    return Table(f"shares that are off, in {counted}: documents stay whole", head, rows)


def _records(manifest: Manifest) -> Table:
    """A table of what is out of the ordinary about the records of sources."""
    nothing, rows = dict.fromkeys(DOCUMENT_TOTALS, 0), []
    for one in manifest.source_records:
        rows += [[one.name, its.figure, its.title] for its in _unusual(nothing | one.totals)]
        rows += [[one.name, count(figure), f"unread {name}"] for name, figure in one.unread.items()]
    title = "counted when sources were tokenized, each record once"
    return Table(title, ["source", "count", "what"], rows, text=["what"])


# What it was made of


def _origin(manifest: Result) -> dict[str, Any]:
    """Inputs, tokenizer, template (None where none rendered) and options, for programs."""
    inputs = manifest.inputs
    return {
        "inputs": {"count": len(inputs), "bytes": sum(one.size for one in inputs)},
        "tokenizer": manifest.document["tokenizer"],
        "chat_template": _template(manifest),
        "config": manifest.document["config"],
    }


def _facts(manifest: Result) -> Iterator[Fact]:
    """Inputs, tokenizer, template and options, for people."""
    inputs, template = manifest.inputs, _template(manifest)
    tokenizer = _tokenizer(manifest.tokenizer, template is not None)
    if isinstance(manifest, Manifest) and manifest.is_from_tokenized:
        # what is around documents, and trained on, is each directory's own
        yield Fact("made from", directories(len(inputs)))
        yield next(tokenizer)
    else:
        taken = size(sum(one.size for one in inputs))
        yield Fact("made from", f"{plural(len(inputs), 'input')}, {taken}")
        yield from tokenizer
        config, shape = manifest.config, shape_of(manifest)
        prompts = prompts_described(shape, config.prompt_template)
        trained = config.train_on or "what is default for each"
        described = f"{kinds_of(shape)}{prompts and ', '}{prompts}; trained on: {trained}"
        yield Fact("records", described)
    if template:
        source = template["source"] or "of the tokenizer"
        yield Fact("template", f"{source}, {_digest(template['sha256'])}")
    if options := " ".join(_options(manifest.document["config"])):
        yield Fact("options", options)


def _tokenizer(tokenizer: TokenizerInfo | None, templated: bool) -> Iterator[Fact]:
    if tokenizer is None:
        yield Fact("tokenizer", "none: the inputs hold token ids")
        return
    t = tokenizer
    description = f"{t.source}, {_digest(t.sha256)}" if t.sha256 else _BUILT_IN
    yield Fact("tokenizer", f"{description}; {t.vocab_size:,} ids", is_doubtful=not t.sha256)
    for name, number, text, where, around in (
        ("EOS", t.eos_token_id, t.eos_token, "after", t.suffix),
        ("BOS", t.bos_token_id, t.bos_token, "before", t.prefix),
    ):
        if number is None:
            yield Fact(name, "none")
            continue
        shown = f"{text} ({number})" if text else str(number)
        if around is not UNSET and number in around:
            shown += f", {where} every document"
        elif around is not UNSET:
            shown += ", left to the chat template" if templated else ", not added"
        yield Fact(name, shown)


def _template(manifest: Result) -> dict[str, Any] | None:
    config, shape = manifest.config, shape_of(manifest)
    is_chat = config.prompt_template == "chat" or any(
        one.is_chat or one.of_messages for one in shape.members.values() or [shape]
    )
    sha256 = manifest.side_files.get(TEMPLATE)
    known = {"source": config.chat_template, "sha256": sha256}
    return known if is_chat and sha256 is not None else None


def _options(config: dict[str, Any]) -> Iterator[str]:
    """Options that matter most or are not the default, as on a command line."""
    of_rows = "max_length" in config
    kind = PackConfig if of_rows else DocumentConfig
    defaults = (PackConfig(config["max_length"]) if of_rows else DocumentConfig()).as_json()
    for name, one in options_of(kind).items():
        default = defaults.get(name)
        value = config.get(name, default)
        is_own = name == "turns" and config["shape"] == TRACE  # nobody asks for it
        if name in _NOT_OPTIONS or is_own or (name not in _SHOWN and value == default):
            continue
        option = one.flag_for(value)
        if isinstance(value, bool):
            yield option
            continue
        for part in value if isinstance(value, list | tuple) else [value]:
            yield f"{option} {_quoted('='.join(part) if isinstance(part, list | tuple) else part)}"
    if of_rows:
        yield from _options_of_rows(config)


def _options_of_rows(config: dict[str, Any]) -> Iterator[str]:
    if config.get("shuffle") is False and not keeps_order(config["strategy"]):
        yield "--no-shuffle"
    unasked = (PADDED_BOUNDARIES, *value_columns_of(tuple(config.get("carry", ()))))
    columns = [name for name in config["columns"] if name not in unasked]
    if columns != list(DEFAULT_COLUMNS):
        yield f"--columns {_quoted(','.join(columns))}"


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return shlex.quote(text) if text.isprintable() else repr(text)


def _digest(sha256: str) -> str:
    return f"sha256 {sha256[:12]}"  # enough to tell tokenizers apart
