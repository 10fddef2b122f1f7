"""What an engine of some ranks keeps in files, an engine of any other number finds."""

from pathlib import Path

import pytest

from hisparse.engine import LoadedModel, load_model
from hisparse.engine.tp import TensorParallel
from tests.engine.test_offload_engine import CONVERSATIONS, SHARED, assert_like_stock, config, offload, one_run

BLOCK = 16


def parallel(num_ranks: int) -> TensorParallel | None:
    return TensorParallel(num_ranks, start_s=60, step_s=60, close_s=10) if num_ranks > 1 else None


@pytest.mark.parametrize(("name", "sizes"), [("builtin:tiny-v32", (2, 4, 1)), ("builtin:tiny-glm", (4, 1, 2))])
def test_engines_of_other_numbers_of_ranks_read_each_others_files(
    name: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    loaded = load_model(name)
    for number, num_ranks in enumerate(sizes):
        options = config(loaded, offload(tmp_path), parallel=parallel(num_ranks), copy_delay=2)
        results, stats = one_run(loaded, options, CONVERSATIONS)
        assert_like_stock(loaded, CONVERSATIONS, results)
        assert stats.rows.unreachable == 0
        # All but the first compute the ends of prompts only: less than a page of each.
        assert (stats.reused.files > len(SHARED)) == bool(number)
        assert (stats.reused.computed < len(CONVERSATIONS) * (BLOCK + 1)) == bool(number)


@pytest.mark.parametrize("num_ranks", [2, 1])
def test_slots_of_two_ranks_are_read_by_two_ranks_only(num_ranks: int, tmp_path: Path) -> None:
    loaded: LoadedModel = load_model("builtin:tiny-v32")
    for number, size in enumerate((2, num_ranks)):
        kept = offload(tmp_path, canonical_layout=False)
        results, stats = one_run(loaded, config(loaded, kept, parallel=parallel(size)), CONVERSATIONS)
        assert_like_stock(loaded, CONVERSATIONS, results)
        assert (stats.reused.files > 0) == (number == 1 and num_ranks == 2)
