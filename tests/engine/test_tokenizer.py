"""Streamed text, joined, is the text; characters are never cut in half."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.engine.tokenizer import ByteTokenizer, StreamDecoder, WindowStreamDecoder
from hisparse.errors import InputError


def streamed(decoder: StreamDecoder, token_ids: Sequence[int]) -> list[str]:
    return [*(decoder.push(token) for token in token_ids), decoder.flush()]


@given(st.text())
def test_text_survives_the_byte_tokenizer(text: str) -> None:
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab_size for token in token_ids)
    assert tokenizer.decode(token_ids) == text


@given(st.binary())
def test_streamed_bytes_join_to_the_decoded_whole_even_when_invalid(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(streamed(tokenizer.stream(), data)) == tokenizer.decode(list(data))


@given(st.text())
def test_the_window_decoder_joins_to_the_decoded_whole(text: str) -> None:
    tokenizer = ByteTokenizer()
    token_ids = tokenizer.encode(text)
    assert "".join(streamed(WindowStreamDecoder(tokenizer), token_ids)) == text


@pytest.mark.parametrize("decoder", [ByteTokenizer().stream(), WindowStreamDecoder(ByteTokenizer())])
def test_a_character_of_several_bytes_appears_with_its_last_byte(decoder: StreamDecoder) -> None:
    assert streamed(decoder, "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


@pytest.mark.parametrize("decoder", [ByteTokenizer().stream(), WindowStreamDecoder(ByteTokenizer())])
def test_an_unfinished_character_becomes_a_replacement_at_the_end(decoder: StreamDecoder) -> None:
    assert streamed(decoder, "€".encode()[:2]) == ["", "", "\ufffd"]


def test_the_window_decoder_does_not_hold_invalid_text_for_ever() -> None:
    decoder = WindowStreamDecoder(ByteTokenizer())
    assert any(decoder.push(255) for _ in range(20))


def test_a_token_over_255_is_refused() -> None:
    with pytest.raises(InputError, match="0 to 255"):
        ByteTokenizer().decode([65, 256])
