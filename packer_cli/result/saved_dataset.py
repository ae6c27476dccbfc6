"""The files with which `datasets.load_from_disk` opens a directory of Arrow streams."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from packer_cli.result.layout import INFO, STATE


def saved_dataset(files: Iterable[str], identity: str) -> dict[str, bytes]:
    """The files to add, by name. `files`: the streams, in their order.

    `identity` distinguishes the data from all others: `datasets` keeps what it derives from them
    under its fingerprint.
    """
    state: dict[str, object] = {
        "_data_files": [{"filename": file} for file in files],
        "_fingerprint": hashlib.sha256(identity.encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    info = {"description": "", "features": None}
    return {
        STATE: json.dumps(state, indent=1).encode(),
        INFO: json.dumps(info, indent=1).encode(),
    }
