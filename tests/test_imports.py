"""House rules: what importing costs, which way imports point, and that nothing lacks a word."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import packer_cli
from packer_cli.cli.app import app

PACKAGE = Path(packer_cli.__file__).parent
FOREIGN = {"torch", "datasets", "ray", "transformers", "megatron", "fsspec"}
HEAVY = FOREIGN | {"pyarrow", "numpy", "tokenizers", "gigatoken", "huggingface_hub"}


def _imported_by(code: str) -> set[str]:
    """Top-level modules loaded by some lines of code in a fresh interpreter."""
    code += "\nimport sys\nprint()\nprint(*{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code]
    elsewhere = sys.prefix  # where no source folder is taken for the installed package
    result = subprocess.run(
        command, cwd=elsewhere, capture_output=True, text=True, check=True, timeout=300
    )
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        pytest.param("import packer_cli", HEAVY, id="package"),
        pytest.param("import packer_cli.cli.app", HEAVY, id="command line"),
        pytest.param("from packer_cli import *", FOREIGN, id="every public name"),
        pytest.param("import packer_cli.run.pipeline", FOREIGN, id="pipeline"),
    ],
)
def test_imports_stay_light(statement: str, forbidden: set[str]) -> None:
    loaded = _imported_by(statement)
    assert "packer_cli" in loaded
    assert loaded & forbidden == set()


def test_help_needs_nothing_heavy() -> None:
    """--help must answer at once."""
    loaded = _imported_by(
        """
import os, sys
from packer_cli.cli import app as cli
sys.argv = ["packer", "pack", "--help"]
os._exit = sys.exit  # or nothing could be asked afterwards
try:
    cli.main()
except SystemExit as end:
    assert not end.code
"""
    )
    assert "typer" in loaded
    assert loaded & HEAVY == set()


def test_a_local_run_needs_no_fsspec(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    loaded = _imported_by(
        f"""
import os, sys
from packer_cli.cli import app as cli
sys.argv = ["packer", "pack", "{tmp_path}/a.jsonl", "-l", "8", "-t", "bytes", "-o", "{tmp_path}/o"]
os._exit = sys.exit
try:
    cli.main()
except SystemExit as end:
    assert not end.code
"""
    )
    assert "pyarrow" in loaded
    assert "fsspec" not in loaded


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


def _imported_names(path: Path) -> Iterator[str]:
    """Every a.b.c of `import a.b.c` and `from a.b import c`, those under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports: `a.b` or, when c is a name in it, `a.b.c`."""
    for name in _imported_names(path):
        yield from {name, name.rpartition(".")[0]} & MODULES.keys() - {"packer_cli"}


GRAPH = {name: {i for i in _imports(path) if i != name} for name, path in MODULES.items()}

# A layer imports itself and those before it. What is not named here is the base, the first.
LAYERS = (
    {"base"},
    {"options"},
    {"packing"},
    {"result"},
    {"inputs"},
    {"tokenization"},
    {"chat"},
    {"mixing"},
    {"run"},
    {"steps"},
    {"plan", "trace"},
    {
        "reports",
        "verify",
        "export",
        "torch",
        "hf",
        "energon",
        "tokenizer_check",
    },
    {"cli"},
    {"__main__"},
)
FOLDERS = set.union(*LAYERS)


def _folder(module: str) -> str:
    part = module.split(".")[1]
    return part if part in FOLDERS else "base"


def _floor(module: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if _folder(module) in names)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in GRAPH.keys() - {"packer_cli"}
        for imported in GRAPH[module]
        if _folder(imported) != _folder(module) and _floor(imported) >= _floor(module)
    ]
    assert wrong == []


def test_the_import_graph_has_no_cycle() -> None:
    order = list(TopologicalSorter(GRAPH).static_order())  # raises CycleError, naming the cycle
    assert set(order) == set(MODULES)


def test_errors_stand_alone() -> None:
    assert GRAPH["packer_cli.errors"] == set()


def _importers(name: str) -> set[str]:
    return {module for module, imports in GRAPH.items() if name in imports}


def test_nothing_but_itself_imports_what_needs_torch() -> None:
    for module in MODULES:
        if module.startswith("packer_cli.torch"):
            assert all(one.startswith("packer_cli.torch") for one in _importers(module)), module


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


def test_kernels_are_called_by_steps_and_their_slow_twins_by_nobody() -> None:
    users = {
        name: [used for used in _imported_names(path) if used.startswith("packer_cli._kernels")]
        for name, path in MODULES.items()
    }
    for name, used in users.items():
        assert not used or _folder(name) not in ("base", "options", "cli"), name
    assert not [name for name, used in users.items() if "reference" in "".join(used)]


@pytest.mark.parametrize("name", packer_cli.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    value = getattr(packer_cli, name)
    assert name in dir(packer_cli)
    if name == "__version__":
        assert value.count(".") >= 1
        return
    assert len(inspect.getdoc(value) or "") > 40
    assert value.__module__.startswith("packer_cli.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pack_everything'"):
        packer_cli.pack_everything  # noqa: B018


def test_every_module_says_what_it_is_for() -> None:
    docstrings = {
        name: ast.get_docstring(ast.parse(path.read_text()))
        for name, path in MODULES.items()
        if not name.endswith("__main__")
    }
    assert len(docstrings) > 100
    assert [name for name, docstring in docstrings.items() if len(docstring or "") <= 20] == []


def _commands() -> dict[str, Any]:
    root = get_command(app)
    return {"packer": root, **getattr(root, "commands", {})}


@pytest.mark.parametrize("name", _commands())
def test_every_command_and_option_has_help(name: str) -> None:
    command = _commands()[name]
    assert command.help
    silent = [one.name for one in command.params if not getattr(one, "help", None)]
    assert [one for one in silent if one != "help"] == []
    assert len(command.params) > 0
