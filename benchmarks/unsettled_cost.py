"""What does it cost to look for characters that Unicode versions differ on?

The seconds of the search over those of the fast engine, on the same texts, on one core: English and
code, which are ASCII mostly, and a hundred languages. Without a reference's share, which texts
with such a character have: there is none in these. A quarter of a minute.
"""

from __future__ import annotations

import pyarrow as pa
from measuring import best_of, on_one_core, report
from settings import Settings, from_environment

from packer_cli.tokenization.engines import FastEngine
from packer_cli.tokenization.unsettled import with_unsettled

MOST = 0.03
FILES = ("text_linux_doc", "code_python", "multi_xquad_contexts", "multi_udhr")
BATCH = 200


def _batches(settings: Settings, name: str) -> list[list[str]]:
    with pa.input_stream(str(settings.data / f"{name}.jsonl.zst"), compression="zstd") as stream:
        lines = stream.read().decode().splitlines()
    return [lines[i : i + BATCH] for i in range(0, len(lines), BATCH)]


def main() -> None:
    settings = from_environment()
    on_one_core()
    engine = FastEngine((settings.tokenizers / "qwen3" / "tokenizer.json").read_bytes())
    for name in FILES:
        batches = _batches(settings, name)
        count = 2 if settings.quick else 5
        encoding = best_of(count, lambda found=batches: [engine.encode(b) for b in found])
        search = best_of(count, lambda found=batches: [with_unsettled(b) for b in found])
        report(
            f"search for unsettled characters, {name}",
            f"< {MOST:.0%} of encoding",
            f"{search / encoding:.2%}",
            search / encoding < MOST,
            search_seconds=search,
            encoding_seconds=encoding,
        )


if __name__ == "__main__":
    main()
