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


def lost(manifest: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Of both kinds of loss: documents, tokens, trained tokens."""
    return {
        kind: tuple(manifest[f"{kind}_{what}"] for what in TOTALS)
        for kind in ("truncated", "dropped")
    }


def check_conserved(manifest: dict[str, Any], texts: list[str]) -> None:
    """Every token, and every trained one, of the documents is placed or counted as lost."""
    both = lost(manifest).values()
    tokens, flagged = sum(one[1] for one in both), sum(one[2] for one in both)
    assert manifest["tokens"] + tokens == sum(map(size, texts))
    assert manifest["trained_tokens"] + flagged == sum(map(trained, texts))


LENGTH = size(LONG_MARKED) - 1
ALL = [SHORT, LONG, SHORT]
ALL_MARKED = [SHORT_MARKED, LONG_MARKED, SHORT_MARKED]


def test_a_document_of_a_row_fits(folder: Any) -> None:
    for policy in ("drop", "truncate", "truncate-turns", "error"):
        assert pack_marked(ALL, "-l", LENGTH + 1, "--overlong", policy) == ALL_MARKED


@pytest.mark.parametrize("options", [(), ("--overlong", "drop")])
def test_drop_is_the_default(folder: Any, options: tuple[str, ...]) -> None:
    manifest = pack_chat(ALL, "-l", LENGTH, *options)
    assert marked("out") == [SHORT_MARKED] * 2
    assert manifest["config"]["overlong"] == "drop"
    assert lost(manifest) == {
        "truncated": (0, 0, 0),
        "dropped": (1, size(LONG_MARKED), trained(LONG_MARKED)),
    }
    check_conserved(manifest, ALL_MARKED)


def test_truncate_cuts_off_the_end(folder: Any) -> None:
    manifest = pack_chat(ALL, "-l", LENGTH - 4, "--overlong", "truncate")
    kept = LONG_MARKED.removesuffix("tant>⟧") + "⟧"
    assert marked("out") == [SHORT_MARKED, kept, SHORT_MARKED]
    assert lost(manifest) == {"truncated": (1, 5, 5), "dropped": (0, 0, 0)}
    check_conserved(manifest, ALL_MARKED)


def test_truncate_side_left_cuts_off_the_beginning(folder: Any) -> None:
    options = ("--overlong", "truncate", "--truncate-side", "left")
    manifest = pack_chat(ALL, "-l", LENGTH - len("<system>") + 1, *options)
    assert marked_pieces("out") == [
        SHORT_MARKED,
        LONG_MARKED.removeprefix("<system>"),
        SHORT_MARKED,
    ]
    assert lost(manifest) == {"truncated": (1, len("<system>"), 0), "dropped": (0, 0, 0)}
    check_conserved(manifest, ALL_MARKED)


def test_where_a_left_cut_begins_is_stored(folder: Any) -> None:
    pack_chat([LONG], "-l", 40, "--overlong", "truncate", "--truncate-side", "left")
    packed = open_packed("out")
    [batch] = packed.batches(packed.manifest["shards"][0])
    [[segment]] = batch.column("segments").to_pylist()
    assert segment["start"] == size(LONG_MARKED) - 40


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_are_truncated_too(folder: Any, side: str) -> None:
    pair = {"prompt": "0123456789", "completion": "abcdefghij"}
    manifest = pack_chat([pair], "-l", 15, "--overlong", "truncate", "--truncate-side", side)
    if side == "right":
        assert marked_pieces("out") == ["0123456789⟦abcde⟧"]
        assert lost(manifest)["truncated"] == (1, 6, 6)  # EOS was trained
    else:
        assert marked_pieces("out") == ["6789⟦abcdefghij<eos>⟧"]
        assert lost(manifest)["truncated"] == (1, 6, 0)


# Whole turns


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_truncate_turns_drops_the_oldest_after_the_system_message(folder: Any, rounds: int) -> None:
    kept = SYSTEM + "".join(ROUND.format(i) for i in range(4 - rounds, 4))
    for more in (0, 5):  # a few tokens more do not help
        options = ("-l", size(kept) + more, "--overlong", "truncate-turns")
        manifest = pack_chat([LONG, SHORT, LONG], *options)
        assert marked("out") == [kept, SHORT_MARKED, kept]
        tokens, flagged = size(LONG_MARKED) - size(kept), trained(LONG_MARKED) - trained(kept)
        assert lost(manifest) == {"truncated": (2, 2 * tokens, 2 * flagged), "dropped": (0, 0, 0)}
        check_conserved(manifest, [LONG_MARKED, SHORT_MARKED, LONG_MARKED])


def test_a_last_turn_that_is_too_long_is_dropped_with_all(folder: Any) -> None:
    long = chat(user("Hi"), assistant("Hello"), user("x" * 200), assistant("y"))
    manifest = pack_chat([SHORT, long], "-l", 100, "--overlong", "truncate-turns")
    assert marked("out") == [SHORT_MARKED]
    text = f"{SHORT_MARKED}<user>{'x' * 200}</user><assistant>⟦y</assistant>⟧"
    assert lost(manifest) == {"truncated": (0, 0, 0), "dropped": (1, size(text), trained(text))}
    check_conserved(manifest, [SHORT_MARKED, text])


def test_a_turn_is_the_question_with_all_that_follows(folder: Any) -> None:
    """Tool calls and results leave together with what they answer, or stay."""
    record = chat(
        user("a"), assistant("b"), {"role": "tool", "content": "c" * 50}, assistant("d"),
        user("e"), assistant("f"), {"role": "tool", "content": "g"}, assistant("h"),
    )  # fmt: skip
    [text] = pack_marked([record], "-l", 120, "--overlong", "truncate-turns")
    assert text == (
        "<user>e</user><assistant>⟦f</assistant>⟧<tool>g</tool><assistant>⟦h</assistant>⟧"
    )


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


def test_turns_that_left_are_not_said_to_be_trained_on(folder: Any) -> None:
    manifest = pack_chat([LONG, LONG], "-l", LENGTH, "--overlong", "truncate-turns")
    assert manifest["trained_turns"] == 8
    lines = packer("stats", "out").stdout.splitlines()
    [line] = [line.split() for line in lines if line.startswith("turns")]
    assert " ".join(line) == "turns 8 written by the assistant"


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


def test_split_can_be_forced(folder: Any) -> None:
    manifest = pack_chat(ALL, "-l", 50, "--overlong", "split", "--force-split")
    assert manifest["documents"] == 3
    assert lost(manifest) == {"truncated": (0, 0, 0), "dropped": (0, 0, 0)}
    ids, labels = recover_documents("out"), recover_documents("out", "labels")
    for place, text in zip(ids, ALL_MARKED, strict=True):
        plain = text.replace("⟦", "").replace("⟧", "")
        assert bytes(ids[place].astype("u1")).decode() == plain
        flags, inside = [], False
        for character in text:
            if character in "⟦⟧":
                inside = character == "⟦"
            else:
                # the first token of a piece is predicted from nothing
                flags.append(inside and len(flags) % 50 != 0)
        assert (labels[place] != -100).tolist() == flags


def test_error_names_the_document(folder: Any) -> None:
    parts = ("data.jsonl, line 2", f"the document has {LENGTH + 1} tokens", f"is {LENGTH}")
    refused(ALL, 1, *parts, options=["-l", LENGTH, "--overlong", "error"])


# Nothing left to train on


def test_a_document_without_a_trained_token_is_dropped_and_counted(folder: Any) -> None:
    silent = chat(user("Hi"), assistant("Hello", weight=0))
    only_user = chat(user("Hello?"))
    texts = [SHORT_MARKED, SHORT_MARKED.replace("⟦", ""), "<user>Hello?</user>"]
    texts[1] = texts[1].replace("⟧", "")
    manifest = pack_chat([SHORT, silent, only_user])
    assert marked("out") == texts[:1]
    gone = size(texts[1]) + size(texts[2])
    assert lost(manifest)["dropped"] == (2, gone, 0)
    assert (manifest["untrained_documents"], manifest["untrained_tokens"]) == (2, gone)
    check_conserved(manifest, texts)
    manifest = pack_chat([SHORT, silent, only_user], "--keep-untrained")
    assert marked("out") == texts
    assert lost(manifest)["dropped"] == (0, 0, 0)
    assert manifest["untrained_documents"] == 0


def test_what_truncation_leaves_without_a_trained_token(folder: Any) -> None:
    limit = len("<user>question")
    long = chat(user("question"), assistant("answer"))
    text = "<user>question</user><assistant>⟦answer</assistant>⟧"
    tiny = {"messages": [assistant("")]}
    options = ("-l", limit + 10, "--overlong", "truncate")
    manifest = pack_chat([long, tiny], *options)
    assert marked("out") == ["<assistant>⟦</assistant>⟧"]
    assert lost(manifest)["dropped"] == (1, size(text), trained(text))
    assert manifest["untrained_documents"] == 1
    assert manifest["untrained_tokens"] == limit + 10
    manifest = pack_chat([long, tiny], *options, "--keep-untrained")
    assert manifest["documents"] == 2
    assert lost(manifest)["truncated"] == (1, size(text) - limit - 10, trained(text))


def test_turns_that_leave_may_take_all_that_was_trained(folder: Any) -> None:
    record = chat(user("a" * 50), assistant("b"), user("c"), assistant("d", weight=0))
    manifest = pack_chat([SHORT, record], "-l", 60, "--overlong", "truncate-turns")
    assert marked("out") == [SHORT_MARKED]
    text = (
        f"<user>{'a' * 50}</user><assistant>⟦b</assistant>⟧<user>c</user><assistant>d</assistant>"
    )
    assert manifest["untrained_documents"] == 1
    check_conserved(manifest, [SHORT_MARKED, text])


@pytest.mark.parametrize("policy", ["drop", "truncate", "truncate-turns"])
@pytest.mark.parametrize("length", [46, 60, 120, 200])
def test_everything_is_placed_or_counted(folder: Any, policy: str, length: int) -> None:
    records, texts = [], []
    for rounds in range(8):
        for size_of in (1, 7, 30):
            words = [("q" * size_of, "r" * (rounds + 1)) for _ in range(rounds + 1)]
            records.append(chat(*chain(*((user(q), assistant(r)) for q, r in words))))
            texts.append("".join(f"<user>{q}</user><assistant>⟦{r}</assistant>⟧" for q, r in words))
    manifest = pack_chat([SHORT, *records], "-l", length, "--overlong", policy)
    check_conserved(manifest, [SHORT_MARKED, *texts])
