"""On a real local Ray: the same bytes as without it, also when a worker dies on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import contents, jsonl, packer, packer_script, random_texts

OPTIONS = ["-l", "256", "-t", "bytes", "-q", "--unit-bytes", "30k"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two cores, which RAY_ADDRESS names."""
    ray_script = str(Path(sys.executable).with_name("ray"))
    start = ["start", "--head", "--num-cpus=2", "--include-dashboard=false", "--port=6399"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    quietly = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 120}
    subprocess.run([ray_script, *start], check=True, env=environment, **quietly)  # type: ignore[call-overload]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", "127.0.0.1:6399")
            yield
    finally:
        subprocess.run([ray_script, "stop", "--force"], check=False, **quietly)  # type: ignore[call-overload]


@pytest.fixture
def inputs(folder: Path) -> Path:
    for name, documents in (("a.jsonl", 3000), ("b.jsonl", 20)):
        (folder / name).write_bytes(jsonl(*random_texts(documents, 600)))
    assert packer("pack", "a.jsonl", "b.jsonl", *OPTIONS, "-o", "local").exit_code == 0
    return folder


RECIPE = """
max_length = 256
tokenizer = "bytes"
unit_bytes = "60k"
validation = {share = "10%"}
[[source]]
name = "a"
inputs = ["a.jsonl"]
epochs = 1.5
[[source]]
name = "b"
inputs = ["b.jsonl"]
"""
COMMANDS = {
    "texts": ["pack", "a.jsonl", "b.jsonl", *OPTIONS],
    "documents": ["tokenize", "a.jsonl", "b.jsonl", *OPTIONS[2:]],
    "tokens": ["pack", "tokens", "-l", "256", "-q", "--unit-bytes", "120k"],
    "a recipe": ["pack", "mix.toml", "-q"],
}


def on_ray(name: str = "texts", out: str = "out") -> list[str]:
    return [packer_script(), *COMMANDS[name], "--engine", "ray", "-o", out]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_bytes_as_without_ray(cluster: None, inputs: Path, name: str) -> None:
    Path("mix.toml").write_text(RECIPE)
    for command, out in ((COMMANDS["documents"], "tokens"), (COMMANDS[name], "here/out")):
        assert packer(*command, "-o", out).exit_code == 0
    done = subprocess.run(on_ray(name, "there/out"), capture_output=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    here, there = (contents(f"{one}/out") for one in ("here", "there"))
    if name == "a recipe":  # whose manifests name the documents of its sources
        here, there = ({name: data for name, data in one.items() if name.endswith(".arrow")}
                       for one in (here, there))  # fmt: skip
    assert len(here) > 6
    assert there == here


def packing_processes() -> list[int]:
    """The Ray workers that pack units."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::_pack_unit" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_workers_that_are_killed(cluster: None, inputs: Path) -> None:
    killed = set[int]()
    with subprocess.Popen(on_ray(), stderr=subprocess.PIPE) as process:
        give_up = time.monotonic() + 60
        while process.poll() is None and len(killed) < 2 and time.monotonic() < give_up:
            for number in packing_processes()[:1]:
                if number not in killed:
                    killed.add(number)
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.01)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert killed
    assert contents("out") == contents("local")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(cluster: None, inputs: Path, number: signal.Signals) -> None:
    with subprocess.Popen(on_ray(), stderr=subprocess.PIPE) as process:
        give_up = time.monotonic() + 60
        while not list(Path("out").glob(".packer/*/unit-*.json")) and time.monotonic() < give_up:
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"\nstopped: interrupted\ntip: " in b"\n" + said
    done = subprocess.run(on_ray(), capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert contents("out") == contents("local")


def test_a_cluster_that_is_not_there(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    done = subprocess.run(on_ray(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-2].startswith("error: RAY_ADDRESS: 127.0.0.1:1: ")
