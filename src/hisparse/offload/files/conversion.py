"""Converting what a directory stores into another family, or from each rank's own layout to canonical pages.

The source is only read. Blocks get their new names as any other block does, so a conversion that is interrupted leaves
whole blocks and can be run again: what is there is not converted twice.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hisparse.errors import InputError
from hisparse.offload.config import FileOptions
from hisparse.offload.convert import Conversion, plan_conversion
from hisparse.offload.files import places
from hisparse.offload.files.filesystem import LocalFileSystem
from hisparse.offload.files.namespace import Identity
from hisparse.offload.files.survey import Namespace, read_into
from hisparse.offload.files.tier import FileTier
from hisparse.offload.layout import Family

_LOCAL = LocalFileSystem()
_BATCH_BYTES = 64 << 20
_NO_LIMIT = 1 << 62
_WRITE_S = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """Namespaces that become one: a single one, or those of all ranks in order.

    Without a `conversion`, `problem` says why; `is_done` when it is that nothing needs to be done.
    """

    sources: tuple[Namespace, ...]
    conversion: Conversion | None
    problem: str | None
    is_done: bool = False

    def keys(self) -> list[bytes]:
        """Keys of the chunks that every source has, sorted."""
        of_each = [{found.key for found in places.blocks(_LOCAL, source.path)} for source in self.sources]
        return sorted(set.intersection(*of_each))


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of one chunk. `problem` is None when it is in its new place."""

    key: bytes
    problem: str | None


def plan_jobs(namespaces: list[Namespace], family: str | None) -> list[Job]:
    """What is to be done to make canonical blocks of `family` out of each namespace; None keeps the family.

    Namespaces of single ranks are joined with those of the other ranks. One that cannot be converted, or is canonical
    and of that family already, is a job with a problem. Raises `InputError` for a family that does not exist.
    """
    wanted = None if family is None else _family(family)
    groups: dict[Identity, list[Namespace]] = defaultdict(list)
    jobs = []
    for namespace in namespaces:
        if namespace.identity is None:
            jobs.append(Job((namespace,), None, namespace.problem))
        else:
            groups[_without_rank(namespace.identity)].append(namespace)
    return jobs + [_plan(group, wanted) for group in groups.values()]


def run_job(job: Job, directory: Path) -> Iterator[Converted]:
    """Convert the chunks of a job into `directory`, one after the other. Raises `InputError` if that cannot be used."""
    conversion = job.conversion
    if conversion is None:
        raise InputError(f"{job.sources[0].path} cannot be converted: {job.problem}")
    per_batch = max(1, _BATCH_BYTES // (conversion.source.row_bytes * conversion.num_sources))
    keys = job.keys()
    # A disk that is full must not cost blocks: they may be the source, or somebody else's.
    tier = FileTier(FileOptions((directory,), _NO_LIMIT, deadline_s=_WRITE_S), conversion.target, evicts=False)
    try:
        for start in range(0, len(keys), per_batch):
            yield from _convert_batch(job, conversion, keys[start : start + per_batch], tier)
    finally:
        tier.close()


def _convert_batch(job: Job, conversion: Conversion, keys: list[bytes], tier: FileTier) -> Iterator[Converted]:
    read: list[bytes] = []
    rows = [np.empty((len(keys), conversion.source.row_bytes), np.uint8) for _ in job.sources]
    for key in keys:
        problem = _read(job, key, [array[len(read)] for array in rows])
        if problem is None:
            read.append(key)
        else:
            yield Converted(key, problem)
    if not read:
        return
    # Rows after a bad one moved up into its place, so those that were read are the first.
    converted = conversion.convert([array[: len(read)] for array in rows])
    transfers = [tier.store(key, row) for key, row in zip(read, converted, strict=True)]
    for key, transfer in zip(read, transfers, strict=True):
        yield Converted(key, None if transfer.result() else "it could not be written: see the log")


def _read(job: Job, key: bytes, rows: list[np.ndarray]) -> str | None:
    for source, row in zip(job.sources, rows, strict=True):
        verdict = read_into(source, key, row.data)
        if verdict is None:
            return f"it vanished from {source.path}"
        if verdict.problem is not None:
            return f"{verdict.path}: {verdict.problem}"
    return None


def _plan(group: list[Namespace], wanted: Family | None) -> Job:
    group = sorted(group, key=_rank)
    identity = group[0].identity
    if identity is None:
        raise InputError(f"{group[0].path} has no identity")
    try:
        conversion = plan_conversion(identity, wanted or _family(identity.family))
        if identity == conversion.target:
            return Job(tuple(group), None, f"it is canonical and {identity.family} already", is_done=True)
        if [_rank(source) for source in group] != list(range(conversion.num_sources)):
            found = ", ".join(str(_rank(source)) for source in group)
            raise InputError(f"it takes the namespaces of all {conversion.num_sources} ranks, and there are: {found}")
    except InputError as error:
        return Job(tuple(group), None, str(error))
    return Job(tuple(group), conversion, None)


def _rank(namespace: Namespace) -> int:
    topology = namespace.identity.topology if namespace.identity else None
    return 0 if topology is None or topology.rank is None else topology.rank


def _without_rank(identity: Identity) -> Identity:
    """What the namespaces of all ranks of one group have in common. -1 keeps them apart from those of whole groups."""
    topology = identity.topology
    if topology is None or topology.rank is None:
        return identity
    return replace(identity, topology=replace(topology, rank=-1))


def _family(name: str) -> Family:
    try:
        return Family(name)
    except ValueError as error:
        raise InputError(f"{name!r} is no family: {', '.join(family.value for family in Family)}") from error
