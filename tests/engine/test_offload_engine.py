"""An engine whose prompts come back from memory and files: the same tokens as stock, and what was reused adds up."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.config import WriteBack
from hisparse.engine import Engine, EngineConfig, LoadedModel, RequestResult, SamplingParams, load_model
from hisparse.engine.reuse import ReusedTokens
from hisparse.engine.revision import weights_revision
from hisparse.engine.stats import EngineStats
from hisparse.engine.stock import stock_generate
from hisparse.errors import CapacityError, InputError
from hisparse.offload.config import FileOptions, OffloadConfig
from tests.engine.parity import GREEDY, prompt, slab_bytes, stock

BLOCK = 16
NUM_TOKENS = 6
SHARED = prompt(90, 10 * BLOCK)
"""What prompts of a test begin with: ten pages."""


def offload(files: Path | None = None, cpu_bytes: int = 4 << 20, **options: Any) -> OffloadConfig:
    below = FileOptions((files,), 256 << 20) if files is not None else None
    return OffloadConfig(cpu_bytes, files=below, lookup_deadline_s=30.0, **options)


def config(loaded: LoadedModel, kept: OffloadConfig | None, **changes: Any) -> EngineConfig:
    """A slab of eight blocks more than the least, so that prompts are spilled, and all checks on."""
    options: dict[str, Any] = {
        "max_tokens": 320,
        "slab_bytes": slab_bytes(loaded, BLOCK, 8),
        "host_pool_bytes": 4 << 20,
        "block_size": BLOCK,
        "max_running": 3,
        "chunk_tokens": 96,
        "debug": True,
        "offload": kept,
    }
    return EngineConfig(**(options | changes))


def run(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[RequestResult]:
    ids = [engine.add_request(tokens, SamplingParams(max_tokens=NUM_TOKENS)) for tokens in prompts]
    for _ in engine.run():
        pass
    return [engine.take_result(request_id) for request_id in ids]


def one_run(
    loaded: LoadedModel, options: EngineConfig, prompts: Sequence[tuple[int, ...]]
) -> tuple[list[RequestResult], EngineStats]:
    with Engine(loaded, options) as engine:
        return run(engine, prompts), engine.stats()


def assert_like_stock(loaded: LoadedModel, prompts: Sequence[tuple[int, ...]], results: list[RequestResult]) -> None:
    for tokens, result in zip(prompts, results, strict=True):
        assert result.output_ids == stock(loaded.name, tokens, GREEDY, NUM_TOKENS).tokens
        assert result.reused.total == len(tokens)


CONVERSATIONS = [SHARED + prompt(seed, length) for seed, length in ((1, 30), (2, 17), (3, 48), (4, 1))]


@pytest.mark.parametrize("delay", [0, 3])
def test_what_one_engine_left_in_files_the_next_does_not_compute(tiny: LoadedModel, tmp_path: Path, delay: int) -> None:
    options = config(tiny, offload(tmp_path), copy_delay=delay, seed=delay)
    for number in range(2):
        results, stats = one_run(tiny, options, CONVERSATIONS)
        assert_like_stock(tiny, CONVERSATIONS, results)
        assert stats.rows.unreachable == 0
        # The second run computes the ends of prompts only: less than a page of each.
        assert (stats.reused.files > len(SHARED)) == bool(number)
        assert (stats.reused.computed < len(CONVERSATIONS) * (BLOCK + 1)) == bool(number)


def test_prompts_that_the_pools_had_to_give_up_come_back_from_memory_and_files(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    page = slab_bytes(tiny, BLOCK, 1) - slab_bytes(tiny, BLOCK, 0)
    small = config(tiny, offload(tmp_path, cpu_bytes=900 << 10), host_pool_bytes=16 * page, indexer_tokens=40 * BLOCK)
    others = [prompt(seed, 250) for seed in range(20, 25)]
    with Engine(tiny, small) as engine:
        first = run(engine, CONVERSATIONS)
        assert_like_stock(tiny, others, run(engine, others))
        again = run(engine, CONVERSATIONS)
        stats = engine.stats()
    assert_like_stock(tiny, CONVERSATIONS, first)
    assert_like_stock(tiny, CONVERSATIONS, again)
    assert sum(result.reused.files + result.reused.cpu_tier for result in first) == 0
    assert again[0].reused.files + again[0].reused.cpu_tier > 0
    assert stats.spills > 0
    assert {tier.group for tier in stats.tiers} == {"resident", "indexer"}
    assert all(tier.num_evicted > 0 and tier.traffic.loads > 0 for tier in stats.tiers)


def test_conversations_of_several_turns_find_their_kv_in_every_place(tiny: LoadedModel, tmp_path: Path) -> None:
    """Prompts end with a page, one token into the next, and one short of its end. Pressure alone moves KV down."""
    page = slab_bytes(tiny, BLOCK, 1) - slab_bytes(tiny, BLOCK, 0)
    small = config(tiny, offload(tmp_path, cpu_bytes=1200 << 10), host_pool_bytes=40 * page, indexer_tokens=70 * BLOCK)
    conversations = [SHARED + prompt(seed, more) for seed, more in ((31, BLOCK), (32, BLOCK + 1), (33, 2 * BLOCK - 1))]
    found = ReusedTokens()
    for engine_number in range(2):
        with Engine(tiny, small) as engine:
            for turn in range(3):
                results = run(engine, conversations)
                assert_like_stock(tiny, conversations, results)
                for result in results:
                    found.add(result.reused)
                seed = 40 + 10 * engine_number + turn
                pairs = enumerate(zip(conversations, results, strict=True))
                # Six tokens of output and ten of a question: remainders stay what they were.
                conversations = [text + result.output_ids + prompt(seed + i, 10) for i, (text, result) in pairs]
                run(engine, [prompt(seed + 3, 250)] * (turn > 0))
            assert engine.stats().rows.unreachable == 0
    assert min(found.device, found.host, found.cpu_tier, found.files, found.computed) > 0, found


def test_memory_alone_gives_prompts_back(tiny: LoadedModel) -> None:
    page = slab_bytes(tiny, BLOCK, 1) - slab_bytes(tiny, BLOCK, 0)
    small = config(tiny, offload(), host_pool_bytes=16 * page, indexer_tokens=40 * BLOCK)
    with Engine(tiny, small) as engine:
        run(engine, CONVERSATIONS)
        run(engine, [prompt(seed, 250) for seed in range(20, 24)])
        again = run(engine, CONVERSATIONS)
    assert_like_stock(tiny, CONVERSATIONS, again)
    assert again[0].reused.cpu_tier > 0
    assert sum(result.reused.files for result in again) == 0


def test_what_an_engine_computed_last_is_kept_however_long_it_is_idle_then(tiny: LoadedModel) -> None:
    kept = offload(transfer_deadline_s=0.3)
    with Engine(tiny, config(tiny, kept, chunk_tokens=320)) as engine:
        engine.add_request(SHARED, SamplingParams(max_tokens=1))
        for _ in engine.run():
            pass
        assert engine.scheduler.num_open, "control: the last stores are still to be sent, or on their way"
        time.sleep(0.4)
        run(engine, [prompt(91, 20)])
        for tier in engine.stats().tiers:
            assert (tier.traffic.failed_stores, tier.traffic.overdue_transfers) == (0, 0)
            assert tier.traffic.stores >= 10


def test_a_prefix_larger_than_the_cpu_tier_flows_through_it(tiny: LoadedModel, tmp_path: Path) -> None:
    one_run(tiny, config(tiny, offload(tmp_path)), CONVERSATIONS[:1])
    results, stats = one_run(tiny, config(tiny, offload(tmp_path, cpu_bytes=110 << 10)), CONVERSATIONS[:1])
    assert_like_stock(tiny, CONVERSATIONS[:1], results)
    assert results[0].reused.files == 11 * BLOCK
    assert [tier.traffic.loads for tier in stats.tiers] == [11, 11]
    # It did not fit: four chunks do, and the others had to make room for one another.
    assert all(tier.num_evicted >= 7 for tier in stats.tiers)


def test_pages_that_fill_one_by_one_are_kept_when_their_chunk_is_whole(tiny: LoadedModel, tmp_path: Path) -> None:
    kept = config(tiny, offload(tmp_path, blocks_per_chunk=3))
    first = prompt(7, 20)
    with Engine(tiny, kept) as engine:
        request = engine.add_request(first, SamplingParams(max_tokens=8 * BLOCK, ignore_eos=True))
        for _ in engine.run():
            pass
        conversation = first + engine.take_result(request).output_ids
    results, _ = one_run(tiny, kept, [conversation])
    assert_like_stock(tiny, [conversation], results)
    # Nine pages are full, all but one of them by decoding.
    assert results[0].reused.files == 9 * BLOCK


@pytest.mark.parametrize("options", [{"blocks_per_chunk": 3}, {"canonical_layout": False}], ids=["chunks", "direct"])
def test_other_ways_to_keep_chunks_give_the_same_tokens(
    tiny: LoadedModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    kept = config(tiny, offload(tmp_path, **options))
    one_run(tiny, kept, CONVERSATIONS)
    results, stats = one_run(tiny, kept, CONVERSATIONS)
    assert_like_stock(tiny, CONVERSATIONS, results)
    assert stats.reused.files >= 6 * BLOCK


def test_without_a_host_pool_prompts_come_back_too(tiny: LoadedModel, tmp_path: Path) -> None:
    kept = config(tiny, offload(tmp_path), slab_bytes=None, write_back=WriteBack.NEVER)
    one_run(tiny, kept, CONVERSATIONS)
    results, stats = one_run(tiny, kept, CONVERSATIONS)
    assert_like_stock(tiny, CONVERSATIONS, results)
    assert stats.reused.files > len(SHARED)
    assert stats.spills == 0


# Misses.


def test_a_changed_byte_in_a_file_is_a_miss_and_the_tokens_are_the_same(tiny: LoadedModel, tmp_path: Path) -> None:
    options = config(tiny, offload(tmp_path))
    one_run(tiny, options, CONVERSATIONS[:1])
    victims = [sorted(folder.glob("*/*.kv"))[0] for folder in tmp_path.glob("v1-*")]
    assert len(victims) == 2
    for victim in victims:
        raw = bytearray(victim.read_bytes())
        raw[5000] ^= 1
        victim.write_bytes(raw)
    results, stats = one_run(tiny, options, CONVERSATIONS[:1])
    assert_like_stock(tiny, CONVERSATIONS[:1], results)
    assert sum(tier.traffic.failed_promotions for tier in stats.tiers) >= 1
    assert len(list(tmp_path.glob("v1-*/quarantine/*.bad"))) >= 1


def other_weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """The model's weights with those of one projection doubled."""
    weights = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    weights["model.layers.1.self_attn.q_a_proj.weight"] *= 2
    return weights


@pytest.mark.parametrize("other", ["weights", "dtype", "block size", "salt", "name"])
def test_what_was_stored_under_another_meaning_is_computed(tiny: LoadedModel, tmp_path: Path, other: str) -> None:
    one_run(tiny, config(tiny, offload(tmp_path)), CONVERSATIONS[:1])
    loaded, changes = tiny, dict[str, Any]()
    if other == "weights":
        loaded = load_model(tiny.name)
        loaded.model.load_state_dict(other_weights(tiny))
    elif other == "dtype":
        loaded = load_model(tiny.name, "bfloat16")
    elif other == "block size":
        changes = {"block_size": 32}
    elif other == "salt":
        changes = {"prefix_salt": "a tenant's secret"}
    elif other == "name":
        loaded = replace(tiny, name=f"{tiny.name}-b")
    before = {path.name for path in tmp_path.iterdir()}
    _, stats = one_run(loaded, config(loaded, offload(tmp_path), **changes), CONVERSATIONS[:1])
    assert stats.reused.files == 0
    assert stats.reused.computed == len(CONVERSATIONS[0])
    assert len({path.name for path in tmp_path.iterdir()} - before) == 2
    # Control: under the same meaning it is found.
    _, stats = one_run(tiny, config(tiny, offload(tmp_path)), CONVERSATIONS[:1])
    assert stats.reused.files == 11 * BLOCK


def test_the_revision_is_that_of_the_weights_in_memory(tiny: LoadedModel) -> None:
    again = load_model(tiny.name)
    assert weights_revision(again.model) == weights_revision(tiny.model)
    for name in ("lm_head.weight", "model.layers.0.self_attn.indexer.wk.weight"):
        changed = load_model(tiny.name)
        tensor = changed.model.state_dict()[name]
        tensor.view(-1)[-1] += 1
        assert weights_revision(changed.model) != weights_revision(tiny.model)


# Weights that change.


@pytest.mark.parametrize("kept", [True, False])
def test_after_a_swap_of_weights_running_requests_and_new_ones_are_those_of_the_new_weights(
    tiny: LoadedModel, tmp_path: Path, kept: bool
) -> None:
    loaded = load_model(tiny.name)
    weights = other_weights(tiny)
    other = load_model(tiny.name)
    other.model.load_state_dict(weights)
    prompts = (CONVERSATIONS[0], prompt(50, 150))
    options = config(loaded, offload(tmp_path) if kept else None, copy_delay=2)
    with Engine(loaded, options) as engine:
        run(engine, prompts[:1])
        running = engine.add_request(prompts[1], SamplingParams(max_tokens=NUM_TOKENS))
        for _ in range(2):
            engine.step()
        engine.swap_weights(weights)
        results = run(engine, prompts[:1])
        results.append(engine.take_result(running))
    assert [result.reused.computed for result in results] == [len(tokens) for tokens in prompts]
    for tokens, result in zip(prompts, results, strict=True):
        assert result.output_ids == stock_generate(other.model, tokens, GREEDY, NUM_TOKENS).tokens
    if kept:
        # What was computed after the swap is found by whoever starts with those weights.
        _, stats = one_run(other, config(other, offload(tmp_path)), CONVERSATIONS[:1])
        assert stats.reused.files == 11 * BLOCK


def test_weights_of_another_shape_or_name_change_nothing(tiny: LoadedModel) -> None:
    weights = other_weights(tiny)
    name = "model.layers.1.self_attn.q_a_proj.weight"
    revision = weights_revision(tiny.model)
    with Engine(tiny, config(tiny, None)) as engine:
        for wrong, said in (
            (weights | {name: weights[name][:-1]}, f"have {name} as"),
            (weights | {"more": weights[name]}, "have more, and the model does not"),
            ({key: value for key, value in weights.items() if key != name}, f"lack {name}"),
        ):
            with pytest.raises(InputError, match=said):
                engine.swap_weights(wrong)
        assert_like_stock(tiny, CONVERSATIONS[:1], run(engine, CONVERSATIONS[:1]))
    assert weights_revision(tiny.model) == revision


def test_a_reset_forgets_the_pools_and_where_asked_the_tiers(tiny: LoadedModel, tmp_path: Path) -> None:
    with Engine(tiny, config(tiny, offload(tmp_path))) as engine:
        run(engine, CONVERSATIONS[:1])
        engine.reset_prefix_cache()
        (tiers,) = run(engine, CONVERSATIONS[:1])
        engine.reset_prefix_cache(tiers=True)
        (nothing,) = run(engine, CONVERSATIONS[:1])
    assert_like_stock(tiny, CONVERSATIONS[:1] * 2, [tiers, nothing])
    assert tiers.reused.cpu_tier == 11 * BLOCK
    assert nothing.reused.computed == len(CONVERSATIONS[0])


# Beginning and end.


def test_what_cannot_be_kept_is_refused_and_leaves_nothing_behind(tiny: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match="CPU tier of 1000 bytes holds no chunk"):
        Engine(tiny, config(tiny, offload(cpu_bytes=1000)))
    file = tmp_path / "file"
    file.write_text("not a directory")
    with pytest.raises(InputError, match=str(file)):
        Engine(tiny, config(tiny, offload(file)))
    # The model carries no hooks, so another engine can have it.
    assert_like_stock(tiny, CONVERSATIONS[:1], one_run(tiny, config(tiny, None), CONVERSATIONS[:1])[0])


def test_an_engine_that_is_closed_in_the_middle_keeps_what_was_stored(tiny: LoadedModel, tmp_path: Path) -> None:
    options = config(tiny, offload(tmp_path), copy_delay=3)
    engine = Engine(tiny, options)
    engine.add_request(CONVERSATIONS[0], SamplingParams(max_tokens=NUM_TOKENS))
    for _ in range(3):
        engine.step()
    engine.close()
    engine.close()
    results, stats = one_run(tiny, options, CONVERSATIONS[:1])
    assert_like_stock(tiny, CONVERSATIONS[:1], results)
    assert stats.reused.files >= 6 * BLOCK
