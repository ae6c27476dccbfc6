"""Which options go with which shape of records, and the defaults that depend on it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, TypeVar

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.pair_rules import overlong_of_pairs, refuse_pairs_among, with_pair_columns
from packer_cli.config.shapes import CONTEXT, REASONING, Shape
from packer_cli.errors import UsageError

_TURNS, _SPLIT_TEXT = "truncate-turns", "split-text"
_Config = TypeVar("_Config", bound=DocumentConfig)


def refuse_idle(config: DocumentConfig, shape: Shape) -> None:
    """UsageError for an option that was given and means nothing for records of this shape, or of
    any of several.
    """
    shapes = list(shape.members.values()) or [shape]
    defaults = {one.name: one.default for one in fields(config)}
    for name, option in options_of(type(config)).items():
        value = getattr(config, name)
        needs = option.needs
        if value == defaults[name] or not needs:
            continue
        if not any(needs.is_met(one, config) for one in shapes):
            written = option.name(name, value)
            raise UsageError(
                f"{written}: is for {needs.what}; the records' shape is {_kinds(shapes)}",
                "leave it out, or name what the records are with --shape and --field",
            )


def without_idle(config: _Config, shape: Shape, names: Collection[str]) -> _Config:
    """With the default for each of these options that records of this shape have no use for."""
    shapes = list(shape.members.values()) or [shape]
    own = [_not_for(config, one) for one in shapes]
    defaults = {one.name: one.default for one in fields(config)}
    idle: dict[str, Any] = {}
    for name, option in options_of(type(config)).items():
        needs = option.needs
        is_idle = needs and not any(needs.is_met(one, config) for one in shapes)
        if name in names and (is_idle or all(name in one for one in own)):
            idle[name] = defaults[name]
    return replace(config, **idle)


def for_shape(config: _Config, shape: Shape) -> _Config:
    """With every option set that depends on the shape of the records; of several shapes, those that
    are the same for all.

    Raises UsageError when the options do not go with the shape, or with any of several.
    """
    config = with_pair_columns(config, shape)
    if shape.members:
        return _for_members(config, list(shape.members.values()))
    train_on = _choice("--train-on", config.train_on, shape.train_on, shape)
    rows: dict[str, Any] = {}
    if isinstance(config, PackConfig):
        rows["overlong"] = _overlong(config, shape)
    template = _choice("--prompt-template", config.prompt_template, shape.prompt_templates, shape)
    _check_turn_end(config, shape, train_on, template)
    _check_all(config, shape, train_on)
    if shape.kind == "tokens" and (config.add_bos or config.add_eos or config.separator):
        raise UsageError(
            "--bos, --eos and --separator are not for input_ids, which are packed as they are",
            "leave them out, or put the tokens into the input",
        )
    # a chat template writes BOS and the ends of turns itself
    as_they_are = shape.is_chat or template == "chat" or shape.kind == "tokens"
    return replace(
        config,
        train_on=train_on,
        prompt_template=template,
        add_bos=False if as_they_are and config.add_bos is None else config.add_bos,
        add_eos=not as_they_are if config.add_eos is None else config.add_eos,
        **rows,
    )


def for_member(config: _Config, member: Shape) -> _Config:
    """The same for the files of one of several shapes; `config` as `for_shape` gives it. An option
    that is not for this shape is left to its default.
    """
    return for_shape(replace(config, **_not_for(config, member)), member)


def _not_for(config: DocumentConfig, member: Shape) -> dict[str, Any]:
    """The options that are not for this shape, with what they are left to. `turns` stays: it says
    what positions count in the whole result, and other records than conversations are one document.
    """
    other: dict[str, Any] = {}
    if config.train_on not in member.train_on:
        other["train_on"] = None
    if config.prompt_template not in member.prompt_templates:
        other["prompt_template"] = None
    template = other.get("prompt_template", config.prompt_template) or member.prompt_templates[0]
    if not member.is_chat and template != "chat":
        other |= {"turn_end": (), "template_args": ()}
        other |= {"train_reasoning": None, "train_tool_calls": None}
    if isinstance(config, PackConfig) and config.overlong == _TURNS and not member.is_chat:
        other["overlong"] = "drop"
    if member.kind == "tokens":
        other |= dict.fromkeys(("add_bos", "add_eos", "separator"))
    return other


def by_file_shape(config: _Config, shape: Shape) -> dict[str | None, tuple[Shape, _Config]]:
    """Shape and options of files, by `InputFile.shape`; `config` as `for_shape` gives it."""
    if not shape.members:
        return {None: (shape, config)}
    return {name: (one, for_member(config, one)) for name, one in shape.members.items()}


def used_columns(shape: Shape, config: DocumentConfig) -> frozenset[str]:
    """The input's names of the fields that are read and have a place in documents; `config` as
    `for_shape` gives it.
    """
    of_messages = shape.is_chat or shape.of_messages
    idle = {CONTEXT, REASONING} if of_messages else {"tools"}
    if config.prompt_template != "chat":  # raw text has no place for it
        idle.add(REASONING)
    return frozenset(name for own, name in shape.columns.items() if own not in idle)


def trained_on(config: DocumentConfig, shape: Shape) -> str:
    """What is trained on, for people; `config` as `for_shape` gives it."""
    own = by_file_shape(config, shape).values()
    return " or ".join(dict.fromkeys(one.train_on or "" for _, one in own))


def _for_members(config: _Config, members: list[Shape]) -> _Config:
    refuse_pairs_among(members)
    for option, given, allowed in (
        ("--train-on", config.train_on, [m.train_on for m in members]),
        ("--prompt-template", config.prompt_template, [m.prompt_templates for m in members]),
    ):
        if given and not any(given in some for some in allowed):
            raise UsageError(
                f"{option}: {given} is not for records of shape {_kinds(members)}",
                f"choose {' or '.join(dict.fromkeys(sum(allowed, ())))}",
            )
    if isinstance(config, PackConfig):
        config = replace(config, overlong=_overlong_of(config, members))
    own = [for_member(config, member) for member in members]
    if config.turn_end and not any(one.turn_end for one in own):
        raise UsageError(
            f"--turn-end: records of shape {_kinds(members)} have no turns without a chat template",
            "leave it out, or give --prompt-template chat",
        )
    common = {
        name: getattr(own[0], name)
        for name in ("train_on", "prompt_template", "add_bos", "add_eos")
        if all(getattr(one, name) == getattr(own[0], name) for one in own)
    }
    return replace(config, **common)


def _overlong_of(config: PackConfig, members: list[Shape]) -> str:
    """One policy for all: what must stay whole decides, but for the one that tells them apart."""
    if members[0].has_pairs:
        return overlong_of_pairs(config)
    whole = [member for member in members if member.stays_whole] or members
    if config.overlong == _TURNS and any(member.is_chat for member in members):
        return _TURNS
    some_may_be_cut = len(whole) < len(members) and config.strategy != "wrap"
    if some_may_be_cut and config.overlong in (None, _SPLIT_TEXT):
        return _SPLIT_TEXT
    return _overlong(config, whole[0])


def _kinds(shapes: list[Shape]) -> str:
    return " or ".join(dict.fromkeys(shape.kind for shape in shapes))


def _choice(option: str, given: str | None, allowed: tuple[str, ...], shape: Shape) -> str:
    """What was given, or the shape's default, which is the first of those allowed."""
    choice = given or allowed[0]
    if choice not in allowed:
        raise UsageError(
            f"{option}: {choice} is not for records of shape {shape.kind}",
            f"choose {' or '.join(allowed)}",
        )
    return choice


def _overlong(config: PackConfig, shape: Shape) -> str:
    if shape.has_pairs:
        return overlong_of_pairs(config)
    supervised, both = shape.stays_whole, shape.of_supervised and shape.of_text
    overlong = config.overlong or _SPLIT_TEXT
    if overlong == _SPLIT_TEXT and not both:
        overlong = "drop" if supervised else "split"
    if supervised and config.strategy == "wrap":
        overlong = "split"
    if supervised and overlong == "split" and not config.force_split:
        others = (
            "split-text, drop or truncate"
            if both
            else "drop or truncate"
            if shape.kind == "tokens"
            else "drop, truncate or truncate-turns"
        )
        raise UsageError(
            f"records of shape {shape.kind} must not be cut: a part would be trained on "
            "without what it answers",
            f"choose --overlong {others}, or insist with --force-split",
        )
    if overlong == _TURNS and not shape.is_chat:
        raise UsageError(
            f"--overlong: truncate-turns is for messages, the records are {shape.kind}",
            "choose drop or truncate",
        )
    return overlong


def _check_turn_end(config: DocumentConfig, shape: Shape, train_on: str, template: str) -> None:
    if "" in config.turn_end:
        raise UsageError("--turn-end: is empty", "name a token, such as <|im_end|>")
    if config.turn_end and train_on == "all":
        raise UsageError("--turn-end: is for --train-on assistant, not all", "leave it out")
    if config.turn_end and not shape.is_chat and template != "chat":
        raise UsageError(
            f"--turn-end: records of shape {shape.kind} have no turns without a chat template",
            "leave it out, or give --prompt-template chat",
        )


def _check_all(config: DocumentConfig, shape: Shape, train_on: str) -> None:
    """UsageError for what says what of the assistant's is trained on, where everything is."""
    given = {
        "--turns each": config.turns == "each" and shape.is_chat,
        "--train-reasoning": config.train_reasoning,
        "--no-train-reasoning": config.train_reasoning is False,
        "--train-tool-calls": config.train_tool_calls,
        "--no-train-tool-calls": config.train_tool_calls is False,
    }
    for option, is_given in given.items():
        if is_given and train_on == "all":
            raise UsageError(
                f"{option}: --train-on all trains on everything, whoever says it",
                "leave one of them out",
            )
