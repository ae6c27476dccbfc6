"""House rules: what importing costs, which way imports point, and that nothing lacks a word."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny
from support import packer
from typer.main import get_command

import packer_cli
from packer_cli.cli.app import app

PACKAGE = Path(packer_cli.__file__).parent
FOREIGN = {"torch", "datasets", "ray", "transformers", "megatron", "fsspec"}
HEAVY = FOREIGN | {"pyarrow", "numpy", "tokenizers", "gigatoken", "huggingface_hub"}
# what Typer, gigatoken and both engines bring along
UNUSED = {"pydantic", "awkward", "huggingface_hub"}
_COMMAND = """
import os, sys
from packer_cli.cli import app as cli
sys.argv = {!r}.split()
os._exit = sys.exit  # or nothing could be asked afterwards
try:
    cli.main()
except SystemExit as end:
    assert not end.code
"""


def _imported_by(code: str) -> set[str]:
    """Top-level modules loaded by some lines of code in a fresh interpreter."""
    code += "\nimport sys\nprint()\nloaded = filter(sys.modules.get, sys.modules)  # not kept out"
    code += "\nprint(*{name.split('.')[0] for name in loaded})"
    elsewhere = sys.prefix  # where no source folder is taken for the installed package
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=elsewhere, capture_output=True, text=True, check=True, timeout=300
    )
    return set(result.stdout.splitlines()[-1].split())


# what is imported or run -> what it does without, and what it needs
LIGHT = {
    "import packer_cli": (HEAVY, "packer_cli"),
    "import packer_cli.cli.app": (HEAVY, "packer_cli"),
    "from packer_cli import *": (FOREIGN, "packer_cli"),
    "packer pack --help": (HEAVY, "typer"),
    "packer pack {0}/a.jsonl -l 8 -t {0}/model -o {0}/out": (FOREIGN | UNUSED, "gigatoken"),
    "packer stats {0}/packed": (HEAVY - {"numpy"} | UNUSED, "msgspec"),
}


@pytest.mark.parametrize("code", LIGHT)
def test_imports_stay_light(tmp_path: Path, code: str) -> None:
    """--help answers at once, stats need no Arrow, and a local run nothing that only came along."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    tiny.save(tmp_path / "model", tiny.byte_level(), tokenizer_config={"eos_token": tiny.EOS})
    if "packed" in code:
        packer("pack", tmp_path / "a.jsonl", "-l", 8, "-q", "-o", tmp_path / "packed")
    forbidden, needed = LIGHT[code]
    is_command = code.startswith("packer ")
    loaded = _imported_by(_COMMAND.format(code.format(tmp_path)) if is_command else code)
    assert needed in loaded
    assert loaded & forbidden == set()


def _modules() -> dict[str, Path]:
    """packer_cli.a.b -> its file."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if "_kernels" in parts:  # in there when installed, beside the package in a checkout
            continue
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


MODULES = _modules()


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def _imported_names(module: str) -> Iterator[str]:
    """Every a.b.c of `import a.b.c` and `from a.b import c`, those under TYPE_CHECKING too."""
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def names() -> dict[str, set[str]]:
    return {module: set(_imported_names(module)) for module in MODULES}


@cache
def graph() -> dict[str, set[str]]:
    """Modules of this package that one imports: `a.b` or, when c is a name in it, `a.b.c`."""
    others = MODULES.keys() - {"packer_cli"}
    return {
        module: {one for name in its for one in {name, name.rpartition(".")[0]} & others - {module}}
        for module, its in names().items()
    }


# A layer imports itself and those before it. What is not named here is the base, the first.
LAYERS = (
    {"base"}, {"options"}, {"packing"}, {"result"}, {"inputs"}, {"tokenization"}, {"chat"},
    {"mixing"}, {"run"}, {"steps"}, {"plan", "audit"},
    {"reports", "verify", "export", "torch", "hf", "grain", "energon"},
    {"cli"}, {"__main__"},
)  # fmt: skip
FOLDERS = set.union(*LAYERS)


def _folder(module: str) -> str:
    part = module.split(".")[1]
    return part if part in FOLDERS else "base"


def _floor(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if _folder(module) in names)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in graph().keys() - {"packer_cli"}
        for imported in graph()[module]
        if _folder(imported) != _folder(module) and _floor(imported) >= _floor(module)
    ]
    assert wrong == []
    order = list(TopologicalSorter(graph()).static_order())  # raises CycleError, naming the cycle
    assert set(order) == set(MODULES)
    assert graph()["packer_cli.errors"] == set()


def test_nothing_but_itself_imports_what_needs_torch() -> None:
    for module, imports in graph().items():
        if not module.startswith("packer_cli.torch"):
            assert not [one for one in imports if one.startswith("packer_cli.torch")], module


def test_kernels_are_called_by_steps_and_their_slow_twins_by_nobody() -> None:
    for module, its in names().items():
        used = [name for name in its if name.startswith("packer_cli._kernels")]
        assert not used or _folder(module) not in ("options", "cli"), module
        assert not [name for name in used if "reference" in name], module


@pytest.mark.parametrize(
    ("extra", "package"), [("torch", "torch"), ("hf", "datasets"), ("energon", "torch")]
)
def test_without_an_extra_its_part_says_what_to_install(extra: str, package: str) -> None:
    code = f"""
import sys
sys.modules[{package!r}] = None
try:
    import packer_cli.{extra}
except ImportError as error:
    assert "pip install 'llm-packer[{extra}]'" in str(error), error
else:
    raise AssertionError
"""
    assert "packer_cli" in _imported_by(code)


def test_public_names_exist_and_are_documented() -> None:
    assert packer_cli.__version__.count(".") >= 1
    for name in set(packer_cli.__all__) - {"__version__"}:
        value = getattr(packer_cli, name)
        assert name in dir(packer_cli)
        assert len(inspect.getdoc(value) or "") > 40, name
        assert value.__module__.startswith("packer_cli."), name
    with pytest.raises(AttributeError, match="no attribute 'pack_everything'"):
        packer_cli.pack_everything  # noqa: B018


def test_every_module_says_what_it_is_for() -> None:
    told = {name: ast.get_docstring(tree) or "" for name, tree in trees().items()}
    assert len(told) > 80
    short = [name for name, text in told.items() if len(text) <= 20]
    assert [name for name in short if not name.endswith("__main__")] == []


def test_every_command_and_option_has_help() -> None:
    root: Any = get_command(app)
    for command in (root, *root.commands.values()):
        assert command.help
        assert command.params
        silent = [one.name for one in command.params if not getattr(one, "help", None)]
        assert [one for one in silent if one != "help"] == [], command.name
