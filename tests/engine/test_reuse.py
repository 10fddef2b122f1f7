"""Where prompts came from adds up."""

from itertools import product

from hisparse.engine.reuse import ReusedTokens, count_hit


def test_counts_have_the_five_names_that_reports_use() -> None:
    counts = ReusedTokens(1, 2, 3, 4, 5)
    assert counts.as_dict() == {"device": 1, "host": 2, "cpu_tier": 3, "files": 4, "computed": 5}
    counts.add(ReusedTokens(10, 20, 30, 40, 50))
    assert counts == ReusedTokens(11, 22, 33, 44, 55)
    assert counts.total == 165


def test_a_hit_counts_token_by_token_as_far_as_the_prompt_goes() -> None:
    block_size = 4
    for num_pages, num_prompt in product(range(4), range(18)):
        for places in product([0, 7], repeat=num_pages):
            of_token = [place for place in places for _ in range(block_size)][:num_prompt]
            counts = ReusedTokens()
            count_hit(counts, places, num_prompt, block_size)
            assert counts == ReusedTokens(device=of_token.count(0), host=of_token.count(7))
