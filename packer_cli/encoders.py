"""What makes tokens of records of a shape: framing, chat template and encoder, by the options."""

from __future__ import annotations

from collections.abc import Callable

from packer_cli.config import PackConfig
from packer_cli.encoding import Encode, plain_encoder
from packer_cli.errors import UsageError
from packer_cli.shapes import Shape
from packer_cli.tokenization import Framing, Tokenizer
from packer_cli.tokenization.locate import TokenizerFiles


def framing_for(shape: Shape, config: PackConfig) -> Framing:
    """What goes around every document. A chat template writes BOS and ends of turns itself."""
    add_bos = False if config.add_bos is None and shape.is_chat else config.add_bos
    add_eos = not shape.is_chat if config.add_eos is None else config.add_eos
    return Framing(add_bos, add_eos, config.eos_token, config.separator)


def encoder_for(
    shape: Shape,
    config: PackConfig,
    tokenizer: Tokenizer | None,
    files: TokenizerFiles | None,
    notify: Callable[[str], None],
) -> tuple[Encode, str | None]:
    """What makes tokens of records, and the source of the chat template it uses."""
    if not shape.is_supervised or tokenizer is None:
        return plain_encoder(tokenizer), None
    from packer_cli.supervised.chat_template import ChatTemplate  # noqa: PLC0415 jinja2 is slow
    from packer_cli.supervised.documents import Composer  # noqa: PLC0415
    from packer_cli.supervised.encoder import SupervisedEncoder  # noqa: PLC0415
    from packer_cli.supervised.templates import find_template, special_tokens  # noqa: PLC0415

    found = find_template(config.chat_template, files)
    template = ChatTemplate(found[0], special_tokens(files)) if found else None
    needed = shape.is_chat or config.prompt_template == "chat"
    if needed and found is None:
        raise UsageError(
            "messages need a chat template, and the tokenizer has none",
            "give one with --chat-template FILE",
        )
    if needed and found and template:
        how = "its {% generation %} tags" if template.marks_generation else "its turns"
        told = "" if config.train_on == "all" else f", told by {how}"
        notify(f"chat template: {found[1]}; trained on: {config.train_on}{told}")
    composer = Composer(shape, config, template, tuple(files.added_tokens if files else ()))
    return SupervisedEncoder(composer, tokenizer, config), found[0] if found else None
