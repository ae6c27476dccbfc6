"""Rows of a long-tailed set through a transformer block, forward and backward, and the steps that
ranks would make of them: {"device", "attention", "rows", "linear", orders: [predicted, measured],
"seconds"}, as JSON, or {"skipped": why}.

Every row is timed by itself. A step of simulated ranks, with one row each, lasts as long as its
costliest row; each figure is max over mean of ranks, mean over steps. Predicted is what the sampler
goes by, 6 * hidden * L + sum of l^2.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from packer_cli import plan_packing
from packer_cli.steps import Order, Schedule, StepSizes, row_costs

HEAD, ROUNDS, WARM = 64, 3, 3


class Block(torch.nn.Module):
    """Attention within documents, and a feed-forward part of four times the width."""

    def __init__(self, hidden: int, attend: Any) -> None:
        super().__init__()
        self.project = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.wide = torch.nn.Linear(hidden, 4 * hidden, bias=False)
        self.narrow = torch.nn.Linear(4 * hidden, hidden, bias=False)
        self.attend = attend

    def forward(self, x: Any, edges: list[int]) -> Any:
        q, k, v = (part.view(len(x), -1, HEAD) for part in self.project(x).chunk(3, dim=1))
        x = x + self.out(self.attend(q, k, v, edges).flatten(1))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


def one_by_one(q: Any, k: Any, v: Any, edges: list[int]) -> Any:
    """torch's attention, a document after another; [tokens, heads, head size]."""
    seen = [
        scaled_dot_product_attention(*(x[a:b].transpose(0, 1) for x in (q, k, v)), is_causal=True)
        for a, b in pairwise(edges)
    ]
    return torch.cat(seen, dim=1).transpose(0, 1)


def attention_of(device: str) -> tuple[str, Any]:
    if device == "cuda":
        try:
            from flash_attn import flash_attn_varlen_func  # noqa: PLC0415
        except ImportError:
            return "SDPA, a document after another", one_by_one

        def varlen(q: Any, k: Any, v: Any, edges: list[int]) -> Any:
            ends = torch.tensor(edges, dtype=torch.int32, device="cuda")
            longest = max(b - a for a, b in pairwise(edges))
            return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, causal=True)

        return "flash-attn, varlen", varlen
    return "SDPA, a document after another", one_by_one


def rows_of(length: int, count: int) -> list[list[int]]:
    """Boundaries of best-fit rows of log-normal documents, padding being one of its own."""
    lengths = np.random.default_rng(0).lognormal(6.2, 1.6, count * length // 1000 + 100)
    lengths = np.clip(lengths, 1, 2**30).astype(np.int32)
    plan = plan_packing(lengths, length, seed=0, overlong="split")
    pieces = plan.pieces.length[plan.order]
    rows = [pieces[a:b] for a, b in pairwise(plan.row_offsets.tolist())][:count]
    return [sorted({0, *np.cumsum(row).tolist(), length}) for row in rows]


def seconds_of(block: Any, rows: list[list[int]], x: Any) -> np.ndarray:
    """float64[rows], the best of some rounds of each."""
    best = np.full(len(rows), np.inf)
    for edges in rows[:WARM]:
        block(x, edges).sum().backward()
    for _ in range(ROUNDS):
        for row, edges in enumerate(rows):
            _wait(x)
            begun = time.perf_counter()
            block(x, edges).sum().backward()
            _wait(x)
            best[row] = min(best[row], time.perf_counter() - begun)
    return best


def _wait(x: Any) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def unevenness(costs: np.ndarray, order: np.ndarray, ranks: int) -> float:
    steps = costs[order].reshape(-1, ranks)
    return float((steps.max(axis=1) / steps.mean(axis=1)).mean())


def main() -> dict[str, Any]:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    for name, value in (("length", 32_768), ("hidden", 4096), ("ranks", 64), ("steps", 8)):
        options.add_argument(f"--{name}", type=int, default=value)
    given = options.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        return {"skipped": "no GPU here"}
    rows = rows_of(given.length, given.ranks * given.steps)
    name, attend = attention_of(given.device)
    kind = torch.bfloat16 if given.device == "cuda" else torch.float32
    block = Block(given.hidden, attend).to(given.device, kind)
    x = torch.randn(given.length, given.hidden, device=given.device, dtype=kind)
    squares = np.array([int((np.diff(edges).astype(np.int64) ** 2).sum()) for edges in rows])
    predicted, measured = row_costs(squares, given.length, given.hidden), seconds_of(block, rows, x)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "CPU",
        "attention": name, "rows": len(rows), "seconds": float(measured.mean()),
    }  # fmt: skip
    for order, balance in (("random order", None), ("even order", "order")):
        sizes = StepSizes(given.ranks)
        schedule = Schedule(Order(len(rows)), sizes, balance=balance, costs=predicted)
        taken = schedule.rows_at(0, len(rows))
        found[order] = [unevenness(costs, taken, given.ranks) for costs in (predicted, measured)]
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
