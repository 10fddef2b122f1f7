"""A conversation as tokens: it only ever grows at its end, and asking changes nothing."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hisparse.cli.conversation import PlainConversation, TemplateConversation, conversation_for
from hisparse.engine.builtin import FINDER_FOLDER
from hisparse.engine.tokenizer import ByteTokenizer, CheckpointTokenizer
from hisparse.errors import InputError

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def checkpoint_tokenizer(template: str | None = None, eos: tuple[int, ...] = ()) -> CheckpointTokenizer:
    inner = AutoTokenizer.from_pretrained(FINDER_FOLDER, local_files_only=True)
    inner.chat_template = template
    return CheckpointTokenizer(inner, 2048, eos)


@given(st.lists(st.tuples(st.text(min_size=1), st.binary(min_size=1)), min_size=1, max_size=5))
def test_a_plain_conversation_begins_with_all_that_was_read_and_generated(turns: Sequence[tuple[str, bytes]]) -> None:
    """Whatever bytes were generated, be they text or not: from the token that differs on, nothing is reused."""
    conversation = PlainConversation(ByteTokenizer())
    said: list[int] = []
    for question, answer in turns:
        asked = conversation.ask(question)
        separator = b"" if not said or said[-1] == ord("\n") else b"\n"
        assert bytes(asked) == bytes(said) + separator + question.encode()
        assert conversation.ask(question) == asked
        conversation.keep(question, asked, list(answer), answer.decode(errors="replace"))
        said = [*asked, *answer]


def test_an_end_token_is_not_part_of_a_plain_conversation() -> None:
    tokenizer = checkpoint_tokenizer(eos=(7,))
    conversation = PlainConversation(tokenizer)
    asked = conversation.ask("x = 1")
    conversation.keep("x = 1", asked, [*tokenizer.encode_more(" + 2"), 7], " + 2")
    assert tokenizer.decode(conversation.ask("y")) == "x = 1 + 2\ny"
    conversation.keep("y", asked, [7], "")
    assert tokenizer.decode(conversation.ask("z")) == "x = 1\nz"


def test_what_a_tokenizer_begins_a_prompt_with_stands_there_once() -> None:
    class Marked(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [0, *super().encode(text)]

        def encode_more(self, text: str) -> list[int]:
            return super().encode(text)

    conversation = PlainConversation(Marked())
    asked = conversation.ask("a")
    conversation.keep("a", asked, [ord("b")], "b")
    assert conversation.ask("c") == [0, *b"ab\nc"]


def test_a_model_with_a_chat_template_is_asked_in_its_form() -> None:
    tokenizer = checkpoint_tokenizer(TEMPLATE)
    conversation = conversation_for(tokenizer)
    assert isinstance(conversation, TemplateConversation)
    asked = conversation.ask("hello")
    assert tokenizer.decode(asked) == "[user] hello\n[assistant]"
    conversation.keep("hello", asked, tokenizer.encode_more(" yes"), " yes")
    assert tokenizer.decode(conversation.ask("and?")) == "[user] hello\n[assistant]  yes\n[user] and?\n[assistant]"
    conversation.clear()
    assert conversation.ask("hello") == asked


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), checkpoint_tokenizer()])
def test_a_model_without_a_template_goes_on_where_the_line_ends(tokenizer: ByteTokenizer) -> None:
    conversation = conversation_for(tokenizer)
    assert isinstance(conversation, PlainConversation)
    assert conversation.stop == ("\n",)
    assert tokenizer.decode(conversation.ask("# the key of lantern is")) == "# the key of lantern is"


def test_a_template_that_fails_is_one_error_and_leaves_the_conversation() -> None:
    conversation = TemplateConversation(checkpoint_tokenizer("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InputError, match="roles must alternate"):
        conversation.ask("hello")
    with pytest.raises(InputError, match="no chat template"):
        TemplateConversation(ByteTokenizer()).ask("hello")
