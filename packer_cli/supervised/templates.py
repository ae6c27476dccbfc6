"""Which chat template: the one named, or the tokenizer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from packer_cli.errors import UsageError, from_os_error
from packer_cli.tokenization.locate import TokenizerFiles

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
_DEFAULT = "default"


def find_template(option: str | None, files: TokenizerFiles | None) -> tuple[str, str] | None:
    """(source, where it came from) of --chat-template or of the tokenizer; None: there is none.

    The option is a file, or the name of one of several templates that the tokenizer has.
    """
    own = _own(files)
    if option is not None:
        if option in own:
            return own[option], f"{option} of the tokenizer"
        path = Path(option).expanduser()
        if not path.is_file():
            names = f"; the tokenizer has: {', '.join(own)}" if own else ""
            raise UsageError(
                f"--chat-template: {option!r} is not a file, nor a template's name{names}",
                "give a .jinja file",
            )
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except OSError as error:
            raise from_os_error(error, path, "read") from error
        except UnicodeDecodeError as error:
            raise UsageError(f"--chat-template: {path} is not UTF-8: {error}") from error
    if _DEFAULT in own:
        return own[_DEFAULT], "the tokenizer"
    if own:
        raise UsageError(
            f"the tokenizer has several chat templates: {', '.join(own)}",
            "choose one with --chat-template NAME",
        )
    return None


def _own(files: TokenizerFiles | None) -> dict[str, str]:
    """The tokenizer's templates by name."""
    if files is None:
        return {}
    if _FILE in files.companions:
        return {_DEFAULT: files.companions[_FILE].decode("utf-8", "replace")}
    found = configuration(files).get("chat_template")
    if isinstance(found, str):
        return {_DEFAULT: found}
    named = found if isinstance(found, list) else []
    return {
        item["name"]: item["template"]
        for item in named
        if isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    }


def configuration(files: TokenizerFiles) -> dict[str, Any]:
    """tokenizer_config.json, {} when there is none."""
    if _CONFIG not in files.companions:
        return {}
    content: dict[str, Any] = msgspec.json.decode(files.companions[_CONFIG])
    return content


def special_tokens(files: TokenizerFiles | None) -> dict[str, Any]:
    """bos_token and the like, as templates know them: transformers' special_tokens_map."""
    if files is None:
        return {}
    found: dict[str, Any] = {}
    for name, value in configuration(files).items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    if isinstance(extra := configuration(files).get("additional_special_tokens"), list):
        found["additional_special_tokens"] = extra
    for name, token in (
        ("bos_token", files.bos),
        ("eos_token", files.eos),
        ("pad_token", files.pad),
    ):
        if token is not None:
            found.setdefault(name, token)
    return found
