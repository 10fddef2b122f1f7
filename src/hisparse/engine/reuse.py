"""Where the KV of a prompt came from, in tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(slots=True)
class ReusedTokens:
    """Tokens of prompts by the slowest place that any group's bytes came from; `computed` are those of no place.

    `device`: shared where they lay. `host`: read from the host pool. `cpu_tier`, `files`: loaded from below.
    """

    device: int = 0
    host: int = 0
    cpu_tier: int = 0
    files: int = 0
    computed: int = 0

    @property
    def total(self) -> int:
        """All tokens that are counted."""
        return self.device + self.host + self.cpu_tier + self.files + self.computed

    def add(self, other: "ReusedTokens") -> None:
        """Count what `other` counts, too."""
        self.device += other.device
        self.host += other.host
        self.cpu_tier += other.cpu_tier
        self.files += other.files
        self.computed += other.computed

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return asdict(self)


def count_hit(reused: ReusedTokens, host: Sequence[int], num_prompt: int, block_size: int) -> None:
    """Count pages of `block_size` tokens from the beginning of a prompt: `host[i]` is page `i`'s host block, or 0 where
    the device has it. Pages may go on behind the prompt's `num_prompt` tokens, after a preemption; those do not count.
    """
    num_full, rest = divmod(num_prompt, block_size)
    whole = host[:num_full]
    on_device = whole.count(0)
    reused.device += on_device * block_size
    reused.host += (len(whole) - on_device) * block_size
    if len(host) > num_full and host[num_full]:
        reused.host += rest
    elif len(host) > num_full:
        reused.device += rest
