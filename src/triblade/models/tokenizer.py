"""Text to token ids and back, and chat messages to prompts, for one model.

Knows no weights. Ids equal those of the model's reference tokenizer; `token_bytes` is exact, so joining the bytes of
ids and decoding once never loses a character. Special tokens written out in text become the special ids, as
everywhere in this field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import tokenizers

from triblade.errors import ConfigError, RequestError
from triblade.models.chat_template import ChatOptions, ChatTemplate, Messages
from triblade.models.tokenizer_files import read_tokenizer_folder
from triblade.models.tokenizer_parts import TokenizerParts, spelling
from triblade.sampling_params import check_token_ids


class Tokenizer:
    """A model's tokenizer with its chat templates.

    Attributes:
        backend: the `tokenizers` object that does the work.
        vocab_size: valid ids are `0 <= id < vocab_size`, added tokens included.
        bos_token_id: the id that begins a text, if the model has one.
        eos_token_ids: ids that end a text or a turn, as far as the tokenizer's files say.
        special_tokens: texts of the special tokens by role, as chat templates name them (`bos_token` is `<s>`).
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    special_tokens: Mapping[str, str]

    def __init__(self, parts: TokenizerParts) -> None:
        self.backend = parts.backend
        self.backend.no_truncation()
        self.backend.no_padding()
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.bos_token_id = parts.bos_token_id
        self.eos_token_ids = frozenset(i for i in parts.eos_token_ids if 0 <= i < self.vocab_size)
        self.special_tokens = dict(parts.special_tokens)
        self._added = {i: token.content for i, token in self.backend.get_added_tokens_decoder().items()}
        self._spelling: Callable[[str], bytes] | None = spelling(self.backend)
        self._chat_templates = dict(parts.chat_templates)
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def load(cls, path: Path, *, chat_template: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a model folder or of a GGUF file.

        Args:
            path: the folder or the file.
            chat_template: a file whose template replaces the model's own.

        Raises:
            CheckpointError: tokenizer files are missing or broken.
            UnsupportedError: the tokenizer is of a kind that is not read.
            ConfigError: `chat_template` cannot be read.
        """
        tokenizer = cls(read_tokenizer_folder(path) if path.is_dir() else _read_gguf(path))
        if chat_template is not None:
            tokenizer._chat_templates = {"default": _read_template(chat_template)}
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        """The source of the default chat template."""
        return self._chat_templates.get("default")

    @property
    def tool_template(self) -> str | None:
        """The source of the template that conversations with tools are rendered by."""
        return self._chat_templates.get("tool_use", self.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` applies the model's own rule (often a leading BOS, often nothing).

        Raises:
            RequestError: `text` holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"text is not valid Unicode at character {error.start}", param="prompt") from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no complete character become U+FFFD.

        Raises:
            RequestError: an id is not in the vocabulary.
        """
        check_token_ids("token_ids", list(ids), self.vocab_size)
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """Text of one token as log-probabilities show it: special tokens by name, parts of characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that one token stands for; empty for an id that the vocabulary leaves out.

        Raises:
            RequestError: the id is not in the vocabulary.
        """
        check_token_ids("token_ids", [token_id], self.vocab_size)
        if (added := self._added.get(token_id)) is not None:
            return added.encode("utf-8")
        if (token := self.backend.id_to_token(token_id)) is None:
            return b""
        if self._spelling is not None:
            return self._spelling(token)
        return self.backend.decode([token_id], skip_special_tokens=False).encode("utf-8")

    def render_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> str:
        """The prompt text of a conversation.

        Args:
            messages: objects with `role` and `content` (a string, or a list of text parts that are joined in order).
            options: see `ChatOptions`.

        Raises:
            RequestError: there is no template, the messages are malformed, or the template refuses them (in its words).
        """
        go_on = options.get("continue_final_message", False)
        if go_on and options.get("add_generation_prompt"):
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        template = self._template(options.get("chat_template"), bool(options.get("tools")))
        variables = self._template_variables(options)
        return template.render_open(messages, variables) if go_on else template.render(messages, variables)

    def encode_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of `render_chat`. The template writes the special tokens, so none are added here."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _template_variables(self, options: ChatOptions) -> dict[str, Any]:
        extra = dict(options.get("template_kwargs") or {})
        fixed = {
            "tools": options.get("tools") or None,
            "add_generation_prompt": options.get("add_generation_prompt", True),
        }
        for name in ("messages", *fixed):
            if name in extra:
                raise RequestError(
                    f"chat template variable is set by the request itself: {name!r}", param="template_kwargs"
                )
        return {**self.special_tokens, **extra, **fixed}

    def _template(self, given: str | None, has_tools: bool) -> ChatTemplate:
        """The template given for this call, the model's own for tools, or its default; own ones are compiled once."""
        if given is not None and given not in self._chat_templates:
            return ChatTemplate(given)
        name = given or ("tool_use" if has_tools and "tool_use" in self._chat_templates else "default")
        if name not in self._chat_templates:
            known = ", ".join(sorted(self._chat_templates))
            raise RequestError(
                "this model has no chat template",
                hint=f"name one of its templates: {known}"
                if known
                else "use completions, or give a template: --chat-template FILE",
                param="messages",
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self._chat_templates[name])
        return self._compiled[name]


def _read_gguf(path: Path) -> TokenizerParts:
    """Imported when it is needed: an engine of other models runs without the gguf package."""
    from triblade.models.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(path)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template: {path}: {error}", param="chat_template") from error
