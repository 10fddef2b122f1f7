"""A worker in a few lines of plain torch, so that the model side is tested against something obviously right.

Every layer has rows of its own; physical rows are a random permutation, different for KV and index keys, so that a
position is never its own row and a mixed-up id space shows. Positions marked as hosted are taken out of the pages and
live in a second tensor; reading one goes through rows behind the pages, as staging and hot rows do.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from hisparse.engine.models import LoadedModel, load_model
from hisparse.kernels.contract import Selection
from hisparse.protocol import Table

NUM_SLOTS = 4
CONTEXT = 1024
STAGING_ROWS = 512


@dataclass
class PlainTables:
    """`rows[table][slot, position]` is a physical row."""

    rows: dict[Table, torch.Tensor]
    any_leased: bool = True

    def physical_rows(self, table: Table, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.rows[table][slots, positions]


@dataclass
class PlainHandle:
    """One layer: pages, then staging rows, then rows that serve decode. `hosted`: bool `[slots, context]`."""

    tables: PlainTables
    hosted: torch.Tensor
    storage: torch.Tensor
    host: torch.Tensor
    leader: "PlainHandle | None" = None
    loads: int = 0
    last: tuple[torch.Tensor, torch.Tensor] | None = None
    passes: list[int] = field(default_factory=list)
    staging_rows: int = STAGING_ROWS

    def write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        self.storage[rows] = values

    def evict(self) -> None:
        """Move hosted positions out of the pages, and leave rubbish behind."""
        where = self.tables.rows[Table.RESIDENT][self.hosted]
        self.host[self.hosted] = self.storage[where]
        self.storage[where] = 1e3

    def resolve(self, selection: Selection) -> torch.Tensor:
        assert self.leader is None, "a follower resolves nothing"
        self.last = (selection.positions, selection.row_slot.long())
        return self._place(*self.last, base=NUM_SLOTS * CONTEXT + STAGING_ROWS)

    def load_followed(self) -> None:
        assert self.leader is not None
        assert self.leader.last is not None
        self.loads += 1
        self._place(*self.leader.last, base=NUM_SLOTS * CONTEXT + STAGING_ROWS)

    def stage(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        fitting = max(1, self.staging_rows // positions.shape[1])
        positions, slots = positions[:fitting], slots[:fitting]
        self.passes.append(positions.shape[0])
        return self._place(positions, slots, base=NUM_SLOTS * CONTEXT)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        return self.storage[rows.long().clamp(min=0)].masked_fill(rows.unsqueeze(-1) < 0, 0.0)

    def _place(self, positions: torch.Tensor, slots: torch.Tensor, base: int) -> torch.Tensor:
        at = positions.long().clamp(min=0)
        slot = slots.unsqueeze(1).expand_as(at)
        rows = self.tables.rows[Table.RESIDENT][slot, at]
        hosted = self.hosted[slot, at] & (positions >= 0)
        rows[hosted] = base + torch.arange(int(hosted.sum()))
        self.storage[rows[hosted]] = self.host[slot[hosted], at[hosted]]
        return rows.masked_fill(positions < 0, -1).int()


@dataclass
class PlainKeys:
    """Index keys by leader."""

    storage: torch.Tensor

    def write(self, leader_index: int, rows: torch.Tensor, keys: torch.Tensor) -> None:
        self.storage[leader_index, rows] = keys

    def read(self, leader_index: int, rows: torch.Tensor) -> torch.Tensor:
        return self.storage[leader_index, rows]


@dataclass
class PlainWorker:
    """`HiSparseWorker` as the model side sees it."""

    handles: list[PlainHandle]
    indexer: PlainKeys
    tables: PlainTables

    def evict(self, hosted: torch.Tensor) -> None:
        """Put the positions of `hosted` (bool `[slots, context]`) on host, in all layers."""
        for handle in self.handles:
            handle.hosted = hosted
            handle.evict()


@pytest.fixture
def make_worker() -> Callable[[LoadedModel], PlainWorker]:
    """Build a `PlainWorker` with room for four requests of 1,024 tokens of the given model."""

    def make(loaded: LoadedModel) -> PlainWorker:
        config, geometry = loaded.config, loaded.geometry
        generator = torch.Generator().manual_seed(7)
        pages = NUM_SLOTS * CONTEXT
        tables = PlainTables(
            {
                table: torch.randperm(pages, generator=generator).view(NUM_SLOTS, CONTEXT)
                for table in (Table.RESIDENT, Table.INDEXER)
            }
        )
        width = config.kv_lora_rank + config.qk_rope_head_dim
        nowhere = torch.zeros((NUM_SLOTS, CONTEXT), dtype=torch.bool)
        handles: list[PlainHandle] = []
        for layer, leader in enumerate(geometry.leader_of):
            storage = torch.full((pages + 2 * STAGING_ROWS, width), 1e3, dtype=loaded.dtype)
            host = torch.zeros((NUM_SLOTS, CONTEXT, width), dtype=loaded.dtype)
            follows = handles[leader] if leader != layer else None
            handles.append(PlainHandle(tables, nowhere, storage, host, follows))
        keys = torch.full((len(geometry.leaders), pages, config.index_head_dim), 1e3, dtype=loaded.dtype)
        return PlainWorker(handles, PlainKeys(keys), tables)

    return make


@pytest.fixture(scope="session", params=["builtin:tiny-v32", "builtin:tiny-glm"])
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    """Each built-in model in turn, float32, stock."""
    return load_model(request.param)
