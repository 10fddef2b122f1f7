"""A request's text as it grows, cut at stop strings."""

from dataclasses import dataclass

from hisparse.engine.request import FinishReason
from hisparse.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token: what text became certain with it, and whether the request ended."""

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed."""

    prefill_tokens: int
    decode_tokens: int
    tokens: tuple[TokenOutput, ...]


class TextStream:
    """Decodes tokens one by one. Text that may yet turn out to begin a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._decoder = tokenizer.stream()
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take a token; return the text that became certain."""
        return self._take(self._decoder.push(token_id))

    def flush(self) -> str:
        """The rest of the text, at the end of the request."""
        if self.stopped:
            return ""
        certain = self._take(self._decoder.flush())
        if self.stopped:
            return certain
        rest, self._held = self._held, ""
        self.text += rest
        return certain + rest

    def _take(self, more: str) -> str:
        self._held += more
        ends = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if ends:
            self.stopped = True
            certain, self._held = self._held[: min(ends)], ""
        else:
            keep = max((_overlap(self._held, text) for text in self._stop), default=0)
            cut = len(self._held) - keep
            certain, self._held = self._held[:cut], self._held[cut:]
        self.text += certain
        return certain


def _overlap(text: str, stop: str) -> int:
    """The longest proper start of `stop` that `text` ends in."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
