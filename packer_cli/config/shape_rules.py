"""Which options go with which shape of records, and the defaults that depend on it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.option import options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.shapes import Shape
from packer_cli.errors import UsageError

_Config = TypeVar("_Config", bound=DocumentConfig)


def refuse_idle(config: DocumentConfig, shape: Shape) -> None:
    """UsageError for an option that was given and means nothing for records of this shape."""
    defaults = {one.name: one.default for one in fields(config)}
    for name, option in options_of(type(config)).items():
        given = getattr(config, name) != defaults[name]
        if given and option.needs and not option.needs.is_met(shape, config):
            raise UsageError(
                f"{option.name(name)}: is for {option.needs.what}; the records' shape is "
                f"{shape.kind}",
                "leave it out, or name what the records are with --shape and --field",
            )


def for_shape(config: _Config, shape: Shape) -> _Config:
    """With every option set that depends on the shape of the records.

    Raises UsageError when the options do not go with the shape.
    """
    train_on = _choice("--train-on", config.train_on, shape.train_on, shape)
    rows: dict[str, Any] = {}
    if isinstance(config, PackConfig):
        rows["overlong"] = _overlong(config, shape)
    template = _choice("--prompt-template", config.prompt_template, shape.prompt_templates, shape)
    _check_turn_end(config, shape, train_on, template)
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
    supervised, both = shape.stays_whole, shape.of_supervised and shape.of_text
    overlong = config.overlong or ("split-text" if both else "drop" if supervised else "split")
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
    if overlong == "truncate-turns" and not shape.is_chat:
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
