"""The tokenizer and the chat template of a run, before anything is loaded.

They are part of a run's identity: `choose_encoding` finds them for whoever begins the run, and
`chosen_for` for whoever joins it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from packer_cli.config.documents import DocumentConfig
from packer_cli.config.shape_rules import by_file_shape, trained_on
from packer_cli.config.shapes import Shape, prompts_described
from packer_cli.errors import UsageError
from packer_cli.records import Notify
from packer_cli.result.layout import TEMPLATE, TOKENIZER, TOOL_TEMPLATE
from packer_cli.run.identity import Run
from packer_cli.run.source import uses_template
from packer_cli.tokenization.fill_in_middle import fill_in_middle
from packer_cli.tokenization.locate import BYTES, TokenizerFiles, choose, locate
from packer_cli.tokenization.rebuilt import rebuilt_otherwise

if TYPE_CHECKING:
    from packer_cli.supervised.templates import TemplateChoice

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True)
class Chosen:
    """The tokenizer and the template of a run, before anything is loaded.

    name      of the tokenizer; None where none is needed
    files     of the tokenizer; None for the built-in one
    template  the chat template, where one is used
    copies, copied_hashes  of the side files, by name, where they were chosen before
    """

    name: str | None
    files: TokenizerFiles | None = None
    template: TemplateChoice | None = None
    copies: dict[str, bytes] = field(default_factory=dict, repr=False)
    copied_hashes: dict[str, str] = field(default_factory=dict)

    @property
    def side_files(self) -> dict[str, bytes]:
        """The files that a result keeps of them, so that it explains itself."""
        contents = dict(self.copies)
        if self.files is not None:
            contents = {TOKENIZER: self.files.json, **self.files.companions}
        if self.template is not None:
            contents[TEMPLATE] = self.template.source.encode()
            contents.pop(TOOL_TEMPLATE, None)
            if self.template.tool_use is not None:
                contents[TOOL_TEMPLATE] = self.template.tool_use.encode()
        return contents

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The sha256 of each side file; that of tokenizer.json, megabytes, is known already."""
        known = self.copied_hashes if self.files is None else {TOKENIZER: self.files.sha256}
        return {
            name: known.get(name) or hashlib.sha256(content).hexdigest()
            for name, content in self.side_files.items()
        }

    def arguments_read(self) -> list[str]:
        """The arguments that its templates read."""
        from packer_cli.supervised.arguments import arguments_of  # noqa: PLC0415 jinja2 is slow
        from packer_cli.supervised.templates import special_tokens  # noqa: PLC0415

        sources = self.template.sources if self.template else []
        return arguments_of(sources, special_tokens(self.files))


def choose_encoding(
    shape: Shape, config: DocumentConfig, tokenizer: str | None, notify: Notify, warn: Notify
) -> Chosen:
    """What `tokenizer` and the options name. `notify` hears what was chosen, `warn` what was most
    likely not meant. Raises UsageError.
    """
    chosen, origin = choose(tokenizer)
    if shape.kind == "tokens" and origin == "default":
        notify("input_ids found: no tokenizer needed; padding is id 0")
        return Chosen(None)
    if chosen == BYTES and origin == "default":
        warn(
            "warning: no --tokenizer given: using the built-in bytes tokenizer (UTF-8 bytes as ids)"
        )
    files = None if chosen == BYTES else locate(chosen)
    for end in config.turn_end:
        if files is not None and files.added_tokens and end not in files.added_tokens:
            warn(
                f"warning: --turn-end: {end!r} is not a token of its own, but text for tokenizer "
                f"{chosen}"
            )
    fill_in_middle(config, files)  # raises before the work what it would raise within it
    if files is not None and (warning := rebuilt_otherwise(files)):
        notify(f"warning: {warning}; see packer tokenizer --check")
    if not shape.is_supervised:
        return Chosen(chosen, files)
    from packer_cli.supervised.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    if not shape.members:  # else said already, with the files
        notify(f"records: {shape.described()}")
    if prompts := prompts_described(shape, config.prompt_template):
        notify(f"{prompts}; see --prompt-template")
    renders = any(uses_template(*own) for own in by_file_shape(config, shape).values())
    if renders and template is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if renders and template:
        _check_arguments(config, template, files)
        how = "its {% generation %} tags" if _GENERATION.search(template.source) else "its turns"
        trained = trained_on(config, shape)
        told = "" if trained == "all" else f", told by {how}"
        notify(f"chat template: {template.origin}; trained on: {trained}{told}")
    return Chosen(chosen, files, template)


def _check_arguments(
    config: DocumentConfig, template: TemplateChoice, files: TokenizerFiles | None
) -> None:
    """UsageError for arguments that the templates do not read."""
    if not config.template_args:
        return
    from packer_cli.supervised.arguments import check_arguments  # noqa: PLC0415 jinja2 is slow
    from packer_cli.supervised.templates import special_tokens  # noqa: PLC0415

    check_arguments(config.arguments, template.sources, special_tokens(files))


def chosen_for(run: Run, work: Path) -> Chosen:
    """What a run has chosen, from what the run's work folder keeps."""
    from packer_cli.supervised.templates import TemplateChoice  # noqa: PLC0415

    files, template = None, None
    if run.tokenizer not in (None, BYTES):
        files = replace(locate(str(work)), source=run.tokenizer or "")
    if TEMPLATE in run.side_files:
        kept = [
            (work / name).read_text(encoding="utf-8") if name in run.side_files else None
            for name in (TEMPLATE, TOOL_TEMPLATE)
        ]
        template = TemplateChoice(kept[0] or "", TEMPLATE, kept[1])
    return Chosen(run.tokenizer, files, template)
