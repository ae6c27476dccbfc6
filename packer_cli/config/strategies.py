"""The packing strategies: their names and aliases, and what the input order is to them.

The loops are in `_kernels/`; `packing/planning.py` calls them. Adding one: CONTRIBUTING.md.
"""

from __future__ import annotations

from packer_cli.errors import one_of

ALIASES: dict[str, tuple[str, ...]] = {
    "best-fit": (),
    "best-fit-decreasing": ("bfd", "obfd"),
    "first-fit": ("ffd",),
    "online-best-fit": ("bf",),
    "online-first-fit": ("ff",),
    "worst-fit": ("wf",),
    "first-fit-shuffle": ("ffs",),
    "next-fit": ("nf",),
    "harmonic": ("hk",),
    "mffd": (),
    "wrap": ("wrapped",),
}
NAMES = tuple(ALIASES)
_KEEPS_ORDER = ("next-fit", "wrap")
_TAKES_INPUT_ORDER = (
    *_KEEPS_ORDER, "online-best-fit", "online-first-fit", "worst-fit", "harmonic",
)  # fmt: skip
BY_ALIAS = {alias: name for name, aliases in ALIASES.items() for alias in (name, *aliases)}


def canonical_name(name: str) -> str:
    """The strategy's full name for a name or alias; UsageError for an unknown one."""
    try:
        return BY_ALIAS[name.lower().replace("_", "-")]
    except KeyError:
        raise one_of("strategy", name, NAMES) from None


def keeps_order(name: str) -> bool:
    """Whether rows hold the documents in input order, so that a shuffle would undo it."""
    return name in _KEEPS_ORDER


def takes_input_order(name: str) -> bool:
    """Whether documents are placed as they come; otherwise in a seeded order, or by length."""
    return name in _TAKES_INPUT_ORDER
