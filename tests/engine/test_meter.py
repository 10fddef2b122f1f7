"""What an engine tells a meter, and that results may be taken out of it."""

from dataclasses import dataclass, field

import pytest

from hisparse.engine import Engine, EngineConfig, FinishReason, LoadedModel, SamplingParams, StepOutput
from hisparse.engine.request import Request
from hisparse.errors import InputError

CONFIG = EngineConfig(max_tokens=64, block_size=16, host_pool_bytes=1 << 20, chunk_tokens=8)


@dataclass
class Diary:
    """Writes down what it is told."""

    told: list[tuple[str, object]] = field(default_factory=list)

    def see_first_token(self, request: Request) -> None:
        assert request.admitted is not None
        assert request.first_token is not None
        assert request.arrival <= request.admitted <= request.first_token
        self.told.append(("first token", request.request_id))

    def see_end(self, engine: Engine, request: Request) -> None:
        self.told.append(("end", request.finish_reason))

    def see_step(self, engine: Engine, output: StepOutput, seconds: float) -> None:
        assert seconds > 0
        engine.scheduler.assert_invariants()
        self.told.append(("step", output.prefill_tokens))


def test_a_meter_is_told_of_each_step_first_token_and_end(tiny: LoadedModel) -> None:
    diary = Diary()
    with Engine(tiny, CONFIG, meter=diary) as engine:
        engine.add_request(range(12), SamplingParams(max_tokens=2))
        for _ in engine.run():
            pass
        assert diary.told == [
            ("step", 8),
            ("first token", "request-0"),
            ("step", 4),
            ("end", FinishReason.LENGTH),
            ("step", 0),
        ]
        waiting = engine.add_request(range(12), SamplingParams(max_tokens=2))
        diary.told.clear()
        engine.abort(waiting)
        engine.abort(waiting)
        assert diary.told == [("end", None)]


def test_a_result_that_was_taken_is_forgotten(tiny: LoadedModel) -> None:
    with Engine(tiny, CONFIG) as engine:
        first, second = (engine.add_request([seed, 2, 3], SamplingParams(max_tokens=2)) for seed in (1, 5))
        with pytest.raises(InputError, match="no request 'request-0' that has ended"):
            engine.take_result(first)
        for _ in engine.run():
            pass
        expected = engine.results()
        assert engine.take_result(first) == expected[0]
        assert engine.results() == expected[1:]
        for name in (first, "nobody"):
            with pytest.raises(InputError, match="no request"):
                engine.take_result(name)
        assert engine.take_result(second) == expected[1]
