"""How a text file begins: the byte order marks of UTF-8, which is no text, and of other encodings.

Marks of other encodings end the run: no byte of such a file means what it would in UTF-8.
"""

from __future__ import annotations

from packer_cli.errors import DataError
from packer_cli.inputs.lines import Lines
from packer_cli.records import InputFile

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8
_MARKS = {  # the longer ones first, of which others are the beginning
    b"\xff\xfe\0\0": "UTF-32LE",
    b"\0\0\xfe\xff": "UTF-32BE",
    b"\xff\xfe": "UTF-16LE",
    b"\xfe\xff": "UTF-16BE",
}


def other_encoding(beginning: bytes) -> tuple[str, str] | None:
    """What a file is instead of UTF-8, by its first bytes, and a tip."""
    for mark, name in _MARKS.items():
        if beginning.startswith(mark):
            what = f"the byte order mark of {name}, expected UTF-8"
            return what, f"convert it: iconv -f {name[:6]} -t UTF-8 FILE > NEW_FILE"
    return None


def refuse_other_than_utf8(file: InputFile, block: Lines) -> None:
    """Raises DataError where the block is the beginning of a file in another encoding."""
    if block.offset or block.data is None:
        return
    if found := other_encoding(block.data[: max(map(len, _MARKS))]):
        what, tip = found
        raise DataError(f"{file.path}: begins with {what}", tip)
