"""The figures of a result as lines, each with what it means: for the terminal and for a page."""

from __future__ import annotations

from typing import Any, NamedTuple

from packer_cli.config.columns import PAIR
from packer_cli.result.manifest import Manifest
from packer_cli.result.wording import above_bound, count, percent, plural, size, unshown
from packer_cli.stats.report import figures


class Line(NamedTuple):
    """`title` is empty where that of the line before goes on."""

    title: str
    figure: str
    meaning: str


def headline(manifest: Manifest, *, times: str = "×") -> list[Line]:
    """What was packed, and how well."""
    f = figures(manifest)
    disk = f"{size(f['bytes'])} in {plural(f['shards'], 'shard')}"
    name = record_name(manifest)
    bound = above_bound(f["rows"], f["lower_bound_rows"])
    fewer = f"{f['unpacked_ratio']:.1f}{times} fewer rows"
    trained = f"{count(f['trained_tokens'])} trained on"
    share = percent(f["trained_tokens"] / max(f["tokens"], 1))
    lines = [
        Line("utilization", percent(f["utilization"]), "of all positions hold real tokens"),
        Line("rows", count(f["rows"]), f"of {f['max_length']:,} tokens, {f['strategy']}; {disk}"),
        Line("lower bound", count(f["lower_bound_rows"]), f"rows; {bound}"),
        Line(
            "unpacked",
            count(f["unpacked_rows"]),
            f"rows if each {name} were padded alone: {fewer}",
        ),
        Line(f"{name}s", count(f["documents"]), f"in {plural(f['segments'], 'segment')}"),
        Line("tokens", count(f["tokens"]), f"{trained} ({share})"),
    ]
    if f["trained_turns"]:
        lines.append(Line("turns", count(f["trained_turns"]), "written by the assistant"))
    lines.append(Line("padding", count(f["padding_tokens"]), "positions without a token"))
    if "mixedness" in f:
        lines += _mixed(f["mixedness"], several_inputs=len(manifest.inputs_now) > 1)
    if "attention_cost" in f:
        before, after = f["attention_cost"]["before"], f["attention_cost"]["after"]
        for name, title, meaning in (
            ("cv", "attention", "variation of cost between rows"),
            ("max_over_mean", "", "costliest row / mean"),
        ):
            was = f"{meaning}; {before[name]:.3f} without --balance"
            lines.append(Line(title, f"{after[name]:.3f}", was))
    return lines


def _mixed(f: dict[str, float | None], *, several_inputs: bool) -> list[Line]:
    """How mixed rows are; [] where rows are of one segment."""
    if f["spread"] is None:
        return []
    shares = [("have nearly one length", f["one_length"])]
    if several_inputs:
        shares.append(("one input", f["one_input"]))
    known = [f"{percent(share)} {what}" for what, share in shares if share is not None]
    rows = f"; of rows {', '.join(known)}" if known else ""
    return [Line("mixed", percent(f["spread"]), f"of the data's spread of lengths in a row{rows}")]


def record_name(manifest: Manifest) -> str:
    """What a document of the result is: "pair" where all have two sides."""
    if PAIR not in manifest.config.columns:
        return "document"
    each = manifest.segments / max(manifest.documents, 1)
    return "pair" if each == 2 else "answer" if each == 1 else "record"


def losses(manifest: Manifest, *, always: tuple[str, ...] = ()) -> list[Line]:
    """What was lost, or may be wrong. `always`: titles of lines that are there for nothing, too."""
    f = figures(manifest)

    def trained(what: str) -> str:
        if manifest.config.train_on == "all":
            return ""
        return f", {f[f'{what}_trained_tokens']:,} of them trained"

    untrained, name = f["untrained_documents"], record_name(manifest)
    rows = [
        ("truncated", f["truncated_documents"],
         f"documents, {f['truncated_tokens']:,} tokens cut off{trained('truncated')}"),
        ("dropped", f["dropped_documents"],
         f"{name}s, {f['dropped_tokens']:,} tokens{trained('dropped')}"),
        ("untrained", untrained, f"of the dropped {name}s, without a token to train on"),
        *unusual(f),
    ]  # fmt: skip
    return [
        Line(title, count(number), meaning)
        for title, number, meaning in rows
        if number or title in always
    ]


def unusual(f: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(title, figure, meaning) of what is out of the ordinary, and may be wrong."""
    return [
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
    ]  # fmt: skip
