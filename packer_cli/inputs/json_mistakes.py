"""What is wrong with a line of JSON, in words for the person who must mend it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from packer_cli.config.shapes import value_at
from packer_cli.errors import named
from packer_cli.records import BadRecord

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"\x04\x22\x4d\x18")
# a string comes first, so that what it holds stays; JSON has no other words that begin so
_CONSTANT = re.compile(rb'("[^"\\]*(?:\\.[^"\\]*)*")|-?Infinity|NaN', re.DOTALL)
_NO_NUMBER = object()
_KINDS = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false",
    "array": "an array", "list": "an array", "object": "an object", "null": "null",
    "NoneType": "null",
}  # fmt: skip


def mend(what: str) -> str:
    """The tip for a bad record, which fills a line or is a record of an array."""
    return f"mend the {what}, or use --on-error skip"


def explain(
    text: bytes, position: int, decode: Callable[[bytes], Any], what: str = "line"
) -> BadRecord:
    """Why `decode` refuses the line, or the record of an array, that begins at `position`."""
    other = _other_format(text) if what == "line" else None
    return BadRecord(position, *(other or _mistake(text, decode, what)))


def without_constants(record: bytes) -> bytes:
    """With 0 for each NaN and Infinity, which Python writes and JSON has not; as long as before."""
    if b"NaN" not in record and b"Infinity" not in record:
        return record
    return _CONSTANT.sub(lambda match: match[1] or b"0".ljust(len(match[0])), record)


def without_idle_constants(record: bytes, columns: Iterable[str]) -> bytes:
    """The same, where none of these columns holds one; else the record as it is."""
    without = without_constants(record)
    if without != record:
        try:
            parsed = json.loads(record, parse_constant=lambda constant: _NO_NUMBER)
            if any(_holds_constant(value_at(parsed, column)) for column in columns):
                return record
        except (ValueError, RecursionError):
            return record
    return without


def _holds_constant(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_constant, value.values()))
    return any(map(_holds_constant, value)) if isinstance(value, list) else value is _NO_NUMBER


def is_closed(record: bytes) -> bool:
    """Whether strings and brackets end within it, so that the next record is where it seems."""
    try:
        json.loads(record.decode(errors="replace"), strict=False)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):  # a number of thousands of digits
        return True
    return True


def _other_format(line: bytes) -> tuple[str, str] | None:
    """What the file is instead of JSON lines, and a tip."""
    begin = line.strip()
    if line.startswith(b"\xef\xbb\xbf"):
        return (
            "a UTF-8 byte order mark, which only the beginning of a file may have",
            "remove it: sed -i 's/\\xEF\\xBB\\xBF//' FILE",
        )
    if begin[:1] == b"[":
        return "a JSON array, expected one object per line", (
            "if the whole file is one array of records, name it FILE.json or give --input-format "
            "json; otherwise convert it: jq -c '.[]' FILE > FILE.jsonl"
        )
    if begin[:1] == b"{" and begin[-1:] in (b"{", b"[", b","):
        what = "an object over several lines, expected one object per line"
        return what, (
            "convert it: jq -c . FILE > FILE.jsonl; if its records are in a list of it: "
            "jq -c '.NAME[]' FILE > FILE.jsonl"
        )
    if line.startswith(_COMPRESSED):
        return "compressed data, not JSON", (
            "name the file by its compression, as FILE.jsonl.gz or FILE.jsonl.zst; stdin must not "
            "be compressed"
        )
    if b"\0" in line:
        return "a NUL byte, which no text has: other data than JSON, or in another encoding", (
            "convert it, for example from UTF-16: iconv -f UTF-16 -t UTF-8 FILE > FILE.jsonl"
        )
    return None


def _mistake(line: bytes, decode: Callable[[bytes], Any], where: str) -> tuple[str, str]:
    """What is wrong in a line or record that should be JSON, and a tip."""
    tip = mend(where)
    try:
        parsed = json.loads(line.decode(), parse_constant=_refuse)
        surrogate = _LONE_SURROGATE.search(json.dumps(parsed, ensure_ascii=False))
    except UnicodeDecodeError as error:
        what = f"invalid UTF-8 at byte {error.start} of the {where}: 0x{line[error.start]:02x}"
        return what, "convert it: iconv -f ORIGINAL_ENCODING -t utf-8"
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at").removesuffix(" starting")
        return f"not valid JSON: {what} at character {error.pos + 1} of the {where}", tip
    except ValueError as error:  # NaN, or a number of thousands of digits
        return f"not valid JSON: {error}", tip
    except RecursionError:
        return "JSON nested too deeply", tip
    if surrogate:
        code = ord(surrogate.group())
        return f"the lone surrogate \\u{code:04x} in a string is not valid Unicode", tip
    try:
        decode(line)
    except DECODE_ERRORS as error:
        return _in_words(str(error), parsed, where), tip
    # It failed and now does not: how deep is too deep depends on the calls above.
    return "JSON nested too deeply", tip


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


def _in_words(error: str, parsed: Any, where: str) -> str:
    """The reason for an error of msgspec, such as "Expected `str`, got `int` - at `$.text`"."""
    if not isinstance(parsed, dict):
        expected = "one object per line" if where == "line" else "an object"
        return f"{_KINDS.get(type(parsed).__name__, 'a value')}, expected {expected}"
    missing = re.fullmatch(r"Object missing required field `(.*)`", error)
    if missing:
        return f"no field '{missing[1]}'; fields found: {named(parsed)}"
    wrong = re.fullmatch(r"Expected `(.*)`, got `(.*)` - at `\$\.(.*)`", error)
    if wrong:
        expected = " or ".join(_KINDS.get(kind, kind) for kind in wrong[1].split(" | "))
        return f"field '{wrong[3]}' is {_KINDS.get(wrong[2], wrong[2])}, expected {expected}"
    return error
