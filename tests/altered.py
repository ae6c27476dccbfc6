"""Programs that are packer, or packer with a fault, in processes that begin at once.

    done = altered(PROGRAM, "pack", "a.jsonl", ...)      as subprocess.run([python, "-c", PROGRAM])
    done = unaltered("pack", "a.jsonl", ...)             as subprocess.run([packer, ...])

A new interpreter would import for half a second. So one imports what packer does, and is copied
(forked) for each program, before it has threads or open files.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_SECONDS = 300


def altered(program: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `program`, which calls `cli.main` in the end, in the current directory."""
    server = _server()
    assert server.stdin
    assert server.stdout
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder, name)) for name in ("stdin", "stdout", "stderr")]
        for stream in streams:
            Path(stream).write_text(stdin if stream == streams[0] else "")
        request = program, ["-c", *arguments], dict(os.environ), os.getcwd(), streams
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], _SECONDS)[0]:
            server.kill()
            _server.cache_clear()
            raise subprocess.TimeoutExpired(program, _SECONDS)
        status = int(server.stdout.readline())
        output, error = (Path(stream).read_text() for stream in streams[1:])
    return subprocess.CompletedProcess(program, status, output, error)


def unaltered(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run packer where a process, and all that it prints, is what is tested."""
    return altered("from packer_cli.__main__ import main; main()", *map(str, arguments))


@functools.cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def end() -> None:
        server.communicate()

    atexit.register(end)
    return server


def _serve() -> None:
    import packer_cli.export
    import packer_cli.run.pipeline  # noqa: F401 all are for the copies

    for line in sys.stdin:
        request = json.loads(line)
        if (child := os.fork()) == 0:
            _become(*request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201


def _become(
    program: str, arguments: list[str], environment: dict[str, str], folder: str, streams: list[str]
) -> None:
    """What a new interpreter would do, to its end."""
    status, end_now = 1, os._exit  # which a program may replace
    try:
        for descriptor, stream in enumerate(streams):
            opened = os.open(stream, os.O_WRONLY if descriptor else os.O_RDONLY)
            os.dup2(opened, descriptor)
            os.close(opened)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", 1)
        sys.argv[:] = arguments
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        exec(program, {"__name__": "__main__"})  # noqa: S102 a test has written it
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        end_now(status)


if __name__ == "__main__":
    _serve()
