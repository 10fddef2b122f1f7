"""What the user asked the model to continue: read from the command line, turned into token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hisparse.errors import InputError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, as text or already as token ids. `label` is what a message calls it."""

    label: str
    content: str | tuple[int, ...]


def read_prompts(texts: Sequence[str], files: Sequence[Path], ids: Sequence[str]) -> list[Prompt]:
    """All prompts of a command line, in the order texts, files, token ids.

    Raises `InputError` when there is none, when one is empty or not UTF-8, when a file cannot be read, and when a list
    of ids holds something else.
    """
    prompts = [Prompt(f"prompt {number}", text) for number, text in enumerate(texts, start=1)]
    prompts += [Prompt(f"prompt file {path}", _read_text(path)) for path in files]
    prompts += [Prompt(f"prompt ids {text!r}", _parse_ids(text)) for text in ids]
    if not prompts:
        raise InputError("there is no prompt: give --prompt TEXT, --prompt-file FILE or --prompt-ids IDS")
    for prompt in prompts:
        if not prompt.content:
            raise InputError(f"{prompt.label} is empty: it needs at least one character, or one id")
        if isinstance(prompt.content, str):
            require_text(prompt.content, prompt.label)
    return prompts


def require_text(text: str, what: str) -> None:
    """Raise `InputError` for an argument of the command line whose bytes are no UTF-8: Python hands them on."""
    try:
        text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        where = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise InputError(f"{what} is not UTF-8 text{where}") from error


def require_room(prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], max_tokens: int, limit: int) -> None:
    """Raise `InputError` naming the first prompt that a model of `limit` positions cannot go on by `max_tokens`."""
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if len(ids) + max_tokens > limit:
            raise InputError(
                f"{prompt.label}: {len(ids) + max_tokens} tokens, prompt and output together, do not fit the model, "
                f"which has {limit} positions: it has {len(ids)}, and --max-tokens is {max_tokens}"
            )


def encode_prompts(prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Token ids per prompt. Raises `InputError` for a text that the tokenizer turns into nothing."""
    encoded = []
    for prompt in prompts:
        ids = list(encode(prompt.content) if isinstance(prompt.content, str) else prompt.content)
        if not ids:
            raise InputError(f"{prompt.label} has no tokens")
        encoded.append(ids)
    return encoded


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"cannot read prompt file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"prompt file {path} is not UTF-8 text (byte {error.start})") from error


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise InputError(f"prompt ids {text!r} are not integers: write them like 72,101,108") from error
