"""Warnings about a result: what was lost, left out or joined, perhaps by mistake.

A warning follows from the manifest alone, so that the end of a run, `packer stats` and its page
have the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import asdict

from packer_cli.errors import named
from packer_cli.options.options import MAX_LENGTH_LIMIT
from packer_cli.options.shapes import prompt_templates, shape_named
from packer_cli.result.counts import mixedness, records_read
from packer_cli.result.layout import TEMPLATE
from packer_cli.result.manifest import DOCUMENT_TOTALS, Input, Manifest, Result, shape_of
from packer_cli.result.wording import percent, plural, unshown

_SHARE = 0.01  # of tokens or documents: less is not worth a warning
_MOST_NAMED = 12
# Rows are alike if most are and the data is not: they have less than half its spread of lengths.
_MOST, _NARROW, _LARGEST, _FEWEST_ROWS = 0.5, 0.5, 0.75, 16
RAW, FORMATS = "raw", "formats"
_WORDS = {"chat": "the chat template's", "none": "as they are", "alpaca": "Alpaca's"}


class ResultWarning(NamedTuple):
    """The subject of a warning, for programs; what is there, with its share; options that help."""

    about: str
    text: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.text}; {self.way_out}"


def warnings_of(manifest: Result) -> list[ResultWarning]:
    """Return the warnings about a result, the gravest first."""
    lost = [*_dropped(manifest), *_untrained(manifest)] if isinstance(manifest, Manifest) else []
    return [
        *lost, *_rejected(manifest), *_left_out(manifest), *_copies(manifest), *_unshown(manifest),
        *(_formats(manifest) or _raw_prompts(manifest)), *_edges(manifest),
        *(_alike(manifest) if isinstance(manifest, Manifest) else ()),
    ]  # fmt: skip


def encoded_tokens(manifest: Result) -> int:
    """Return the tokens that a run encoded, including those that were lost."""
    lost = ("truncated_tokens", "dropped_tokens")
    return manifest.tokens + sum(getattr(manifest, name, 0) for name in lost)


def _dropped(manifest: Manifest) -> Iterator[ResultWarning]:
    encoded = encoded_tokens(manifest)
    documents = manifest.documents + manifest.dropped_documents
    untrained = manifest.untrained_documents, manifest.untrained_tokens
    overlong = (
        manifest.dropped_documents - untrained[0], manifest.dropped_tokens - untrained[1],
    )  # fmt: skip
    length = manifest.config.max_length
    for about, (number, tokens), why, way_out in (
        ("dropped", overlong, f"longer than --max-length {length}", _longer(manifest)),
        ("untrained", untrained, "without a token to train on", []),
    ):
        if tokens > _SHARE * encoded:
            text = (
                f"{number:,} of {plural(documents, 'document')} dropped, "
                f"{percent(tokens / encoded)} of the tokens: {why}"
            )
            yield ResultWarning(
                about, text, ", ".join([*way_out, "--max-loss 1% makes it an error"])
            )


def _untrained(manifest: Manifest) -> Iterator[ResultWarning]:
    if manifest.tokens and not manifest.trained_tokens:
        is_short = manifest.config.max_length == 1
        way_out = (
            "the first token of a document is never trained on: use a longer --max-length"
            if is_short
            else "check what the records or --train-on mark as trained"
        )
        yield ResultWarning("nothing trained", "no token of the result is trained on", way_out)


def _longer(manifest: Manifest) -> list[str]:
    """Return options that would keep documents that are longer than a row."""
    ways = []
    is_given = manifest.config.overlong == "truncate-turns"
    if not is_given and any(shape.is_chat for shape in shape_of(manifest).each):
        ways.append("--overlong truncate-turns keeps their last turns")
    left = 0
    for exponent in reversed(range(len(manifest.dropped_length))):
        left += manifest.dropped_length[exponent]
        if left > _SHARE * encoded_tokens(manifest):
            if (length := 2 << exponent) <= MAX_LENGTH_LIMIT:
                kept = 1 - (left - manifest.dropped_length[exponent]) / encoded_tokens(manifest)
                how_much = "all" if kept == 1 else f"{kept:.1%} of the tokens"
                ways.append(f"--max-length {length} keeps {how_much}")
            break
    return ways


def _rejected(manifest: Result) -> Iterator[ResultWarning]:
    read = records_read(manifest)
    if manifest.rejected_records > _SHARE * read:
        share = percent(manifest.rejected_records / read)
        bad = plural(manifest.rejected_records, "bad record")
        text = f"leaves out {bad}, {share} of all: see rejected.jsonl"
        yield ResultWarning("rejected", text, "--max-errors 1% makes it an error")


def _left_out(manifest: Result) -> Iterator[ResultWarning]:
    if not manifest.rejected_files:
        return
    names = [file.name for file in manifest.inputs if file.rejected_files]
    files = plural(manifest.rejected_files, "input")
    text = f"leaves out {files} that cannot be decoded: {named(names, _MOST_NAMED)}"
    yield ResultWarning("files", text, "see rejected.jsonl; once they are fixed, --add packs them")


def _copies(manifest: Result) -> Iterator[ResultWarning]:
    """Yield a warning about inputs with the content of an earlier one, but not for recipes."""
    if isinstance(manifest, Manifest) and manifest.sources:
        return
    first, copies = dict[str, Input](), list[tuple[Input, Input]]()
    for file in manifest.inputs:
        other = first.setdefault(file.sha256, file) if file.sha256 else file
        if other is not file and file.documents:
            copies.append((other, file))
    if not copies:
        return
    more = f"; so have {len(copies) - 1:,} more" if len(copies) > 1 else ""
    (original, copy), documents = copies[0], sum(file.documents for _, file in copies)
    there = "are there more than once" if documents > 1 else "is there more than once"
    text = (
        f"{plural(documents, 'document')} {there}: {copy.name} has the content of "
        f"{original.name}{more}"
    )
    yield ResultWarning("copies", text, "name one of such files")


def _unshown(manifest: Result) -> Iterator[ResultWarning]:
    if not manifest.unshown_documents:
        return
    figures = {name: getattr(manifest, name) for name in DOCUMENT_TOTALS}
    text = (
        f"of {plural(manifest.unshown_documents, 'document')} the chat template does not show: "
        f"{unshown(figures)}"
    )
    way_out = "use a --chat-template that shows all of it"
    of_conversations = any(shape.is_chat for shape in shape_of(manifest).each)
    if manifest.unshown_reasoning and of_conversations and manifest.config.turns == "all":
        way_out = (
            "use --turns each where only earlier turns lose their reasoning, or a --chat-template "
            "that shows all of it"
        )
    yield ResultWarning("unshown", text, f"{way_out}; --on-unshown error ends such runs")


def _formats(manifest: Result) -> list[ResultWarning]:
    """Return a warning if prompts take several formats in one set, with the documents of each."""
    whole, prompts, documents = shape_of(manifest), _prompts(manifest), Counter[str]()
    for file in manifest.inputs:
        shape = shape_named(file.shape) if file.shape else whole
        if shape.is_composed:
            documents["chat" if shape.is_chat else prompts[shape.name]] += file.documents
    documents += Counter()  # without those of no document
    if len(documents) < 2:
        return []
    each = [f"{_WORDS[name]} in {plural(number, 'document')}" for name, number in documents.items()]
    common = "chat" if "chat" in documents or TEMPLATE in manifest.side_files else "alpaca"
    text = f"prompts take {len(documents)} formats: {', '.join(each)}"
    return [ResultWarning(FORMATS, text, f"--prompt-template {common} gives all of them one")]


def _raw_prompts(manifest: Result) -> Iterator[ResultWarning]:
    raw = [name for name, template in _prompts(manifest).items() if template == "none"]
    if raw and TEMPLATE in manifest.side_files:
        text = (
            f"prompts and answers of {' and '.join(raw)} records are concatenated without the chat "
            "template"
        )
        yield ResultWarning(RAW, text, "add --prompt-template chat to use it")


def _edges(manifest: Result) -> Iterator[ResultWarning]:
    documents = manifest.documents + getattr(manifest, "dropped_documents", 0)
    if manifest.edge_tokens > _SHARE * documents:
        share = manifest.edge_tokens / documents
        text = (
            f"{plural(manifest.edge_tokens, 'token')} in {plural(documents, 'document')} "
            f"({percent(share)}) straddle a prompt and its answer, so at inference the prompt is "
            "tokenized differently"
        )
        chat = "chat" if TEMPLATE in manifest.side_files else "chat, with a --chat-template,"
        or_alpaca = "" if "alpaca" in _prompts(manifest).values() else " or alpaca"
        yield ResultWarning("edges", text, f"--prompt-template {chat}{or_alpaca} avoids this")


def _alike(manifest: Manifest) -> Iterator[ResultWarning]:
    """Yield warnings about rows of one length or one input, although the data has many."""
    totals = asdict(manifest)
    mixed = mixedness(totals, histograms := asdict(manifest.histograms))
    documents = [file.documents for file in manifest.inputs]
    other = "first-fit-shuffle" if manifest.config.strategy == "best-fit" else "best-fit"
    for about, is_avoidable, way_out in (
        ("one length", (mixed["spread"] or 1) < _NARROW, f"--strategy {other} mixes lengths"),
        ("one input", max(documents, default=0) <= _LARGEST * sum(documents),
         "shuffle records across inputs before, or name the inputs as sources of a recipe"),
    ):  # fmt: skip
        name = about.replace(" ", "_")
        if is_avoidable and sum(histograms[name]) >= _FEWEST_ROWS and mixed[name] > _MOST:
            share = f"{percent(mixed[name])} of the rows with four segments or more"
            text = f"{share} hold documents of {'nearly ' * ('length' in about)}{about}"
            yield ResultWarning(name, text, way_out)


def _prompts(manifest: Result) -> dict[str, str]:
    return prompt_templates(shape_of(manifest), manifest.config.prompt_template)
