"""From a run's slices to tokens: what makes them is chosen first, then loaded.

    choose_encoding(shape, config, ...) -> Chosen      the tokenizer and the template, not loaded
    prepare(run, ...)                   -> Source      loaded, with the reader

What was chosen is part of a run's identity. Documents of tokenized directories are tokens already:
there, the tokenizer's copies and figures are enough, and nothing is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, structs

from packer_cli.chat.limits import LimitedComposer
from packer_cli.chat.messages import RefusedError
from packer_cli.errors import DamagedInputError, UsageError, os_errors
from packer_cli.inputs.byte_streams import STDIN, peeking
from packer_cli.inputs.formats import beginning, reader_for
from packer_cli.inputs.tokenized import TokenizedInputs, opened, shape_of
from packer_cli.mixing.units import choice_of
from packer_cli.options.documents import OF_ROWS_TOO, DocumentConfig
from packer_cli.options.option import options_of
from packer_cli.options.options import PackConfig
from packer_cli.options.run_options import EncodingOptions
from packer_cli.options.shape_rules import by_file_shape, trained_on
from packer_cli.options.shapes import TRACE, Shape, prompts_described
from packer_cli.records import (
    HIGHEST_ID,
    POSITION,
    InputFile,
    Notify,
    Records,
    Slice,
    turn_position,
)
from packer_cli.result.layout import TOKENIZER, TOKENIZER_FILES
from packer_cli.result.manifest import (
    TokenizedManifest,
    TokenizerInfo,
    as_named,
    load_tokenized,
)
from packer_cli.result.reader import check_side_file
from packer_cli.run.identity import Chosen, Run
from packer_cli.run.pool import Pool
from packer_cli.storage import read_bytes
from packer_cli.tokenization.encoding import Encode, Encoded, Read, plain_encoder, skipping
from packer_cli.tokenization.fill_in_middle import fill_in_middle
from packer_cli.tokenization.locate import (
    BYTES,
    TokenizerFiles,
    choose,
    highest_id,
    locate,
)
from packer_cli.tokenization.specials import Specials
from packer_cli.tokenization.tokenizer import (
    Framing,
    Tokenizer,
    bytes_tokenizer,
    load_tokenizer,
)
from packer_cli.tokenization.trust import FIRST_DOCUMENTS_CHARACTERS

if TYPE_CHECKING:
    from packer_cli.chat.documents import Composer
    from packer_cli.chat.messages import Conversation
    from packer_cli.chat.renderer import Document
    from packer_cli.chat.templates import TemplateChoice

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_TEXT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
_TURN_END = re.compile(r"<\|(eot|eot_id|eom|eom_id|im_end|end|end_of_turn|return)\|>|<end_of_turn>")
_Render = Callable[["Conversation"], "Document"]
_Own = dict[str | None, tuple[Shape, DocumentConfig]]  # by `InputFile.shape`


def choose_encoding(
    shape: Shape, config: DocumentConfig, tokenizer: str | None, options: EncodingOptions
) -> Chosen:
    """The choice that `tokenizer` and `config` name. Raises UsageError."""
    notify, warn = options.notify, options.warn
    chosen, origin = choose(tokenizer)
    if shape.is_of_tokens and origin == "default":
        what = "traces" if shape.kind == TRACE else "input_ids"
        notify(f"{what} found: no tokenizer needed; padding is id 0")
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
    if files is not None and files.warning:
        notify(f"warning: {files.warning}; see packer tokenizer --check")
    is_text = any(one.kind == "text" for one in shape.each)
    if files is not None and is_text and config.add_eos is not False and not config.eos_token:
        _note_turn_end(files, notify)
    if not shape.is_supervised:
        return Chosen(chosen, files)
    return Chosen(chosen, files, _choose_template(shape, config, files, notify))


def _note_turn_end(files: TokenizerFiles, notify: Notify) -> None:
    """Say that EOS ends turns of conversations, if it does, and not texts."""
    from packer_cli.chat.templates import own_templates  # noqa: PLC0415

    ends, eos = [one for one in _TEXT_ENDS if one in files.added_tokens], files.eos
    if eos is None or eos in ends:
        return
    is_written = ends and any(eos in one for one in own_templates(files).values())
    if _TURN_END.fullmatch(eos) or is_written:
        tip = f"--eos-token '{ends[0]}' ends texts" if ends else "--eos-token names another"
        notify(f"texts end with EOS {eos}, which ends turns of conversations; {tip}")


def _choose_template(
    shape: Shape, config: DocumentConfig, files: TokenizerFiles | None, notify: Notify
) -> TemplateChoice | None:
    from packer_cli.chat.templates import find_template  # noqa: PLC0415

    template = find_template(config.chat_template, files)
    if not shape.members:  # else said already, with the files
        notify(f"records: {shape.described()}")
    if shape.kind == TRACE:  # it is compared with, where there is one
        return template
    if prompts := prompts_described(shape, config.prompt_template):
        notify(f"{prompts}; see --prompt-template")
    if not any(uses_template(*own) for own in by_file_shape(config, shape).values()):
        return template
    if template is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if config.template_args:
        from packer_cli.chat.syntax import check_arguments  # noqa: PLC0415 jinja2 is slow
        from packer_cli.chat.templates import special_tokens  # noqa: PLC0415

        check_arguments(config.arguments, template.sources, special_tokens(files))
    how = "{% generation %} tags" if _GENERATION.search(template.source) else "turn markers"
    trained = trained_on(config, shape)
    found = "" if trained == "all" else f" (found from {how})"
    notify(f"chat template: {template.origin}; trained on: {trained}{found}")
    return template


def choose_tokenized(
    files: Sequence[InputFile],
    config: DocumentConfig,
    tokenizer: str | None,
) -> tuple[Shape, Chosen]:
    """The shape of the records of tokenized directories, and the tokenizer that has made the
    tokens. UsageError for options that come too late.
    """
    if not isinstance(config, PackConfig):
        raise UsageError(f"{as_named(files[0].path)}: is tokenized already", "pack it: packer pack")
    _refuse_late(files[0], config, tokenizer)
    folder = Path(files[0].path).parent
    facts = load_tokenized(folder)
    copies = {name: _kept(folder, facts, name)
              for name in TOKENIZER_FILES if name in facts.side_files}  # fmt: skip
    name = facts.tokenizer.source if facts.tokenizer else None
    known = {name: facts.side_files[name] for name in copies}
    return shape_of(files), Chosen(name, copies=copies, known=known)


def _kept(folder: Path, facts: TokenizedManifest, name: str) -> bytes:
    """A file that a tokenized directory keeps of its tokenizer. DataError where it has changed."""
    check_side_file(folder / name, facts, name)
    with os_errors(folder / name):
        return read_bytes(folder / name)


def _refuse_late(file: InputFile, config: DocumentConfig, tokenizer: str | None) -> None:
    defaults = {one.name: one.default for one in fields(config)}
    late = [
        option.flag
        for name, option in options_of(DocumentConfig).items()
        if name not in OF_ROWS_TOO and getattr(config, name) != defaults[name]
    ]
    if tokenizer is not None and choose(tokenizer)[1] == "--tokenizer":
        late.insert(0, "--tokenizer")
    why = ""
    if getattr(config, "overlong", None) == "truncate-turns":
        why = "" if late else ", and where its turns are is not known any more"
        late.append("--overlong truncate-turns")
    if late:
        raise UsageError(
            f"{', '.join(late)}: {as_named(file.path)} is tokenized already{why}",
            "leave it out, or give it with the original data",
        )


@dataclass(frozen=True)
class Source:
    """`read` gives the records of a slice, `encode` makes tokens of them.

    `tokenized`: where documents are tokens already, which neither is asked for. `info`: of the
    tokenizer that makes, or has made, the tokens.
    """

    read: Read
    encode: Encode
    tokenizer: Tokenizer | None = None
    tokenized: TokenizedInputs | None = None
    info: TokenizerInfo | None = None

    def confirm(self) -> None:
        """Compare what is left of the fast engine's tokens, before they are relied on."""
        if self.tokenizer is not None:
            self.tokenizer.finish()


def prepare(run: Run, options: EncodingOptions) -> Source:
    """Load what the units of a run need. Raises UsageError.

    Chat templates are only named here: each worker analyses them when it reads its first records.
    """
    if run.is_tokenized:
        # inputs that no unit reads need not be there any more, as with --add
        used = {part.file for unit in run.units for part in unit.slices}
        inputs = [file for file in run.files if run.row_config.mixture or file.index in used]
        return _tokenized_again(inputs, run.row_config)
    own, files = by_file_shape(run.config, run.shape), run.chosen.files
    if run.chosen.name is None:
        encoders = {name: _plain_encoder(*one) for name, one in own.items()}
        return Source(_reading(own), _by_shape(encoders))
    read, renders = _composing(own, run)
    file = run.files[run.units[0].slices[0].file]
    framing = _framing_of(own[file.shape][1])
    tokenizer = bytes_tokenizer(framing) if files is None else load_tokenizer(
        files, backend=options.tokenizer_backend, framing=framing,
        first_documents=_first_texts(*own[file.shape], file), notify=options.notify,
    )  # fmt: skip
    return _source(own, files, tokenizer, read, renders)


def _composing(own: _Own, run: Run) -> tuple[Read, dict[str | None, _Render]]:
    """Return what reads slices, and what renders conversations of each shape that is supervised."""
    reads, renders = dict[str | None, Read](), dict[str | None, _Render]()
    for name, parts in _composers(own, run.chosen.files, run.chosen.template).items():
        from packer_cli.chat.documents import make_composer  # noqa: PLC0415 jinja2 is slow

        composer: Composer | LimitedComposer | _Elsewhere
        if not uses_template(*parts[:2]):
            composer = make_composer(*parts)
        elif run.resumable:
            composer = LimitedComposer(parts)
        else:
            composer = _Elsewhere(LimitedComposer(parts), _reading(own))
        renders[name] = composer.render
        if own[name][0].kind != TRACE:  # the ids of a trace are there
            reads[name] = composer.read
    return _reading(own, reads), renders


class _Elsewhere:
    """Renders in a worker of its own what this process reads: what came from stdin cannot be read
    again if a template holds up the worker.
    """

    def __init__(self, composer: LimitedComposer, read: Read) -> None:
        self._composer, self._read = composer, read
        self._pool = Pool(self._perform, describe=lambda item: STDIN)

    def read(self, file: InputFile, part: Slice) -> Iterator[Records]:
        return (self._in_worker("compose", records) for records in self._read(file, part))

    def render(self, conversation: Conversation) -> Document:
        """Raises RefusedError."""
        document = self._in_worker("render", conversation)
        if isinstance(document, str):
            raise RefusedError(document)
        return document  # type: ignore[no-any-return]

    def _in_worker(self, method: str, argument: Any) -> Any:
        ((_, result),) = self._pool.map([(method, argument)])
        return result

    def _perform(self, item: tuple[str, Any]) -> Any:
        method, argument = item
        try:
            return getattr(self._composer, method)(argument)
        except RefusedError as error:
            return str(error)


def _reading(own: _Own, others: Mapping[str | None, Read] = MappingProxyType({})) -> Read:
    """Return what reads slices: `others`, by shape, or else what reads them as they are stored."""

    def read(file: InputFile, part: Slice) -> Iterator[Records]:
        if file.shape in others:
            return others[file.shape](file, part)
        return reader_for(file.format).read(file, part, *own[file.shape])

    return read


def _by_shape(encoders: dict[str | None, Encode]) -> Encode:
    return lambda records, file: encoders[file.shape](records, file)


def _first_texts(shape: Shape, config: DocumentConfig, file: InputFile) -> Iterator[str]:
    """Yield texts from the beginning of the input, to check the fast engine. Of records that a
    template renders, what they hold.
    """
    if shape.is_of_tokens:
        return
    part = beginning(file, FIRST_DOCUMENTS_CHARACTERS)
    with peeking(), suppress(DamagedInputError):  # which the unit that reads it meets, too
        for records in reader_for(file.format).read(file, part, shape, config):
            yield from records.texts or _strings_in(records.fields or [])
            if part.stop is None:  # the rest is the whole input
                return


def _strings_in(value: Any) -> Iterator[str]:
    """All strings in fields of records, but for names of fields."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()  # half of a surrogate pair is a bad record
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings_in(item)


def _source(
    own: _Own,
    files: TokenizerFiles | None,
    tokenizer: Tokenizer,
    read: Read,
    renders: dict[str | None, _Render],
) -> Source:
    """Reads and encodes the files of each shape. UsageError where the tokenizer lacks what goes
    around documents.
    """
    tokenizers = {name: tokenizer.framed(_framing_of(one)) for name, (_, one) in own.items()}
    infos = [one.info for one in tokenizers.values()]
    around = {name: _agreed(infos, name) for name in ("prefix", "suffix")}
    encoders = dict[str | None, Encode]()
    for name, (its, its_config) in own.items():
        if its.is_composed:
            from packer_cli.chat.encoder import SupervisedEncoder  # noqa: PLC0415

            glued = not uses_template(its, its_config)
            encoder = SupervisedEncoder(renders[name], its_config, tokenizers[name], glued=glued)
            encoders[name] = skipping(encoder, tokenizers[name], its_config.turns)
        else:
            encoders[name] = _plain_encoder(
                its, its_config, tokenizers[name], files, renders.get(name)
            )
    info = structs.replace(infos[0], **around)
    return Source(read, _by_shape(encoders), tokenizer, info=info)


def _plain_encoder(
    shape: Shape,
    config: DocumentConfig,
    tokenizer: Tokenizer | None = None,
    files: TokenizerFiles | None = None,
    render: _Render | None = None,
) -> Encode:
    """Makes tokens of texts, and documents of token ids. `render`: gives what traces are compared
    with.
    """
    highest = None
    if shape.is_of_tokens and tokenizer is not None:
        highest = highest_id(files.json) if files else tokenizer.info.vocab_size - 1
    fim = fill_in_middle(config, files)
    encode = plain_encoder(tokenizer, highest, _specials_of(files, config), fim)
    if tokenizer is not None:
        encode = skipping(encode, tokenizer)
    if shape.kind == TRACE:
        from packer_cli.chat.traces import TraceEncoder  # noqa: PLC0415 a run of texts needs none

        return TraceEncoder(shape, config, encode, render, tokenizer)
    if config.turns != "each":
        return encode

    def encode_one_each(records: Records, file: InputFile) -> Encoded:
        """Beside conversations that become a document for each answer."""
        encoded = encode(records, file)
        position = turn_position(encoded.batch.position, 0)
        return encoded._replace(batch=encoded.batch.beside({}, {POSITION: position}))

    return encode_one_each


def _composers(
    own: _Own, files: TokenizerFiles | None, template: TemplateChoice | None
) -> dict[str | None, tuple[Any, ...]]:
    """The arguments of `make_composer`, of the shapes that are supervised."""
    supervised = {name: one for name, one in own.items() if one[0].is_composed}
    if template is not None:  # messages of traces are rendered to compare them with the ids
        supervised |= {
            name: (
                Shape("messages"),
                DocumentConfig(train_on="all", template_args=config.template_args),
            )
            for name, (shape, config) in own.items()
            if shape.kind == TRACE
        }
    if not supervised:
        return {}
    from packer_cli.chat.templates import special_tokens  # noqa: PLC0415

    names, end_tokens = special_tokens(files), tuple(files.added_tokens) if files else ()
    return {
        name: (
            shape, config, template if uses_template(shape, config) else None, names, end_tokens,
            _specials_of(files, config),
        )
        for name, (shape, config) in supervised.items()
    }  # fmt: skip


def uses_template(shape: Shape, config: DocumentConfig) -> bool:
    """True if a chat template makes the texts; `config` as `for_shape` gives it."""
    return shape.is_chat or config.prompt_template == "chat"


def _specials_of(files: TokenizerFiles | None, config: DocumentConfig) -> Specials:
    return Specials(files.specials if files else (), config.special_tokens_in_text)


def _framing_of(config: DocumentConfig) -> Framing:
    """The tokens that go around every document; `config` as `for_shape` gives it."""
    return Framing(config.add_bos, bool(config.add_eos), config.eos_token)


def _agreed(values: Sequence[Any], name: str) -> Any:
    """The value that all have by this name; UNSET where they differ."""
    first, *others = (getattr(one, name, UNSET) for one in values)
    return first if all(other == first for other in others) else UNSET


def _tokenized_again(files: Sequence[InputFile], config: PackConfig) -> Source:
    """The documents of these inputs, in the order of the options' seed."""
    seed, choice = config.seed if config.shuffle else None, choice_of(files, config)
    folder, facts = Path(files[0].path).parent, opened(files[0]).facts
    highest = facts.tokenizer.vocab_size - 1 if facts.tokenizer else HIGHEST_ID
    if TOKENIZER in facts.side_files:
        highest = highest_id(_kept(folder, facts, TOKENIZER))
    inputs = TokenizedInputs(
        files, seed, highest, choice.pools if choice else None, config.value_columns.values()
    )
    tokenizers, info = [one.tokenizer for one in inputs.facts], None
    if tokenizers[0] is not None:  # what is around documents, only if all agree
        around = {name: _agreed(tokenizers, name) for name in ("prefix", "suffix")}
        info = structs.replace(tokenizers[0], **around)

    return Source(_reading({}), plain_encoder(None), tokenized=inputs, info=info)
