"""Makes the options of a command, and their --help, from declarations: see `options/option.py`.

A command is a function. Of its parameters,

    options: StatsOptions              a dataclass of options: gets the configuration
    given: Annotated[Values, PackConfig, (PackOptions, "output")]
                                       options of several: gets the values that are given, by field

and what Typer itself knows (arguments) stays as it is. A field that several have is that of the
first.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from typing import Annotated, Any, get_type_hints

import typer

from packer_cli.options.option import Option, Owner, Values, options_of, refuse_missing

_REPEATED = ("texts", "pairs", "arguments")
_OTHERS = "Options"
# The sections of --help of the commands that take a `shape`, in their order.
SECTIONS = {
    "Used most": "max_length tokenizer output sample text_field chat_template train_on overlong "
    "strategy workers overwrite",
    "Input": "shape fields roles input_format sample_by on_error max_errors tokenized",
    "Documents": "add_bos add_eos eos_token special_tokens_in_text fim_rate fim_spm_rate "
    "truncate_side max_loss carry carry_default min_reward max_age",
    "Supervised data": "template_args prompt_template turns train_reasoning train_tool_calls "
    "turn_end allow_open_turns on_unshown",
    "Rows": "seed shuffle max_segments_per_row segment_multiple balance",
    "Output": "columns view shard_bytes add html",
    "Running": "rank world_size unit_bytes tokenizer_backend engine no_lock as_json quiet debug",
}
_SECTION_OF = {name: title for title, names in SECTIONS.items() for name in names.split()}
_COLUMN = 30  # where the help begins


def _owners(run: Callable[..., None]) -> dict[str, list[Owner]]:
    """Parameter -> the dataclasses whose options it holds; none for arguments."""
    hints = get_type_hints(run, include_extras=True)
    return {
        name: [
            one
            for one in (hint, *getattr(hint, "__metadata__", ()))
            if isinstance(one, tuple) or hasattr(one, "__dataclass_fields__")
        ]
        for name, hint in hints.items()
        if name != "return"
    }


def options_in(run: Callable[..., None]) -> dict[str, Option]:
    """The options of a command, by the names of fields, in their order."""
    return options_of(*(one for owners in _owners(run).values() for one in owners))


def command(run: Callable[..., None]) -> Callable[..., None]:
    """`run` in the form that Typer takes, with a parameter for each option that it declares."""
    parameters = inspect.signature(run, eval_str=True).parameters
    owners, options = _owners(run), options_in(run)

    def filled(**given: Any) -> None:
        read: Values = {
            name: one.typed(given[name])
            for name, one in options.items()
            # a switch that is not on the command line arrives as False
            if given[name] not in (None, []) and not (given[name] is False and one.default is False)
        }
        values: Values = {}
        for name, parameter in parameters.items():
            kind = parameter.annotation
            own = {of: read[of] for of in options_of(*owners[name]) if of in read}
            if owners[name] == [kind]:
                refuse_missing(kind, own)
            values[name] = kind(**own) if owners[name] == [kind] else own
        run(**values | {name: given[name] for name in parameters if not owners[name]})

    taken: Any = filled
    taken.__name__, taken.__doc__ = run.__name__, run.__doc__
    titles = _SECTION_OF if "shape" in options else {}
    places = {name: place for place, name in enumerate(titles)}
    ordered = sorted(options, key=lambda name: places.get(name, len(places)))
    arguments = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in parameters.items()
        if not owners[name]
    ]
    taken.__signature__ = inspect.Signature(  # in the order of --help
        arguments + [_parameter(name, options[name], titles.get(name)) for name in ordered]
    )
    return filled


def _parameter(name: str, one: Option, section: str | None) -> inspect.Parameter:
    """The parameter that becomes an option. Numbers arrive as text, options not given as None."""
    is_switch = one.value == "flag" and one.default is False
    kind: Any = bool if is_switch else bool | None if one.value == "flag" else str | None
    metavar = one.metavar or one.kind.metavar or ("NAME" if one.choices else None)

    def completed(incomplete: str) -> list[tuple[str, str]]:
        return [choice for choice in one.choices.items() if choice[0].startswith(incomplete)]

    about = typer.Option(
        one.flag,
        *([one.short] if one.short else []),
        help=one.described + (" Required." if one.default is MISSING else ""),
        metavar=None if one.value == "flag" else metavar,
        rich_help_panel=section,
        autocompletion=completed if one.choices else None,
        show_default=False,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[list[str] | None if one.value in _REPEATED else kind, about],
        default=False if is_switch else None,
    )


def write_parameters(ctx: Any, formatter: Any) -> None:
    """Write the arguments, then the options by group, the most used first: nothing cut off, no name
    broken at a dash.
    """
    sections: dict[str, list[tuple[str, str]]] = {}
    title = ""
    for parameter in ctx.command.get_params(ctx):
        if parameter.param_type_name == "argument":
            title = "Arguments"
            # older versions of Typer add what the usage says: which are required
            sections.setdefault(title, []).append((parameter.metavar, parameter.help))
            continue
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.name != "help" or title == "Arguments":  # which is in the last section
            title = getattr(parameter, "rich_help_panel", None) or _OTHERS
        # without the type that Typer adds where there is no metavar
        row = record[0].partition(" <")[0], record[1]
        sections.setdefault(title, []).append(row)
    for title, rows in sections.items():
        with formatter.section(title):
            write_rows(formatter, rows)


def write_rows(formatter: Any, rows: Iterable[tuple[str, str]]) -> None:
    """Write two columns; a name too long for its column has its help on the next line."""
    margin, width = " " * formatter.current_indent, max(20, formatter.width - _COLUMN)
    for names, text in rows:
        lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
        head = f"{margin}{names}"
        if len(head) <= _COLUMN - 2 and lines:
            head = f"{head:<{_COLUMN}}{lines.pop(0)}"
        formatter.write("\n".join([head, *(" " * _COLUMN + line for line in lines)]) + "\n")
