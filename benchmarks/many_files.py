"""A directory of 100,000 small files: how long does it take, and how much memory?

Files of about 500 bytes, the bytes tokenizer, L = 4096. A minute.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import inputs
from measuring import report, run
from settings import Settings, from_environment

MOST_SECONDS, MOST_GB = 60.0, 1.5
FOLDERS = 100


def _files(settings: Settings, count: int) -> Path:
    """A directory of `count` files in a hundred folders, made once."""
    folder = settings.cache / f"many-{count}"
    if not folder.is_dir():
        settings.cache.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=settings.cache))
        for number in range(count):
            part = work / f"{number % FOLDERS:02d}"
            part.mkdir(exist_ok=True)
            text = f"document {number} " * 30
            (part / f"{number:06d}.jsonl").write_text(f'{{"text": "{text}"}}\n')
        os.rename(work, folder)
    return folder


def main() -> None:
    settings = from_environment()
    count = 2000 if settings.quick else 100_000
    folder = _files(settings, count)
    with inputs.Output(settings) as output:
        command: list[str | Path] = [settings.packer, "pack", folder, "--max-length", "4096"]
        command += ["--tokenizer", "bytes", "--output", output, "--quiet", "--json"]
        packed = run(command, watch=True)
        update = run([*command, "--add"], settle=False)
        manifest = (output / "manifest.json").stat().st_size
    report(
        f"{count:,} files of 500 bytes",
        "" if settings.quick else f"<= {MOST_SECONDS:.0f} s, <= {MOST_GB} GB",
        f"{packed.seconds:.1f} s, {packed.peak / 1e9:.2f} GB; manifest {manifest / 1e6:.1f} MB; "
        f"--add with nothing new {update.seconds:.1f} s",
        None if settings.quick else packed.seconds <= MOST_SECONDS and packed.peak <= MOST_GB * 1e9,
        seconds=packed.seconds,
        peak_bytes=packed.peak,
        update_seconds=update.seconds,
    )


if __name__ == "__main__":
    main()
