"""The documents say what is true: their commands run, their code prints what they show."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path

import docs_runner
import pytest
from chats import marked_pieces, run
from support import packer
from test_imports import LAYERS, MODULES, PACKAGE, trees

from packer_cli.export import FORMATS
from packer_cli.options import recipe
from packer_cli.options.documents import DocumentConfig
from packer_cli.options.formats import COMPRESSIONS, DOCUMENT_SUFFIXES, SUFFIXES
from packer_cli.options.formats import FORMATS as FILES
from packer_cli.options.option import options_of
from packer_cli.options.options import (
    ALIASES,
    COLUMNS,
    PADDED_BOUNDARIES,
    Amount,
    Mixture,
    PackConfig,
)
from packer_cli.options.shapes import KINDS
from packer_cli.result.manifest import TOTALS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
# what coding agents read, from where it is in site-packages
SKILL = "packer_cli/.agents/skills/packer/SKILL.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / SKILL]
EXPORT = (ROOT / "docs" / "export.md").read_text()
SUPERVISED = (ROOT / "docs" / "supervised.md").read_text()
# the paths of its tree
TREE = [path for path, _ in re.findall(r"^    ([\w/.]+[/\w]) {2,}(.*)$", CONTRIBUTING, re.M)]
# (record, options, document) of the page's examples, each cell as it is written there
EXAMPLES = [
    [cell.strip() for cell in line.strip("|").split(" |")]
    for line in SUPERVISED.splitlines()
    if line.startswith("| `{")
]


NEEDS_EXTRAS = ("import datasets", "from datasets", "torch", "packer_cli.hf")
# (page, what it begins with, parts of what is not run here); tests/extras run what needs extras
RUN = [
    (
        "README.md",
        "## Install",
        ("DIR", "--check", "--engine ray", "--add", "s3://", "INPUT", "mix.toml"),
    ),
    ("docs/runs.md", "", ("--engine ray", "--add")),
    ("docs/tokenized.md", "", ("--tokens moved",)),
    ("docs/recipes.md", "", ()),
    ("docs/packing.md", "", ()),
    ("docs/plan.md", "", ()),
    ("docs/export.md", "", ()),
    ("docs/inspect.md", "What was in the step", ("DIR",)),
    ("docs/supervised.md", "### Arguments", ()),
    ("docs/python.md", "", ()),
    ("docs/audit.md", "", ()),
    ("docs/inputs.md", "## Filters", ("src/",)),
    (SKILL, "", ()),
]


@pytest.fixture
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a reader of the pages is, with all that they name."""
    docs_runner.prepare(monkeypatch)


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("name", "begin", "skip"), RUN, ids=[name for name, *_ in RUN])
def test_a_page_runs_as_written(name: str, begin: str, skip: tuple[str, ...]) -> None:
    if name == "docs/inspect.md":
        packer("pack", "sample_data/documents.jsonl", "--max-length", 1024)
    docs_runner.run(docs_runner.page(name, begin), skip + NEEDS_EXTRAS, anew=("out", "mixed"))


def _named_options(text: str) -> set[str]:
    return set(re.findall(r"`?(--[a-z][a-z-]+)", text))


# text, the commands whose options it names, and others that it may name
OPTIONS_OF = [
    (SUPERVISED, "pack", ("--no-eos", "--check")),
    ("\n".join(re.findall("`--[^`]*`", README)), "pack stats show verify", ()),
    ((ROOT / SKILL).read_text(), "pack tokenize export show plan stats", ()),
]


@pytest.mark.parametrize(("text", "commands", "others"), OPTIONS_OF, ids=["pack", "all", "skill"])
def test_the_options_that_a_page_names_exist(
    text: str, commands: str, others: tuple[str, ...]
) -> None:
    help_text = "".join(packer(name, "--help").stdout for name in commands.split())
    named = _named_options(text)
    assert len(named) > 10
    assert [one for one in named.difference(others) if one not in help_text] == []


def _messages() -> str:
    """Every text in the package, with … for what is put into it."""
    texts = []
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return "\n".join(texts)


def test_the_messages_in_troubleshooting_are_those_of_packer() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]*)` ", page, re.M)
    assert len(quoted) > 10
    messages = _messages()
    for message in quoted:
        for part in message.split("…"):
            assert part.strip() in messages, message


def test_every_export_format_has_a_row_and_a_command() -> None:
    trainers = (ROOT / "docs" / "trainers").glob("*.md")
    everywhere = EXPORT + "".join(page.read_text() for page in trainers)
    assert set(re.findall(r"^    packer export \S+ --to (\S+)", everywhere, re.M)) == set(FORMATS)
    rows = re.findall(r"^\| `([a-z][a-z-]+)` \|", EXPORT, re.M)
    assert rows == list(FORMATS)


def test_the_skill_is_what_agents_look_for() -> None:
    """Tools find it by its place in a package, and by its name, which is that of its folder."""
    place, text = Path(SKILL), (ROOT / SKILL).read_text()
    (name, description) = re.findall(r"^(?:name|description): (.*)$", text.split("---")[1], re.M)
    assert text.startswith("---\n")
    assert name == place.parent.name
    assert 100 < len(description) <= 1024
    assert ": " not in description  # YAML
    assert len(text.splitlines()) <= 150
    assert f'"{place.relative_to("packer_cli")}"' in (ROOT / "pyproject.toml").read_text()
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 30
    figures = text.split("## What to read")[1].split("\n\n")[1]
    named = set(re.findall(r"`(\w+_\w+)`", figures))
    assert len(named) >= 5
    assert named <= set(TOTALS)


def test_every_key_of_recipes_is_on_their_page() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text()
    beginning, *of_sources = page.split("```")[1].split("[[source]]")
    of_sources[-1], of_validation = of_sources[-1].split("[validation]")
    in_example = [
        {*re.findall(r"^(?:# )?(\w+) = ", text, re.M)}
        for text in (beginning, "".join(of_sources), of_validation)
    ]
    top, source = recipe.keys_of(*recipe.TOP), recipe.keys_of(*recipe.SOURCE)
    of_all, of_top = (
        re.findall(r"`(\w+)`", re.findall(rf"^\| {where} \| (.*) \|$", page, re.M)[0])
        for where in ("top and sources", "top only")
    )
    own = recipe.keys_of(recipe.RecipeKeys, Mixture)
    amounts = recipe.keys_of(recipe.SourceKeys, Amount).keys() - {"text_field"}
    keys = own.keys() - {"inputs"}, amounts, recipe.keys_of(*recipe.VALIDATION).keys()
    assert [its - found for its, found in zip(keys, in_example, strict=True)] == [set()] * 3
    assert set(of_all) == source.keys() - amounts
    assert set(of_top) == top.keys() - own.keys() - set(of_all)
    of_tiers = page.split("\n## Tiers\n")[1].split("\n## ")[0]
    assert recipe.keys_of(*recipe.TIER).keys() <= {*re.findall(r"`(\w+)", of_tiers)}


def test_every_command_has_a_line_in_readme() -> None:
    section = README.split("\n## Commands\n")[1].split("\n## ")[0]
    shown = re.findall(r"^\| `packer ([a-z]+)` \|", section, re.M)
    commands = packer("--help").stdout.split("Commands:")[1]
    assert sorted(shown) == sorted(re.findall(r"^  ([a-z]+) ", commands, re.M))


def test_every_option_has_its_command_on_the_page_on_tokenized_directories() -> None:
    page = (ROOT / "docs" / "tokenized.md").read_text()
    early, late = (
        set(re.findall("`(--[a-z-]+)`", re.findall(rf"^\| `packer {name}` \|.*$", page, re.M)[0]))
        for name in ("tokenize", "pack")
    )
    documents = {option.flag for option in options_of(DocumentConfig).values()}
    rows = {option.flag for option in options_of(PackConfig).values()}
    running = {"--unit-bytes", "--shard-bytes"}
    assert early == (documents - running) | {"--tokenizer", "--text-field"}
    assert late == rows - documents


def test_every_strategy_column_and_total_is_documented() -> None:
    packing = (ROOT / "docs" / "packing.md").read_text()
    layout = (ROOT / "docs" / "format.md").read_text()
    for name, aliases in ALIASES.items():
        row = next(line for line in packing.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(alias in row for alias in aliases), name
    for name in (
        *COLUMNS,
        PADDED_BOUNDARIES,
        *TOTALS,
        "rows",
        "padding_tokens",
        "utilization",
        "lower_bound_rows",
    ):
        assert f"`{name}`" in layout, name


def test_links_between_documents_lead_somewhere() -> None:
    for path in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", path.read_text()):
            if target.startswith("http"):
                continue
            page = path.parent / target if target else path
            assert page.exists(), (path.name, target)
            assert not anchor or anchor in _anchors(page), (path.name, target, anchor)


def _anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def test_the_page_of_inputs_names_every_ending() -> None:
    page = (ROOT / "docs" / "inputs.md").read_text()
    named = set(re.findall(r"(?<![\w/*])\.[a-z0-9]+(?:\.[a-z]+)?\b", page))
    beside = {one.beside for one in FILES.values()}
    endings = {*SUFFIXES, *DOCUMENT_SUFFIXES, *COMPRESSIONS}
    assert endings <= named
    assert named - endings - beside - {".zst", ".data"} == set()


def test_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", README))
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} == linked


def test_the_figures_are_those_of_the_result_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("readme")
    results = json.loads((ROOT / "benchmarks" / "results" / "latest.json").read_text())
    text = figures.PAGE.read_text()
    assert text.count(figures.BEGIN) == 1
    assert figures.updated(text, results) == text
    rows = [row for answer in results["answers"] for row in answer["rows"]]
    assert set(figures.FLOORS) <= {row["what"] for row in rows}


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_supervised_data(folder: Path, number: int) -> None:
    record, options, document = EXAMPLES[number]
    template = re.findall(r"```jinja\n(.*?)```", SUPERVISED, re.S)[0]
    arguments = shlex.split(options.strip("`").replace("--max-length", "-l"))
    length = [] if "-l" in arguments else ["-l", 512]
    result = run([json.loads(record.strip("`"))], *length, *arguments, template=template)
    if document == "dropped":
        assert "nothing to pack: 0 empty, 1 dropped" in result.stderr
        return
    assert result.exit_code == 0, result.stderr
    shown = [piece.replace("\\n", "\n") for piece in re.findall("`(.*?)`", document)]
    pieces = marked_pieces("out")
    for text, piece in zip(pieces, shown, strict=True):
        begin, *rest = piece.split(" … ")
        assert text.startswith(begin)
        assert text.endswith(rest[0]) if rest else text == begin


def test_the_examples_of_supervised_data_have_every_shape_and_option() -> None:
    assert len(EXAMPLES) > 25
    section = SUPERVISED.split("## Examples")[1].split("## Chat templates")[0]
    shapes = [list(kind.required) for kind in KINDS.values()]
    for required in shapes:
        assert any(all(f'{{"{name}"' in one or f', "{name}"' in one
                       for name, *_ in required) for one, _, _ in EXAMPLES), required  # fmt: skip
    for option in ("shape", "field", "train-on", "prompt-template", "overlong",
                   "truncate-side", "no-eos"):  # fmt: skip
        assert f"--{option}" in section, option
    for name, kind in KINDS.items():
        row = next(line for line in SUPERVISED.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{field}`" in row for names in kind.required for field in names), name


def test_every_path_that_a_page_names_exists() -> None:
    assert 20 < len(TREE) <= 40  # a screen
    assert [path for path in TREE if not (ROOT / path).exists()] == []
    path = r"`((?:packer_cli|_kernels|tests|benchmarks|docs|sample_data)/[\w/.-]*)`"
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            named = re.findall(path, page.read_text())
            assert [name for name in named if not (ROOT / name).exists()] == [], page.name


def test_the_way_of_a_record_names_functions_of_its_modules() -> None:
    section = CONTRIBUTING.split("## The way of one record")[1].split("\n## ")[0]
    steps = re.findall(r"^\| `([\w/]+)\.py` \| `([\w.]+)` \|", section, re.M)
    assert len(steps) == 10
    for module, name in steps:
        body: list[ast.stmt] = trees()[module.replace("/", ".")].body
        for part in name.split("."):
            found = [one for one in body if getattr(one, "name", None) == part]
            assert found, (module, name)
            body = getattr(found[0], "body", [])


def test_contributing_names_at_most_two_files_of_code_for_an_addition() -> None:
    section = CONTRIBUTING.split("## To add something")[1].split("\n### ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| a")]
    assert len(rows) > 10
    files = [(row[0], re.findall(r"`((?:packer_cli|_kernels)/[\w/.]+)`", row[1])) for row in rows]
    assert [row for row in files if len(row[1]) > 2] == []


def test_contributing_has_the_tree_and_the_layers_of_the_imports() -> None:
    folders = {f"packer_cli/{name.split('.')[1]}/" for name in MODULES if name.count(".") > 1}
    assert folders | {"_kernels/", "benchmarks/", "docs/", "tests/"} <= set(TREE)
    beside = {f"packer_cli/{name}.py" for name in LAYERS[-3] if (PACKAGE / f"{name}.py").exists()}
    assert beside <= set(TREE)
    section = CONTRIBUTING.split("## Layers")[1].split("\n## ")[0]
    lines = re.findall(r"^\d+\. (.*)$", section, re.M)
    shown = [set(re.findall(r"`(\w+)`", line)) for line in lines[1:]]
    assert shown == [layer for layer in LAYERS[1:] if layer != {"__main__"}]
