"""The model on a GPU: decode rows replayed from CUDA graphs, prefill rows eager, both through the same hooks.

The two run one after the other, so that a decode row is computed at a size that does not depend on the prefill beside
it, and a step with both still replays.
"""

from dataclasses import dataclass
from typing import Any

import torch

from hisparse.engine.attention import LayerAttention, MlaWeights, split_weights
from hisparse.engine.batch import StepBatch
from hisparse.engine.config import EngineConfig
from hisparse.engine.cuda_graphs import DecodeGraphs, DecodeLimits, DecodeRows
from hisparse.engine.cuda_indexer import PagedIndexer, PagedQueries
from hisparse.engine.hooks import DsaModelRunner, StepCache
from hisparse.engine.models import LoadedModel
from hisparse.engine.observer import SelectionWatch
from hisparse.kernels.attention_libraries import AttentionChoice, AttentionNeed, FlashMla, choose_attention
from hisparse.kernels.contract import EMPTY
from hisparse.kernels.row_elements import RowElements
from hisparse.kernels.triton_ops.attention import attend_rows
from hisparse.kernels.triton_ops.index_scores import IndexRows
from hisparse.protocol import Table
from hisparse.worker import HiSparseCacheHandle, HiSparseWorker
from hisparse.worker.upload import upload
from hisparse.worker.views import row_dtype

PREFILL_PASS_ROWS = 256
"""Prefill rows that are staged at once: each pass looks at its rows anew, so a long window would look too often."""

GROUPED_MIN_CAPABILITY = (9, 0)
"""From here on the grouped matrix product of bfloat16 experts runs without asking the host."""

BATCHED_BYTES = 2 << 30
"""Bound on the copies of expert weights that `batched_mm` experts make in a prefill."""


class PagedRows:
    """`RowAttention` where rows lie: by the Triton kernel, decode rows by a library where one was chosen.

    Queries for packed rows are bfloat16, whatever the model's dtype.
    """

    def __init__(
        self, handle: HiSparseCacheHandle, elements: RowElements, scaling: float, kernel: AttentionChoice
    ) -> None:
        """`kernel`: what `choose_attention` gave."""
        self._handle = handle
        self._elements = elements
        self._scaling = scaling
        self._library = FlashMla(handle.slab, elements, scaling) if kernel == "flashmla" else None
        self.dtype = torch.bfloat16 if elements.dtype is torch.uint8 else elements.dtype

    def pass_size(self, query: torch.Tensor, selected: torch.Tensor) -> int:
        return PREFILL_PASS_ROWS

    def decode(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return self(query, rows) if self._library is None else self._library(query, rows)

    def __call__(self, query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return attend_rows(query, rows, self._handle.slab, self._elements, self._scaling)


class PagedStep(StepCache):
    """A step whose tensors lie on the GPU. Making one only launches."""

    def __init__(self, runner: "CudaModelRunner", batch: StepBatch, width: int) -> None:
        """`width`: positions that the indexer scores, more than the highest one in the batch."""
        tables = runner.gpu_worker.tables
        self.batch = batch
        self.runner = runner
        self.write_rows = tables.physical_rows(Table.RESIDENT, batch.slots, batch.positions)
        self.key_write_rows = tables.physical_rows(Table.INDEXER, batch.slots, batch.positions)
        self.key_rows = ()
        seen = IndexRows(batch.slots, batch.positions, tables[Table.INDEXER], width)
        self.queries = PagedQueries(self.key_write_rows, seen)


@dataclass(frozen=True, slots=True)
class ExpertKinds:
    """Which of transformers' expert implementations each kind of step uses; None when the model has no choice."""

    decode: str | None
    prefill: str | None


class CudaModelRunner(DsaModelRunner):
    """A model and a worker on one GPU. Batches come in on the CPU; logits go out on the GPU."""

    def __init__(
        self,
        loaded: LoadedModel,
        worker: HiSparseWorker,
        config: EngineConfig,
        watch: SelectionWatch | None = None,
    ) -> None:
        """Install the hooks. With a `watch` nothing is captured, because a replay would not call it.

        Raises as `DsaModelRunner` does, and as `choose_attention`.
        """
        self.gpu_worker = worker
        dtype = row_dtype(worker.plan.model.row)
        self._elements = RowElements(dtype, loaded.config.kv_lora_rank, loaded.config.qk_rope_head_dim)
        self.attention = choose_attention(config.attention, self._need(loaded, worker))
        super().__init__(loaded, worker, watch)
        modules = self.model.model.layers
        self._paged = {
            layer: PagedIndexer(modules[layer].self_attn.indexer, index, worker.indexer)
            for layer, index in self._leaders.items()
        }
        self._device = worker.tables.device
        self._fixed_tokens = config.chunk_tokens if config.fixed_shapes else 0
        self._width = worker.plan.max_pages * worker.plan.config.block_size
        self._stock_experts = getattr(self.model.config, "_experts_implementation", None)
        self._experts = expert_kinds(self.model, config.chunk_tokens)
        limits = DecodeLimits(worker.plan.config.max_running, self._width, config.fixed_shapes)
        use_graphs = config.cuda_graphs and watch is None
        self.graphs = DecodeGraphs(self._forward_decode, limits, self._device, use_graphs=use_graphs)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """One step, of which decode and prefill rows are two passes. `batch` lies on the CPU.

        Returns float32 `[len(batch.logit_rows), vocab]` on the GPU, valid until the next call.
        """
        wanted = batch.logit_rows.tolist()
        parts = []
        if batch.num_decode:
            rows = slice(0, batch.num_decode)
            columns = (batch.token_ids[rows].tolist(), batch.positions[rows].tolist(), batch.slots[rows].tolist())
            self._use_experts(self._experts.decode)
            logits = self.graphs.run(DecodeRows(*columns), leased=self.gpu_worker.tables.any_leased)
            decoded = [row for row in wanted if row < batch.num_decode]
            if len(decoded) < batch.num_decode:
                logits = logits[upload(decoded, torch.int64, self._device)]
            parts.append(logits)
        if batch.segments:
            self._use_experts(self._experts.prefill)
            prefilled = [row - batch.num_decode for row in wanted if row >= batch.num_decode]
            parts.append(self._forward_prefill(batch, prefilled))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def uninstall(self) -> None:
        """As `DsaModelRunner.uninstall`; forgets all graphs and gives the model its own experts back."""
        self.graphs.clear()
        self._use_experts(self._stock_experts)
        super().uninstall()

    def _forward_decode(self, inputs: torch.Tensor, width: int) -> torch.Tensor:
        tokens, positions, slots = inputs.unbind(0)
        count = inputs.shape[1]
        rows = torch.arange(count, device=self._device)
        batch = StepBatch(tokens, positions, slots, count, segments=(), logit_rows=rows, logit_items=())
        return self._forward(PagedStep(self, batch, width))

    def _forward_prefill(self, batch: StepBatch, logit_rows: list[int]) -> torch.Tensor:
        start = batch.num_decode
        padding = max(0, self._fixed_tokens - (batch.num_tokens - start))
        num_logits = self.gpu_worker.plan.config.max_running if self._fixed_tokens else max(1, len(logit_rows))

        def column(values: torch.Tensor, fill: int) -> torch.Tensor:
            return upload([*values[start:].tolist(), *[fill] * padding], torch.int64, self._device)

        on_device = StepBatch(
            token_ids=column(batch.token_ids, 0),
            positions=column(batch.positions, 0),
            slots=column(batch.slots, EMPTY),
            num_decode=0,
            segments=(),
            # As many logits as fixed shapes ask for, and one at least: those of row 0 stand in, and are thrown away.
            logit_rows=upload([*logit_rows, *[0] * (num_logits - len(logit_rows))], torch.int64, self._device),
            logit_items=(),
        )
        width = max(segment.context_end for segment in batch.segments)
        return self._forward(PagedStep(self, on_device, width))[: len(logit_rows)]

    def _positions(self, layer: int, step: StepCache, tokens: tuple[Any, Any, Any]) -> torch.Tensor:
        assert isinstance(step, PagedStep)
        return self._paged[layer].select(*tokens, step.queries)

    def _make_attention(self, layer: int, weights: MlaWeights) -> LayerAttention:
        handle = self.gpu_worker.handles[layer]
        attend = PagedRows(handle, self._elements, weights.scaling, self.attention)
        return LayerAttention(handle, weights, follows=layer not in self._leaders, attend_rows=attend)

    def _need(self, loaded: LoadedModel, worker: HiSparseWorker) -> AttentionNeed:
        return AttentionNeed(
            elements=self._elements,
            layout=worker.handles[0].slab.layout,
            # Of this rank: a sharded projection has the heads that are here.
            num_heads=split_weights(loaded.model.model.layers[0].self_attn).w_uk.shape[0],
            topk=worker.plan.model.index_topk,
            capability=torch.cuda.get_device_capability(worker.tables.device),
            max_rows=worker.plan.config.max_running,
        )

    def _use_experts(self, kind: str | None) -> None:
        if kind is not None and self.model.config._experts_implementation != kind:
            self.model.set_experts_implementation(kind)


def expert_kinds(model: Any, chunk_tokens: int) -> ExpertKinds:
    """The expert implementations for a model on a GPU.

    Stock experts ask the host which of them have tokens, so a graph cannot hold them. Grouped products do not, and
    copy no weights; where they are missing, batched ones do not either, but copy an expert's weights per token, which
    a long prefill may not have room for.
    """
    if not getattr(model, "_can_set_experts_implementation", lambda: False)():
        return ExpertKinds(None, None)
    config = model.config
    has_grouped = torch.cuda.get_device_capability(model.device) >= GROUPED_MIN_CAPABILITY
    if model.dtype is torch.bfloat16 and has_grouped:
        return ExpertKinds("grouped_mm", "grouped_mm")
    weights = 3 * config.hidden_size * config.moe_intermediate_size * model.dtype.itemsize
    copied = chunk_tokens * config.num_experts_per_tok * weights
    return ExpertKinds("batched_mm", "batched_mm" if copied <= BATCHED_BYTES else "eager")
