"""`packer stats`, and the end of a run: what the manifest of a result says, and first what it was
made of and with, since nothing in the figures shows a forgotten option.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict

from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import options_of
from packer_cli.options.options import (
    DEFAULT_COLUMNS,
    PADDED_BOUNDARIES,
    PAIR,
    PAIR_COLUMNS,
    TRAIN,
    PackConfig,
    keeps_order,
)
from packer_cli.options.shapes import kinds_of, prompts_described
from packer_cli.packing.figures import cost_spread
from packer_cli.reports.report import (
    Fact,
    Figure,
    Part,
    Report,
    Section,
    Share,
    Shares,
    Table,
    Text,
    alike,
    document_lengths,
    row_fill,
    segments_per_row,
)
from packer_cli.result.counts import mixedness
from packer_cli.result.layout import DOCUMENTS, TEMPLATE, kind_of, short_name
from packer_cli.result.manifest import (
    DOCUMENT_TOTALS,
    TOKENIZED,
    TOTALS,
    Cost,
    Input,
    Manifest,
    Result,
    Tokenizer,
    by_source,
    shape_of,
    shares,
    sources_as_json,
)
from packer_cli.result.warnings import warnings_of
from packer_cli.result.wording import count, directories, percent, plural, size, unshown

if TYPE_CHECKING:
    from packer_cli.reports.steps import Prediction

_MOST_INPUTS = 100  # that a page lists: it stays small
_OF_INPUTS = ("documents", "tokens", "empty_documents", "rejected_records")
_LOSSES = {
    "truncated_documents": "truncated", "truncated_tokens": "(tokens)",
    "dropped_documents": "dropped", "dropped_tokens": "(tokens)",
    "untrained_documents": "untrained",
}  # fmt: skip
# What inputs are counted by, as columns: the rest of a name is what the tables begin with.
_TITLES = {
    "documents": "documents", "tokens": "tokens", "trained_tokens": "trained",
    "empty_documents": "empty", "rejected_records": "rejected",
    "truncated_documents": "truncated", "truncated_tokens": "tokens cut off",
    "dropped_documents": "dropped", "dropped_tokens": "their tokens",
    "untrained_documents": "untrained", "untrained_tokens": "their tokens",
}  # fmt: skip
_ALWAYS = ("documents", "tokens", "trained_tokens")
_BUILT_IN = "built-in bytes, as when no --tokenizer is given"
_DIGITS = 12  # of a digest: enough to tell tokenizers apart
_SHOWN = ("max_length", "strategy", "overlong")
_NOT_OPTIONS = {"shape", "train_on", "prompt_template", "add_bos", "add_eos", "chat_template",
                "columns", "fields", "roles", "template_args", "turn_end", "shuffle",
                "window_tokens", "mixture"}  # fmt: skip


def stats_report(
    directory: Path | str,
    manifest: Result,
    *,
    by: str | None = None,
    steps: Prediction | None = None,
    is_detailed: bool = True,
    is_recounted: bool = False,
) -> Report:
    """What was packed or tokenized, and how well.

    by           shard, input or source: what to list, too
    steps        what steps of training would cost
    is_detailed  with histograms and warnings, which the end of a run says on stderr
    """
    of_rows = isinstance(manifest, Manifest)
    sections = [*_of_rows(manifest, by)] if isinstance(manifest, Manifest) else []
    if is_detailed:
        sections += _histograms(manifest)
    sections += _listed(manifest, by)
    if steps is not None:
        sections.append(Section("Steps", [steps.table()]))
    if is_recounted:
        agreed = Text("recounted from the shards: all figures agree", only_page=False)
        sections.append(Section("Recounted", [agreed]))
    incomplete = f"Marked incomplete: {manifest.incomplete}" if manifest.incomplete else ""
    warnings = [str(one) for one in warnings_of(manifest)] if is_detailed else []
    return Report(
        str(directory),
        _facts(manifest),
        _content(directory, manifest, by, steps),
        f"{'packed' if of_rows else 'tokenized'} by packer {manifest.packer_version}",
        [*headline(manifest)] if isinstance(manifest, Manifest) else [*_of_documents(manifest)],
        warnings,
        sections,
        incomplete,
    )


def _content(
    directory: Path | str, manifest: Result, by: str | None, steps: Prediction | None
) -> dict[str, Any]:
    """The report for programs; what newer packers add to histograms, shards and inputs is kept."""
    document = manifest.document
    content: dict[str, Any] = {"directory": str(directory)}
    if isinstance(manifest, Manifest):
        content |= _origin(manifest) | figures(manifest)
        if steps is not None:
            content["steps"] = steps.as_json()
        if manifest.sources:
            content["sources"] = sources_as_json(manifest.sources)
            content["stages"] = document["stages"]
            for name in ("missed_shares", "source_records"):
                content[name] = document.get(name, [])
        if by == "source":
            content["by_source"] = by_source(manifest)
    else:
        content |= {"kind": TOKENIZED} | _origin(manifest) | _figures_of_documents(manifest)
    content["warnings"] = [one._asdict() for one in warnings_of(manifest)]
    content["histograms"] = document["histograms"]
    if by == "shard":
        content["by_shard"] = document["shards"]
    elif by == "input":
        content["by_input"] = [document["inputs"][index] for index in manifest.inputs_now]
    return content


def figures(manifest: Manifest) -> dict[str, Any]:
    """The manifest's totals and what follows from them.

    `rows_over_bound`: rows divided by the lower bound.
    """
    names = ("rows", *TOTALS, "padding_tokens", "utilization", "lower_bound_rows")
    mixed = mixedness(asdict(manifest), asdict(manifest.histograms))
    costs = manifest.attention_cost
    return {name: getattr(manifest, name) for name in names} | {
        "max_length": manifest.config.max_length,
        "strategy": manifest.config.strategy,
        "rows_over_bound": manifest.rows / manifest.lower_bound_rows,
        "unpacked_ratio": manifest.unpacked_rows / manifest.rows,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        **({"mixedness": mixed} if mixed else {}),
        **({} if costs is UNSET else {
            "attention_cost": {"before": _spread(costs.before), "after": _spread(costs.after)}
        }),
    }  # fmt: skip


def _spread(cost: Cost) -> dict[str, float]:
    return cost_spread(cost.rows, cost.sum, cost.sum_of_squares, cost.max)


def _figures_of_documents(manifest: Result) -> dict[str, Any]:
    """Figures of a tokenized directory. `bytes`: of documents and indexes."""
    return {name: getattr(manifest, name) for name in DOCUMENT_TOTALS} | {
        "tokens_per_document": manifest.tokens / max(manifest.documents, 1),
        "shards": sum(kind_of(shard.file) == DOCUMENTS for shard in manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }


def headline(manifest: Manifest) -> Iterator[Figure]:
    """What was packed, and how well; what was lost, and may be wrong."""
    f = figures(manifest)
    disk = f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"
    name, over = "document", f["rows"] - f["lower_bound_rows"]
    if PAIR in manifest.config.columns:  # "pair" where all have two sides
        each = manifest.segments / max(manifest.documents, 1)
        name = "pair" if each == 2 else "answer" if each == 1 else "record"
    saved = f"at most {over:,} ({over / f['lower_bound_rows']:.2%}) could be saved"
    yield Figure("utilization", percent(f["utilization"]), "of all positions hold real tokens")
    packed = f"of {f['max_length']:,} tokens, {f['strategy']}; {disk}"
    yield Figure("rows", count(f["rows"]), packed)
    bound = f"rows; {saved if over else 'no packer can do better'}"
    yield Figure("lower bound", count(f["lower_bound_rows"]), bound)
    alone = f"rows if each {name} were padded alone: {f['unpacked_ratio']:.1f}× fewer rows"
    yield Figure("unpacked", count(f["unpacked_rows"]), alone)
    yield Figure(f"{name}s", count(f["documents"]), f"in {plural(f['segments'], 'segment')}")
    yield from _tokens(f)
    yield Figure("padding", count(f["padding_tokens"]), "positions without a token")
    mixed = f.get("mixedness", {})
    if mixed.get("spread") is not None:  # where rows are of more than one segment
        shares_alike = [("have nearly one length", mixed["one_length"])]
        shares_alike += [("one input", mixed["one_input"])] * (len(manifest.inputs_now) > 1)
        said = [f"{percent(share)} {what}" for what, share in shares_alike if share is not None]
        text = f"of the data's spread of lengths in a row{'; of rows ' if said else ''}"
        yield Figure("mixed", percent(mixed["spread"]), text + ", ".join(said))
    if "attention_cost" in f:
        before, after = f["attention_cost"]["before"], f["attention_cost"]["after"]
        for key, meaning in (
            ("cv", "variation of cost between rows"), ("max_over_mean", "costliest row / mean")
        ):  # fmt: skip
            was = f"{meaning}; {before[key]:.3f} without --balance"
            yield Figure("attention", f"{after[key]:.3f}", was)
    of_trained = manifest.config.train_on != "all"
    for what, of, lost in (
        ("truncated", "documents", "tokens cut off"), ("dropped", f"{name}s", "tokens"),
    ):  # fmt: skip
        trained = f", {f[f'{what}_trained_tokens']:,} of them trained" if of_trained else ""
        text = f"{of}, {f[f'{what}_tokens']:,} {lost}{trained}"
        yield Figure(what, count(f[f"{what}_documents"]), text, is_loss=True)
    yield from _unusual(f | {"name": name})


def _tokens(f: dict[str, Any]) -> Iterator[Figure]:
    share = percent(f["trained_tokens"] / max(f["tokens"], 1))
    trained = f"{count(f['trained_tokens'])} trained on ({share})"
    yield Figure("tokens", count(f["tokens"]), trained)
    if f["trained_turns"]:
        yield Figure("turns", count(f["trained_turns"]), "written by the assistant")


def _unusual(f: dict[str, Any]) -> Iterator[Figure]:
    """What is out of the ordinary, and may be wrong."""
    for title, number, meaning in (
        ("untrained", f.get("untrained_documents"), f"of the dropped {f.get('name')}s, without a "
         "token to train on"),
        ("empty", f["empty_documents"], "documents without a token, not packed"),
        ("rejected", f["rejected_records"], "bad records, see rejected.jsonl"),
        ("damaged", f["rejected_files"], "of these are whole inputs that cannot be decoded"),
        ("no end", f["turns_without_end"], f"of {f['trained_turns']:,} trained turns end in no "
         "special token: the model may not learn to stop"),
        ("empty turns", f["empty_turns"], "of the assistant, of which the chat template shows "
         "nothing: not trained on"),
        ("not shown", f["unshown_documents"], "documents, of which the chat template leaves out "
         f"{unshown(f)}"),
        ("masked", f["masked_tokens"], "tokens of the assistant in "
         f"{plural(f['masked_documents'], 'document')} not trained on, by options or flags"),
        ("repeated", f["repeated_tokens"], "tokens that documents share with those of "
         "the turn before, see --turns each"),
        ("edges", f["edge_tokens"], "tokens that hold the end of a prompt and the beginning of its "
         "answer"),
        ("special", f["special_tokens_in_text"], "special tokens that the content of "
         "records spells out, see --special-tokens-in-text"),
        ("rearranged", f["fim_documents"], "texts put into another order, see --fim-rate"),
        ("double BOS", f["double_bos_documents"], "documents begin with BOS twice"),
    ):  # fmt: skip
        if number:
            yield Figure(title, count(number), meaning, is_loss=True)


def _of_documents(manifest: Result) -> Iterator[Figure]:
    """What was tokenized."""
    f = _figures_of_documents(manifest)
    disk = f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"
    mean = f"{f['tokens_per_document']:,.1f} tokens each"
    yield Figure("documents", count(f["documents"]), f"{mean}; {disk}")
    yield from _tokens(f)
    yield from _unusual(f)


def _histograms(manifest: Result) -> Iterator[Section]:
    if not isinstance(manifest, Manifest):
        yield Section("Document lengths", [document_lengths(manifest.histograms.document_length)])
        return
    histograms, lengths = manifest.histograms, [manifest.config.max_length]
    documents = document_lengths(histograms.document_length, lengths)
    yield Section("Row fill", [row_fill(histograms.row_fill)])
    yield Section("Document lengths", [documents])
    yield Section("Segments in a row", [segments_per_row(histograms.segments_per_row)])
    if any(histograms.one_length):  # no row else has enough segments for that to mean anything
        charts = [alike("length", "within 5% of its median length", histograms.one_length)]
        if len(manifest.inputs_now) > 1:
            charts.append(alike("input", "from one input", histograms.one_input))
        yield Section("How mixed rows are", charts, only="page")


def _listed(manifest: Result, by: str | None) -> Iterator[Section]:
    """Inputs and, in the terminal, shards, where they are asked for. A page always has inputs."""
    inputs = [*manifest.inputs_now.values()]
    if by == "shard":
        table = _shards(manifest)
        yield Section("Shards", [table], only="terminal")
    elif by == "input":
        tables = [_inputs(inputs), *_lost(manifest, inputs)]
        yield Section("Inputs", tables, only="terminal")
    parts: list[Part] = [_inputs(inputs, _MOST_INPUTS)]
    if rest := len(inputs) - _MOST_INPUTS:
        text = (
            f"Listed: the {count(_MOST_INPUTS)} of {count(len(inputs))} inputs with the most "
            f"tokens. Not listed: {count(rest)}; packer stats --by input lists them."
        )
        parts = [Text(text), *parts] if rest > 0 else parts
    yield Section("Inputs", parts, only="page")


def _inputs(inputs: list[Input], most: int | None = None) -> Table:
    """A line for each, in their order; of more than `most`, for those with the most tokens."""
    shapes = any(one.shape for one in inputs)
    head = ["input", "documents", "tokens", "empty", "rejected", "bytes", *["shape"] * shapes]

    def line(name: str, some: Iterable[Input], shape: str) -> list[str]:
        some = [*some]
        totals = (sum(getattr(one, figure) for one in some) for figure in (*_OF_INPUTS, "size"))
        return [name, *map(count, totals), *[shape] * shapes]

    listed = [*range(len(inputs))]
    if most is not None and len(inputs) > most:
        listed = sorted(nlargest(most, listed, key=lambda index: inputs[index].tokens))
    rows = [line(inputs[i].path, [inputs[i]], inputs[i].shape or "") for i in listed]
    if len(listed) < len(inputs):
        rest = [inputs[i] for i in sorted({*range(len(inputs))} - {*listed})]
        rows.append(line(f"{count(len(rest))} other inputs", rest, ""))
    return Table("", head, rows, text=["shape"] if most is not None else [])


def _lost(manifest: Result, inputs: list[Input]) -> list[Table]:
    """What inputs have lost on the way to rows; [] for nothing."""
    names = [
        name for name in manifest.counted_by_input
        if name in _LOSSES and any(getattr(one, name) for one in inputs)
    ]  # fmt: skip
    rows = [[one.path, *(count(getattr(one, name)) for name in names)]
            for one in inputs if any(getattr(one, name) for name in names)]  # fmt: skip
    return [Table("", ["input", *(_LOSSES[name] for name in names)], rows)] if rows else []


def _shards(manifest: Result) -> Table:
    if not isinstance(manifest, Manifest):
        rows = [
            [short_name(one.file),
             *map(count, (one.rows, one.tokens, one.trained_tokens, one.bytes))]
            for one in manifest.shards if kind_of(one.file) == DOCUMENTS
        ]  # fmt: skip
        return Table("", ["shard", "documents", "tokens", "trained", "bytes"], rows)
    head = ["shard", "rows", "segments", "tokens", "utilization", "bytes"]
    rows = []
    for one in manifest.shards:
        share = percent(one.tokens / (one.rows * manifest.config.max_length))
        counts = map(count, (one.rows, one.segments, one.tokens))
        rows.append([short_name(one.file), *counts, share, count(one.bytes)])
    return Table("", head, rows)


def _of_rows(manifest: Manifest, by: str | None) -> Iterator[Section]:
    """Shares, what is left out, and stages of a recipe. `by` source: all figures of these."""
    if not manifest.sources:
        return
    mixture = manifest.document["config"].get("mixture") or {}
    counted = "trained tokens" if mixture.get("count") == "trained" else "tokens"
    parts: list[Part] = [
        _shares(manifest, counted),
        _missed(manifest, counted),
        _of_sources(manifest, "documents left out", [
            ("held out", [one.held_out_documents if mixture.get("part", TRAIN) == TRAIN else 0
                          for one in manifest.sources]),
            ("duplicates", [one.duplicate_documents for one in manifest.sources]),
        ]),
        _records(manifest),
    ]  # fmt: skip
    if by == "source":
        counts = by_source(manifest)
        names = [name for name in counts[0] if name not in (*_ALWAYS, "name")]
        epoch = f"one epoch of each source, and {counted} asked of it and taken"
        parts += [
            _of_sources(manifest, epoch, [
                ("documents", [one.documents for one in manifest.sources]),
                (counted, [one.available for one in manifest.sources]),
                ("asked", [round(one.asked) for one in manifest.sources]),
                ("taken", [one.taken for one in manifest.sources]),
            ]),
            _of_sources(manifest, "lost", [
                (_TITLES.get(name, name), [one.get(name, 0) for one in counts]) for name in names
            ]),
        ]  # fmt: skip
    stages = [
        [one.name or str(number), count(one.first_row), count(one.rows)]
        for number, one in enumerate(manifest.stages, 1)
    ]
    parts.append(Table("stages", ["stage", "first row", "rows"], stages))
    shown = [part for part in parts if not isinstance(part, Table) or part.rows]
    yield Section("Sources", shown)


def _shares(manifest: Manifest, counted: str) -> Shares:
    """What is packed of every source, and its share."""
    counts, reached = by_source(manifest), shares(manifest.sources)
    names = [name for name in _ALWAYS if all(name in one for one in counts)]
    head = ["source", *(_TITLES[name] for name in names), "epochs", "asked", "reached"]
    rows = [
        [one.name, *(count(own[name]) for name in names), f"{one.epochs:.2f}",
         *map(percent, of_all)]
        for one, own, of_all in zip(manifest.sources, counts, reached, strict=True)
    ]  # fmt: skip
    table = Table(f"sources, in shares of {counted}", head, rows)
    drawn = zip(manifest.sources, reached, strict=True)
    return Shares([Share(one.name, *of_all) for one, of_all in drawn], table, counted)


def _missed(manifest: Manifest, counted: str) -> Table:
    """Shares that are off, since documents stay whole, and how long the document at the end of what
    is taken is.
    """
    rows = []
    for one in manifest.missed_shares:
        stage = [] if one.stage is None else manifest.stages[one.stage : one.stage + 1]
        where = "".join(f", stage {its.name or (one.stage or 0) + 1}" for its in stage)
        document = count(one.document) if one.document else "-"
        taken = count(round(one.asked)), count(one.taken), percent(one.off)
        rows.append([f"{one.source}{where}", *taken, document])
    head = ["source", "asked", "got", "share off", "document at its end"]
    return Table(f"shares that are off, in {counted}: documents stay whole", head, rows)


def _records(manifest: Manifest) -> Table:
    """What is out of the ordinary about the records of sources."""
    nothing, rows = dict.fromkeys(DOCUMENT_TOTALS, 0), []
    for one in manifest.source_records:
        rows += [[one.name, its.figure, its.title] for its in _unusual(nothing | one.totals)]
        rows += [[one.name, count(figure), f"unread {name}"] for name, figure in one.unread.items()]
    title = "counted when sources were tokenized, each record once"
    return Table(title, ["source", "count", "what"], rows, text=["what"])


def _of_sources(manifest: Manifest, title: str, columns: list[tuple[str, list[int]]]) -> Table:
    """With those of the columns that have a figure for any source; without any, no lines."""
    shown = [(name, values) for name, values in columns if any(values)]
    rows = [
        [one.name, *(count(values[place]) for _, values in shown)]
        for place, one in enumerate(manifest.sources)
    ]
    return Table(title, ["source", *(name for name, _ in shown)], rows if shown else [])


# What it was made of


class _Template(NamedTuple):
    source: str | None
    sha256: str


def _origin(manifest: Result) -> dict[str, Any]:
    """What a result was made of, for programs. `chat_template`: None where none rendered."""
    inputs, template = manifest.inputs_now.values(), _template(manifest)
    return {
        "inputs": {"count": len(inputs), "bytes": sum(one.size for one in inputs)},
        "tokenizer": manifest.document["tokenizer"],
        "chat_template": template and template._asdict(),
        "config": manifest.document["config"],
    }


def _facts(manifest: Result) -> list[Fact]:
    """What a result was made of, for people."""
    inputs, template = manifest.inputs_now.values(), _template(manifest)
    tokenizer = list(_tokenizer(manifest.tokenizer, template is not None))
    if isinstance(manifest, Manifest) and manifest.is_from_tokenized:
        # what is around documents, and trained on, is each directory's own
        lines = [("made from", directories(len(inputs))), *tokenizer[:1]]
    else:
        taken = sum(one.size for one in inputs)
        lines = [("made from", f"{plural(len(inputs), 'input')}, {size(taken)}"), *tokenizer]
        lines.append(("records", _records_described(manifest)))
    if template:
        source = template.source or "of the tokenizer"
        lines.append(("template", f"{source}, {_digest(template.sha256)}"))
    if options := " ".join(_options(manifest.document["config"])):
        lines.append(("options", options))
    return [Fact(name, text, text.startswith(_BUILT_IN)) for name, text in lines]


def _records_described(manifest: Result) -> str:
    config, shape = manifest.config, shape_of(manifest)
    prompts = prompts_described(shape, config.prompt_template)
    trained = config.train_on or "what is default for each"
    return f"{kinds_of(shape)}{prompts and ', '}{prompts}; trained on: {trained}"


def _tokenizer(tokenizer: Tokenizer | None, templated: bool) -> Iterator[tuple[str, str]]:
    if tokenizer is None:
        yield "tokenizer", "none: the inputs hold token ids"
        return
    t = tokenizer
    description = f"{t.source}, {_digest(t.sha256)}" if t.sha256 else _BUILT_IN
    yield "tokenizer", f"{description}; {t.vocab_size:,} ids"
    for name, number, text, where, around in (
        ("EOS", t.eos_token_id, t.eos_token, "after", t.suffix),
        ("BOS", t.bos_token_id, t.bos_token, "before", t.prefix),
    ):
        if number is None:
            yield name, "none"
            continue
        shown = f"{text} ({number})" if text else str(number)
        if around is not UNSET and number in around:
            shown += f", {where} every document"
        elif around is not UNSET:
            shown += ", left to the chat template" if templated else ", not added"
        yield name, shown


def _template(manifest: Result) -> _Template | None:
    config = manifest.config
    shape = shape_of(manifest)
    chat = config.prompt_template == "chat" or any(
        one.is_chat or one.of_messages for one in shape.members.values() or [shape]
    )
    sha256 = manifest.side_files.get(TEMPLATE)
    return None if sha256 is None or not chat else _Template(config.chat_template, sha256)


def _options(config: dict[str, Any]) -> Iterator[str]:
    """Options that matter most or are not the default, as on a command line."""
    of_rows = "max_length" in config
    defaults = (PackConfig(config["max_length"]) if of_rows else DocumentConfig()).as_json()
    own = tuple(PackConfig.__annotations__) if of_rows else ()
    options = options_of(PackConfig if of_rows else DocumentConfig)
    for name in (*own, *DocumentConfig.__annotations__):  # rows first
        default = defaults[name]
        value = config.get(name, default)
        if name in _SHOWN or (name not in _NOT_OPTIONS and value != default):
            option = options[name].name(name, value)
            if isinstance(value, bool):
                yield option
            elif not isinstance(value, list | tuple):
                yield f"{option} {_quoted(value)}"
            else:
                yield from (f"{option} {_quoted(one)}" for one in value)
    if of_rows:
        yield from _options_of_rows(config)
    for pair in config.get("fields", ()):
        yield f"--field {_quoted('='.join(pair))}"
    for pair in config.get("roles", ()):
        yield f"--role {_quoted('='.join(pair))}"
    for pair in config.get("template_args", ()):
        yield f"--template-arg {_quoted('='.join(pair))}"
    for token in config.get("turn_end", ()):
        yield f"--turn-end {_quoted(token)}"


def _options_of_rows(config: dict[str, Any]) -> Iterator[str]:
    if config.get("shuffle") is False and not keeps_order(config["strategy"]):
        yield "--no-shuffle"
    unasked = (PADDED_BOUNDARIES, *PAIR_COLUMNS)
    columns = [name for name in config["columns"] if name not in unasked]
    if columns == [*DEFAULT_COLUMNS, "position_ids"]:
        yield "--position-ids"
    elif columns != list(DEFAULT_COLUMNS):
        yield f"--columns {_quoted(','.join(columns))}"


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return shlex.quote(text) if text.isprintable() else repr(text)


def _digest(sha256: str) -> str:
    return f"sha256 {sha256[:_DIGITS]}"
