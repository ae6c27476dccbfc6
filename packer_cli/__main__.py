"""`python -m packer_cli`, and the `packer` command.

Next to nothing is imported before Ctrl-C has a handler: without one, it ends in a traceback.
"""

import os
import signal
import sys


def main() -> None:
    """Entry point of the `packer` command."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_at_once)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # a shell may ignore it: workers leave no code then
    from packer_cli.cli.app import main as run  # noqa: PLC0415

    run()


def _end_at_once(number: int, frame: object) -> None:
    """End before `cli/app.py` has installed the handlers of a command."""
    progress = sys.modules.get("packer_cli.progress")
    below = b"\n" if getattr(progress, "bars", None) else b""
    # while a library works, descriptor 2 is not what stderr writes to: see tokenization/engines.py
    os.write(
        sys.stderr.fileno() if sys.stderr else 2,
        below + b"stopped: interrupted\ntip: run the same command again\n",
    )
    os._exit(130)


if __name__ == "__main__":
    main()
