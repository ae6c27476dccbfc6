"""The same short conversation in several dialects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from chats import assistant, user

HI = [user("Hi"), assistant("Hello")]
HI_MARKED = "<user>Hi</user><assistant>⟦Hello</assistant>⟧"
HI_SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}


def parquet(columns: dict[str, Any], schema: Any = None) -> Path:
    pq.write_table(pa.table(columns, schema=schema), "data.parquet")
    return Path("data.parquet")
