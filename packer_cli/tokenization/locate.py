"""Finding a tokenizer: a folder, a tokenizer.json, a hub name, or the built-in `bytes`.

Reads files, loads no engine. Special tokens come from tokenizer_config.json (strings or
objects), then special_tokens_map.json, then well-known names among the added tokens.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec

from packer_cli.early import ENVIRONMENT_VARIABLE
from packer_cli.errors import UsageError, from_os_error
from packer_cli.result.layout import (
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
)
from packer_cli.tokenization.specials import SpecialToken

BYTES = "bytes"
# Where each of them lies beside tokenizer.json; the last one is what results of packer keep of it.
_COMPANIONS = {
    TOKENIZER_CONFIG: (TOKENIZER_CONFIG,),
    SPECIAL_TOKENS: (SPECIAL_TOKENS,),
    TEMPLATE: (TEMPLATE,),
    TOOL_TEMPLATE: ("additional_chat_templates/tool_use.jinja", TOOL_TEMPLATE),
}
# Only used when no configuration names the EOS, and only if exactly one of them exists.
_KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
# Engines make tables as long as the highest id: a corrupt id must not take all memory.
_HIGHEST_ID = 1 << 24
_TIP = "give a folder with tokenizer.json, the file itself, or a hub name like org/model"


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer on disk.

    source      what the user asked for
    json        contents of tokenizer.json
    sha256      its digest
    added_tokens   contents of the added tokens
    bos, eos, pad   their contents, where configured
    companions  file name -> contents, of the other files of the tokenizer
    specials    the added tokens that are special
    """

    source: str
    json: bytes
    sha256: str
    added_tokens: list[str]
    bos: str | None
    eos: str | None
    pad: str | None
    companions: dict[str, bytes]
    specials: tuple[SpecialToken, ...] = ()


def choose(option: str | None) -> tuple[str, str]:
    """(tokenizer, where that choice came from): the option, the environment, or bytes."""
    if option:
        return option, "--tokenizer"
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return os.environ[ENVIRONMENT_VARIABLE], ENVIRONMENT_VARIABLE
    return BYTES, "default"


def locate(source: str) -> TokenizerFiles:
    """Read the files of a tokenizer. UsageError when there is none under that name."""
    if source == BYTES:
        raise UsageError("tokenizer bytes: is built into packer, and has no files", _TIP)
    path = Path(source).expanduser()
    try:
        path = _tokenizer_json(source, path)
        content = path.read_bytes()
        companions = {
            name: (path.parent / place).read_bytes()
            for name, places in _COMPANIONS.items()
            for place in places
            if (path.parent / place).is_file()
        }
    except OSError as error:
        raise from_os_error(error, error.filename or path, "read") from error
    added, specials = _added_tokens(content, path)
    added_tokens = [token.content for token in added]
    special = _special_tokens(companions, path.parent)
    eos = special.get("eos_token")
    if eos is None:
        known = [name for name in _KNOWN_EOS if name in added_tokens]
        eos = known[0] if len(known) == 1 else None
    return TokenizerFiles(
        source,
        content,
        hashlib.sha256(content).hexdigest(),
        added_tokens,
        special.get("bos_token"),
        eos,
        special.get("pad_token"),
        companions,
        specials,
    )


def _tokenizer_json(source: str, path: Path) -> Path:
    """The file of a source. Raises UsageError, and OSError where it is not allowed to look."""
    if path.is_dir():
        path = path / TOKENIZER
        if not path.is_file():
            with suppress(FileNotFoundError):
                os.stat(path)  # or it is there, and may not be read
            raise UsageError(f"tokenizer {source}: the folder has no tokenizer.json", _TIP)
    elif not path.is_file():
        if path.suffix == ".json" or source.startswith((".", "/", "~")) or source.count("/") > 1:
            raise UsageError(f"tokenizer {source}: no such file or folder", _TIP)
        return _from_hub(source)
    return path


class _AddedToken(msgspec.Struct):
    content: str
    id: int = 0
    special: bool = False
    single_word: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None  # a list in unigram models
    unk_token: str | None = None
    unk_id: int | None = None  # in unigram models


class _TokenizerJson(msgspec.Struct):
    """The fields that are needed here: the merges, megabytes of them, are skipped."""

    model: _Model
    added_tokens: list[_AddedToken] | None = None
    normalizer: Any = None


def _added_tokens(content: bytes, path: Path) -> tuple[list[_AddedToken], tuple[SpecialToken, ...]]:
    try:
        document = msgspec.json.decode(content, type=_TokenizerJson)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"tokenizer {path}: not a tokenizer.json: {error}", _TIP) from error
    vocabulary = document.model.vocab
    ids = [token.id for token in document.added_tokens or []]
    if isinstance(vocabulary, dict):
        ids.extend(vocabulary.values())
    highest = max(ids, default=0)
    if highest > _HIGHEST_ID:
        raise UsageError(
            f"tokenizer {path}: has the id {highest}, at most {_HIGHEST_ID} works", _TIP
        )
    added = document.added_tokens or []
    return added, tuple(_special(t, document) for t in added if t.special and t.content)


def _special(token: _AddedToken, document: _TokenizerJson) -> SpecialToken:
    plain = not token.single_word and not (token.normalized and document.normalizer)
    unknown = token.content == document.model.unk_token or token.id == document.model.unk_id
    return SpecialToken(token.content, token.id, token.lstrip, token.rstrip, plain, unknown)


def found_as_written(content: bytes, token: str) -> bool:
    """Whether an added token of a located tokenizer.json is found wherever a text has it, and takes
    no white space next to it.
    """
    document = msgspec.json.decode(content, type=_TokenizerJson)
    normalizes = document.normalizer not in (None, {"type": "Sequence", "normalizers": []})
    return any(
        not (one.lstrip or one.rstrip or one.single_word or (one.normalized and normalizes))
        for one in document.added_tokens or []
        if one.content == token
    )


def highest_id(content: bytes) -> int:
    """The highest id that a located tokenizer.json can give."""
    document = msgspec.json.decode(content, type=_TokenizerJson)
    vocabulary = document.model.vocab or []
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token.id for token in document.added_tokens or [])], default=0)


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"tokenizer {path}: not valid JSON: {error}", _TIP) from error
    if not isinstance(document, dict):
        raise UsageError(f"tokenizer {path}: a JSON {type(document).__name__}, not an object", _TIP)
    return document


def _special_tokens(companions: dict[str, bytes], folder: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        if name not in companions:
            continue
        config = _parse(companions[name], folder / name)
        for key in ("bos_token", "eos_token", "pad_token"):
            value = config.get(key)
            if isinstance(value, dict):  # an added-token object
                value = value.get("content")
            if isinstance(value, str):
                tokens.setdefault(key, value)
    return tokens


def _refuse_out_of_reach(endpoint: str) -> None:
    """OSError when the hub's name has no address: the library would try for half a minute."""
    host = urlsplit(endpoint).hostname
    if host and not getproxies():
        socket.getaddrinfo(host, None)


def _from_hub(name: str) -> Path:
    """tokenizer.json of a hub repository, companions beside it.

    The local cache comes first, so that a run waits for no network when it needs none.
    """
    from huggingface_hub import (  # noqa: PLC0415
        constants,
        hf_hub_download,
        try_to_load_from_cache,
    )
    from huggingface_hub.errors import (  # noqa: PLC0415
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(name, TOKENIZER)
        if not (isinstance(cached, str) or constants.HF_HUB_OFFLINE):
            _refuse_out_of_reach(constants.ENDPOINT)
        path = Path(cached if isinstance(cached, str) else hf_hub_download(name, TOKENIZER))
        commit = path.parent.name
        for name_here, (companion, *_) in _COMPANIONS.items():
            if name_here == TOOL_TEMPLATE and isinstance(cached, str):
                continue  # hardly any repository has it: no reason to wait for the network
            try:
                if try_to_load_from_cache(name, companion, revision=commit) is None:
                    hf_hub_download(name, companion, revision=commit)
            except LocalEntryNotFoundError:
                break  # out of reach, so the next one would be too
            except EntryNotFoundError:
                continue
        return path
    except HFValidationError:
        reason = "no such file or folder, and not a hub name"
    except LocalEntryNotFoundError:
        reason = "not a local path, not in the local hub cache, and the hub cannot be reached"
    except RepositoryNotFoundError:
        reason = "no such file or folder, and the hub has no such repository (or it is private)"
    except EntryNotFoundError:
        reason = "the hub repository has no tokenizer.json"
    except socket.gaierror:
        reason = "not a local path, not in the local hub cache, and the hub cannot be reached"
    except OSError as error:
        reason = f"the hub did not answer: {error}"
    raise UsageError(f"tokenizer {name}: {reason}", _TIP)
