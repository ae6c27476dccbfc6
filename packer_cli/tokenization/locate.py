"""Find a tokenizer: a folder, a tokenizer.json, a hub name, or the built-in `bytes`.

Only files are read, no engine is loaded; a tokenizer of 9 MB takes 50 ms. Special tokens come from
tokenizer_config.json (strings or objects), then special_tokens_map.json, then well-known names
among the added tokens. Tokens that only these files or added_tokens.json name are added to
tokenizer.json, as AutoTokenizer does.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import msgspec

from packer_cli._kernels.texts import may_hold
from packer_cli.errors import UsageError, os_errors
from packer_cli.inputs.byte_streams import BYTE_ORDER_MARK, other_content
from packer_cli.result.layout import (
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
)
from packer_cli.storage import read_bytes

BYTES = "bytes"
ENVIRONMENT_VARIABLE = "PACKER_TOKENIZER"
_ADDED, _OF_PROCESSOR = "added_tokens.json", "chat_template.json"  # results do not keep these
# Places of files beside tokenizer.json; the last one is that in a result.
_COMPANIONS = {
    TOKENIZER_CONFIG: (TOKENIZER_CONFIG,),
    SPECIAL_TOKENS: (SPECIAL_TOKENS,),
    _ADDED: (_ADDED,),
    _OF_PROCESSOR: (_OF_PROCESSOR,),
    TEMPLATE: (TEMPLATE,),
    TOOL_TEMPLATE: ("additional_chat_templates/tool_use.jinja", TOOL_TEMPLATE),
}
DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates
TEMPLATE_FILES = {DEFAULT: TEMPLATE, TOOL_USE: TOOL_TEMPLATE}
CHAT_TEMPLATE = "chat_template"  # where a configuration has them
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Only used when no configuration names the EOS, and only if exactly one of them exists.
_KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>")
# Engines make tables as long as the highest id: a corrupt id must not take all memory.
_HIGHEST_ID = 1 << 24
SPELLED_OUT_TIP = "see --special-tokens-in-text, or use --on-error skip"
_TIP = "give a folder with tokenizer.json, the file itself, or a hub name like org/model"


class SpecialToken(msgspec.Struct, frozen=True):
    """An added token of a tokenizer.json; most are special.

    lstrip, rstrip  it takes the white space before or after it with it
    plain           it is found wherever a text has its content
    unknown         it also stands for texts that are not in the vocabulary
    """

    content: str
    id: int = 0
    special: bool = False
    single_word: bool = False
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    plain: bool = True
    unknown: bool = False


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer on disk.

    source         as the user named it
    json           contents of tokenizer.json, with all added tokens
    sha256         digest of `json`
    added          added tokens
    bos, eos, pad  contents of tokens; None if they are not configured
    companions     file name -> contents, for the other files of the tokenizer
    warning        why AutoTokenizer gives other tokens for some texts; "" if that is not known
    """

    source: str
    json: bytes
    sha256: str
    added: tuple[SpecialToken, ...]
    bos: str | None
    eos: str | None
    pad: str | None
    companions: dict[str, bytes]
    warning: str

    @property
    def added_tokens(self) -> list[str]:
        """Return the contents of the added tokens."""
        return [token.content for token in self.added]

    @property
    def specials(self) -> tuple[SpecialToken, ...]:
        """Return the added tokens that are special."""
        return tuple(token for token in self.added if token.special and token.content)


def choose(option: str | None) -> tuple[str, str]:
    """Return (tokenizer, origin of that choice): the option, the environment, or bytes."""
    if option:
        return option, "--tokenizer"
    if os.environ.get(ENVIRONMENT_VARIABLE):
        return os.environ[ENVIRONMENT_VARIABLE], ENVIRONMENT_VARIABLE
    return BYTES, "default"


def locate(source: str) -> TokenizerFiles:
    """Read the files of a tokenizer. Raises UsageError if there is none of that name."""
    if source == BYTES:
        raise UsageError("tokenizer bytes: is built into packer, and has no files", _TIP)
    path = Path(source).expanduser()
    with os_errors(str(path)):
        path = _tokenizer_json(source, path)
        content = read_bytes(path).removeprefix(BYTE_ORDER_MARK)
        companions = {
            name: read_bytes(path.parent / place).removeprefix(BYTE_ORDER_MARK)
            for name, places in _COMPANIONS.items()
            for place in places
            if (path.parent / place).exists()
        }
    document = _decoded(content, path)
    configs = [_config(companions.get(name, b"{}"), path.parent / name)
               for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS)]  # fmt: skip
    listed = _config(companions.pop(_ADDED, b"{}"), path.parent / _ADDED)
    if missing := _missing(document, configs, listed, path.parent):
        content = _with_added(content, missing)
        document = _decoded(content, path)
    of_processor = _config(companions.pop(_OF_PROCESSOR, b"{}"), path.parent / _OF_PROCESSOR)
    if TEMPLATE not in companions and not configs[0].get(CHAT_TEMPLATE):
        named = templates_in(of_processor)
        companions |= {TEMPLATE_FILES[name]: named[name].encode() for name in TEMPLATE_FILES
                       if name in named}  # fmt: skip
    model = document.model
    changes = document.normalizer not in (None, {"type": "Sequence", "normalizers": []})
    added = tuple(
        msgspec.structs.replace(
            token,
            plain=not (token.single_word or (token.normalized and changes)),
            unknown=token.content == model.unk_token or token.id == model.unk_id,
        )
        for token in document.added_tokens or []
    )
    configured = _configured(configs)
    known = [token.content for token in added if token.content in _KNOWN_EOS]
    eos = configured.get("eos_token", known[0] if len(set(known)) == 1 else None)
    bos, pad = configured.get("bos_token"), configured.get("pad_token")
    digest = hashlib.sha256(content).hexdigest()
    warning = _warning(document, configured.get("tokenizer_class", ""))
    return TokenizerFiles(source, content, digest, added, bos, eos, pad, companions, warning)


def _tokenizer_json(source: str, path: Path) -> Path:
    """Return the file of a source. Raises UsageError, and OSError if it may not be read."""
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


class Model(msgspec.Struct):
    """The model of a tokenizer.json. `merges`, megabytes of them, are not decoded."""

    vocab: dict[str, int] | list[Any] | None = None  # a list in unigram models
    type: str = "BPE"  # old files do not name the type of BPE models, which alone have merges
    merges: msgspec.Raw = msgspec.Raw()
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    byte_fallback: bool | None = False
    ignore_merges: bool | None = False
    unk_token: str | None = None
    unk_id: int | None = None  # in unigram models


class TokenizerJson(msgspec.Struct):
    """The fields of a tokenizer.json that packer reads."""

    model: Model
    added_tokens: list[SpecialToken] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


def _decoded(content: bytes, path: Path) -> TokenizerJson:
    """Decode a tokenizer.json. Raises UsageError if it is not one, or has too high ids."""
    try:
        document = msgspec.json.decode(content, type=TokenizerJson)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason, tip = other_content(content) or (f"not a tokenizer.json: {error}", _TIP)
        raise UsageError(f"tokenizer {path}: {reason}", tip) from error
    if (highest := _highest(document)) > _HIGHEST_ID:
        problem = f"tokenizer {path}: has the id {highest}, at most {_HIGHEST_ID} works"
        raise UsageError(problem, _TIP)
    return document


def highest_id(content: bytes) -> int:
    """Return the highest id of a tokenizer.json."""
    return _highest(msgspec.json.decode(content, type=TokenizerJson))


def _highest(document: TokenizerJson) -> int:
    vocabulary = document.model.vocab or []
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max([*ids, *(token.id for token in document.added_tokens or [])], default=0)


def _config(content: bytes, path: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"tokenizer {path}: not valid JSON: {error}", _TIP) from error
    if not isinstance(config, dict):
        what = f"a JSON {type(config).__name__}, not an object"
        raise UsageError(f"tokenizer {path}: {what}", _TIP)
    return config


def _configured(configs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the contents of special tokens, and the class, that configurations name."""
    tokens: dict[str, str] = {}
    for config in configs:
        for key in (*_NAMED, "tokenizer_class"):
            value = config.get(key)
            if isinstance(value, dict):  # an added-token object
                value = value.get("content")
            if isinstance(value, str):
                tokens.setdefault(key, value)
    return tokens


def templates_in(config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a configuration by name: `DEFAULT` if there is only one."""
    value = config.get(CHAT_TEMPLATE)
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, dict):
        value = [{"name": name, "template": text} for name, text in value.items()]
    return {
        item["name"]: item["template"]
        for item in (value if isinstance(value, list) else [])
        if isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("template"), str)
    }


def _missing(
    document: TokenizerJson, configs: list[dict[str, Any]], listed: dict[str, Any], folder: Path
) -> list[SpecialToken]:
    """Return the tokens that AutoTokenizer adds to a tokenizer.json, with the ids that it gives.

    listed  contents of added_tokens.json, which is not read beside `added_tokens_decoder`
    Raises UsageError if a file names another id: a model has learned one of the two.
    """
    decoder, source = configs[0].get("added_tokens_decoder"), TOKENIZER_CONFIG
    if decoder is not None:
        configs = configs[:1]
    named = _configured(configs)
    special = [named[key] for key in _NAMED if key in named]
    extra = _extra_tokens(configs, folder)
    if decoder is None:
        decoder, source = {}, _ADDED
        for content, number in listed.items():
            is_special = content in (*special, *extra)
            decoder[number] = {
                "content": content, "special": is_special, "normalized": not is_special
            }  # fmt: skip
    try:
        tokens = {int(number): msgspec.convert(token, SpecialToken)
                  for number, token in decoder.items()}  # fmt: skip
        further = [SpecialToken(msgspec.convert(token, str), -1, special=True) for token in extra]
    except (msgspec.ValidationError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"tokenizer {folder / source}: its added tokens: {error}", _TIP) from error
    added = {token.content: token.id for token in document.added_tokens or []}
    wanted = [msgspec.structs.replace(tokens[number], id=number) for number in sorted(tokens)]
    if all(token.content in added for token in (*wanted, *further)):
        return []  # padding alone needs no token of its own, and for EOS there is an option
    wanted += [SpecialToken(content, -1, special=True) for content in special]
    vocabulary = document.model.vocab or []
    if isinstance(vocabulary, list):
        vocabulary = {piece[0]: number for number, piece in enumerate(vocabulary)}
    missing = list[SpecialToken]()
    for token in (*wanted, *further):
        if token.content in added or not token.content:
            continue
        highest = max(added.values(), default=-1)
        number = vocabulary.get(token.content, max(highest + 1, len(vocabulary)))
        if token.id not in (-1, number):
            raise UsageError(
                f"tokenizer {folder / source}: has the id {token.id} for {token.content!r}, which "
                f"tokenizer.json lacks, and AutoTokenizer gives it {number}",
                "save it again with the ids of the model: tokenizer.save_pretrained(FOLDER)",
            )
        added[token.content] = number
        missing.append(msgspec.structs.replace(token, id=number))
    return missing


def _extra_tokens(configs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """Return the contents of further special tokens. Raises UsageError if they are not a list."""
    extra = list[Any]()
    for config in configs:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            values = config.get(key) or []
            if not isinstance(values, list | dict):
                what = f"{key} is {values!r}, expected a list or an object"
                raise UsageError(f"tokenizer {folder}: {what}", _TIP)
            for token in values.values() if isinstance(values, dict) else values:
                extra.append(token.get("content") if isinstance(token, dict) else token)
    return extra


def _with_added(content: bytes, tokens: list[SpecialToken]) -> bytes:
    """Return a tokenizer.json with more added tokens."""
    parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    added = msgspec.json.decode(parts.get("added_tokens", b"null")) or []
    keys = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added += [{key: getattr(token, key) for key in keys} for token in tokens]
    return msgspec.json.encode(parts | {"added_tokens": added})


def _from_hub(name: str) -> Path:
    """Return the path of a hub repository's tokenizer.json, which has its companions beside it.

    The local cache comes first, so a run does not wait for a network that it does not need.
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
        host = urlsplit(constants.ENDPOINT).hostname
        if not (isinstance(cached, str) or constants.HF_HUB_OFFLINE or getproxies()) and host:
            # the library would try for half a minute to reach a host without an address
            socket.getaddrinfo(host, None)
        path = Path(cached if isinstance(cached, str) else hf_hub_download(name, TOKENIZER))
        commit = path.parent.name
        for name_here, (companion, *_) in _COMPANIONS.items():
            if name_here in (TOOL_TEMPLATE, _OF_PROCESSOR) and isinstance(cached, str):
                continue  # hardly any repository needs it: no reason to wait for the network
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
    except (LocalEntryNotFoundError, socket.gaierror):
        reason = "not a local path, not in the local hub cache, and the hub cannot be reached"
    except RepositoryNotFoundError:
        reason = "no such file or folder, and the hub has no such repository (or it is private)"
    except EntryNotFoundError:
        reason = "the hub repository has no tokenizer.json"
    except OSError as error:
        reason = f"the hub did not answer: {error}"
    raise UsageError(f"tokenizer {name}: {reason}", _TIP)


# tokenizer_class without "Fast" -> test for the pre-tokenizer that transformers 5 builds for it
_BUILT: dict[str, Callable[[dict[str, Any]], bool]] = {
    "LlamaTokenizer": lambda part: part.get("prepend_scheme") == "first",
    "GPT2Tokenizer": lambda part: bool(
        part.get("type") == "ByteLevel" and part.get("use_regex", True)
    ),
}


def _warning(document: TokenizerJson, tokenizer_class: str) -> str:
    """Return the warning of `TokenizerFiles`. transformers 5 takes the vocabulary of some values of
    `tokenizer_class` and builds everything else itself. `packer tokenizer DIR --check` compares the
    two tokenizers; this needs no transformers.
    """
    name = tokenizer_class.removesuffix("Fast")
    is_built = _BUILT.get(name)
    if is_built is None or (not document.normalizer and is_built(document.pre_tokenizer or {})):
        return ""
    return (
        f"transformers 5 builds a {name} otherwise than tokenizer.json says: AutoTokenizer gives "
        'other tokens for some texts, unless tokenizer_class is "PreTrainedTokenizerFast"'
    )


# -- Special tokens in the content of records, such as "<|im_end|>" in a user's question
#
# Tokenizers make real special tokens of them, wherever the characters came from. With
# `--special-tokens-in-text keep` they are counted, with `error` the record is bad. Special tokens
# that a chat template writes do not count.


@dataclass(frozen=True)
class Specials:
    """Special tokens of a tokenizer, and the policy for those in records: "keep" or "error"."""

    tokens: tuple[SpecialToken, ...] = ()
    policy: str = "keep"

    def in_text(self, text: str) -> str | None:
        """Return the first special token in a text; None if it has none."""
        match = self._contents.search(text) if self.tokens else None
        return match and match.group()

    def may_be_in(self, value: Any) -> bool:
        """Tell quickly whether a record's fields may have special tokens; False is certain."""
        return bool(self.tokens) and may_hold(value, self._common)

    def beside(self, cut: int, text: str) -> int:
        """Return the place of a cut in a text, moved before a special token that it would split."""
        if not self.tokens:
            return cut
        longest = len(self._longest_first[0].content)
        begin = max(cut - longest, 0)
        for match in self._contents.finditer(text, begin, cut + longest):
            if match.start() < cut < match.end():
                return match.start()
        return cut

    def in_record(self, value: Any) -> list[str]:
        """Return all special tokens in the strings of a record's fields, names of fields aside."""
        if not self.tokens:
            return []
        if isinstance(value, str):
            return self._contents.findall(value)
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list | tuple):
            return []
        return [token for item in value for token in self.in_record(item)]

    @cached_property
    def _longest_first(self) -> list[SpecialToken]:
        return sorted(self.tokens, key=lambda token: -len(token.content))

    @cached_property
    def _contents(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(token.content) for token in self._longest_first))

    @cached_property
    def _common(self) -> str:
        """The beginning that all special tokens share."""
        return commonprefix([token.content for token in self.tokens])  # noqa: RUF071 of strings


NO_SPECIALS = Specials()


def spelled_out(token: str) -> str:
    """Return the reason why a record is bad."""
    return f"its content spells out the special token {token!r}"
