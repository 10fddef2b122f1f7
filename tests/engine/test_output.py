"""Text is given out as soon as it is certain, and never what a stop string takes back."""

from hypothesis import given
from hypothesis import strategies as st

from hisparse.engine.output import TextStream
from hisparse.engine.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
letters = st.text(alphabet="abé", max_size=30)
stops = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3).map(tuple)


def push_all(stream: TextStream, data: bytes) -> list[str]:
    """What each token made certain, up to the one that stops the stream, and what the end makes certain."""
    given_out = []
    for token in data:
        given_out.append(stream.push(token))
        if stream.stopped:
            break
    return [*given_out, stream.flush()]


def cut(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the stop string that is complete first; of several that end together, before the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return text[: min(starts)]
    return text


@given(text=letters, stop=stops)
def test_joined_the_text_is_what_comes_before_the_first_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stop)
    assert "".join(push_all(stream, text.encode())) == stream.text == cut(text, stop)
    assert stream.stopped is (cut(text, stop) != text)


@given(text=letters, stop=stops)
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stop)
    for length in range(len(text)):
        for token in text[length].encode():
            stream.push(token)
        if stream.stopped:
            return
        held = text[len(stream.text) : length + 1]
        assert held == "" or any(each.startswith(held) for each in stop)


@given(data=st.binary(max_size=20), stop=stops)
def test_invalid_bytes_come_out_as_the_tokenizer_decodes_them(data: bytes, stop: tuple[str, ...]) -> None:
    stream = TextStream(TOKENIZER, stop)
    push_all(stream, data)
    assert stream.text == cut(TOKENIZER.decode(list(data)), stop)


def test_a_stop_string_that_does_not_come_is_given_out_at_the_end() -> None:
    stream = TextStream(TOKENIZER, ("end",))
    assert push_all(stream, b"the en") == ["t", "h", "", "e ", "", "", "en"]
    assert stream.text == "the en"
    assert not stream.stopped


def test_after_a_stop_nothing_more_comes() -> None:
    stream = TextStream(TOKENIZER, ("b",))
    assert push_all(stream, b"abc") == ["a", "", ""]
    assert stream.flush() == ""
    assert stream.text == "a"
