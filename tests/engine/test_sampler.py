"""Tokens depend on the request alone, follow the distribution asked for, and bad parameters are refused."""

import pytest
import torch

from hisparse.engine.sampler import MIN_TEMPERATURE, SamplingParams, sample, uniform
from hisparse.errors import BackendError, InputError

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 2.0])


def many(params: SamplingParams, count: int = 1500) -> torch.Tensor:
    """How often each token is drawn over `count` steps, as frequencies."""
    drawn = sample(LOGITS.expand(count, -1), [params] * count, range(count))
    return torch.bincount(torch.tensor(drawn), minlength=5) / count


def test_temperature_zero_takes_the_best_token_and_the_lowest_of_equals() -> None:
    assert sample(LOGITS.unsqueeze(0), [SamplingParams()], [0]) == [0]
    assert sample(LOGITS.flip(0).unsqueeze(0), [SamplingParams()], [0]) == [0]


def test_frequencies_follow_the_softmax_at_the_given_temperature() -> None:
    for temperature in (0.5, 1.0, 3.0):
        expected = (LOGITS / temperature).softmax(0)
        torch.testing.assert_close(many(SamplingParams(temperature=temperature)), expected, atol=0.05, rtol=0)


def test_control_the_frequencies_would_show_another_temperature() -> None:
    with pytest.raises(AssertionError):
        torch.testing.assert_close(many(SamplingParams(temperature=1.0)), (LOGITS / 3).softmax(0), atol=0.05, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_no_numbers_is_refused_and_its_request_named(temperature: float, wrong: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 3] = wrong
    with pytest.raises(BackendError, match="request-7, output token 4: the model gave logits that are no numbers"):
        sample(
            logits, [SamplingParams(temperature=temperature)] * 3, [3, 4, 5], ["request-6", "request-7", "request-8"]
        )


def test_a_row_that_excludes_every_token_is_refused() -> None:
    with pytest.raises(BackendError, match="no numbers"):
        sample(torch.full((1, 4), -torch.inf), [SamplingParams()], [0])


def test_a_row_may_exclude_single_tokens() -> None:
    logits = LOGITS.clone()
    logits[[0, 4]] = -torch.inf
    assert sample(logits.unsqueeze(0), [SamplingParams()], [0]) == [1]


def test_the_lowest_temperature_is_greedy_whatever_the_logits_are() -> None:
    params = SamplingParams(temperature=MIN_TEMPERATURE)
    largest = torch.finfo(torch.float32).max
    for logits in (torch.tensor([[-largest, 0.0, largest]]), torch.tensor([[0.0, 1.0, 1.001]])):
        assert {sample(logits, [params], [step])[0] for step in range(50)} == {2}


def test_a_lower_temperature_is_refused() -> None:
    for temperature in (1e-310, MIN_TEMPERATURE / 2):
        with pytest.raises(InputError, match=r"must be 0 \(greedy\), or at least 1e-06"):
            SamplingParams(temperature=temperature)


def test_top_k_keeps_the_k_best_and_the_lowest_of_equals() -> None:
    assert many(SamplingParams(temperature=1.0, top_k=1))[0] == 1
    assert (many(SamplingParams(temperature=1.0, top_k=2)) > 0).tolist() == [True, False, False, False, True]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    best = LOGITS.softmax(0)[0].item()
    for top_p, kept in ((best * 0.9, [0]), (best * 1.5, [0, 4]), (best * 2 + 0.01, [0, 1, 4]), (1.0, [0, 1, 2, 3, 4])):
        frequencies = many(SamplingParams(temperature=1.0, top_p=top_p))
        assert frequencies.nonzero().flatten().tolist() == kept


def test_a_request_draws_the_same_token_alone_and_in_any_company() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(6)]
    logits = torch.randn((6, 50), generator=torch.Generator().manual_seed(0))
    together = sample(logits, params, [9] * 6)
    alone = [sample(logits[row : row + 1], params[row : row + 1], [9])[0] for row in range(6)]
    backwards = sample(logits.flip(0), params[::-1], [9] * 6)[::-1]
    assert together == alone == backwards


def test_seed_and_step_both_change_the_draw() -> None:
    numbers = {uniform(seed, step) for seed in range(40) for step in range(40)}
    assert len(numbers) == 1600
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1600 - 0.5) < 0.03


def test_the_numbers_of_a_seed_never_change_between_releases() -> None:
    drawn = [round(uniform(seed, step), 6) for seed, step in ((0, 0), (1, 0), (0, 1), (-1, 7))]
    assert drawn == [0.652448, 0.36819, 0.034012, 0.10135]


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=5.0, seed=3)
    tokens = sample(LOGITS.expand(40, -1), [greedy, sampled] * 20, range(40))
    assert set(tokens[::2]) == {0}
    assert len(set(tokens[1::2])) > 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top-p"),
        ({"top_p": 1.5}, "top-p"),
        ({"top_k": -1}, "top-k"),
        ({"stop": ("end", "")}, "stop string"),
        ({"stop_token_ids": (-3,)}, "stop tokens"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_rows_without_a_request_are_refused() -> None:
    with pytest.raises(InputError, match="2 rows of logits for 1 requests"):
        sample(LOGITS.expand(2, -1), [SamplingParams()], [0])
