"""Builds the kernels. All metadata is in pyproject.toml.

PACKER_KERNELS=asan      bounds checks, address and undefined-behavior sanitizers (make test-asan)
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

MODE = os.environ.get("PACKER_KERNELS", "release")
if MODE not in ("release", "asan"):
    raise SystemExit(f"PACKER_KERNELS={MODE!r} is not release or asan")
CHECKED = MODE == "asan"
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"] if CHECKED else []

# Cython's own code for memoryviews, made and compiled once instead of into every kernel.
SHARED = "packer_cli._kernels.memoryviews"
SOURCES = {f"packer_cli._kernels.{one.stem}": str(one) for one in Path("_kernels").glob("*.pyx")}
SOURCES[SHARED] = "_kernels/memoryviews.c"

extensions = [
    Extension(
        name,
        [source],
        extra_compile_args=["-O1", "-g", *SANITIZE] if CHECKED else ["-O3", "-g0"],
        extra_link_args=SANITIZE,
    )
    for name, source in sorted(SOURCES.items())
]

setup(
    options={
        "build": {"build_base": f"build/{MODE}"},  # objects of one mode must not end up in another
        "build_ext": {"parallel": os.cpu_count()},
    },
    ext_modules=cythonize(
        extensions,
        include_path=["_kernels"],
        build_dir=f"build/{MODE}/cython",
        shared_utility_qualified_name=SHARED,
        compiler_directives={
            "language_level": 3,
            "boundscheck": CHECKED,
            "wraparound": False,
            "initializedcheck": CHECKED,
            "overflowcheck": False,
            "cdivision": True,
        },
    ),
)
