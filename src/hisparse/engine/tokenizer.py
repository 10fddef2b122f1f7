"""Text to token ids and back, whole or one token at a time.

The engine knows a tokenizer only by the `Tokenizer` protocol, so that the built-in byte tokenizer and the tokenizer
of a checkpoint directory are used alike.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from hisparse.errors import InputError

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""A character is at most four bytes, so text that still ends in a replacement character after this many tokens is
not an unfinished character but invalid, and is given out as it is."""


Role = Literal["user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One side's words in a conversation."""

    role: Role
    text: str


class StreamDecoder(Protocol):
    """Turns the tokens of one request into text as they come. Joined, its texts are the decoded whole."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; "" while a character is unfinished."""
        ...

    def flush(self) -> str:
        """What is left at the end. An unfinished character becomes a replacement character."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 … `vocab_size`-1."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation; empty if there are none."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be asked: the model was trained on conversations in a form of its own."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Token ids of text that continues a prompt: without what the tokenizer begins one with."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant's next words begin. Raises `InputError`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def stream(self) -> StreamDecoder:
        """A new decoder for one request."""
        ...


class ByteTokenizer:
    """One token per byte of the UTF-8 text. Has no end token: a generation ends by its length or a stop string."""

    vocab_size = 256
    eos_token_ids: tuple[int, ...] = ()
    has_chat_template = False

    def encode(self, text: str) -> list[int]:
        """The bytes of `text`. Lone surrogates (undecodable bytes of a file name) are kept as they came."""
        return list(text.encode("utf-8", errors="surrogateescape"))

    def encode_more(self, text: str) -> list[int]:
        """The same: bytes begin with nothing."""
        return self.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """There is no form for conversations: raises `InputError`."""
        raise InputError("a byte tokenizer has no chat template")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text; invalid bytes become replacement characters. Raises `InputError` for an id over 255."""
        return self._bytes(token_ids).decode("utf-8", errors="replace")

    def stream(self) -> "ByteStreamDecoder":
        return ByteStreamDecoder()

    @staticmethod
    def _bytes(token_ids: Sequence[int]) -> bytes:
        try:
            return bytes(token_ids)
        except ValueError:
            raise InputError("a byte tokenizer has the token ids 0 to 255 only") from None


class ByteStreamDecoder:
    """`StreamDecoder` over single bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes((token_id,)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint directory, wrapped. `inner` is a transformers tokenizer."""

    def __init__(self, inner: Any, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    @property
    def vocab_size(self) -> int:
        """The model's, which may be padded beyond the tokenizer's own."""
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer adds by itself."""
        return [int(token) for token in self._inner.encode(text)]

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def encode_more(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return [int(token) for token in self._inner.encode(text, add_special_tokens=False)]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids by the chat template. Raises `InputError` for a template that fails."""
        conversation = [{"role": message.role, "content": message.text} for message in messages]
        try:
            ids = self._inner.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of the checkpoint's: it may raise anything
            raise InputError(f"the model's chat template failed: {error!r}") from error
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stream(self) -> "WindowStreamDecoder":
        return WindowStreamDecoder(self)


class WindowStreamDecoder:
    """`StreamDecoder` for any tokenizer whose text depends on the tokens before (spaces, multi-byte characters).

    Decodes a short window twice, with and without the new tokens, and gives out the difference once it ends in a
    whole character. `_context` are tokens already given out, `_held` those that are not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._pending()
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._pending())

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._held])[len(known) :]

    def _give(self, text: str) -> str:
        self._context, self._held = self._held, []
        return text
