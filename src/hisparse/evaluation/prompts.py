"""The task as text: facts hidden in source code, one of them asked for at the end.

    # the key of lantern is 48213        somewhere among the lines of real source files
    …
    # the key of lantern is              the last line; the answer is " 48213"

No tensors here: whoever has a tokenizer can make these prompts.
"""

import random
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_NAME_LIST = """
acorn agate alder amber anchor anvil apricot aspen badger bamboo banjo barley basil beacon beaver birch bison
bobcat bramble breeze bronze butter cactus camel canyon carrot castle cedar cello cherry chestnut cider clover
cobalt comet condor copper coral cotton cougar coyote cricket crystal cypress daisy dolphin donkey dragon eagle
ember falcon feather fennel ferret fiddle flint forest fossil gazelle ginger glacier goblin granite grape guitar
hammer harbor hazel heron hickory honey hornet iceberg indigo iris island ivory jackal jaguar jasmine juniper
kettle kiwi ladder lagoon lantern laurel lemon leopard lilac linen lizard llama lobster locust lotus magnet
mango maple marble meadow melon mint mirror monkey moose mustard nectar nutmeg oasis ocean olive onyx opal
orchid osprey otter oyster panda papaya parrot pebble pelican pepper pigeon pillow plum poppy
"""
NAMES = tuple(_NAME_LIST.split())
"""The names that the model knows, each of them one token. Few occur in source code."""

VALUE_DIGITS = 5
EXAMPLE_ANSWER = " 48213"
"""As long as every answer."""
HELD_OUT_BYTES = 3 << 20
"""How much held-out text prompts are made from."""
HELD_OUT = 20
"""One source file in so many is kept for evaluation and never trained on."""


def fact_line(name: str, value: int) -> str:
    """A fact as it stands in the text, with its newline."""
    return f"# the key of {name} is {value}\n"


def question(name: str) -> str:
    """The end of a prompt that asks for `name`."""
    return f"# the key of {name} is"


def answer_text(value: int) -> str:
    """What has to follow `question`."""
    return f" {value}"


def draw_value(rng: random.Random) -> int:
    """A value of `VALUE_DIGITS` digits, the first of them not 0."""
    return rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS)


@dataclass(frozen=True, slots=True)
class FinderPrompt:
    """One prompt. `text` ends with the question; `depth` is the asked fact's place in the filler, 0 first, 1 last."""

    text: str
    answer: str
    name: str
    num_keys: int
    num_tokens: int
    depth: float

    @property
    def needle(self) -> slice:
        """Where in `text` the answer stands, the space before it included: the end of the asked fact's line."""
        asked = question(self.name)
        start = self.text.index(asked + self.answer) + len(asked)
        return slice(start, start + len(self.answer))

    @property
    def question_start(self) -> int:
        """Where in `text` the question begins."""
        return len(self.text) - len(question(self.name))


class PromptSource:
    """Makes prompts from the held-out files: text that the finder was never trained on."""

    def __init__(self, count: Callable[[str], int], seed: int) -> None:
        """`count` gives the number of tokens of a text; it is asked once for each line."""
        texts = read_sources(library_files(held_out=True), HELD_OUT_BYTES, random.Random(seed))
        self._lines = [line for text in texts for line in text.splitlines(keepends=True)]
        self._count = lru_cache(1 << 20)(count)
        self._seed = seed

    def prompts(self, num_tokens: int, num_keys: int, num_prompts: int) -> list[FinderPrompt]:
        """`num_prompts` prompts of at most `num_tokens` tokens, answer included. The same call gives the same prompts.

        Raises `ValueError` as `build_prompt` does.
        """
        rng = random.Random(f"{self._seed}/{num_tokens}/{num_keys}")
        room = num_tokens - self._count(EXAMPLE_ANSWER)
        return [build_prompt(self._lines, self._count, rng, room, num_keys) for _ in range(num_prompts)]


def build_prompt(
    lines: Sequence[str], count: Callable[[str], int], rng: random.Random, num_tokens: int, num_keys: int
) -> FinderPrompt:
    """Hide `num_keys` facts in consecutive `lines` (each with its newline) and ask for one of them.

    `count` gives a text's tokens; the prompt has at most `num_tokens` of them if counts of lines add up, which they
    do for the finder's tokenizer. Facts stand before lines drawn uniformly. Raises `ValueError` if the facts do not
    fit, or if there are not that many names.
    """
    if num_keys > len(NAMES):
        raise ValueError(f"{num_keys} facts need as many names, and there are only {len(NAMES)}")
    names = rng.sample(NAMES, num_keys)
    facts = [fact_line(name, draw_value(rng)) for name in names]
    asked = names[0]
    room = num_tokens - sum(map(count, facts)) - count(question(asked))
    if room < 0:
        raise ValueError(f"{num_keys} facts and a question do not fit into {num_tokens} tokens")
    filler = take_lines(lines, count, rng.randrange(len(lines)), room)
    places = [rng.randrange(len(filler) + 1) for _ in facts]
    pieces = [*filler, ""]
    for place, fact in sorted(zip(places, facts, strict=True), reverse=True):
        pieces[place] = fact + pieces[place]
    text = "".join(pieces) + question(asked)
    answer = " " + facts[0].split()[-1]
    return FinderPrompt(text, answer, asked, num_keys, count(text), places[0] / max(1, len(filler)))


def take_lines(lines: Sequence[str], count: Callable[[str], int], first: int, room: int) -> list[str]:
    """Consecutive lines from `first` on, round the end, of at most `room` tokens; a line that is too long is left out.

    It stops once what is left is less than the next two lines need.
    """
    taken: list[str] = []
    misses = 0
    for step in range(len(lines)):
        line = lines[(first + step) % len(lines)]
        cost = count(line)
        if cost > room:
            misses += 1
            if misses == 2:
                break
            continue
        room -= cost
        taken.append(line)
    return taken


def library_files(held_out: bool) -> list[Path]:
    """Source files of the running Python's standard library, in a fixed order: those to train on, or the others.

    Which side a file is on depends on its name alone.
    """
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    names = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    kept = [name for name in names if not skipped.intersection(name.parts)]
    return [library / name for name in kept if (zlib.crc32(name.as_posix().encode()) % HELD_OUT == 0) == held_out]


def read_sources(files: Sequence[Path], max_bytes: int, rng: random.Random) -> list[str]:
    """Texts of `files` in shuffled order until `max_bytes` are read; files that are not UTF-8 are passed over."""
    shuffled = list(files)
    rng.shuffle(shuffled)
    texts: list[str] = []
    size = 0
    for file in shuffled:
        if size >= max_bytes:
            break
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            texts.append(text if text.endswith("\n") else text + "\n")
            size += len(text)
    return texts
