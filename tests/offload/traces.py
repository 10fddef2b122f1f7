"""A synthetic trace of prompts as chains of chunk keys, and a cache without bytes that serves it."""

import random
from collections.abc import Callable, Iterator

from hisparse.offload.policies import EvictionPolicy

Prompt = tuple[bytes, ...]


def _chain(*parts: tuple[str, int]) -> Prompt:
    """Keys of a prompt made of named parts of so many chunks; equal beginnings have equal keys."""
    keys: list[bytes] = []
    name = ""
    for part, length in parts:
        for number in range(length):
            name = f"{part}.{number}" if not keys else f"{keys[-1].hex()[:8]}/{part}.{number}"
            keys.append(random.Random(name).randbytes(16))
    return tuple(keys)


def prompts(count: int, seed: int) -> Iterator[Prompt]:
    """A server's day: assistants with long instructions, conversations that come back, and documents read once.

    40 instructions of 8 to 24 chunks with popularity 1/rank; conversations of up to 8 turns that add 2 chunks each
    and of which 30 are open; every fourth prompt is a document of 40 to 120 chunks that nobody sends again.
    """
    rng = random.Random(seed)
    instructions = [(f"instruction {i}", rng.randint(8, 24)) for i in range(40)]
    weights = [1 / (rank + 1) for rank in range(len(instructions))]
    conversations: list[list[tuple[str, int]]] = []
    for number in range(count):
        if rng.random() < 0.25:
            yield _chain((f"document {number}", rng.randint(40, 120)))
            continue
        if len(conversations) < 30 or rng.random() < 0.3:
            conversations.append([rng.choices(instructions, weights)[0]])
        talk = rng.choice(conversations)
        talk.append((f"turn {number}", 2))
        yield _chain(*talk)
        if len(talk) > 8:
            conversations.remove(talk)


def hit_rate(make: Callable[[int], EvictionPolicy], capacity: int, trace: list[Prompt]) -> float:
    """Share of all chunks that were found, where a prompt finds only a run of chunks that starts with its first."""
    policy = make(capacity)
    hits = 0
    for prompt in trace:
        run = next((i for i, key in enumerate(prompt) if key not in policy), len(prompt))
        hits += run
        for key in reversed(prompt[:run]):
            policy.use(key)
        own = set(prompt)
        for key in prompt[run:]:
            if key in policy:
                continue
            if len(policy) == capacity and policy.evict(lambda key, own=own: key not in own) is None:
                break
            policy.insert(key)
        policy.refresh(reversed(prompt))
        policy.assert_invariants()
    return hits / sum(map(len, trace))
