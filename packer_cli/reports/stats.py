"""`packer stats`, and the end of a run: the figures of a result, after what it was made from.

Only the manifest is read. Inputs, tokenizer and options come first, since no figure reveals an
option that was forgotten.
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
from packer_cli.packing.figures import AttentionCost
from packer_cli.reports import (
    OF_SOURCES,
    Aligned,
    Cell,
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
    tables_of_sources,
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
    shape_of,
    sources_as_json,
)
from packer_cli.result.warnings import warnings_of
from packer_cli.result.wording import count, directories, percent, plural, size, unshown, value

_MOST_INPUTS = 100  # on a page, so that it stays small
_OF_INPUTS = {"documents": "documents", "tokens": "tokens", "empty": "empty_documents",
              "rejected": "rejected_records", "bytes": "size"}  # fmt: skip
_BUILT_IN = "bytes (built in)"
_SHOWN = ("max_length", "strategy", "overlong")  # options that are listed with their default, too
_NOT_OPTIONS = {"shape", "train_on", "prompt_template", "add_bos", "add_eos", "chat_template",
                "columns", "shuffle", "window_tokens", "mixture"}  # fmt: skip
_Values = dict[str, Any]  # as in JSON


def stats_report(
    directory: Path | str,
    manifest: Result,
    *,
    by: str | None = None,
    steps: _Values | None = None,
    is_detailed: bool = True,
    is_recounted: bool = False,
) -> Report:
    """Report what was packed or tokenized, and how well.

    by           shard, input or source: what is listed, too
    steps        how uneven training steps are
    is_detailed  with histograms, inputs, and warnings, which a run itself prints on stderr
    """
    sections = list[Section]()
    if isinstance(manifest, Manifest) and manifest.sources:
        sections.append(_of_recipe(manifest, by))
    sections += [*(_histograms(manifest) if is_detailed else ()), *_carried(manifest)]
    if is_detailed:
        sections += _listed(manifest, by)
    if is_recounted:
        agreed = Text("recounted from the shards: all figures agree", only_page=False)
        sections.append(Section("Recounted", [agreed]))
    packed = manifest if isinstance(manifest, Manifest) else None
    return Report(
        str(directory),
        list(_facts(manifest)),
        _content(directory, manifest, by, steps),
        f"{'packed' if packed else 'tokenized'} by packer {manifest.packer_version}",
        [
            *(headline(packed) if packed else _of_documents(manifest)),
            *([_steps(steps)] if steps is not None else []),
        ],
        [str(warning) for warning in warnings_of(manifest)] if is_detailed else [],
        sections,
        f"Marked incomplete: {manifest.incomplete}" if manifest.incomplete else "",
    )


# Values for JSON


def _content(
    directory: Path | str, manifest: Result, by: str | None, steps: _Values | None
) -> _Values:
    """Return the report for JSON. What newer packers add to histograms, shards and inputs stays."""
    document, content = manifest.document, _Values(directory=str(directory))
    if isinstance(manifest, Manifest):
        content |= _origin(manifest) | figures(manifest)
        if steps is not None:
            content["steps"] = steps
        if manifest.sources:
            content["sources"] = sources_as_json(manifest.sources)
            content |= {
                name: document.get(name, []) for name in ("missed_shares", "source_records")
            }
        if by == "source":
            content["by_source"] = manifest.by_source
    else:
        content |= {"kind": TOKENIZED} | _origin(manifest) | _figures_of_documents(manifest)
    if carried := _carried_figures(manifest):
        content["carried"] = carried
    content["warnings"] = [warning._asdict() for warning in warnings_of(manifest)]
    content["histograms"] = document["histograms"]
    if manifest.first_drifted:
        content["first_drifted"] = manifest.first_drifted
    if by in ("shard", "input"):
        content[f"by_{by}"] = document[f"{by}s"]
    return content


def figures(manifest: Manifest) -> _Values:
    """Return the manifest's totals and what follows from them."""
    costs = None if manifest.attention_cost is UNSET else to_builtins(manifest.attention_cost)
    totals = asdict(manifest) | {
        "histograms": asdict(manifest.histograms), "attention_cost": costs,
    }  # fmt: skip
    return figures_of_rows(totals, manifest.config) | {
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def figures_of_rows(totals: Mapping[str, Any], config: PackConfig) -> _Values:
    """Return totals of rows and what follows from them, such as rows over the lower bound."""
    names = ("rows", *TOTALS, "padding_tokens", "utilization", "lower_bound_rows")
    mixed, costs = mixedness(totals, totals["histograms"]), totals.get("attention_cost") or {}
    if not all(cost["rows"] for cost in costs.values()):
        costs = {}
    spreads = {side: AttentionCost(**cost).spread for side, cost in costs.items()}
    return {name: totals.get(name, 0) for name in names} | {
        "max_length": config.max_length,
        "strategy": config.strategy,
        "rows_over_bound": totals["rows"] / max(totals["lower_bound_rows"], 1),
        "unpacked_ratio": totals["unpacked_rows"] / max(totals["rows"], 1),
        "mixedness": mixed,
        **({"attention_cost": spreads} if spreads else {}),
    }


def _figures_of_documents(manifest: Result) -> _Values:
    """Return figures of a tokenized directory. `bytes`: of documents and indexes."""
    return {name: getattr(manifest, name) for name in DOCUMENT_TOTALS} | {
        "tokens_per_document": manifest.tokens / max(manifest.documents, 1),
        "shards": sum(kind_of(shard.file) == DOCUMENTS for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


# Figures


def headline(manifest: Manifest) -> Iterator[Figure]:
    """Yield figures of rows: how many and how full, then what was lost or may be wrong."""
    f = figures(manifest)
    over = f["rows"] - f["lower_bound_rows"]
    bound = f"rows (this is {over:,} above it)" if over else "rows (optimal)"
    yield Figure("utilization", percent(f["utilization"]), "of all positions hold real tokens")
    packed = f"of {f['max_length']:,} tokens, {f['strategy']}; {_on_disk(f)}"
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
            balanced = f"{meaning}; {before[key]:.3f} without --balance"
            yield Figure("attention", f"{after[key]:.3f}", balanced)
    for loss in ("truncated", "dropped"):
        trained = f", {f[f'{loss}_trained_tokens']:,} of them trained"
        f[f"trained_of_{loss}"] = trained if manifest.config.train_on != "all" else ""
    yield from _unusual(f | _first_drifted(manifest))


def _of_documents(manifest: Result) -> Iterator[Figure]:
    """Yield figures of a tokenized directory."""
    f = _figures_of_documents(manifest)
    mean = f"{f['tokens_per_document']:,.1f} tokens each"
    yield Figure("documents", count(f["documents"]), f"{mean}; {_on_disk(f)}")
    yield from _tokens(f)
    yield from _unusual(f | _first_drifted(manifest))


def _first_drifted(manifest: Result) -> _Values:
    """Return the place of the first call that drifted, in words."""
    if not manifest.first_drifted:
        return {}
    file, position, call = manifest.first_drifted
    place = f"call {call} at position {position} of {manifest.inputs[file].name}"
    return {"first_drifted": f"; the first: {place}"}


def _on_disk(f: _Values) -> str:
    return f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"


def _tokens(f: _Values) -> Iterator[Figure]:
    share = percent(f["trained_tokens"] / max(f["tokens"], 1))
    trained = f"{count(f['trained_tokens'])} trained on ({share})"
    yield Figure("tokens", count(f["tokens"]), trained)
    if f["trained_turns"]:
        yield Figure("turns", count(f["trained_turns"]), "written by the assistant")
    if f["traces"]:
        shared = f"{f['shared_tokens']:,} tokens shared with an earlier one, and trained on there"
        branches = plural(f["branches"], "branch", "branches")
        yield Figure("traces", count(f["traces"]), f"with {branches}; {shared}")
    if f["calls"]:
        sessions = f"of {plural(f['sessions'], 'session')}, merged where one goes on from another"
        yield Figure("calls", count(f["calls"]), sessions)
    if f["compared_branches"]:
        compared = (
            f"of {f['compared_branches']:,} branches compared, the chat template gives other ids"
        )
        yield Figure("drift", count(f["drifted_branches"]), compared)


class _Named(int):
    """A total within the words of another one: 1,234, or "1 document" with the noun as format."""

    def __format__(self, noun: str) -> str:
        return plural(int(self), noun) if noun else count(int(self))


def _unusual(f: _Values) -> Iterator[Figure]:
    """Yield figures of losses, and of what may be wrong: see `Total`."""
    words = {name: _Named(figure) if type(figure) is int else figure for name, figure in f.items()}
    for name, total in SHOWN_TOTALS.items():
        if total.title and (f.get(name) or (total.is_loss and name in f)):
            meaning = total.meaning.format(**{"first_drifted": ""} | words, unshown=unshown(f))
            yield Figure(total.title, count(f[name]), meaning, is_loss=True)


def _steps(steps: _Values) -> Figure:
    """Return how uneven training steps are, in one line."""
    sizes = f"steps of {steps['sizes']}, hidden size {steps['hidden_size']:,}"
    if not steps["steps"]:
        return Figure("slowest rank", "-", f"there are fewer rows than in {sizes}")
    even = ", ".join(f"{steps[name]:.3f} with balance {name}" for name in ("step", "order"))
    text = f"times the mean rank, {even}; {sizes}"
    if steps["steps_counted"] < steps["steps"]:
        text += f", the first {steps['steps_counted']:,} of {steps['steps']:,}"
    return Figure("slowest rank", f"{steps['random']:.3f}", text)


# Sections


def _histograms(manifest: Result) -> Iterator[Section]:
    if not isinstance(manifest, Manifest):
        yield Section("Document length", [document_lengths(manifest.histograms.document_length)])
        return
    histograms, lengths = manifest.histograms, [manifest.config.max_length]
    yield Section("Row fill", [row_fill(histograms.row_fill)])
    yield Section("Document length", [document_lengths(histograms.document_length, lengths)])
    titles = "segments per row (rows)", "segments", "rows"
    yield Section("Segments per row", [Histogram(*titles, powers(histograms.segments_per_row))])
    if any(histograms.one_length):  # or no row has enough segments to be mixed
        charts = [alike("length", "within 5% of its median length", histograms.one_length)]
        if len(manifest.inputs) > 1:
            charts.append(alike("input", "from one input", histograms.one_input))
        yield Section("How mixed rows are", charts, only="page")


def _carried_figures(manifest: Result) -> _Values:
    """Return figures of each carried column, by name; for a view, where its values are."""
    measured = dict[str, Measured]()
    for shard in manifest.shards:
        add_measured(measured, shard.values)
    columns = _Values()
    for name, column in manifest.config.value_columns.items():
        columns[name] = {"type": column.type, "count": column.count, "of": column.of}
        if name in measured:
            number, low, high, total = measured[name]
            columns[name] |= {
                "values": number, "minimum": low, "mean": total / number, "maximum": high,
            }  # fmt: skip
        else:
            columns[name]["directories"] = [directory.name for directory in manifest.inputs]
    return columns


def _carried(manifest: Result) -> Iterator[Section]:
    lines, title = list[dict[str, Cell]](), "carried columns"
    for name, column in _carried_figures(manifest).items():
        kind = column["type"] + ("" if column["count"] is None else f"[{column['count']}]")
        kind += " (as uint16)" * (column["type"] == "bfloat16")
        line: dict[str, Cell] = {"column": name, "type": kind, "of": column["of"]}
        if "values" in column:
            line["values"] = column["values"]
            line |= {of: Aligned(value(column[of])) for of in ("minimum", "mean", "maximum")}
        else:
            title = f"carried columns, with their values in {named(column['directories'], 3)}"
        lines.append(line)
    if lines:
        yield Section("Carried values", [Table(title, lines, names_first=True)])


def _listed(manifest: Result, by: str | None) -> Iterator[Section]:
    """Yield inputs and shards for the terminal if it is to list them, and inputs for pages."""
    inputs = manifest.inputs
    if by == "shard":
        yield Section("Shards", [_shards(manifest)], only="terminal")
    elif by == "input":
        losses = [total for total in manifest.counted_by_input
                  if total in SHOWN_TOTALS and SHOWN_TOTALS[total].is_loss]  # fmt: skip
        lost = [(file.name, {name: getattr(file, name) for name in losses}) for file in inputs]
        lossy = [(name, totals) for name, totals in lost if any(totals.values())]
        tables = [_inputs(inputs, len(inputs)), *_nonzero("", "input", lossy)]
        yield Section("Inputs", tables, only="terminal")
    yield Section("Inputs", [_inputs(inputs, _MOST_INPUTS)], only="page")


def _inputs(inputs: list[Input], most: int) -> Table:
    """Return a line for each input, in their order; beyond `most`, for those with most tokens."""
    largest = {*nlargest(most, range(len(inputs)), key=lambda place: inputs[place].tokens)}
    groups = [(file.name, file.shape, [file]) for at, file in enumerate(inputs) if at in largest]
    if left := [file for at, file in enumerate(inputs) if at not in largest]:
        groups.append((f"{count(len(left))} other inputs", None, left))
    has_shapes = any(file.shape for file in inputs)
    lines = [
        {"input": name}
        | {
            title: sum(getattr(file, total) for file in group)
            for title, total in _OF_INPUTS.items()
        }
        | ({"shape": shape or ""} if has_shapes else {})
        for name, shape, group in groups
    ]
    return Table("", lines)


def _nonzero(title: str, what: str, lines: Sequence[tuple[str, dict[str, int]]]) -> list[Table]:
    """Return a table of totals without the columns that are 0 in all lines; [] if all are."""
    names = [
        name for name in (lines[0][1] if lines else ()) if any(totals[name] for _, totals in lines)
    ]
    titles = {name: SHOWN_TOTALS[name].column if name in SHOWN_TOTALS else "" for name in names}
    table = [{what: line} | {titles[name] or name: totals[name] for name in names}
             for line, totals in lines]  # fmt: skip
    return [Table(title, table)] if names else []


def _shards(manifest: Result) -> Table:
    if isinstance(manifest, Manifest):
        positions = manifest.config.max_length
        return Table("", [
            {"shard": short_name(shard.file), "rows": shard.rows, "segments": shard.segments,
             "tokens": shard.tokens, "utilization": shard.tokens / (shard.rows * positions),
             "bytes": shard.bytes}
            for shard in manifest.shards
        ])  # fmt: skip
    return Table("", [
        {"shard": short_name(shard.file), "documents": shard.rows, "tokens": shard.tokens,
         "trained": shard.trained_tokens, "bytes": shard.bytes}
        for shard in manifest.shards if kind_of(shard.file) == DOCUMENTS
    ])  # fmt: skip


def _of_recipe(manifest: Manifest, by: str | None) -> Section:
    """Return shares of sources and what is left out. `by` source: with all figures of these."""
    mixture, sources = manifest.document["config"].get("mixture") or {}, manifest.sources
    counted = "trained tokens" if mixture.get("count") == "trained" else "tokens"
    holds_out, totals = mixture.get("part", TRAIN) == TRAIN, manifest.by_source
    left_out = [
        (source.name, {"held out": source.held_out_documents * holds_out,
                       "duplicates": source.duplicate_documents,
                       "filtered": source.filtered_documents})
        for source in sources
    ]  # fmt: skip
    missed = [
        {"source": missed.name, "asked": round(missed.asked), "got": missed.taken,
         "share off": missed.off, "document at its end": missed.document or None}
        for missed in manifest.missed_shares
    ]  # fmt: skip
    parts = [
        *tables_of_sources("sources", counted, sources_as_json(sources), totals),
        Table(f"shares that are off, in {counted}: documents stay whole", missed),
        *_nonzero("documents left out", "source", left_out),
        Table("counted when sources were tokenized, each record once", [*_records(manifest)]),
    ]
    if by == "source":
        epoch = [
            (source.name, {"documents": source.documents, counted: source.available,
                        "asked": round(source.asked), "taken": source.taken})
            for source in sources
        ]  # fmt: skip
        shown = (*OF_SOURCES, "name")
        lost = [(sums["name"], {name: sums[name] for name in sums if name not in shown})
                for sums in totals]  # fmt: skip
        title = f"one epoch of each source, and {counted} asked of it and taken"
        parts += [*_nonzero(title, "source", epoch), *_nonzero("lost", "source", lost)]
    return Section("Sources", [part for part in parts if part.lines])


def _records(manifest: Manifest) -> Iterator[dict[str, Cell]]:
    """Yield what is out of the ordinary about the records of sources."""
    nothing = dict.fromkeys(DOCUMENT_TOTALS, 0)
    for source in manifest.source_records:
        for figure in _unusual(nothing | source.totals):
            yield {"source": source.name, "count": Aligned(figure.figure), "what": figure.label}
        for name, number in source.unread.items():
            yield {"source": source.name, "count": number, "what": f"unread {name}"}


# What it was made from


def _origin(manifest: Result) -> _Values:
    """Return inputs, tokenizer, chat template (None if none rendered) and options, for JSON."""
    inputs = manifest.inputs
    return {
        "inputs": {"count": len(inputs), "bytes": sum(file.size for file in inputs)},
        "tokenizer": manifest.document["tokenizer"],
        "chat_template": _template(manifest),
        "config": manifest.document["config"],
    }


def _facts(manifest: Result) -> Iterator[Fact]:
    """Yield inputs, tokenizer, chat template and options, in words."""
    inputs, template = manifest.inputs, _template(manifest)
    tokenizer = _tokenizer(manifest.tokenizer, template is not None)
    if isinstance(manifest, Manifest) and manifest.is_from_tokenized:
        # what is trained on, and what is around documents, differs between directories
        yield Fact("made from", directories(len(inputs)))
        yield next(tokenizer)
    else:
        taken = size(sum(file.size for file in inputs))
        yield Fact("made from", f"{plural(len(inputs), 'input')}, {taken}")
        yield from tokenizer
        config, shape = manifest.config, shape_of(manifest)
        prompts = prompts_described(shape, config.prompt_template)
        trained = config.train_on or "what is default for each"
        first = getattr(manifest, "segments", manifest.documents)  # tokens that nothing precedes
        if shape.kind == "tokens" and manifest.trained_tokens < manifest.tokens - first:
            trained = "what labels and masks say"
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
        member.is_chat or member.of_messages for member in shape.members.values() or [shape]
    )
    sha256 = manifest.side_files.get(TEMPLATE)
    known = {"source": config.chat_template, "sha256": sha256}
    return known if is_chat and sha256 is not None else None


def _options(config: dict[str, Any]) -> Iterator[str]:
    """Yield options that matter most or are not the default, as on a command line."""
    of_rows = "max_length" in config
    kind = PackConfig if of_rows else DocumentConfig
    defaults = (PackConfig(config["max_length"]) if of_rows else DocumentConfig()).as_json()
    for name, option in options_of(kind).items():
        default = defaults.get(name)
        value = config.get(name, default)
        is_implied = name == "turns" and config["shape"] == TRACE
        if name in _NOT_OPTIONS or is_implied or (name not in _SHOWN and value == default):
            continue
        flag = option.flag_for(value)
        if isinstance(value, bool):
            yield flag
            continue
        for part in value if isinstance(value, list | tuple) else [value]:
            yield f"{flag} {_quoted('='.join(part) if isinstance(part, list | tuple) else part)}"
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
