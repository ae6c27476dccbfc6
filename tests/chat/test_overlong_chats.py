"""Conversations and prompts longer than a row: what stays, what is lost, and that it is counted."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import pytest
from chats import (
    CHATML,
    TAGS,
    assistant,
    chat,
    chat_tokenizer,
    marked,
    marked_pieces,
    pack_chat,
    pack_marked,
    refused,
    system,
    user,
)
from support import packer, recover_documents

from packer_cli import open_packed

SHORT = chat(user("Hi"), assistant("Hello"))
SHORT_MARKED = "<user>Hi</user><assistant>⟦Hello</assistant>⟧"
LONG = chat(
    system("Be brief."),
    *chain.from_iterable((user(f"question {i}"), assistant(f"answer {i}")) for i in range(4)),
)
SYSTEM = "<system>Be brief.</system>"
ROUND = "<user>question {0}</user><assistant>⟦answer {0}</assistant>⟧"
LONG_MARKED = SYSTEM + "".join(ROUND.format(i) for i in range(4))
TOTALS = ("documents", "tokens", "trained_tokens")


def size(text: str) -> int:
    """Tokens of a marked document, with the bytes tokenizer."""
    return len(text.replace("⟦", "").replace("⟧", "").replace("<eos>", "E"))


def trained(text: str) -> int:
    return sum(size(part.split("⟧")[0]) for part in text.split("⟦")[1:])


# a record, the whole of its text, and what stays of it; None: it is dropped
Documents = list[tuple[Any, str, str | None]]


def lost(documents: Documents) -> dict[str, tuple[int, int, int]]:
    """Of both kinds of loss: documents, tokens, trained tokens."""
    cut = [(text, kept) for _, text, kept in documents if kept not in (None, text)]
    left_out = [(text, "") for _, text, kept in documents if kept is None]
    return {
        kind: (
            len(some),
            sum(size(text) - size(kept or "") for text, kept in some),
            sum(trained(text) - trained(kept or "") for text, kept in some),
        )
        for kind, some in (("truncated", cut), ("dropped", left_out))
    }


def assert_placed_or_counted(documents: Documents, *options: Any) -> dict[str, Any]:
    """What stays lies in rows, and every other token is counted; gives the manifest."""
    manifest = pack_chat([record for record, *_ in documents], *options)
    assert marked_pieces("out") == [kept for *_, kept in documents if kept is not None]
    counted = {
        kind: tuple(manifest[f"{kind}_{what}"] for what in TOTALS)
        for kind in ("truncated", "dropped")
    }
    assert counted == lost(documents)
    return manifest


LENGTH = size(LONG_MARKED) - 1
ALL = [SHORT, LONG, SHORT]
PAIR = {"prompt": "0123456789", "completion": "abcdefghij"}
PAIR_MARKED = "0123456789⟦abcdefghij<eos>⟧"
SILENT = chat(user("Hi"), assistant("Hello", weight=0))
SILENT_MARKED = SHORT_MARKED.replace("⟦", "").replace("⟧", "")
LAST_TOO_LONG = chat(user("Hi"), assistant("Hello"), user("x" * 200), assistant("y"))
# Tool calls and results leave together with what they answer, or stay.
CALLS = chat(
    user("a"), assistant("b"), {"role": "tool", "content": "c" * 50}, assistant("d"),
    user("e"), assistant("f"), {"role": "tool", "content": "g"}, assistant("h"),
)  # fmt: skip
CALLS_KEPT = "<user>e</user><assistant>⟦f</assistant>⟧<tool>g</tool><assistant>⟦h</assistant>⟧"
ASKED = "<user>question</user><assistant>⟦answer</assistant>⟧"
EMPTY = {"messages": [assistant("")]}


def with_long(kept: str | None, text: str = LONG_MARKED, record: Any = LONG) -> Documents:
    return [(SHORT, *[SHORT_MARKED] * 2), (record, text, kept), (SHORT, *[SHORT_MARKED] * 2)]


# (options, documents, how many are dropped since nothing of them is trained on)
CASES: dict[str, tuple[list[Any], Documents, int]] = {
    **{f"a row's length, {policy}": (
        ["-l", LENGTH + 1, "--overlong", policy], with_long(LONG_MARKED), 0)
       for policy in ("drop", "truncate", "truncate-turns", "error")},
    "dropped by default": (["-l", LENGTH], with_long(None), 0),
    "dropped": (["-l", LENGTH, "--overlong", "drop"], with_long(None), 0),
    "cut at its end": (["-l", LENGTH - 4, "--overlong", "truncate"],
                       with_long(LONG_MARKED.removesuffix("tant>⟧") + "⟧"), 0),
    "cut at its beginning": (
        ["-l", LENGTH - len("<system>") + 1, "--overlong", "truncate", "--truncate-side", "left"],
        with_long(LONG_MARKED.removeprefix("<system>")), 0),
    "a prompt, cut at its end": (["-l", 15, "--overlong", "truncate"],
                                 [(PAIR, PAIR_MARKED, "0123456789⟦abcde⟧")], 0),
    "a prompt, cut at its beginning": (
        ["-l", 15, "--overlong", "truncate", "--truncate-side", "left"],
        [(PAIR, PAIR_MARKED, "6789⟦abcdefghij<eos>⟧")], 0),
    **{f"the last {rounds} turns and {more} tokens": (
        ["-l", size(kept) + more, "--overlong", "truncate-turns"], with_long(kept), 0)
       for rounds in (1, 2, 3) for more in (0, 5)
       for kept in [SYSTEM + "".join(ROUND.format(i) for i in range(4 - rounds, 4))]},
    "a last turn that is too long": (
        ["-l", 100, "--overlong", "truncate-turns"],
        with_long(None, f"{SHORT_MARKED}<user>{'x' * 200}</user><assistant>⟦y</assistant>⟧",
                  LAST_TOO_LONG), 0),
    "a question with all that follows": (
        ["-l", 120, "--overlong", "truncate-turns"],
        [(CALLS, f"<user>a</user><assistant>⟦b</assistant>⟧<tool>{'c' * 50}</tool><assistant>⟦d"
          f"</assistant>⟧{CALLS_KEPT}", CALLS_KEPT)], 0),
    "nothing is trained on": (
        [], [*with_long(None, SILENT_MARKED, SILENT), (chat(user("Hello?")), "<user>Hello?</user>",
                                                       None)], 2),
    "cut before all that is trained on": (
        ["-l", 24, "--overlong", "truncate"],
        [(chat(user("question"), assistant("answer")), ASKED, None),
         (EMPTY, *["<assistant>⟦</assistant>⟧"] * 2)], 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_stays_of_what_is_too_long(folder: Any, case: str) -> None:
    options, documents, untrained = CASES[case]
    manifest = assert_placed_or_counted(documents, *options)
    assert manifest["untrained_documents"] == untrained
    assert case != "dropped by default" or manifest["config"]["overlong"] == "drop"


@pytest.mark.parametrize(("policy", "turns"), [("drop", 2), ("truncate", 6)])
def test_turns_of_dropped_documents_are_not_counted(folder: Any, policy: str, turns: int) -> None:
    """Nor those without an end; where none are dropped, all are."""
    short = chat(user("a"), assistant("b"), user("c"), assistant("d"))
    long = chat(*[turn for _ in range(4) for turn in (user("x" * 90), assistant("y"))])
    manifest = pack_chat([short, long], "-l", 200, "--overlong", policy)
    assert (manifest["trained_turns"], manifest["dropped_documents"]) == (turns, policy == "drop")
    assert f"turns {turns:>13}  written by" in packer("stats", "out").stdout


def test_where_a_left_cut_begins_is_stored(folder: Any) -> None:
    pack_chat([LONG], "-l", 40, "--overlong", "truncate", "--truncate-side", "left")
    packed = open_packed("out")
    [batch] = packed.batches(packed.manifest["shards"][0])
    [[segment]] = batch.column("segments").to_pylist()
    assert segment["start"] == size(LONG_MARKED) - 40


# Whole turns


def test_what_the_template_refuses_is_shortened_further(folder: Any) -> None:
    picky = "{% if messages | length == 4 %}{{ raise_exception('four') }}{% endif %}"
    record = chat(*LONG["messages"][1:])
    limit = size(ROUND.format(0)) * 3 - 1
    options = ("-l", limit, "--overlong", "truncate-turns")
    assert pack_marked([record], *options, template=picky + TAGS) == [ROUND.format(3)]
    assert pack_marked([record], *options) == [ROUND.format(2) + ROUND.format(3)]


def test_as_few_turns_leave_as_must_of_many(folder: Any) -> None:
    """Found by doubling steps: before, between and after all of them."""
    record = chat(*chain.from_iterable((user(f"{i:03}"), assistant("a" * i)) for i in range(70)))
    turns = [f"<user>{i:03}</user><assistant>⟦{'a' * i}</assistant>⟧" for i in range(70)]
    for first in (1, 2, 4, 7, 34, 69):
        kept = "".join(turns[first:])
        for limit in (size(kept), size(turns[first - 1] + kept) - 1):
            assert pack_marked([record], "-l", limit, "--overlong", "truncate-turns") == [kept]


def test_a_huge_conversation_is_shortened_in_few_renderings(folder: Any) -> None:
    """One rendering for each turn that leaves would take minutes."""
    count = 3000
    record = chat(*chain.from_iterable((user("q" * 99), assistant("a" * 99)) for _ in range(count)))
    start = time.process_time()
    manifest = pack_chat([record], "-l", 2048, "--overlong", "truncate-turns")
    assert time.process_time() - start < 10
    text = f"<user>{'q' * 99}</user><assistant>{'a' * 99}</assistant>"
    assert manifest["tokens"] == 2048 // len(text) * len(text)
    assert manifest["truncated_tokens"] == count * len(text) - manifest["tokens"]


def test_a_record_that_cannot_be_decided_once_shortened(folder: Any) -> None:
    """It ends the run, or is left out and counted as what is too long is."""
    template = (
        "{% macro all(list) %}{% for m in list %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
        "{% endfor %}{% endmacro %}{% if messages[0].content == 'Bye' %}{{ messages | length }}"
        "{% endif %}{{ all(messages) }}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    record = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
    parts = ("data.jsonl, line 2 (byte ", "cannot tell which part")
    options = ["-l", 60, "--overlong", "truncate-turns"]
    refused([SHORT, record], 1, *parts, template=template, options=options)
    manifest = pack_chat([SHORT, record], *options, "--on-error", "skip", template=template)
    assert (manifest["documents"], manifest["dropped_documents"]) == (1, 1)


def test_truncate_turns_by_the_tokens_of_a_tokenizer(folder: Any) -> None:
    tokenizer = chat_tokenizer(folder / "t", CHATML)
    how: dict[str, Any] = {"template": None, "tokenizer": tokenizer}
    [whole] = pack_marked([LONG], **how)
    length = len(recover_documents("out")[0, 0])
    manifest = pack_chat([LONG], "-l", length - 1, "--overlong", "truncate-turns", **how)
    [text] = marked("out")
    head, first = whole.split("<|im_start|>user\nquestion 0")
    assert text == head + "<|im_start|>user" + first.split("<|im_start|>user", 1)[1]
    assert manifest["tokens"] + manifest["truncated_tokens"] == length


# Cutting


def test_turns_that_leave_may_take_all_that_was_trained(folder: Any) -> None:
    turns = (user("a" * 50), assistant("b"), user("c"), assistant("d", weight=0))
    manifest = pack_chat([SHORT, chat(*turns)], "-l", 60, "--overlong", "truncate-turns")
    assert marked("out") == [SHORT_MARKED]
    assert manifest["untrained_documents"] == 1
    lost_tokens = manifest["truncated_tokens"] + manifest["dropped_tokens"]
    text = f"<user>{'a' * 50}</user><assistant>b</assistant><user>c</user><assistant>d</assistant>"
    assert lost_tokens == len(text)
