"""Request fields that this server understands but does not do.

A field that would change the answer is refused with a reason, never dropped in silence; a field that would not
(`user`, `metadata`, a vendor's own) is ignored with a debug line, as clients send many of them. Values that ask for
nothing, such as `functions: []`, pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from triblade.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused, and which of its values are harmless."""

    reason: str
    harmless: Callable[[Any], bool] = lambda value: not value


def _text_only(value: Any) -> bool:
    return not value or value == ["text"]


def _only_reasoning(value: Any) -> bool:
    """Clients that store nothing ask for reasoning in a sealed form; here it comes back readable anyway."""
    return not value or value == ["reasoning.encrypted_content"]


_FUNCTIONS = Refusal("use tools and tool_choice")
_TEXT_IN = Refusal("this server reads text and token ids only")

COMMON: Mapping[str, Refusal] = {
    "guided_whitespace_pattern": Refusal("whitespace is limited anyway"),
    "structural_tag": Refusal("use response_format or structured_outputs"),
    "use_beam_search": Refusal("there is no beam search"),
    "length_penalty": Refusal("there is no beam search", lambda value: value in (None, 1)),
    "truncate_prompt_tokens": Refusal("shorten the prompt before sending it"),
    "logits_processors": Refusal("use logit_bias, allowed_token_ids or bad_words"),
    "return_tokens_as_token_ids": Refusal("use return_token_ids"),
    "cache_salt": Refusal("the prefix cache is shared by all requests; start the server without one"),
    "kv_transfer_params": Refusal("KV transfer is not controlled by requests"),
    "prompt_embeds": _TEXT_IN,
}
COMPLETION: Mapping[str, Refusal] = {
    **COMMON,
    "suffix": Refusal("inserting text before a suffix needs a model trained for it", lambda value: value is None),
}
EMBEDDING: Mapping[str, Refusal] = {
    "dimensions": Refusal("vectors of these models are not made to be cut", lambda value: value is None),
    "normalize": Refusal("vectors are of length one always", lambda value: value is not False),
    "messages": Refusal("send text or token ids as input"),
    **{name: COMMON[name] for name in ("truncate_prompt_tokens", "cache_salt", "prompt_embeds")},
}
CHAT: Mapping[str, Refusal] = {
    **COMMON,
    "functions": _FUNCTIONS,
    "function_call": Refusal(_FUNCTIONS.reason, lambda value: value in (None, "none", "auto")),
    "audio": Refusal("text is the only output"),
    "modalities": Refusal("text is the only output", _text_only),
    "web_search_options": Refusal("put what was found into the messages"),
    "documents": Refusal("put the documents into the messages, or into chat_template_kwargs"),
    "mm_processor_kwargs": _TEXT_IN,
    "echo": Refusal("use continue_final_message to go on with a message"),
    "best_of": Refusal("use n"),
    "suffix": COMPLETION["suffix"],
}


_STATELESS = Refusal("nothing is stored here; send the whole conversation as input")
RESPONSES: Mapping[str, Refusal] = {
    **COMMON,
    "store": Refusal("nothing is stored here; send store: false"),
    "background": Refusal("nothing is stored here; send background: false"),
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": Refusal("prompts are not stored here; send the text as input"),
    "truncation": Refusal("shorten the input before sending it", lambda value: value in (None, "disabled")),
    "top_logprobs": Refusal("use /v1/chat/completions"),
    "include": Refusal("log-probabilities: use /v1/chat/completions; others: this server makes none", _only_reasoning),
    "context_management": Refusal("shorten the input before sending it"),
}


def refuse_unsupported(extra: Mapping[str, Any], refusals: Mapping[str, Refusal]) -> None:
    """Check the fields that the body's model does not have.

    Raises:
        RequestError: for the first field that would change the answer.
    """
    for name, value in extra.items():
        refusal = refusals.get(name)
        if refusal is None:
            logger.debug("ignored field: %r", name[:80])
        elif not refusal.harmless(value):
            raise RequestError(f"{name} is not supported: {refusal.reason}", param=name)
