"""Which KV a directory holds: an identity that covers all that decides what the bytes mean.

Two configurations share files only if their identities are equal. The digest of the identity is part of the
directory's name and stands in every file's header, so a file that was copied to the wrong place is still not read.
How a model was sharded belongs to the identity only where the layout depends on it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from hisparse.errors import InputError

FORMAT_VERSION = 1
DIGEST_BYTES = 16
IDENTITY_FILE = "identity.json"
NAMESPACE_NAME = re.compile(r"v(\d+)-[a-z0-9][a-z0-9.+-]*-([0-9a-f]{32})")
"""A namespace's directory: format, family and model for the reader, the digest for the program."""

_UNRELATED = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""What a checkpoint's configuration says that changes no KV. Anything not named here is taken to change it."""


def attention_config_digest(config: Mapping[str, Any]) -> str:
    """32 hex digits over a model's configuration, RoPE and all, less what surely changes no KV.

    An entry that is not known counts: at worst KV is computed again, never read as what it is not. Raises `InputError`
    when the configuration cannot be written as JSON.
    """
    relevant = {key: value for key, value in config.items() if key not in _UNRELATED}
    try:
        text = json.dumps(relevant, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"the model's configuration has no canonical form: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class DirectTopology:
    """How the writers were sharded. Part of an identity only where each rank's bytes are stored as they lie.

    `rank` names the one rank whose bytes a file holds; None when a file holds the slots of all ranks in order.
    """

    tp: int
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    interleave: int = 1
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What decides the meaning of a file's payload.

    `family` is the order of the bytes ("packed-nhd", "latent" …), `page_bytes` the page of each layer held, the first
    of which is layer `first_layer`; `page_tokens` are the tokens of one page, over all context-parallel ranks where the
    layout is canonical. `row_bytes` is the payload of one file: `blocks_per_chunk` pages of all layers, and padding.
    `topology` is None for canonical bytes. Raises `InputError` when the numbers cannot belong together.
    """

    model: str
    revision: str
    config_digest: str
    hash_seed: str
    family: str
    dtype: str
    num_kv_heads: int
    head_bytes: int
    page_tokens: int
    page_bytes: tuple[int, ...]
    row_bytes: int
    blocks_per_chunk: int = 1
    first_layer: int = 0
    topology: DirectTopology | None = None
    format: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_bytes", "page_tokens", "row_bytes", "blocks_per_chunk", "format"):
            if getattr(self, name) < 1:
                raise InputError(f"a namespace's {name} is {getattr(self, name)}: it must be at least 1")
        if re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.family) is None:
            raise InputError(f"{self.family!r} is no name of a layout family: lower case, digits and dashes only")
        if not self.page_bytes or min(self.page_bytes) < 1:
            raise InputError("a namespace needs the page bytes of at least one layer, each at least 1")
        if sum(self.page_bytes) * self.blocks_per_chunk > self.row_bytes:
            raise InputError(
                f"rows of {self.row_bytes} bytes cannot hold {self.blocks_per_chunk} x {sum(self.page_bytes)} bytes"
            )

    def to_json(self) -> str:
        """The identity in words, one field a line and sorted: equal identities give equal text."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The identity that `to_json` wrote. Raises `InputError` for anything else, of a newer format included."""
        try:
            read = json.loads(text)
            version = read.get("format")
        except (ValueError, AttributeError) as error:
            raise InputError(f"it is no JSON object: {error}") from error
        if version != FORMAT_VERSION:
            raise InputError(f"it is of format {version}, and this version reads format {FORMAT_VERSION}")
        if set(read) != {field.name for field in fields(cls)}:
            raise InputError("its fields are not those of a namespace")
        try:
            topology = None if read["topology"] is None else DirectTopology(**read["topology"])
            identity = cls(**read | {"page_bytes": tuple(read["page_bytes"]), "topology": topology})
        except TypeError as error:
            raise InputError(f"its fields are not those of a namespace: {error}") from error
        if identity.to_json() != text:
            raise InputError("it was written or changed by something else")
        return identity

    @property
    def digest(self) -> bytes:
        """16 bytes over every field."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=DIGEST_BYTES).digest()

    @property
    def name(self) -> str:
        """The name of the directory: matches `NAMESPACE_NAME`."""
        model = re.sub(r"[^a-z0-9.]+", "-", self.model.rstrip("/").rpartition("/")[2].lower()).strip("-.")[:40]
        return f"v{self.format}-{self.family}-{model or 'model'}-{self.digest.hex()}"
