"""What is wrong with a command line that cannot be read, and what would be right."""

from typing import Any

import typer

_NUMBERS = {
    "int_parsing": "is no whole number, such as 8",
    "int_parsing_size": "is a number with more digits than can be read",
    "float_parsing": "is no number, such as 0.7",
    "greater_than_equal": "is too small: it must be at least {ge}",
    "less_than_equal": "is too large: it must be at most {le}",
}
"""What is said of a value by the kind of mistake that pydantic found in it."""
_NOISE = "Value error, "


def describe(error: typer.TyperException) -> str:
    """One line about a command line that typer refused."""
    found: Any = error
    said = error.format_message()
    command = getattr(found, "ctx", None)
    if hasattr(found, "param_type"):
        return _missing(found, said)
    if command is None:
        return said.replace(_NOISE, "")
    if said.startswith("No such command"):
        return f"{said.rstrip('.')}: use one of {', '.join(command.command.list_commands(command))}"
    if hasattr(found, "param"):
        return _bad_value(found, said)
    return f"{said.rstrip('.')}: {command.command_path} --help lists what there is"


def _missing(error: Any, said: str) -> str:
    """The help of an argument says what it is to be."""
    help_text = getattr(error.param, "help", None)
    if not help_text:
        return said
    return f"{said.rstrip('.')}: name {help_text[0].lower()}{help_text[1:].rstrip('.')}"


def _bad_value(error: Any, said: str) -> str:
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return said.replace(_NOISE, "")
    first = details()[0]
    words = _NUMBERS.get(first["type"])
    words = words.format(**first.get("ctx", {})) if words else first["msg"].removeprefix(_NOISE)
    before = said[: len(said) - len(error.message)]
    return f"{before}{first['input']!r} {words}" if repr(first["input"]) not in words else f"{before}{words}"
