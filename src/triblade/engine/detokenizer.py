"""What a client may see of one choice: token ids in, text deltas and the end by a stop string out.

Knows no request and no schedule. Invariant: the deltas joined are the text of the tokens kept, cut at the stop
string if there was one; no delta ends in half a character or shows a piece of a stop string that is cut away. Text
is held back only while it could be the beginning of a stop string.

    given out | held: final, may begin a stop string | open: complete characters that may still change
              |<------------------- searched for stop strings as soon as it is there ---------------->|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from triblade.engine.incremental_text import incremental_text
from triblade.engine.stop_strings import StopMatch, StopStrings
from triblade.sampling_params import SamplingParams, check_token_ids


class Detokenizes(Protocol):
    """What is needed of the model's tokenizer."""

    @property
    def backend(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added to the text."""

    text: str
    num_tokens: int  # how many of the tokens given are kept; fewer than given once a stop string was met
    stop_string: str | None = None


class OutputStream:
    """The text of one choice.

    A stop string is looked for after every token and ends the output with the token that completes it, though not
    before `min_tokens` other tokens exist. Of several, the one that begins first counts, and the longest of those.

    Args:
        tokenizer: of the model.
        params: `stop`, `include_stop_str_in_output`, `min_tokens` and `skip_special_tokens` are read.
        prompt_token_ids: ids before the output; a space between prompt and output belongs to the output.
    """

    def __init__(self, tokenizer: Detokenizes, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._vocab_size = tokenizer.vocab_size
        self._text = incremental_text(tokenizer.backend, params.skip_special_tokens, prompt_token_ids)
        self._stop_strings = StopStrings(params.stop)
        self._shows_stop_string = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        self._searched = (
            0  # characters of held and open text that were searched, or belong to the first `min_tokens` tokens
        )
        self._stop_string: str | None = None

    def append(self, token_ids: Sequence[int]) -> TextDelta:
        """Commit tokens one by one until a stop string is complete; nothing is kept after that.

        Raises:
            RequestError: an id is outside the vocabulary.
        """
        check_token_ids("token_ids", token_ids, self._vocab_size)
        texts: list[str] = []
        for token_id in token_ids:
            if self._stop_string is not None:
                break
            texts.append(self._commit(token_id))
        return TextDelta("".join(texts), len(texts), self._stop_string)

    def flush(self) -> str:
        """The text held back, when the output ends for another reason; an unfinished character is U+FFFD."""
        if self._stop_string is not None:
            return ""
        rest, self._held = self._held + self._text.flush(), ""
        return rest

    def _commit(self, token_id: int) -> str:
        self._num_tokens += 1
        self._held += self._text.feed(token_id)
        if not self._stop_strings:
            return self._give_out(len(self._held))
        view = self._held + self._text.open_text
        if self._num_tokens > self._min_tokens and (match := self._stop_strings.find(view, self._searched)):
            return self._stop(view, match)
        shown = self._give_out(len(view) - self._stop_strings.held_length(view))
        self._searched = len(view) - len(shown)
        return shown

    def _give_out(self, number: int) -> str:
        shown, self._held = self._held[:number], self._held[number:]
        return shown

    def _stop(self, view: str, match: StopMatch) -> str:
        self._stop_string = match.stop_string
        self._held = ""
        return view[: match.end if self._shows_stop_string else match.start]
