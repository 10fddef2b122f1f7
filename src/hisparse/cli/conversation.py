"""A conversation as the tokens that a model reads: all of it, every turn, so that its beginning never changes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hisparse.engine.tokenizer import Message, Role, Tokenizer

NEWLINE = "\n"


class Conversation(Protocol):
    """What was said so far. Asking changes nothing: a turn counts once its answer is kept."""

    stop: tuple[str, ...]
    """Text that ends an answer, beside what the user and the model name."""

    def ask(self, text: str) -> list[int]:
        """Token ids of all that was said, and of `text` at its end."""
        ...

    def keep(self, text: str, prompt_ids: Sequence[int], output_ids: Sequence[int], answer: str) -> None:
        """`text` was asked as `prompt_ids`, and answered by `output_ids`, of which the user saw `answer`."""
        ...

    def clear(self) -> None:
        """Forget everything."""
        ...


class PlainConversation:
    """For models that know no conversations: each side writes a line, one below the other, and the model goes on.

    It is kept as tokens and not as text: encoding an answer anew might give others than those that were generated, and
    from there on nothing could be reused.
    """

    stop: tuple[str, ...] = (NEWLINE,)

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []

    def ask(self, text: str) -> list[int]:
        """The user's line follows on a line of its own."""
        if not self._ids:
            return self._tokenizer.encode(text)
        ends_line = self._tokenizer.decode(self._ids[-1:]).endswith(NEWLINE)
        return self._ids + self._tokenizer.encode_more(text if ends_line else NEWLINE + text)

    def keep(self, text: str, prompt_ids: Sequence[int], output_ids: Sequence[int], answer: str) -> None:
        """All that was read and generated, without an end-of-text token."""
        ends = bool(output_ids) and output_ids[-1] in self._tokenizer.eos_token_ids
        self._ids = [*prompt_ids, *(output_ids[:-1] if ends else output_ids)]

    def clear(self) -> None:
        """Forget everything."""
        self._ids = []


class TemplateConversation:
    """For models with a chat template, which says how the whole of it is written."""

    stop: tuple[str, ...] = ()

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._messages: list[Message] = []

    def ask(self, text: str) -> list[int]:
        """Raises `InputError` when the template fails."""
        return self._tokenizer.encode_chat([*self._messages, self._message("user", text)])

    def keep(self, text: str, prompt_ids: Sequence[int], output_ids: Sequence[int], answer: str) -> None:
        """The template is given what was seen."""
        self._messages += [self._message("user", text), self._message("assistant", answer)]

    def clear(self) -> None:
        """Forget everything."""
        self._messages = []

    @staticmethod
    def _message(role: "Role", text: str) -> "Message":
        # Loaded here: the tokenizer's module comes with torch.
        from hisparse.engine.tokenizer import Message

        return Message(role, text)


def conversation_for(tokenizer: "Tokenizer") -> Conversation:
    """An empty conversation in the form that the model was trained on, if it was on any."""
    return TemplateConversation(tokenizer) if tokenizer.has_chat_template else PlainConversation(tokenizer)
