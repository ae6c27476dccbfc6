"""The table of unsettled characters, computed again from two Unicode versions."""

from __future__ import annotations

import unicodedata

import unicodedata2

from packer_cli.tokenization.trust import unsettled


def test_settled_characters_have_one_category_in_both_versions() -> None:
    known = {chr(code) for part in unsettled() for code in part}
    old, new = unicodedata.category, unicodedata2.category
    differ = {c for c in map(chr, range(0x110000)) if old(c) == "Cn" or old(c) != new(c)}
    assert differ <= known
    if unicodedata.unidata_version == "14.0.0":  # the table is of 14 and 18
        assert differ == known
