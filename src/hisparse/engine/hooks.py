"""Runs a stock transformers model over our KV, through public hooks only.

Three hooks, installed once and removed without a trace:
- a cache object of which the model calls only `update`: it stores the latents in pages and hands back one dummy row,
  so that the stock code's expansion of K and V costs nothing;
- `forward` of each indexer, overridden on the instance: keys go to pages, and what it returns are our selections;
- an attention function, registered with transformers, that reads the selected rows.

Everything about a step travels in a `StepCache`, so the hooks themselves hold no state.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from hisparse.engine.attention import LayerAttention, LayerCache, MlaWeights, split_weights
from hisparse.engine.batch import PrefillSegment, StepBatch
from hisparse.engine.indexer import KeyRows, KeyStore, LeaderIndexer
from hisparse.engine.models import LoadedModel
from hisparse.engine.observer import SelectionWatch
from hisparse.errors import InvariantError
from hisparse.kernels.contract import Selection
from hisparse.protocol import Table

ATTENTION_NAME = "hisparse"
_STEP = "hisparse_step"


class LayerHandle(LayerCache, Protocol):
    """A layer's cache; `resolve` is called on leaders only."""

    def resolve(self, selection: Selection) -> torch.Tensor: ...


class RowTables(Protocol):
    """The worker's tables, as far as the hooks read them."""

    @property
    def any_leased(self) -> bool: ...

    def physical_rows(self, table: Table, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...


class ModelWorker(Protocol):
    """What the hooks need of a worker. `worker.HiSparseWorker` is the implementation."""

    @property
    def handles(self) -> Sequence[LayerHandle]: ...

    @property
    def indexer(self) -> KeyStore: ...

    @property
    def tables(self) -> RowTables: ...


class StepCache:
    """The `cache` argument of one forward pass: where this step's rows go, and which keys its queries score.

    All physical rows are computed here, once per step and not per layer.
    """

    def __init__(self, runner: "DsaModelRunner", batch: StepBatch) -> None:
        tables = runner.worker.tables
        self.batch = batch
        self.runner = runner
        self.write_rows = tables.physical_rows(Table.RESIDENT, batch.slots, batch.positions)
        self.key_write_rows = tables.physical_rows(Table.INDEXER, batch.slots, batch.positions)
        self.key_rows = tuple(_key_rows(tables, segment, batch.slots) for segment in _query_rows(batch))

    def update(self, latents: torch.Tensor, rope_keys: torch.Tensor, layer_idx: int, **_: Any) -> Any:
        """Store `[1, 1, T, lora]` latents and `[1, 1, T, rope]` keys; give the model one dummy row of each."""
        rows = torch.cat([latents, rope_keys], dim=-1)[0, 0]
        self.runner.worker.handles[layer_idx].write(self.write_rows, rows)
        return torch.zeros_like(latents[:, :, :1]), torch.zeros_like(rope_keys[:, :, :1])


class DsaModelRunner:
    """A model, a worker, and the hooks between them: batches in, logits out.

    A model carries the hooks of one runner at a time. Use as a context manager, or call `uninstall`.
    """

    def __init__(self, loaded: LoadedModel, worker: ModelWorker, watch: SelectionWatch | None = None) -> None:
        """Install the hooks. `watch` is shown every selection, if there is one.

        Raises `InvariantError` if the model already carries hooks, or has not as many layers as the worker.
        """
        self.model: Any = loaded.model
        self.worker = worker
        self._watch = watch
        geometry = loaded.geometry
        if is_hooked(self.model):
            raise InvariantError(f"{loaded.name} is driven by another runner: uninstall that one first")
        if len(worker.handles) != geometry.num_layers:
            raise InvariantError(f"{loaded.name} has {geometry.num_layers} layers, the worker {len(worker.handles)}")
        modules = [layer.self_attn for layer in self.model.model.layers]
        self._leaders = {layer: index for index, layer in enumerate(geometry.leaders)}
        self._attention = [self._make_attention(layer, split_weights(module)) for layer, module in enumerate(modules)]
        self._indexers = {
            layer: LeaderIndexer(modules[layer].indexer, index, worker.indexer)
            for layer, index in self._leaders.items()
        }
        self._stock_attention = self.model.config._attn_implementation
        self._cache_argument = cache_argument(self.model)
        self._install(modules)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """One forward pass between the worker's `start_step` and `finish_step`.

        Returns float32 `[len(batch.logit_rows), vocab]`, in the order of `batch.logit_rows`.
        """
        return self._forward(StepCache(self, batch))

    def _forward(self, step: StepCache) -> torch.Tensor:
        batch, device = step.batch, step.batch.token_ids.device
        arguments = {self._cache_argument: step, _STEP: step}
        with torch.no_grad():
            output = self.model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                # Four-dimensional masks are passed on as they are; ours hides nothing, selection is all the mask.
                attention_mask=torch.zeros((1, 1, 1, 1), dtype=self.model.dtype, device=device),
                logits_to_keep=batch.logit_rows,
                **arguments,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def select(self, layer: int, step: StepCache, tokens: tuple[Any, Any, Any]) -> torch.Tensor:
        """A leader's selection, int32 `[1, T, topk]`: physical rows for decode rows, positions for prefill rows.

        `tokens`: hidden states, query residual and position embeddings, as the stock indexer is given them.
        """
        batch = step.batch
        selected = self._positions(layer, step, tokens)
        if self._watch is not None:
            self._watch.see(layer, selected, batch)
        if batch.num_decode:
            positions, staged_later = selected.split([batch.num_decode, batch.num_tokens - batch.num_decode])
            row_slot = batch.slots[: batch.num_decode].int()
            selection = Selection(positions, row_slot, leased=self.worker.tables.any_leased)
            selected = torch.cat([self.worker.handles[layer].resolve(selection), staged_later])
        return selected.unsqueeze(0)

    def _positions(self, layer: int, step: StepCache, tokens: tuple[Any, Any, Any]) -> torch.Tensor:
        """What a leader's indexer selects, int32 `[T, topk]`; stores the step's index keys."""
        return self._indexers[layer].select(*tokens, step.key_write_rows, step.key_rows)

    def _make_attention(self, layer: int, weights: MlaWeights) -> LayerAttention:
        return LayerAttention(self.worker.handles[layer], weights, follows=layer not in self._leaders)

    def attend(self, layer: int, query: torch.Tensor, indices: torch.Tensor, step: StepCache) -> torch.Tensor:
        """One layer's attention, `[1, T, H, v]`."""
        return self._attention[layer](query, indices, step.batch)

    def uninstall(self) -> None:
        """Take the hooks off the model, which is then stock again. Harmless when repeated."""
        if not is_hooked(self.model):
            return
        for layer in self._leaders:
            del self.model.model.layers[layer].self_attn.indexer.forward
        self.model.set_attn_implementation(self._stock_attention)

    def __enter__(self) -> "DsaModelRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _install(self, modules: Sequence[Any]) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attention_hook)
        self.model.set_attn_implementation(ATTENTION_NAME)
        for layer in self._leaders:
            modules[layer].indexer.forward = _indexer_hook(layer)


def is_hooked(model: Any) -> bool:
    """Whether a transformers model carries the hooks of a runner."""
    return bool(model.config._attn_implementation == ATTENTION_NAME)


def cache_argument(model: Any) -> str:
    """How this release of transformers calls the cache: "cache", or "past_key_values" before 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _indexer_hook(layer: int) -> Any:
    def forward(
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: Any,
        cache: Any = None,
        past_key_values: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        step = past_key_values if cache is None else cache
        if not isinstance(step, StepCache):
            raise InvariantError("the model was called without its runner while hooks are installed")
        return step.runner.select(layer, step, (hidden_states, q_resid, position_embeddings))

    return forward


def _attention_hook(
    module: Any, query: torch.Tensor, *_: Any, indices: torch.Tensor, **arguments: Any
) -> tuple[torch.Tensor, None]:
    step: StepCache = arguments[_STEP]
    return step.runner.attend(module.layer_idx, query, indices, step), None


def _query_rows(batch: StepBatch) -> tuple[PrefillSegment, ...]:
    """Every request's query rows: a decode row is a segment of one."""
    decode = zip(batch.slots[: batch.num_decode].tolist(), batch.positions[: batch.num_decode].tolist(), strict=True)
    rows = tuple(PrefillSegment(row, 1, slot, position + 1) for row, (slot, position) in enumerate(decode))
    return rows + batch.segments


def _key_rows(tables: RowTables, segment: PrefillSegment, like: torch.Tensor) -> KeyRows:
    positions = torch.arange(segment.context_end, dtype=torch.int64, device=like.device)
    slots = torch.full_like(positions, segment.slot)
    return KeyRows(segment, tables.physical_rows(Table.INDEXER, slots, positions))
