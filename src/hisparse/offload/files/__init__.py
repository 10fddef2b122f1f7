"""KV in files: one file per block, in namespaces that hold nothing else, published whole or not at all. No torch."""

from hisparse.offload.files.block_file import Fault
from hisparse.offload.files.filesystem import FileSystem, LocalFileSystem
from hisparse.offload.files.namespace import DirectTopology, Identity, attention_config_digest
from hisparse.offload.files.tier import FileTier, FileTierConfig, FileTierStats
from hisparse.offload.files.work import Transfer

__all__ = [
    "DirectTopology",
    "Fault",
    "FileSystem",
    "FileTier",
    "FileTierConfig",
    "FileTierStats",
    "Identity",
    "LocalFileSystem",
    "Transfer",
    "attention_config_digest",
]
