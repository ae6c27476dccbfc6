"""Supervised records through the command line, given back as text that shows what is trained on.

    pack_marked([{"messages": [...]}], "--train-on", "all")  ->  ["<|im_start|>⟦user..."]

Trained tokens stand in ⟦⟧, as in `packer show`, and come from the labels in the shards. The first
token of a document is never trained: nothing predicts it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import tiny_tokenizers
from support import BYTES_EOS, assert_error, check_directory, packer, recover_documents
from tokenizers import Tokenizer

from packer_cli import open_packed
from packer_cli.result.columns import rows_of, segments_of

Json = dict[str, Any]

LENGTH = 2048
CHATML = """\
{% if tools %}<tools>{{ tools | tojson }}</tools>
{% endif %}
{% for m in messages %}
<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""  # noqa: E501
# A call of a tool, as a message has it, and its result.
CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Oslo"}}}
RESULT = {"role": "tool", "content": "wet"}
# The shortest that tells who speaks.
TAGS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Parts of templates that are made like real ones.
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
REWRITTEN = (  # a loop over messages that the template made
    "{% set ns = namespace(pairs=[]) %}{% for m in messages %}"
    "{% set ns.pairs = ns.pairs + [{'role': m.role, 'content': m.content | upper}] %}{% endfor %}"
    "{% for p in ns.pairs %}<{{ p.role }}>{{ p.content }}</{{ p.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(content: Any, **more: Any) -> Json:
    return {"role": "user", "content": content, **more}


def assistant(content: Any, **more: Any) -> Json:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> Json:
    return {"role": "system", "content": content}


def chat(*messages: Json, **more: Any) -> Json:
    return {"messages": list(messages), **more}


def many(count: int) -> list[Json]:
    """Thousands are more than a megabyte, and rendered in other processes."""
    return [
        chat(user(f"naïve {i} " + "?" * (i % 300)), assistant(f"{i}! " * (i % 50 + 1)))
        for i in range(count)
    ]


TWO = chat(user("Hi"), assistant("Hello"), user("Bye"), assistant("Ciao"))
TWO_MARKED = (
    "<user>Hi</user><assistant>⟦Hello</assistant>⟧<user>Bye</user><assistant>⟦Ciao</assistant>⟧"
)


def write(records: Sequence[Any], name: str = "data.jsonl") -> Path:
    path = Path(name)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def positions(records: Sequence[Any]) -> list[int]:
    """Where `write` puts the records."""
    sizes = [len(json.dumps(record)) + 1 for record in records]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def template_options(template: str | None) -> list[str]:
    if template is None:
        return []
    Path("template.jinja").write_text(template, encoding="utf-8")
    return ["--chat-template", "template.jinja"]


def _is_rendered(record: Any, options: Sequence[Any]) -> bool:
    """Whether a chat template makes the record's text."""
    if "chat" in options or not isinstance(record, dict):
        return True
    if "instruction" in record:
        return False
    fields = {"messages", "conversations", "conversation"} & record.keys()
    return bool(fields) or any(
        v.startswith(("[{", "{"))
        if isinstance(v, str)
        else "role" in v
        if isinstance(v, dict)
        else isinstance(v, list) and (not v or isinstance(v[0], dict))
        for v in record.values()
    )


def run(data: Any, *options: Any, template: str | None = TAGS, tokenizer: Any = "bytes") -> Any:
    """Pack records, or a file, into `out`: the result of the command, whatever it is.

    The template is for records that one renders; with others it would be refused.
    """
    if isinstance(data, list) and not any(_is_rendered(one, options) for one in data):
        template = None
    path = write(data) if isinstance(data, list) else data
    length = [] if "-l" in options else ["-l", LENGTH]
    return packer(
        "pack", path, *length, "-t", tokenizer, "-o", "out", "--overwrite", "-q",
        *template_options(template), *options,
    )  # fmt: skip


def pack_chat(data: Any, *options: Any, **how: Any) -> Json:
    """The manifest of a run that must succeed, checked."""
    result = run(data, *options, **how)
    assert result.exit_code == 0, result.stderr
    return check_directory("out")


def pack_marked(data: Any, *options: Any, **how: Any) -> list[str]:
    """The documents in the order of the input, what is trained on in ⟦⟧."""
    pack_chat(data, *options, **how)
    return marked("out")


def refused(data: Any, code: int, *parts: str, options: Sequence[Any] = (), **how: Any) -> None:
    """The run must fail with one line that holds all of `parts`, and leave no output."""
    assert_error(run(data, *options, **how), code, *parts)
    assert not Path("out").exists()


def marked(directory: str) -> list[str]:
    """The documents of a result, put together again from its shards."""
    ids, labels = recover_documents(directory), recover_documents(directory, "labels")
    path = Path(directory) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path)) if path.exists() else None
    return [marked_text(tokens, labels[place], tokenizer) for place, tokens in ids.items()]


def marked_pieces(directory: str) -> list[str]:
    """Of the bytes tokenizer: pieces of documents, which may have lost tokens, in input order."""
    return [text for _, text in sorted(marked_by_place(directory).items())]


def marked_by_place(directory: str) -> dict[tuple[int, int], str]:
    """The same pieces, by their position and the token that they start with."""
    packed, texts = open_packed(directory), dict[tuple[int, int], str]()
    for shard in packed.manifest["shards"]:
        for batch in packed.batches(shard):
            ids, labels = rows_of(batch.column("input_ids")), rows_of(batch.column("labels"))
            begins, lengths, of_row = segments_of(batch)
            for row, sources in enumerate(batch.column("segments").to_pylist()):
                for source, k in zip(sources, range(of_row[row], of_row[row + 1]), strict=True):
                    place = slice(begins[k], begins[k] + lengths[k])
                    text = marked_text(ids[row, place], labels[row, place], None)
                    texts[source["position"], source["start"]] = text
    return texts


def marked_text(tokens: Any, labels: Any, tokenizer: Tokenizer | None) -> str:
    """A piece as text; `tokenizer`: None for bytes."""
    flags, text = (labels != -100).tolist(), ""
    assert labels[flags].tolist() == tokens[flags].tolist()
    for trained, group in groupby(zip(flags, tokens.tolist(), strict=True), itemgetter(0)):
        part = _decoded([token for _, token in group], tokenizer)
        text += f"⟦{part}⟧" if trained else part
    return text


def _decoded(tokens: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is not None:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))
    parts = b"".join(b"<eos>" if t == BYTES_EOS else bytes([t]) for t in tokens)
    return parts.decode("utf-8", "replace")


def chat_tokenizer(
    folder: Path, template: str | None = CHATML, document: Json | None = None, **config: Any
) -> Path:
    """A byte-level tokenizer, or another, with ChatML's special tokens and a template."""
    document = document or tiny_tokenizers.byte_level()
    for content in ("<|im_start|>", "<|im_end|>"):
        highest = max(t["id"] for t in document["added_tokens"])
        highest = max([highest, *document["model"]["vocab"].values()])
        tiny_tokenizers.with_added_token(document, content, highest + 1)
    config = {"bos_token": tiny_tokenizers.BOS, "eos_token": tiny_tokenizers.EOS, **config}
    if template is not None:
        config["chat_template"] = template
    return tiny_tokenizers.save(folder, document, tokenizer_config=config)
