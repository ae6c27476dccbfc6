"""What a result was made of and with, from its manifest: inputs, tokenizer, template, options.

The first thing that a report says, since nothing in the figures shows a forgotten option.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from packer_cli.config.options import DEFAULT_COLUMNS, PADDED_BOUNDARIES, PackConfig
from packer_cli.config.strategies import keeps_order

BUILT_IN = "built-in bytes, as when no --tokenizer is given"
_DIGITS = 12  # of a digest: enough to tell tokenizers apart
_TEMPLATE = "chat_template.jinja"
_ALWAYS = ("max_length", "strategy", "overlong")
_NOT_OPTIONS = {"shape", "train_on", "prompt_template", "add_bos", "add_eos", "chat_template",
                "columns", "fields", "turn_end", "shuffle", "window_tokens"}  # fmt: skip


def inputs_of(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The inputs, without those that an update has dropped."""
    return [said for said in manifest["inputs"] if not said.get("removed")]


def origin(manifest: dict[str, Any]) -> dict[str, Any]:
    """The same for programs. `chat_template`: None where none rendered."""
    inputs = inputs_of(manifest)
    return {
        "inputs": {"count": len(inputs), "bytes": sum(one["size"] for one in inputs)},
        "tokenizer": manifest["tokenizer"],
        "chat_template": _template(manifest),
        "config": manifest["config"],
    }


def origin_lines(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, how it was) for people, each of one line."""
    found, config = origin(manifest), manifest["config"]
    count, size = found["inputs"]["count"], found["inputs"]["bytes"]
    lines = [("made from", f"{count:,} input{'s' * (count != 1)}, {_bytes(size)}")]
    lines += _tokenizer(manifest["tokenizer"], found["chat_template"] is not None)
    shape = config["shape"]
    if config.get("prompt_template") == "alpaca":
        shape += ", prompts as alpaca"
    lines.append(("records", f"{shape}; trained on: {config.get('train_on', 'all')}"))
    if found["chat_template"]:
        source, sha256 = found["chat_template"].values()
        lines.append(("template", f"{source or 'of the tokenizer'}, {_short(sha256)}"))
    lines.append(("options", " ".join(_options(config))))
    return [(name, text if text.isprintable() else repr(text)) for name, text in lines]


def _tokenizer(tokenizer: dict[str, Any] | None, templated: bool) -> Iterator[tuple[str, str]]:
    if tokenizer is None:
        yield "tokenizer", "none: the inputs hold token ids"
        return
    source, sha256 = tokenizer["source"], tokenizer["sha256"]
    named = f"{source}, {_short(sha256)}" if sha256 else BUILT_IN
    yield "tokenizer", f"{named}; {tokenizer['vocab_size']:,} ids"
    for name, where, around in (("eos", "after", "suffix"), ("bos", "before", "prefix")):
        number, text = tokenizer[f"{name}_token_id"], tokenizer.get(f"{name}_token")
        if number is None:
            yield name.upper(), "none"
            continue
        shown = f"{text} ({number})" if text else str(number)
        if number in (tokenizer.get(around) or ()):
            shown += f", {where} every document"
        elif around in tokenizer:
            shown += ", left to the chat template" if templated else ", not added"
        yield name.upper(), shown


def _template(manifest: dict[str, Any]) -> dict[str, Any] | None:
    config = manifest["config"]
    chat = config["shape"] in ("messages", "conversations")
    if _TEMPLATE in manifest.get("side_files", {}) and (
        chat or config.get("prompt_template") == "chat"
    ):
        return {
            "source": config.get("chat_template"),
            "sha256": manifest["side_files"][_TEMPLATE],
        }
    return None


def _options(config: dict[str, Any]) -> Iterator[str]:
    """As on a command line: what matters most, and what is not as by default."""
    defaults = PackConfig(config["max_length"]).as_json()
    for name, default in defaults.items():
        value = config.get(name, default)
        if name in _ALWAYS or (name not in _NOT_OPTIONS and value != default):
            option = f"--{name.replace('_', '-')}"
            if value is True:
                yield option
            elif not isinstance(value, list | tuple):
                yield f"{option} {_quoted(value)}"
            else:
                yield from (f"{option} {_quoted(one)}" for one in value)
    if config.get("shuffle") is False and not keeps_order(config["strategy"]):
        yield "--no-shuffle"
    columns = [name for name in config["columns"] if name != PADDED_BOUNDARIES]
    if columns == [*DEFAULT_COLUMNS, "position_ids"]:
        yield "--position-ids"
    elif columns != list(DEFAULT_COLUMNS):
        yield f"--columns {_quoted(','.join(columns))}"
    for pair in config.get("fields", ()):
        yield f"--field {_quoted('='.join(pair))}"
    for token in config.get("turn_end", ()):
        yield f"--turn-end {_quoted(token)}"


def _quoted(value: object) -> str:
    text = str(value)
    return shlex.quote(text) if text.isprintable() else repr(text)


def _short(sha256: str) -> str:
    return f"sha256 {sha256[:_DIGITS]}"


def _bytes(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,} bytes"
