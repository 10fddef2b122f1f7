"""An engine without a model: it answers every request with the bytes of "ok", and can be told to misbehave."""

import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

from hisparse.cli import interrupts
from hisparse.config import ModelGeometry
from hisparse.geometry import RowFormat

OUTPUT = "ok"


@dataclass
class KV:
    total_bytes: int = 8 << 20
    device_bytes: int = 1 << 20
    indexer_bytes: int = 2048
    host_bytes: int = 7 << 20
    host_physical_bytes: int = 8 << 20
    pages_resident: int = 4
    pages_host: int = 28
    staging_bytes: int = 512


@dataclass
class Rows:
    resident: int = 10
    hot: int = 20
    miss: int = 30
    unreachable: int = 0


@dataclass
class Moved:
    host_to_device_bytes: int = 4096
    device_to_host_bytes: int = 1 << 20


@dataclass
class Reused:
    device: int = 3
    host: int = 2
    cpu_tier: int = 1
    files: int = 4
    computed: int = 5


@dataclass
class FakeBackend:
    """What the fake engine was told, and how it should behave. Tests read and write it."""

    interrupt_after: int | None = None
    text: str = OUTPUT
    verdict: Any = field(
        default_factory=lambda: SimpleNamespace(
            reference="transformers", identical=True, max_logit_diff=1e-6, mismatches=()
        )
    )
    engines: list["FakeEngine"] = field(default_factory=list)
    verified: list[tuple[Any, ...]] = field(default_factory=list)
    meters: list[Any] = field(default_factory=list)
    loaded: list[tuple[str, str, str]] = field(default_factory=list)

    def load_model(self, name: str, dtype: str, device: str) -> SimpleNamespace:
        self.loaded.append((name, dtype, device))
        return SimpleNamespace(
            geometry_for=self.geometry_for,
            tokenizer=SimpleNamespace(encode=lambda text: list(text.encode())),
            max_tokens=16384,
        )

    def geometry_for(self, kv_dtype: str) -> ModelGeometry:
        row = RowFormat("float32", 320) if kv_dtype == "auto" else RowFormat(kv_dtype, 656)
        return ModelGeometry(row, leader_of=(0, 1, 2, 3), index_topk=32, index_row_bytes=64)

    def make_engine(self, loaded: Any, config: Any, meter: Any = None) -> "FakeEngine":
        self.engines.append(FakeEngine(self, config))
        self.meters.append(meter)
        return self.engines[-1]

    def verify(self, *arguments: Any) -> Any:
        self.verified.append(arguments)
        arguments[-1]("stock", 1, 1)
        return self.verdict


class FakeEngine:
    """One prefill step per prompt, then one decode step per output character."""

    def __init__(self, backend: FakeBackend, config: Any) -> None:
        self.backend = backend
        self.config = config
        self.requests: list[tuple[Sequence[int], Any]] = []
        self.decoded = 0
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def add_request(self, prompt_ids: Sequence[int], params: Any) -> str:
        self.requests.append((prompt_ids, params))
        return f"request-{len(self.requests)}"

    def run(self) -> Iterator[SimpleNamespace]:
        for ids, _ in self.requests:
            yield SimpleNamespace(prefill_tokens=len(ids), decode_tokens=0, tokens=())
        for char in self.backend.text:
            if self.decoded == self.backend.interrupt_after:
                raise KeyboardInterrupt
            self.decoded += 1
            tokens = tuple(SimpleNamespace(text=char, token_id=ord(char)) for _ in self.requests)
            yield SimpleNamespace(prefill_tokens=0, decode_tokens=len(tokens), tokens=tokens)

    def results(self) -> list[SimpleNamespace]:
        text = self.backend.text[: self.decoded]
        done = text == self.backend.text
        return [
            SimpleNamespace(
                request_id=f"request-{number}",
                prompt_tokens=len(ids),
                output_ids=[ord(char) for char in text],
                text=text,
                ttft_s=0.25 if text else None,
                tpot_s=0.0125 if len(text) > 1 else None,
                finish_reason=SimpleNamespace(value="length") if done else None,
            )
            for number, (ids, _) in enumerate(self.requests, start=1)
        ]

    def stats(self) -> SimpleNamespace:
        assert not self.closed, "the engine was asked for its totals after it was closed"
        return SimpleNamespace(
            kv=KV(), rows=Rows(), moved=Moved(), reused=Reused(), spills=28, restores=1, preemptions=2
        )


@pytest.fixture
def signals() -> Iterator[None]:
    """What a test has signals do ends with it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    usual = [signal.getsignal(number) for number in numbers]
    yield
    interrupts.heed_endings()
    for number, handler in zip(numbers, usual, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    """The command line runs on a `FakeBackend` instead of the engine."""
    from hisparse.engine import parallel

    fake = FakeBackend()
    engine, verify = ModuleType("hisparse.engine"), ModuleType("hisparse.engine.verify")
    vars(engine).update(
        load_model=lambda *names: fake.load_model(*names),
        describe_model=lambda *names: fake.load_model(*names, "meta"),
        TensorParallel=parallel.TensorParallel,
        HostBacking=parallel.HostBacking,
        Engine=fake.make_engine,
        EngineConfig=SimpleNamespace,
        SamplingParams=SimpleNamespace,
    )
    vars(verify).update(verify=fake.verify)
    for module in (engine, verify):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake
