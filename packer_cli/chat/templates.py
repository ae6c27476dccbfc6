"""Choose a chat template: the one that is named, or the tokenizer's own, as transformers does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from packer_cli.errors import UsageError, os_errors
from packer_cli.inputs.byte_streams import BYTE_ORDER_MARK
from packer_cli.result.layout import TEMPLATE, TOKENIZER_CONFIG
from packer_cli.storage import read_bytes
from packer_cli.tokenization.locate import (
    CHAT_TEMPLATE,
    DEFAULT,
    TEMPLATE_FILES,
    TOOL_USE,
    TokenizerFiles,
    templates_in,
)


@dataclass(frozen=True)
class TemplateChoice:
    """Sources of the chat templates in use.

    source     of the template
    origin     description of its place, for people
    tool_use   source of another one, for conversations that have tools
    """

    source: str
    origin: str
    tool_use: str | None = None

    @property
    def sources(self) -> list[str]:
        return [self.source] if self.tool_use is None else [self.source, self.tool_use]


def find_template(option: str | None, files: TokenizerFiles | None) -> TemplateChoice | None:
    """Return the template of --chat-template, or the tokenizer's; None if it has none.

    The option is a file, or the name of one of several templates that the tokenizer has. Raises
    UsageError if it is neither, or if there are several templates and no name.
    """
    templates, origin = own_templates(files), "the tokenizer's own"
    if option is not None:
        if option in templates:
            return TemplateChoice(templates[option], f"{option} of the tokenizer")
        path = Path(option).expanduser()
        if not path.is_file():
            names = f"; the tokenizer has: {', '.join(templates)}" if templates else ""
            raise UsageError(
                f"--chat-template: {option!r} is not a file, nor a template's name{names}",
                "give a .jinja file",
            )
        templates, origin = _in_file(path), str(path)
    if DEFAULT in templates:
        tool_use = templates.get(TOOL_USE)
        if tool_use is not None:
            origin += ", tool_use for tools"
        return TemplateChoice(templates[DEFAULT], origin, tool_use)
    if templates:
        where, which = ("the tokenizer", "NAME") if option is None else (option, "FILE.jinja")
        raise UsageError(
            f"{where} has several chat templates: {', '.join(templates)}",
            f"choose one with --chat-template {which}",
        )
    return None


def _in_file(path: Path) -> dict[str, str]:
    """Read templates from a file: Jinja, or JSON like tokenizer_config.json. Raises UsageError."""
    with os_errors(path):
        content = read_bytes(path).removeprefix(BYTE_ORDER_MARK)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"--chat-template: {path} is not UTF-8: {error}") from error
    try:
        config = msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError):
        return {DEFAULT: text}
    if not isinstance(config, dict):
        return {DEFAULT: text}
    if templates := templates_in(config):
        return templates
    raise UsageError(
        f"--chat-template: {path} is JSON without a {CHAT_TEMPLATE!r}", "give a .jinja file"
    )


def own_templates(files: TokenizerFiles | None) -> dict[str, str]:
    """Return the tokenizer's templates by name."""
    if files is None:
        return {}
    if TEMPLATE in files.companions:
        return {
            name: files.companions[file].decode("utf-8", "replace")
            for name, file in TEMPLATE_FILES.items()
            if file in files.companions
        }
    return templates_in(configuration(files))


def configuration(files: TokenizerFiles) -> dict[str, Any]:
    """Decode tokenizer_config.json; {} if there is none."""
    if TOKENIZER_CONFIG not in files.companions:
        return {}
    content: dict[str, Any] = msgspec.json.decode(files.companions[TOKENIZER_CONFIG])
    return content


def special_tokens(files: TokenizerFiles | None) -> dict[str, Any]:
    """Return bos_token and the like, as templates know them: transformers' special_tokens_map."""
    if files is None:
        return {}
    config, tokens = configuration(files), dict[str, Any]()
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    if isinstance(extra := config.get("additional_special_tokens"), list):
        tokens["additional_special_tokens"] = extra
    known = {"bos_token": files.bos, "eos_token": files.eos, "pad_token": files.pad}
    return {name: token for name, token in known.items() if token is not None} | tokens
