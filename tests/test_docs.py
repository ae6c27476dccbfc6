"""The documents say what is true: their commands run, their code prints what they show."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path

import pytest
import tiny_tokenizers as tiny
from chats import marked_pieces, run
from support import jsonl, packer, recover_texts
from test_imports import LAYERS, MODULES, PACKAGE

from packer_cli.config import recipe_keys
from packer_cli.config.columns import COLUMNS, PADDED_BOUNDARIES
from packer_cli.config.documents import DocumentConfig
from packer_cli.config.formats import COMPRESSIONS, DOCUMENT_SUFFIXES, SUFFIXES
from packer_cli.config.formats import FORMATS as FILES
from packer_cli.config.option import options_of
from packer_cli.config.options import PackConfig
from packer_cli.config.recipe_keys import keys_of
from packer_cli.config.shapes import KINDS
from packer_cli.config.strategies import ALIASES
from packer_cli.export import FORMATS
from packer_cli.result.manifest import TOTALS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
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


@pytest.fixture
def project(folder: Path) -> Path:
    """The current directory of a reader of README, with sample_data."""
    shutil.copytree(ROOT / "sample_data", folder / "sample_data")
    return folder


def prepare_recipes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the recipes name: data/, chats/, and my-model with a chat template."""
    (folder / "data").mkdir()
    (folder / "data" / "a.jsonl").write_bytes(jsonl(*(f"document {n} " * n for n in range(400))))
    (folder / "chats").mkdir()
    shutil.copy(ROOT / "sample_data" / "chat.jsonl", folder / "chats")
    template = (ROOT / "sample_data" / "chat.jinja").read_text()
    settings = {"eos_token": tiny.EOS, "chat_template": template}
    tiny.save(folder / "my-model", tiny.byte_level(), tokenizer_config=settings)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")


def test_the_commands_of_readme_run_as_written(project: Path) -> None:
    commands = re.findall(
        r"^    packer ((?:pack|stats) (?:sample_data|documents)\S*.*)$", README, re.M
    )
    assert len(commands) >= 3
    for command in commands:
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)
        assert "utilization" in result.stdout


def test_the_commands_on_long_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_recipes(folder, monkeypatch)
    page = (ROOT / "docs" / "runs.md").read_text()
    for text in (page, README):
        commands = re.findall(r"^    packer (pack data/ [^#\n]*)", text, re.M)
        assert len(commands) > 3
        for command in commands:
            if "--engine ray" in command:  # in tests/extras
                continue
            if "--update" not in command:
                shutil.rmtree("out", ignore_errors=True)
            result = packer(*command.split())
            assert result.exit_code == 0, (command, result.stderr)


@pytest.mark.parametrize("recipe", ["### Chat", "### CI", "### Several lengths"])
def test_the_recipes_of_readme(folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    prepare_recipes(folder, monkeypatch)
    section = README.split(f"\n{recipe}\n")[1].split("\n### ")[0]
    commands = re.findall(r"^    packer (.*)$", section, re.M)
    assert len(commands) == 3
    for command in commands:
        if "--check" in command:  # needs transformers
            continue
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)


def test_the_command_of_every_night_keeps_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_recipes(folder, monkeypatch)
    page = (ROOT / "docs" / "runs.md").read_text()
    for text in (page, README):
        (command,) = re.findall(r"^    packer (pack new/[^#\n]* --add[^#\n]*)", text, re.M)
        shutil.rmtree("out", ignore_errors=True)
        (folder / "new").mkdir(exist_ok=True)
        for name, content in (("2024-01-01", ["one", "two"]), ("2024-01-02", ["three"])):
            (folder / "new" / f"{name}.jsonl").write_bytes(jsonl(*content))
            night = command.replace("2024-01-02", name).split()
            assert packer(*night, "-t", "bytes").exit_code == 0
            (folder / "new" / f"{name}.jsonl").unlink()
        assert sorted(recover_texts("out")) == ["one", "three", "two"]


def test_the_figures_that_readme_shows(project: Path) -> None:
    assert packer("pack", "sample_data/documents.jsonl", "--max-length", "1024").exit_code == 0
    printed = textwrap.indent(packer("stats", "documents-packed-1024").stdout, "    ")
    shown = README.split("without them at its end:\n\n")[1].split("\n\n`packer show")[0]
    assert printed.startswith(shown), printed


def test_the_row_that_readme_shows(project: Path) -> None:
    assert packer("pack", "sample_data/documents.jsonl", "--max-length", "1024").exit_code == 0
    shown = README.split("`packer show documents-packed-1024 97` prints:\n\n")[1]
    result = packer("show", "documents-packed-1024", 97)
    printed = textwrap.indent(result.stdout, "    ")
    assert shown.startswith(printed), printed


def test_the_step_that_the_page_on_looking_shows(project: Path) -> None:
    assert packer("pack", "sample_data/documents.jsonl", "--max-length", "1024").exit_code == 0
    page = (ROOT / "docs" / "inspect.md").read_text()
    command, shown = re.findall(r"^`packer (trace .*)` prints:\n\n(.*)", page, re.M | re.S)[0]
    printed = textwrap.indent(packer(*command.split()).stdout, "    ")
    assert shown.startswith(printed), printed
    section = page.split("\n## packer trace\n")[1].split("\n## ")[0]
    options = set(re.findall(r"--[a-z][a-z-]+", section))
    help_text = packer("trace", "--help").stdout
    assert len(options) > 15
    assert [option for option in options if f"  {option} " not in help_text] == []


def test_the_conversation_that_readme_shows(project: Path) -> None:
    pack, show = re.findall(
        r"^    packer ((?:pack|show) \S*chat[.-]\S* .*(?:jinja|segment 1))$", README, re.M
    )
    assert packer(*pack.split()).exit_code == 0
    shown = README.split("or, where there is no color, in brackets:\n\n")[1]
    printed = textwrap.indent(packer(*show.split()).stdout, "    ")
    assert shown.startswith(printed), printed


def test_the_python_of_readme_prints_what_it_shows(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert packer("pack", "sample_data/documents.jsonl", "--max-length", "1024").exit_code == 0
    section = README.split("## From Python")[1]
    code = re.findall(r"```python\n(.*?)```", section, re.S)[0]
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    shown = re.findall(r"^print\(.*?\)  # (.*)$", code, re.M)
    printed = capsys.readouterr().out.splitlines()
    assert len(shown) == 4
    assert printed == [*shown, "193 rows of 1024"]


def test_the_page_on_python_prints_what_it_shows(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What needs no extra; tests/extras run the rest."""
    assert packer("pack", "sample_data/documents.jsonl", "--max-length", "1024").exit_code == 0
    assert packer("tokenize", "sample_data/documents.jsonl", "-o", "tokens").exit_code == 0
    view = ("--max-length", "1024", "--view", "-o", "view")
    assert packer("pack", "tokens", *view).exit_code == 0
    Path("moved").mkdir()
    shutil.move("tokens", "moved")
    page = (ROOT / "docs" / "python.md").read_text().split("## PyTorch")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102
    shown = [
        line for block in blocks for line in re.findall(r"^print\(.*?\)  # (.*)$", block, re.M)
    ]
    assert len(shown) == 15
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in shown] == shown


def _messages() -> str:
    """Every text in the package, with … for what is put into it."""
    texts = []
    for path in (ROOT / "packer_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                )
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_messages_in_troubleshooting_are_those_of_packer() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `([^`]*)`", page, re.M)
    assert len(headings) > 10
    messages = _messages()
    for heading in headings:
        for part in heading.split("…"):
            assert part.strip() in messages, heading


def test_the_commands_of_the_page_on_exports_run_as_written(project: Path) -> None:
    commands = re.findall(r"^    packer (.*)$", EXPORT, re.M)
    for command in commands:
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)
    trainers = (ROOT / "docs" / "trainers").glob("*.md")
    everywhere = EXPORT + "".join(page.read_text() for page in trainers)
    assert set(re.findall(r"^    packer export \S+ --to (\S+)", everywhere, re.M)) == set(FORMATS)
    rows = re.findall(r"^\| `([a-z][a-z-]+)` \|", EXPORT, re.M)
    assert rows == list(FORMATS)


def shown_as_run(section: str, name: str) -> list[str]:
    """What `packer pack` says of the section's NAME.jsonl and NAME.jinja, each time; what `packer
    show` prints must be in the section.
    """
    for kind, ending in (("jinja", "jinja"), ("json", "jsonl")):
        (content,) = re.findall(rf"```{kind}\n(.*?)```", section, re.S)
        Path(f"{name}.{ending}").write_text(content)
    commands = re.findall(r"^    packer (.*)$", section, re.M)
    assert [command.split()[0] for command in commands] == ["pack", "show"] * 2
    said = []
    for command in commands:
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)
        if command.startswith("show"):
            printed = textwrap.indent(result.stdout, "    ")
            assert f"    packer {command}\n\n{printed}" in section, printed
        else:
            said.append(result.stderr)
    return said


def test_the_thoughts_that_the_page_on_supervised_data_shows(folder: Path) -> None:
    section = SUPERVISED.split("### Arguments\n")[1].split("\n### ")[0]
    for notes in shown_as_run(section, "thinking"):
        assert "does not show: reasoning (1 turn, 9 tokens)" in notes


def test_the_turns_that_the_page_on_supervised_data_shows(folder: Path) -> None:
    section = SUPERVISED.split("## Every turn as it is asked for\n")[1].split("\n## ")[0]
    shown_as_run(section, "turns")


def test_the_pair_that_the_page_on_preference_shows(folder: Path) -> None:
    page = (ROOT / "docs" / "preference.md").read_text().split("\n## ")[0]
    Path("pairs.jsonl").write_text(re.findall(r"```json\n(.*?)```", page, re.S)[0])
    pack, show = re.findall(r"^    packer (.*)$", page, re.M)
    assert packer(*pack.split()).exit_code == 0
    printed = textwrap.indent(packer(*show.split()).stdout, "    ")
    assert f"    packer {show}\n\n{printed}" in page, printed


def test_the_page_on_plans(project: Path) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    shutil.copy("sample_data/documents.jsonl", "data.jsonl")
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    Path("mix.toml").write_text(recipe)
    commands = re.findall(r"^    packer (.*)$", page, re.M)
    assert len(commands) > 8
    for command in commands:
        if "--html" in command and not (PACKAGE / "page").exists():
            continue
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)
        if command.startswith("plan mix.toml") and "--json" not in command:
            sources = "sources" + result.stdout.split("sources", 1)[1]
            assert "--max-length" in command or textwrap.indent(sources, "    ") in page
    first = textwrap.indent(packer(*commands[0].split()).stdout, "    ")
    assert first in page, first


def test_the_page_on_tokenized_directories(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: later commands use what earlier ones have written, and print what is shown."""
    prepare_recipes(project, monkeypatch)
    page = (ROOT / "docs" / "tokenized.md").read_text()
    commands = re.findall(r"^    packer ([^#\n]*)", page, re.M)
    assert len(commands) > 20
    printed = []
    for command in commands:
        if "--tokens" in command:
            (project / "moved").mkdir()
            shutil.move("tokens", "moved")
        result = packer(*command.split())
        assert result.exit_code == 0, (command, result.stderr)
        printed.append(textwrap.indent(result.stdout, "    "))
        if "--tokens" in command:
            shutil.move("moved/tokens", ".")
    outputs = re.findall(r"    [\w-]+\n    made from.*\n(?:    .*\n|\n(?=    ))+", page)
    assert len(outputs) == 3
    for output in outputs:
        assert output in printed, output


def test_the_page_on_recipes(project: Path) -> None:
    """Its recipes are files by their first line; its commands run in order."""
    page = (ROOT / "docs" / "recipes.md").read_text()
    recipes = re.findall(r"^```toml\n# (\S+\.toml)\n(.*?)^```", page, re.M | re.S)
    for name, text in recipes:
        (project / name).write_text(text)
    assert len(recipes) == page.count("```toml\n") == 4
    commands = re.findall(r"^    packer (.*)$", page, re.M)
    assert len(commands) > 10
    for command in commands:
        result = packer(*command.split(), *(["-q"] if command.startswith("pack ") else []))
        assert result.exit_code == 0, (command, result.stderr)
    shares = json.loads(Path("weights/manifest.json").read_text())
    of_chat, all_tokens = (
        sum(one["tokens"] for one in shares["inputs"] if part in one["path"])
        for part in ("chat", "")
    )
    assert abs(of_chat / all_tokens - 0.25) < 0.001


def test_every_key_of_recipes_is_on_their_page() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text().split("## All keys")[1]
    tables = [re.findall(r"^\| `(\w+)` \|", part, re.M) for part in page.split("\n\n| key |")[1:]]
    top, source = keys_of(*recipe_keys.TOP), keys_of(*recipe_keys.SOURCE)
    of_all, of_top = (
        re.findall(r"`(\w+)`", re.findall(rf"^\| {where} \| (.*) \|$", page, re.M)[0])
        for where in ("top and sources", "top only")
    )
    own = keys_of(recipe_keys.Inputs, recipe_keys.MixtureKeys)
    assert [set(table) for table in tables] == [
        own.keys(),
        keys_of(recipe_keys.SourceKeys).keys(),
        keys_of(*recipe_keys.VALIDATION).keys(),
        keys_of(*recipe_keys.STAGE).keys(),
    ]
    assert set(of_all) == source.keys() - keys_of(recipe_keys.SourceKeys).keys()
    assert set(of_top) == top.keys() - own.keys() - set(of_all)


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
    documents = {
        option.name(name).split("/")[0] for name, option in options_of(DocumentConfig).items()
    }
    rows = {option.name(name).split("/")[0] for name, option in options_of(PackConfig).items()}
    running = {"--unit-bytes", "--shard-bytes"}
    assert early == (documents - running) | {"--tokenizer", "--text-field"}
    assert late == (rows - documents) | {"--position-ids"}


def test_the_options_that_readme_names_exist() -> None:
    help_text = "".join(
        packer(name, "--help").stdout for name in ("pack", "stats", "show", "verify", "finalize")
    )
    options = set(re.findall(r"`(--[a-z-]+)", README))
    assert len(options) > 10
    assert [option for option in options if option not in help_text] == []


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
        if name in COLUMNS[:5]:
            assert f"| `{name}` |" in README, name


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
    beside = {ending for one in FILES.values() for ending in one.beside}
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
    assert set(figures.PAGES) == {"README.md", "docs/benchmarks.md"}
    for page in figures.PAGES:
        text = (ROOT / page).read_text()
        assert text.count(figures.BEGIN) == 1
        assert figures.updated(page, text, results) == text


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
    assert len(EXAMPLES) > 30
    section = SUPERVISED.split("## Examples")[1].split("## Chat templates")[0]
    shapes = [list(kind.required) for kind in KINDS.values()]
    for required in shapes:
        assert any(all(f'{{"{name}"' in one or f', "{name}"' in one
                       for name, *_ in required) for one, _, _ in EXAMPLES), required  # fmt: skip
    for option in ("shape", "field", "train-on", "prompt-template", "keep-untrained", "overlong",
                   "truncate-side", "force-split", "no-eos", "separator"):  # fmt: skip
        assert f"--{option}" in section, option
    for name, kind in KINDS.items():
        row = next(line for line in SUPERVISED.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{field}`" in row for names in kind.required for field in names), name


def test_the_options_that_the_page_on_supervised_data_names_exist() -> None:
    help_text = packer("pack", "--help").stdout
    named = set(re.findall(r"--[a-z][a-z-]+", SUPERVISED)) - {"--no-eos"}
    assert [option for option in named if option not in help_text] == []


def test_every_path_that_a_page_names_exists() -> None:
    assert len(TREE) > 40
    assert [path for path in TREE if not (ROOT / path).exists()] == []
    path = r"`((?:packer_cli|_kernels|tests|benchmarks|docs|sample_data)/[\w/.-]*)`"
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            named = re.findall(path, page.read_text())
            assert [name for name in named if not (ROOT / name).exists()] == [], page.name


def test_every_folder_and_what_stands_beside_them_has_a_line_in_contributing() -> None:
    folders = {f"packer_cli/{name.split('.')[1]}/" for name in MODULES if name.count(".") > 1}
    assert folders | {"_kernels/", "benchmarks/", "docs/", "tests/"} <= set(TREE)
    beside = {f"packer_cli/{name}.py" for name in LAYERS[-3] if (PACKAGE / f"{name}.py").exists()}
    assert beside <= set(TREE)


def test_the_layers_in_contributing_are_those_of_the_imports() -> None:
    section = CONTRIBUTING.split("## Layers")[1].split("\n## ")[0]
    lines = re.findall(r"^\d+\. (.*)$", section, re.M)
    shown = [set(re.findall(r"`(\w+)`", line)) for line in lines[1:]]
    assert shown == [layer for layer in LAYERS[1:] if layer != {"__main__"}]
