"""How long does it take from a clone to the first result, and to build a wheel?

Copies of the checkout without what is built. Packages are downloaded before, and apart. Not quick:
two builds, a minute and a half.
"""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import report, run, skip
from settings import CHECKOUT, from_environment

DEMO, DEMO_SECONDS = "make demo in a clone", 75
WHEEL, WHEEL_SECONDS = "a wheel of a clone", 50
DEMO_TARGET = f"<= {DEMO_SECONDS} s on two cores, without downloads"
WHEEL_TARGET = f"<= {WHEEL_SECONDS} s of processor time"
_BUILT = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")


def main() -> None:
    if from_environment().quick:
        skip(DEMO, DEMO_TARGET, "not quick")
        skip(WHEEL, WHEEL_TARGET, "not quick")
        return
    needed = [one for one in metadata.requires("llm-packer") or () if "extra ==" not in one]
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet"]
    with TemporaryDirectory() as name:
        packages, *clones = (Path(name) / part for part in ("packages", "demo", "wheel"))
        for clone in clones:
            shutil.copytree(CHECKOUT, clone, ignore=_BUILT)
        of_build = ("pip", "setuptools", "cython")
        download = run([*pip, "download", "--dest", packages, *of_build, *needed])
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages)}
        make: list[str | Path] = [
            "make",
            "--directory",
            clones[0],
            f"PYTHON={sys.executable}",
            "demo",
        ]
        demo = run(make, environment=offline)
        wheel = run(
            [*pip, "wheel", "--no-deps", "--wheel-dir", name, clones[1]], environment=offline
        )
    report(
        DEMO,
        DEMO_TARGET,
        f"{demo.seconds:.0f} s, {demo.processor_seconds:.0f} s of processor time; downloads "
        f"{download.seconds:.0f} s",
        demo.seconds <= DEMO_SECONDS,
        seconds=demo.seconds,
        processor_seconds=demo.processor_seconds,
        download_seconds=download.seconds,
    )
    report(
        WHEEL,
        WHEEL_TARGET,
        f"{wheel.processor_seconds:.0f} s in {wheel.seconds:.0f} s",
        wheel.processor_seconds <= WHEEL_SECONDS,
        seconds=wheel.seconds,
        processor_seconds=wheel.processor_seconds,
    )


if __name__ == "__main__":
    main()
