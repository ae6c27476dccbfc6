"""The command line: its commands, its errors as two lines (what is wrong, what to do), exit codes.

Heavy modules are imported inside the commands, so that --help answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from packer_cli.cli import startup
from packer_cli.cli.declared import command, other_names
from packer_cli.cli.export import export
from packer_cli.cli.finalize import finalize
from packer_cli.cli.help import write_parameters, write_rows
from packer_cli.cli.pack import pack
from packer_cli.cli.plan import plan
from packer_cli.cli.recipe import recipe
from packer_cli.cli.show import show
from packer_cli.cli.stats import stats
from packer_cli.cli.suggestions import elsewhere, missing, suggested
from packer_cli.cli.tokenize import tokenize
from packer_cli.cli.tokenizer import tokenizer
from packer_cli.cli.trace import trace
from packer_cli.cli.verify import verify
from packer_cli.errors import (
    InternalError,
    Interrupted,
    PackerError,
    UsageError,
    from_os_error,
    one_line,
    visible,
)
from packer_cli.interrupts import interruptible

# From click, or from its copy inside newer versions of Typer.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class _Commands(TyperGroup):
    """The group of commands. Errors of the parser are reported like all others."""

    def main(
        self,
        args: Sequence[str] | None = None,
        *rest: Any,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        given = sys.argv[1:] if args is None else args
        try:
            code = super().main(args, *rest, standalone_mode=False, **extra)  # type: ignore[misc]
        except _ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()
                sys.exit(2)
            _report(_of_parser(error), as_json="--json" in given)
            sys.exit(2)
        except typer.Abort:
            sys.exit(130)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(ctx, formatter)
        with formatter.section("Commands"):
            commands = ((name, self.commands[name]) for name in self.list_commands(ctx))
            write_rows(
                formatter, ((name, (one.help or "").partition("\n")[0]) for name, one in commands)
            )


class _Command(TyperCommand):
    """A command whose errors end it as two lines on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        problem = _problem_of(lambda: super(_Command, self).invoke(ctx))
        if problem is None:
            return
        if ctx.params["debug"]:
            import traceback

            print(visible("".join(traceback.format_exception(problem))), end="", file=sys.stderr)
        problem.tip = problem.tip or f"see {ctx.command_path} --help"
        _report(problem, as_json=ctx.params.get("as_json", False))
        raise typer.Exit(problem.exit_code)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments by name alone: newer versions of Typer put required ones in braces."""
        return [
            piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(ctx, formatter)


def _of_parser(error: Any) -> PackerError:
    """An error of the parser as a UsageError, with a suggestion if a name is close."""
    command = getattr(getattr(error, "ctx", None), "command_path", "packer")
    name = command.split()[-1]
    aliases = other_names(_RUNS[name]) if name in _RUNS else {}
    meant = suggested(error, aliases)
    other = "" if getattr(error, "option_name", "") in aliases else elsewhere(error)
    message = getattr(error, "message", "") if meant or other else error.format_message()
    tip = other or (f"did you mean {meant}?" if meant else missing(error))
    tip = tip or f"see {command} --help"
    return UsageError(message.replace("\n", " "), tip)


def _report(problem: PackerError, *, as_json: bool) -> None:
    """The one place where errors are printed."""
    if as_json:
        import json

        content = {"error": problem.message, "tip": problem.tip, "exit_code": problem.exit_code}
        print(json.dumps(content), file=sys.stderr)
        return
    kind = "bug" if isinstance(problem, InternalError) else "error"
    if isinstance(problem, Interrupted):
        kind = "stopped"
    for title, text in ((kind, problem.message), ("tip", problem.tip)):
        print(one_line(f"{title}: {text}"), file=sys.stderr)


def _problem_of(run: Callable[[], object]) -> PackerError | None:
    """Call `run`; its failure as a PackerError, or None if it succeeds."""
    try:
        with interruptible():
            run()
            sys.stdout.flush()
    except PackerError as error:
        return error
    except KeyboardInterrupt:
        return Interrupted("interrupted", "run the same command again")
    except BrokenPipeError:
        sys.stderr.close()
        raise typer.Exit(1) from None
    except OSError as error:  # errors of other files are PackerErrors by now
        with suppress(OSError):
            sys.stdout.close()  # or the interpreter fails again when it flushes it
        return from_os_error(error, error.filename or "stdout", "write")
    except MemoryError as error:
        return PackerError(
            f"out of memory: {error}", "use fewer --workers, or a smaller --max-line-bytes"
        )
    except typer.Exit:
        raise
    except Exception as error:
        problem = InternalError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
        return problem
    return None


_HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    context_settings=_HELP,
    cls=_Commands,
    suggest_commands=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Pack training data for language models into memory-mappable shards.",
    epilog="Exit codes: 0 done; 1 bad data or a missed threshold; 2 bad usage; "
    "3 a bug in packer; 130 interrupted.",
)
_RUNS: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (
        pack,
        tokenize,
        plan,
        recipe,
        finalize,
        stats,
        show,
        trace,
        verify,
        export,
        tokenizer,
    )
}
for _run in _RUNS.values():
    # row numbers from the end, such as -1, are not options
    _settings = {"ignore_unknown_options": True} if _run is show else {}
    app.command(cls=_Command, no_args_is_help=True, context_settings=_settings | _HELP)(
        command(_run)
    )


def _version(wanted: bool) -> None:
    if wanted:
        import packer_cli

        print(f"packer {packer_cli.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `packer` command, once this module is imported: see `__main__.py`."""
    startup.open_streams()
    status: object = 0
    try:
        with startup.reference_begun_early(sys.argv) as early:
            app(obj=early)
    except SystemExit as end:
        status = end.code
    startup.end_at_once(status if isinstance(status, int) else int(status is not None))
