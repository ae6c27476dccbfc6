"""Conditions that choose records and documents by their fields, for `--where` and tiers of recipes.

    score >= 0.8        meta.lang in ["en", "de"]        license exists        tokens >= 64

FIELD OP VALUE: dots in FIELD lead into objects, VALUE is JSON. A value is compared with values of
its own type only, where 1 equals 1.0 and true is not 1. A condition does not hold for a record
that lacks the field, or has null there, or a value of another type.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

from packer_cli.errors import UsageError

# What a condition says of a value.
FAILS, HOLDS, LACKS, DIFFERS = range(4)
# Facts of documents; a record's own fields of these names are `record.tokens` and so on.
TOKENS, TRAINED_TOKENS = "tokens", "trained"
OF_DOCUMENTS = (TOKENS, TRAINED_TOKENS)
OF_RECORDS = "record."
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_MEMBERS = ("in", "not in")
_EXISTS = "exists"
_OPERATOR = re.compile(r"[=!<>]+|(?<=\s)(?:not\s+in|in)(?=[\s\[])|(?<=\s)exists\s*$")
_EXAMPLE = """for example --where 'score >= 0.8', 'lang in ["en", "de"]' or 'license exists'"""
_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "text",
          list: "a list", dict: "an object"}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A condition on one field.

    text   as it is written
    field  name in a record, or one of `OF_DOCUMENTS`, if it `is_of_document`
    op     a key of `COMPARISONS`, "in", "not in" or "exists"
    value  what a field is compared with; a tuple of values after "in"
    """

    text: str
    field: str
    op: str
    value: Any = None
    is_of_document: bool = False

    def judge(self, value: Any) -> int:
        """Return `HOLDS`, `FAILS`, `LACKS` or `DIFFERS` for a value as Python has it."""
        if value is None:
            return LACKS
        if self.op == _EXISTS:
            return HOLDS
        if isinstance(value, Decimal | date):  # of Parquet
            value = float(value) if isinstance(value, Decimal) else value.isoformat()
        kind = _KINDS.get(type(value))
        if self.op in _MEMBERS:
            if kind not in {_KINDS[type(one)] for one in self.value}:
                return DIFFERS
            return int(any(_equal(value, one) for one in self.value) == (self.op == "in"))
        if kind != _KINDS[type(self.value)]:
            return DIFFERS
        if self.op in ("==", "!="):
            return int(_equal(value, self.value) == (self.op == "=="))
        return int(COMPARISONS[self.op](value, self.value))


def _equal(value: Any, other: Any) -> bool:
    """Compare JSON values, in which true is not 1."""
    if _KINDS.get(type(value)) != _KINDS.get(type(other)):
        return False
    if isinstance(value, list):
        return len(value) == len(other) and all(map(_equal, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_equal(value[k], other[k]) for k in value)
    return bool(value == other)


@lru_cache
def condition_of(text: str) -> Condition:
    """Parse a condition. Raises UsageError with the place of what is wrong."""

    def refused(at: int, problem: str, tip: str = _EXAMPLE) -> UsageError:
        return UsageError(f"--where: {text!r}: character {at + 1}: {problem}", tip)

    found, known = _OPERATOR.search(text), (*COMPARISONS, *_MEMBERS, _EXISTS)
    op = " ".join(found[0].split()) if found else ""
    if found is None or op not in known:
        what = f"{op!r} is no operator" if found else "no operator"
        at = found.start() if found else len(text)
        raise refused(at, f"{what}, expected one of {', '.join(known)}")
    field, rest = text[: found.start()].strip(), text[found.end() :]
    at = found.end() + len(rest) - len(rest.lstrip())
    if not field:
        raise refused(0, f"no field before {op}")
    is_of_document = field in OF_DOCUMENTS
    name = field.removeprefix(OF_RECORDS)
    if name.partition(".")[0] in OF_DOCUMENTS:
        field = name
    if op == _EXISTS:
        return Condition(text, field, op, None, is_of_document)
    try:
        value = msgspec.json.decode(rest)
    except msgspec.DecodeError:
        if not rest.strip():
            raise refused(at, f"no value after {op}") from None
        raise refused(
            at,
            f"{rest.strip()!r} is not JSON",
            "put text into quotes, and more conditions into more --where: --where 'lang == \"en\"'",
        ) from None
    if op in _MEMBERS:
        if not isinstance(value, list) or not value:
            raise refused(at, f"{rest.strip()} is no list of values, which {op} expects")
        value = tuple(value)
    for one in value if op in _MEMBERS else (value,):
        if one is None:
            raise refused(at, "null: no condition holds for it", "'FIELD exists' leaves null out")
        if op in ("<", "<=", ">", ">=") and _KINDS[type(one)] not in ("a number", "text"):
            raise refused(at, f"{rest.strip()} has no order, expected a number or text")
        if is_of_document and _KINDS[type(one)] != "a number":
            tip = f"the record's own field of this name is {OF_RECORDS}{field}"
            raise refused(at, f"{field} is a number of tokens, and {rest.strip()} is none", tip)
    return Condition(text, field, op, value, is_of_document)
