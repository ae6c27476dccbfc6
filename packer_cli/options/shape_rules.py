"""Rules for options and shapes of records: which go together, and defaults that depend on the
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from packer_cli.errors import UsageError
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.option import Rule, mutually_exclusive, options_of, refuse
from packer_cli.options.options import PackConfig
from packer_cli.options.shapes import CONTEXT, HISTORY, REASONING, SYSTEM, TRACE, Shape, list_in
from packer_cli.options.value_columns import MESSAGE, OF_MESSAGES

_TURNS, _SPLIT_TEXT = "truncate-turns", "split-text"
_Config = TypeVar("_Config", bound=DocumentConfig)


def _is_rendered(shape: Shape, config: DocumentConfig) -> bool:
    return shape.is_chat or shape.of_messages or config.prompt_template == "chat"


# Options that apply only to some records: the records in words, a test, and the fields.
_RENDERED = "records that a chat template renders"
_OF_RENDERED = "train_reasoning train_tool_calls turn_end allow_open_turns on_unshown"
_APPLY_TO: tuple[tuple[str, Callable[[Shape, DocumentConfig], bool], str], ...] = (
    (_RENDERED, _is_rendered, _OF_RENDERED),
    # traces are compared with what the template gives
    (
        _RENDERED,
        lambda shape, config: shape.kind == TRACE or _is_rendered(shape, config),
        "chat_template template_args",
    ),
    ("chat records", lambda shape, _: shape.is_chat, "turns"),
    ("chat records", lambda shape, _: shape.is_chat or shape.of_messages, "roles"),
    (
        "chat records if it names the role or content of messages",
        lambda shape, config: not config.message_keys or shape.is_chat or shape.of_messages,
        "fields",
    ),
    ("records with text", lambda shape, _: not shape.is_of_tokens, "special_tokens_in_text"),
    ("plain text", lambda shape, _: shape.kind == "text", "fim_rate fim_spm_rate"),
)


def check_options_apply(config: DocumentConfig, shape: Shape) -> None:
    """Raise UsageError for an option that means nothing for records of this shape."""
    options = options_of(type(config))
    for name, records in _idle(config, shape):
        if (value := getattr(config, name)) != options[name].default:
            raise UsageError(
                f"{options[name].flag_for(value)} applies only to {records}; these are "
                f"{_kinds(shape.each)}",
                "leave it out, or name what the records are with --shape and --field",
            )


def without_idle(config: _Config, shape: Shape, names: Collection[str]) -> _Config:
    """Return options with the default for each of `names` that such records have no use for."""
    idle = {name for name, *_ in _idle(config, shape)}
    idle |= set.intersection(*({*_not_for(config, member)} for member in shape.each))
    options = options_of(type(config))
    return replace(config, **{name: options[name].default for name in idle & {*names}})


def _idle(config: DocumentConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield options that mean nothing for these records, with the records that they apply to."""
    for records, applies, names in _APPLY_TO:
        if not any(applies(member, config) for member in shape.each):
            yield from ((name, records) for name in names.split())


def for_shape(config: _Config, shape: Shape) -> _Config:
    """Return options with the defaults that depend on the shape of the records; for several shapes,
    those that are the same for all.

    Raises UsageError if the options do not go with the shape, or with any of several.
    """
    members = shape.each
    refuse(_rules_of_all(config, members))
    if isinstance(config, PackConfig):
        config = replace(config, overlong=_overlong(config, members))
    if not shape.members:
        return _for_one(config, shape)
    configs = [for_member(config, member) for member in members]
    first, names = configs[0], ("train_on", "prompt_template", "add_bos", "add_eos", "turns")
    common = [name for name in names if len({getattr(member, name) for member in configs}) == 1]
    return replace(config, **{name: getattr(first, name) for name in common})


def for_member(config: _Config, member: Shape) -> _Config:
    """Return the options for files of one of several shapes. `config`: from `for_shape`."""
    return for_shape(replace(config, **_not_for(config, member)), member)


def by_file_shape(config: _Config, shape: Shape) -> dict[str | None, tuple[Shape, _Config]]:
    """Return shape and options of files, by `InputFile.shape`. `config`: from `for_shape`."""
    if not shape.members:
        return {None: (shape, config)}
    return {name: (member, for_member(config, member)) for name, member in shape.members.items()}


def used_columns(shape: Shape, config: DocumentConfig) -> frozenset[str]:
    """Return the columns that have a place in documents. `config`: from `for_shape`."""
    idle = set[str]()
    if shape.of_messages:
        idle = {CONTEXT}
    elif not shape.is_chat and config.prompt_template != "chat":  # raw text has no place for it
        idle = {"tools", REASONING}
    return frozenset(name for key, name in shape.columns.items() if key not in idle)


def known_texts(shape: Shape, config: DocumentConfig) -> frozenset[str]:
    """Return the optional fields of text, or of earlier turns, that were found by a well-known
    name. Such a field may mean something else in other records, as in HotpotQA: without a text, the
    record is as one without the field.
    """
    names = {CONTEXT, SYSTEM, REASONING, HISTORY}
    if not shape.of_messages:  # a prompt of messages, too
        names.add("input")
    return frozenset(names.intersection(shape.optional).difference(config.renamed))


def is_known_value(key: str, value: Any) -> bool:
    """Tell if a field of `known_texts` holds what its name means."""
    return bool(list_in(value)) if key == HISTORY else isinstance(value, str)


def trained_on(config: DocumentConfig, shape: Shape) -> str:
    """Return what is trained on, in words. `config`: from `for_shape`."""
    members = by_file_shape(config, shape).values()
    return " or ".join(dict.fromkeys(member.train_on or "" for _, member in members))


def _kinds(shapes: Sequence[Shape]) -> str:
    return " or ".join(dict.fromkeys(shape.kind for shape in shapes))


def _not_for(config: DocumentConfig, member: Shape) -> dict[str, Any]:
    """Return the options that are not for this shape, with the values that they are left to.
    `turns` stays: it decides what positions count in the whole result, and records other than
    conversations are one document.
    """
    other: dict[str, Any] = {}
    if config.train_on not in member.train_on:
        other["train_on"] = None
    if config.prompt_template not in member.prompt_templates:
        other["prompt_template"] = None
    template = other.get("prompt_template", config.prompt_template) or member.prompt_templates[0]
    if not member.is_chat and template != "chat":
        options = options_of(type(config))
        other |= {name: options[name].default for name in _OF_RENDERED.split()}
    if isinstance(config, PackConfig) and config.overlong == _TURNS and not member.is_chat:
        other["overlong"] = "drop"
    if member.is_of_tokens:
        other |= dict.fromkeys(("add_bos", "add_eos"))
    return other


def _for_one(config: _Config, shape: Shape) -> _Config:
    train_on = config.train_on or shape.train_on[0]
    template = config.prompt_template or shape.prompt_templates[0]
    refuse(_rules_of_one(config, shape, train_on))
    # a chat template writes BOS and the ends of turns itself
    as_they_are = shape.is_chat or template == "chat" or shape.is_of_tokens
    return replace(
        config,
        train_on=train_on,
        prompt_template=template,
        turns="each" if shape.kind == TRACE else config.turns,  # its branches
        add_bos=False if as_they_are and config.add_bos is None else config.add_bos,
        add_eos=not as_they_are if config.add_eos is None else config.add_eos,
    )


def _overlong(config: PackConfig, shapes: list[Shape]) -> str:
    """Return one policy for all shapes: records that must stay whole decide, unless it differs."""
    whole, is_wrap = [shape for shape in shapes if shape.stays_whole], config.strategy == "wrap"
    both = 0 < len(whole) < len(shapes) and not is_wrap
    both = both or any(shape.of_supervised and shape.of_text for shape in shapes)
    overlong = config.overlong or _SPLIT_TEXT
    if overlong == _SPLIT_TEXT and not both:
        overlong = "drop" if whole else "split"
    if whole and is_wrap:
        overlong = "split"
    turns = any(shape.is_chat for shape in shapes)
    policies = "split-text, " * both + "drop, truncate"
    refuse([
        (
            whole and overlong == "split",
            f"records of shape {_kinds(whole)} must not be cut: a part would be trained on "
            "without what it answers",
            "choose another --strategy"
            if is_wrap
            else f"choose --overlong {policies}{', truncate-turns' * turns}",
        ),
        (
            overlong == _TURNS and not turns,
            f"--overlong truncate-turns applies only to chat records; these are {_kinds(shapes)}",
            "choose drop or truncate",
        ),
    ])  # fmt: skip
    return overlong


# What does not go together: condition, message, tip


def _rules_of_all(config: DocumentConfig, shapes: list[Shape]) -> Iterator[Rule]:
    """Yield rules for values that must suit one of the shapes."""
    for option, value, allowed in (
        ("--train-on", config.train_on, [shape.train_on for shape in shapes]),
        ("--prompt-template", config.prompt_template, [shape.prompt_templates for shape in shapes]),
    ):
        yield (
            value and not any(value in values for values in allowed),
            f"{option} {value} does not apply to {_kinds(shapes)} records",
            f"choose {' or '.join(dict.fromkeys(sum(allowed, ())))}",
        )


def _rules_of_one(config: DocumentConfig, shape: Shape, train_on: str) -> Iterator[Rule]:
    yield "" in config.turn_end, "--turn-end: is empty", "name a token, such as <|im_end|>"
    narrowing = {  # they choose among the assistant's tokens
        OF_MESSAGES: any(column.of == MESSAGE for column in config.value_columns.values()),
        "--turn-end": config.turn_end,
        "--turns each": config.turns == "each" and shape.is_chat,
        "--train-reasoning": config.train_reasoning is not None,
        "--train-tool-calls": config.train_tool_calls is not None,
    }
    for option, is_given in narrowing.items():
        yield mutually_exclusive(option, is_given, "--train-on all", train_on == "all")
    yield (
        shape.is_of_tokens and (config.add_bos or config.add_eos),
        "--bos and --eos are not for token ids, which are packed as they are",
        "leave them out, or put the tokens into the input",
    )
