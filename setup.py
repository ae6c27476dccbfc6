"""Builds the kernels. All metadata is in pyproject.toml.

PACKER_KERNELS=debug     bounds and overflow checks on (make test-debug)
PACKER_KERNELS=asan      AddressSanitizer and UndefinedBehaviorSanitizer (make test-asan)
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

MODE = os.environ.get("PACKER_KERNELS", "release")
if MODE not in ("release", "debug", "asan"):
    raise SystemExit(f"PACKER_KERNELS={MODE!r} is not release, debug or asan")
CHECKED = MODE != "release"
SANITIZE = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"] if MODE == "asan" else []

extensions = [
    Extension(
        f"packer_cli._kernels.{source.stem}",
        [str(source)],
        extra_compile_args=["-O3", *SANITIZE] if not CHECKED else ["-O1", "-g", *SANITIZE],
        extra_link_args=SANITIZE,
    )
    for source in sorted(Path("_kernels").glob("*.pyx"))
]

setup(
    # a folder per mode: objects of one must not end up in another
    options={"build": {"build_base": f"build/{MODE}"}},
    ext_modules=cythonize(
        extensions,
        include_path=["_kernels"],
        build_dir=f"build/{MODE}/cython",
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
