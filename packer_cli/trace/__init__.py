"""`packer trace`: which documents were in a step of a training run, and in which step one was.

    trace(paths, step=..., world_size=...)     a step's rows, by rank and micro-batch
    find(paths, "a.jsonl:65", world_size=...)  where a document was

A run's rows follow from its options, so nothing of the run is needed but these, or a state of its
sampler. Without torch.
"""

from __future__ import annotations

from packer_cli.trace.finding import Found, find
from packer_cli.trace.run import Run
from packer_cli.trace.step import Place, TracedStep, trace

__all__ = ["Found", "Place", "Run", "TracedStep", "find", "trace"]
