"""The command line: its commands, its errors as two lines (what is wrong, what to do), exit codes.

A command is made when it is used, and imports heavy modules when it runs, so that --help answers at
once. It is a function with annotated parameters, as Typer takes them, or groups of options (see
`options/option.py`):

    options: StatsOptions       gets an object of the class
    given: Annotated[Values, PackConfig, PackOptions]
                                gets the values that are on the command line, by field

If several groups have a field, the first one counts.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import MISSING
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from packer_cli.errors import (
    InternalError,
    Interrupted,
    PackerError,
    UsageError,
    cut,
    from_os_error,
    nearest,
    one_line,
    visible,
)
from packer_cli.options.option import (
    FLAG,
    DeclaredOption,
    OptionGroup,
    Values,
    options_of,
    refuse_missing,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# command -> the module that has its function, of the same name
_COMMANDS = {
    "pack": "pack", "tokenize": "pack", "plan": "plan",
    "stats": "stats", "show": "show", "verify": "verify", "audit": "audit",
    "export": "export", "tokenizer": "tokenizer",
}  # fmt: skip
# names of similar commands in other tools
_OTHER_NAMES = {
    "inspect": "show", "view": "show", "head": "show", "print": "show", "info": "stats",
    "stat": "stats", "check": "verify", "validate": "verify", "convert": "export",
    "trace": "show", "preprocess": "pack", "lint": "audit",
}  # fmt: skip
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DESTRUCTOR_SECONDS = 0.1  # until a destructor has ended, on a busy machine, too
_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_URL = re.compile(r"(--[a-z-]+=|-o)?@?[a-z][a-z0-9+.:-]*://", re.IGNORECASE)
_MOST = 2_000  # characters of a line of an error, which may quote data
# From click, or from its copy inside newer versions of Typer.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
_OTHERS = "Options"
# The sections of --help of the commands that take a `shape`, in their order.
SECTIONS = {
    "Used most": "max_length tokenizer output sample text_field chat_template train_on overlong "
    "strategy workers overwrite",
    "Input": "shape fields roles input_format sample_by on_error max_errors tokenized",
    "Documents": "add_bos add_eos eos_token special_tokens_in_text fim_rate fim_spm_rate "
    "truncate_side max_loss where carry carry_default",
    "Supervised data": "template_args prompt_template turns train_reasoning train_tool_calls "
    "turn_end allow_open_turns on_unshown",
    "Rows": "seed shuffle max_segments_per_row segment_multiple balance",
    "Lengths": "lengths key ranks micro_batches batch_size hidden_size",
    "Output": "columns view shard_bytes add html",
    "Running": "rank world_size unit_bytes tokenizer_backend engine no_lock as_json quiet debug",
}
_SECTION_OF = {name: title for title, names in SECTIONS.items() for name in names.split()}
_COLUMN = 30  # where the help begins


def _groups(run: Callable[..., None]) -> dict[str, list[type]]:
    """Return parameter -> the option groups whose options it gets; [] for arguments."""
    hints = get_type_hints(run, include_extras=True)
    return {
        name: [
            group
            for group in (hint, *getattr(hint, "__metadata__", ()))
            if isinstance(group, type) and issubclass(group, OptionGroup)
        ]
        for name, hint in hints.items()
        if name != "return"
    }


def options_in(run: Callable[..., None]) -> dict[str, DeclaredOption]:
    """Return the options of a command by field, in their order."""
    return options_of(*(group for groups in _groups(run).values() for group in groups))


def with_parameters(run: Callable[..., None]) -> Callable[..., None]:
    """Return a command as Typer takes it, with a parameter for each option of its groups."""
    parameters = inspect.signature(run, eval_str=True).parameters
    groups, options = _groups(run), options_in(run)

    def command(**arguments: Any) -> None:
        given: Values = {
            name: option.read_argument(arguments[name])
            for name, option in options.items()
            # a switch that is not on the command line arrives as False
            if arguments[name] not in (None, [])
            and not (arguments[name] is False and option.default is False)
        }
        for name, parameter in parameters.items():
            if groups[name]:
                group, fields = parameter.annotation, options_of(*groups[name])
                values = {field: given[field] for field in fields if field in given}
                arguments[name] = values
                if groups[name] == [group]:
                    refuse_missing(group, values)
                    arguments[name] = group(**values)
        run(**{name: arguments[name] for name in parameters})

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    section_of = _SECTION_OF if "shape" in options else {}
    places = {name: place for place, name in enumerate(section_of)}
    ordered = sorted(options, key=lambda name: places.get(name, len(places)))
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    signature = [
        *(parameter.replace(kind=by_keyword)
          for name, parameter in parameters.items() if not groups[name]),
        *(inspect.Parameter(name, by_keyword, **_for_typer(options[name], section_of.get(name)))
          for name in ordered),
    ]  # fmt: skip
    cast("Any", command).__signature__ = inspect.Signature(signature)
    return command


def _for_typer(option: DeclaredOption, section: str | None) -> dict[str, Any]:
    """Return annotation and default of a parameter of Typer; values arrive as text or switches."""
    is_flag, is_switch = option.format is FLAG, option.format is FLAG and option.default is False

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [(name, about) for name, about in choices.items() if name.startswith(incomplete)]

    choices = option.format.choices
    info = typer.Option(
        *option.flags,
        help=option.help + (" Required." if option.default is MISSING else ""),
        metavar=None if is_flag else option.metavar,
        rich_help_panel=section,
        autocompletion=complete if choices else None,
        show_default=False,
    )
    kind: Any = bool if is_flag else str
    kind = kind if is_switch else list[str] | None if option.format.is_repeated else kind | None
    return {"annotation": Annotated[kind, info], "default": False if is_switch else None}


def write_parameters(ctx: Any, formatter: Any) -> None:
    """Write the arguments, then the options by group, the most used first."""
    sections: dict[str, list[tuple[str, str]]] = {}
    title = ""
    for parameter in ctx.command.get_params(ctx):
        if parameter.param_type_name == "argument":
            title = "Arguments"
            # older versions of Typer also mark the required ones here
            sections.setdefault(title, []).append((parameter.metavar, parameter.help))
            continue
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        if parameter.name != "help" or title == "Arguments":  # --help ends the last section
            title = getattr(parameter, "rich_help_panel", None) or _OTHERS
        # without the type that Typer adds if there is no metavar
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


def _function(name: str) -> Callable[..., None]:
    run: Callable[..., None] = getattr(import_module(f"packer_cli.cli.{_COMMANDS[name]}"), name)
    return run


@cache
def _made(name: str) -> Any:
    """Return a command as Typer's parser has it."""
    # row numbers from the end, such as -1, are not options
    settings = {"ignore_unknown_options": True} if name == "show" else {}
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(cls=_Command, no_args_is_help=True, context_settings=settings | _HELP)(
        with_parameters(_function(name))
    )
    return typer.main.get_command(alone)


class _AsGiven:
    """Reader of parameters, which passes on texts and switches as they are given.

    Typer 0.29 uses pydantic for that, whose import costs nearly as much as all of --help. Earlier
    versions do not look for a reader.
    """

    @classmethod
    def of(cls, parameters: list[Any]) -> list[Any]:
        for parameter in parameters:
            parameter.get_runtime_param = cls
        return parameters

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        return [*(value or ())] if param.multiple or param.nargs == -1 else value


class _Group(TyperGroup):
    """The group of commands. Errors of the parser are reported like all others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _made(cmd_name) if cmd_name in _COMMANDS else None

    def main(self, args: Sequence[str] | None = None, *more: Any, **settings: Any) -> Any:
        arguments = [_shown(text) for text in (sys.argv[1:] if args is None else args)]
        try:
            code = super().main(arguments, *more, **settings | {"standalone_mode": False})
        except _ClickException as error:
            code = 2
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
            else:
                _report(_of_parser(error), as_json="--json" in arguments)
        except typer.Abort:
            code = 130
        sys.exit(code if isinstance(code, int) else 0)

    def get_params(self, ctx: Any) -> list[Any]:
        return _AsGiven.of(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(ctx, formatter)
        with formatter.section("Commands"):
            docs = {name: _function(name).__doc__ or "" for name in _COMMANDS}
            write_rows(formatter, ((name, doc.partition("\n")[0]) for name, doc in docs.items()))


def _shown(argument: str) -> str:
    """Return an argument, without the parts of a URL that must not be printed or stored."""
    if not _URL.match(argument):
        return argument
    from packer_cli.storage import public

    return public(argument)


@contextmanager
def _interruptible() -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM raise KeyboardInterrupt, at whatever step a command is.

    A signal that is ignored (nohup, `&` in a script) stays ignored. One that comes inside a
    destructor, where nothing can be raised, is sent again.
    """
    before = sys.unraisablehook

    def look(dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            before(dropped)
            return
        at_end = signal.getsignal(signal.SIGALRM)

        def again(number: int, frame: object) -> None:
            signal.signal(signal.SIGALRM, at_end)
            signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, _DESTRUCTOR_SECONDS)

    with ExitStack() as stack:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN and handler is not None:
                stack.callback(signal.signal, number, handler)
                signal.signal(number, signal.default_int_handler)
        stack.callback(setattr, sys, "unraisablehook", before)
        sys.unraisablehook = look
        yield


class _Command(TyperCommand):
    """A command whose errors end it as two lines on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _interruptible():
                super().invoke(ctx)
                sys.stdout.flush()
        except typer.Exit:
            raise
        except BrokenPipeError:
            sys.stderr.close()
            raise typer.Exit(1) from None
        except (Exception, KeyboardInterrupt) as error:
            problem = _problem_of(error)
            if ctx.params["debug"]:
                import traceback

                print(visible("".join(traceback.format_exception(error))), end="", file=sys.stderr)
            problem.tip = problem.tip or f"see {ctx.command_path} --help"
            _report(problem, as_json=ctx.params.get("as_json", False))
            raise typer.Exit(problem.exit_code) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return arguments by name: versions of Typer differ in what they put around it."""
        pieces = [self.options_metavar or ""]
        for parameter in self.get_params(ctx):
            if isinstance(parameter, TyperArgument):
                name = parameter.metavar if parameter.required else f"[{parameter.metavar}]"
                pieces.append(f"{name}..." if parameter.nargs == -1 else f"{name}")
        return pieces

    def get_params(self, ctx: Any) -> list[Any]:
        return _AsGiven.of(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(ctx, formatter)


def _problem_of(error: BaseException) -> PackerError:
    """Return the error that is reported for an exception that ends a command."""
    if isinstance(error, PackerError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted", "run the same command again")
    if isinstance(error, MemoryError):
        return PackerError(f"out of memory: {error}", "use fewer --workers")
    if isinstance(error, OSError):  # errors of other files are PackerErrors by now
        with suppress(OSError):
            sys.stdout.close()  # or the interpreter fails again when it flushes it
        return from_os_error(error, error.filename or "stdout", "write")
    return InternalError(f"{type(error).__name__}: {error}")


def _report(problem: PackerError, *, as_json: bool) -> None:
    """Print an error. All errors are printed here."""
    if as_json:
        import json

        message, tip = cut(problem.message, _MOST), cut(problem.tip, _MOST)
        content = {"error": message, "tip": tip, "exit_code": problem.exit_code}
        print(json.dumps(content), file=sys.stderr)
        return
    kinds = {InternalError: "bug", Interrupted: "stopped"}
    for title, text in ((kinds.get(type(problem), "error"), problem.message), ("tip", problem.tip)):
        print(cut(one_line(f"{title}: {text}"), _MOST), file=sys.stderr)


def _of_parser(error: Any) -> UsageError:
    """Return an error of the parser, with a tip if another name is near, or of another command."""
    message, ctx = error.format_message(), getattr(error, "ctx", None)
    tip = ""
    if type(error).__name__ == "NoSuchOption":
        message, tip = error.message, _about_option(error.option_name, ctx)
    elif unknown := re.match(r"No such command '(.*)'", message):
        names = {name: name for name in _COMMANDS} | _OTHER_NAMES
        near = nearest(unknown[1], names)
        tip = f"did you mean {names[near]}?" if near else ""
    tip = tip or f"see {getattr(ctx, 'command_path', 'packer')} --help"
    return UsageError(message.replace("\n", " "), tip)


def _about_option(name: str, ctx: Any) -> str:
    """Return a tip: the commands that have an option, or the nearest option of this one, or ""."""
    options = options_in(_function(ctx.info_name)) if ctx.info_name in _COMMANDS else {}
    names = {other: option.flag for option in options.values() for other in option.names_elsewhere}
    having = [
        f"packer {command}"
        for command in (_COMMANDS if options and name not in names else ())
        if any(name in parameter.opts for parameter in _made(command).params)
    ]
    if having:
        return f"it is an option of {', '.join(having)}"
    for parameter in ctx.command.params:
        names |= {flag: flag for flag in (*parameter.opts, *parameter.secondary_opts)}
    # a name without --no- means the opposite of one with it
    is_negative = name.lower().replace("_", "-").startswith("--no-")
    near = nearest(name, [flag for flag in names if flag.startswith("--no-") == is_negative])
    return f"did you mean {names[near]}?" if near else ""


app = typer.Typer(
    context_settings=_HELP,
    cls=_Group,
    suggest_commands=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Pack training data for language models into memory-mappable shards.",
    epilog="Exit codes: 0 done; 1 bad data or a missed threshold; 2 bad usage; "
    "3 a bug in packer; 130 interrupted.",
)


def _version(wanted: bool) -> None:
    if wanted:
        import packer_cli

        print(f"packer {packer_cli.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `packer` command: see `__main__.py`."""
    # Numpy starts threads for matrices on its import, which packer does not use. Without them the
    # import takes 50 of 140 ms less of processor time (best of 15).
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    _open_streams()
    status: object = 0
    try:
        app()
    except SystemExit as end:
        status = end.code
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Nothing is left to do, not even to free memory: saves 85 ms of 2 seconds with a tokenizer of
    # 11 MB, whose tables take that long to free (median of 6 pairs), and 127 ms of processor time.
    os._exit(status if isinstance(status, int) else int(status is not None))


class _Notes(io.RawIOBase):
    """stderr, whose failures end nothing: a full disk or a closed pipe would make a run whose
    result is complete look like one that failed.
    """

    def __init__(self, replaced: object) -> None:
        self._replaced = replaced  # which closes 2 when it goes
        self._descriptor = os.dup(2)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: ReadableBuffer, /) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        with suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
        return size


def _open_streams() -> None:
    """Make sure that descriptors 0 to 2 are open and that any name can be printed.

    Closed ones are opened on /dev/null: files of ours would otherwise get these numbers, to which
    libraries and child processes write.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
        if descriptor == 1:
            sys.stdout = open(1, "w")  # noqa: SIM115
    os.close(descriptor)
    encoding = getattr(sys.stderr, "encoding", None)
    notes = cast("Any", _Notes(sys.stderr))
    sys.stderr = io.TextIOWrapper(notes, encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: no name may fail to print
