"""What is wrong with a line of JSON, in words for the person who must mend it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from packer_cli.errors import named
from packer_cli.records import BadRecord

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
MEND = "mend the line, or use --on-error skip"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"\x04\x22\x4d\x18")
_KINDS = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "true or false",
    "array": "an array", "list": "an array", "object": "an object", "null": "null",
    "NoneType": "null",
}  # fmt: skip


def explain(line: bytes, position: int, decode: Callable[[bytes], Any]) -> BadRecord:
    """Why `decode` refuses the line that begins at `position`."""
    return BadRecord(position, *(_other_format(line) or _mistake(line, decode)))


def _other_format(line: bytes) -> tuple[str, str] | None:
    """What the file is instead of JSON lines, and a tip."""
    if line.startswith(b"\xef\xbb\xbf"):
        return "a UTF-8 byte order mark", "remove it: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE"
    if line.lstrip()[:1] == b"[":
        return "a JSON array, expected one object per line", "convert it: jq -c '.[]' FILE"
    if line.strip() == b"{":
        what = "an object over several lines, expected one object per line"
        return what, "convert it: jq -c . FILE"
    if line.startswith(_COMPRESSED):
        return "compressed data, not JSON", (
            "name the file by its compression, as FILE.jsonl.gz or FILE.jsonl.zst; stdin must not "
            "be compressed"
        )
    return None


def _mistake(line: bytes, decode: Callable[[bytes], Any]) -> tuple[str, str]:
    """What is wrong in a line that should be JSON, and a tip."""
    try:
        parsed = json.loads(line.decode(), parse_constant=_refuse)
        surrogate = _LONE_SURROGATE.search(json.dumps(parsed, ensure_ascii=False))
    except UnicodeDecodeError as error:
        what = f"invalid UTF-8 at byte {error.start} of the line: 0x{line[error.start]:02x}"
        return what, "convert it: iconv -f ORIGINAL_ENCODING -t utf-8"
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at").removesuffix(" starting")
        return f"not valid JSON: {what} at character {error.pos + 1} of the line", MEND
    except ValueError as error:  # NaN, or a number of thousands of digits
        return f"not valid JSON: {error}", MEND
    except RecursionError:
        return "JSON nested too deeply", MEND
    if surrogate:
        code = ord(surrogate.group())
        return f"the lone surrogate \\u{code:04x} in a string is not valid Unicode", MEND
    try:
        decode(line)
    except DECODE_ERRORS as error:
        return _in_words(str(error), parsed), MEND
    # It failed and now does not: how deep is too deep depends on the calls above.
    return "JSON nested too deeply", MEND


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


def _in_words(error: str, parsed: Any) -> str:
    """The reason for an error of msgspec, such as "Expected `str`, got `int` - at `$.text`"."""
    if not isinstance(parsed, dict):
        return f"{_KINDS.get(type(parsed).__name__, 'a value')}, expected one object per line"
    missing = re.fullmatch(r"Object missing required field `(.*)`", error)
    if missing:
        return f"no field '{missing[1]}'; fields found: {named(parsed)}"
    wrong = re.fullmatch(r"Expected `(.*)`, got `(.*)` - at `\$\.(.*)`", error)
    if wrong:
        expected = " or ".join(_KINDS.get(kind, kind) for kind in wrong[1].split(" | "))
        return f"field '{wrong[3]}' is {_KINDS.get(wrong[2], wrong[2])}, expected {expected}"
    return error
