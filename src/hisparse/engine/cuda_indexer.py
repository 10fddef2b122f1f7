"""The indexer on a GPU: one kernel scores all rows of a step against paged keys, whatever their requests' lengths."""

from dataclasses import dataclass

import torch

from hisparse.engine.indexer import StockIndexer, select_topk
from hisparse.kernels.triton_ops.index_scores import IndexRows, paged_index_scores
from hisparse.worker import IndexerStore

KEY_BYTES = 256 << 20
"""Bound on the 64-bit keys from which a block of rows selects."""


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """The query rows of a step: `write_rows` int64 `[T]` is where their keys go, `seen` what each may look at."""

    write_rows: torch.Tensor
    seen: IndexRows


class PagedIndexer(StockIndexer[IndexerStore]):
    """One leader's indexer on a GPU: all rows at once, keys read where the worker keeps them. Only launches."""

    def select(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        rows: PagedQueries,
    ) -> torch.Tensor:
        """Store the step's keys and select: int32 `[T, index_topk]`, ascending positions, -1 for none."""
        module = self._module
        asked = self._ask(hidden_states, q_resid, position_embeddings, rows.write_rows)
        keys, seen = self._store.view(self._leader_index), rows.seen
        # Queries are the model's own numbers, widened: back in its dtype they are the same.
        queries = asked.queries.to(asked.keys.dtype)
        block = max(1, KEY_BYTES // (8 * seen.width))
        parts = []
        for start in range(0, queries.shape[0], block):
            part = slice(start, start + block)
            of_part = IndexRows(seen.slots[part], seen.positions[part], seen.table, seen.width)
            scores = paged_index_scores(queries[part], asked.weights[part], keys, of_part, module.softmax_scale)
            parts.append(select_topk(scores, int(module.index_topk)))
        return torch.cat(parts)
