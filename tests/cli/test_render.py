"""Numbers and texts as people read them."""

import pytest

from hisparse.cli.render import format_bytes, format_seconds, format_share, visible


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (512 << 10, "512 KiB"),
        (12 * 1024 + 512, "12.5 KiB"),
        (3 << 30, "3.00 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_have_about_three_digits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.0004, "0.4 ms"), (0.25, "250.0 ms"), (2.5, "2.50 s")])
def test_durations(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(1, 8, " (12.5% of the total)"), (8, 8, " (100.0% of the total)"), (9, 8, ""), (0, 0, "")],
)
def test_a_share_is_told_where_it_says_something(part: int, whole: int, text: str) -> None:
    assert format_share(part, whole) == text


def test_visible_keeps_text_and_replaces_controls() -> None:
    assert visible("grün 漢字\n\tend") == "grün 漢字\n\tend"
    assert visible("\x00\x1b\r\x9b\u202e") == "\N{REPLACEMENT CHARACTER}" * 5
