"""Values as they are written on the command line: sizes, shares, lists, names of fields."""

from __future__ import annotations

from packer_cli.errors import UsageError

_SUFFIXES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(option: str, text: str) -> int:
    """64M, 1GiB, 512kb or a number of bytes."""
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _SUFFIXES else ""
    try:
        return round(float(number.removesuffix(unit)) * _SUFFIXES[unit])
    except (ValueError, OverflowError):
        raise UsageError(f"{option}: {text!r} is not a size like 256M or 1G") from None


def parse_share(option: str, text: str | None) -> float | None:
    """0.01, or 1%."""
    try:
        if text is None:
            return None
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise UsageError(f"{option}: {text!r} is not a share", "1% is 0.01") from None


def parse_max_errors(text: str | None) -> int | float | None:
    """100, or a share of all records."""
    return int(text) if text and text.isdecimal() else parse_share("--max-errors", text)


def refuse_name(option: str, name: str | None) -> None:
    """UsageError for what nothing can be written to."""
    if name == "":
        raise UsageError(f"{option}: is empty", "is a variable of your script unset?")
    from packer_cli.storage import refuse_other_than_utf8

    refuse_other_than_utf8(f"{option}: ", name or "")


def parse_list(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def parse_fields(mapped: list[str], text_field: str | None) -> tuple[tuple[str, str], ...]:
    """NAME=COLUMN options as pairs, in the order of the names."""
    pairs = {} if text_field is None else {"text": text_field}
    for item in mapped:
        own, separator, name = item.partition("=")
        if not (own and separator and name):
            raise UsageError(f"--field: {item!r} is not NAME=COLUMN", "for example messages=chosen")
        pairs[own] = name
    return tuple(sorted(pairs.items()))
