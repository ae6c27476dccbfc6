"""What a result was made of and with, from its manifest: inputs, tokenizer, template, options.

Reports begin with it, since nothing in the figures shows a forgotten option.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec import UNSET

from packer_cli.config.columns import DEFAULT_COLUMNS, PADDED_BOUNDARIES, PAIR_COLUMNS
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import kinds_of, prompts_described
from packer_cli.config.strategies import keeps_order
from packer_cli.result.layout import TEMPLATE
from packer_cli.result.manifest import Manifest, TokenizedManifest, Tokenizer
from packer_cli.result.manifest_check import shape_of
from packer_cli.result.wording import directories, plural, size

BUILT_IN = "built-in bytes, as when no --tokenizer is given"
_DIGITS = 12  # of a digest: enough to tell tokenizers apart
_ALWAYS = ("max_length", "strategy", "overlong")
_NOT_OPTIONS = {"shape", "train_on", "prompt_template", "add_bos", "add_eos", "chat_template",
                "columns", "fields", "roles", "template_args", "turn_end", "shuffle",
                "window_tokens", "mixture"}  # fmt: skip


class _Template(NamedTuple):
    source: str | None
    sha256: str


def origin(manifest: Manifest | TokenizedManifest) -> dict[str, Any]:
    """What a result was made of, for programs. `chat_template`: None where none rendered."""
    inputs, template = manifest.inputs_now.values(), _template(manifest)
    return {
        "inputs": {"count": len(inputs), "bytes": sum(one.size for one in inputs)},
        "tokenizer": manifest.document["tokenizer"],
        "chat_template": template and template._asdict(),
        "config": manifest.document["config"],
    }


def origin_lines(manifest: Manifest | TokenizedManifest) -> list[tuple[str, str]]:
    """(title, text) for people, each on one line."""
    inputs, template = manifest.inputs_now.values(), _template(manifest)
    tokenizer = list(_tokenizer(manifest.tokenizer, template is not None))
    if isinstance(manifest, Manifest) and manifest.is_from_tokenized:
        # what is around documents, and trained on, is each directory's own
        lines = [("made from", directories(len(inputs))), *tokenizer[:1]]
    else:
        taken = sum(one.size for one in inputs)
        lines = [("made from", f"{plural(len(inputs), 'input')}, {size(taken)}"), *tokenizer]
        lines.append(("records", _records(manifest)))
    if template:
        source = template.source or "of the tokenizer"
        lines.append(("template", f"{source}, {_short(template.sha256)}"))
    if options := " ".join(_options(manifest.document["config"])):
        lines.append(("options", options))
    return [(name, text if text.isprintable() else repr(text)) for name, text in lines]


def _records(manifest: Manifest | TokenizedManifest) -> str:
    config, shape = manifest.config, shape_of(manifest)
    prompts = prompts_described(shape, config.prompt_template)
    trained = config.train_on or "what is default for each"
    return f"{kinds_of(shape)}{prompts and ', '}{prompts}; trained on: {trained}"


def _tokenizer(tokenizer: Tokenizer | None, templated: bool) -> Iterator[tuple[str, str]]:
    if tokenizer is None:
        yield "tokenizer", "none: the inputs hold token ids"
        return
    t = tokenizer
    description = f"{t.source}, {_short(t.sha256)}" if t.sha256 else BUILT_IN
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


def _template(manifest: Manifest | TokenizedManifest) -> _Template | None:
    config = manifest.config
    shape = shape_of(manifest)
    chat = config.prompt_template == "chat" or any(
        one.is_chat or one.of_messages for one in shape.members.values() or [shape]
    )
    sha256 = manifest.side_files.get(TEMPLATE)
    return None if sha256 is None or not chat else _Template(config.chat_template, sha256)


def _options(config: dict[str, Any]) -> Iterator[str]:
    """As on a command line: the options that matter most, and those that are not the default."""
    of_rows = "max_length" in config
    defaults = (PackConfig(config["max_length"]) if of_rows else DocumentConfig()).as_json()
    own = tuple(PackConfig.__annotations__) if of_rows else ()
    options = options_of(PackConfig if of_rows else DocumentConfig)
    for name in (*own, *DocumentConfig.__annotations__):  # rows first
        default = defaults[name]
        value = config.get(name, default)
        if name in _ALWAYS or (name not in _NOT_OPTIONS and value != default):
            option = options[name].name(name, value)
            if isinstance(value, bool):
                yield option
            elif not isinstance(value, list | tuple):
                yield f"{option} {_quoted(value)}"
            else:
                yield from (f"{option} {_quoted(one)}" for one in value)
    if of_rows:
        yield from _of_rows(config)
    for pair in config.get("fields", ()):
        yield f"--field {_quoted('='.join(pair))}"
    for pair in config.get("roles", ()):
        yield f"--role {_quoted('='.join(pair))}"
    for pair in config.get("template_args", ()):
        yield f"--template-arg {_quoted('='.join(pair))}"
    for token in config.get("turn_end", ()):
        yield f"--turn-end {_quoted(token)}"


def _of_rows(config: dict[str, Any]) -> Iterator[str]:
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


def _short(sha256: str) -> str:
    return f"sha256 {sha256[:_DIGITS]}"
