"""One rank, in a process of its own: it loads its part of the model, and then does what it is told.

It ends when it is told to, when something fails, and when the process that started it is gone, whatever it does then.
"""

import faulthandler
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed

from hisparse.engine.executor import ModelRank, StepWork, default_backend
from hisparse.engine.models import LoadedModel
from hisparse.engine.offload import attach_regions
from hisparse.engine.parallel import HostBacking
from hisparse.engine.revision import weights_revision
from hisparse.engine.tp import host_group
from hisparse.engine.tp.meeting import LOOPBACK
from hisparse.engine.tp.messages import (
    Close,
    Closed,
    Count,
    Counted,
    Failed,
    FailureKind,
    Move,
    Moved,
    OpenCaches,
    Opened,
    Phase,
    Ready,
    Stepped,
)
from hisparse.engine.tp.parent_channel import ParentChannel
from hisparse.engine.tp.parent_watch import die_with_parent, end_with_parent
from hisparse.engine.tp.rank_spec import RankSpec
from hisparse.engine.tp.sharded_model import load_part
from hisparse.errors import BackendError, InputError, InvariantError
from hisparse.worker.host_order import HostOrder
from hisparse.worker.shared_pool import CpuPoolSharing, PoolSharing

# Its stores are public, but its annotations do not say so.
dist: Any = torch.distributed

ORPHAN_EXIT = 3
"""Exit code of a rank whose parent is gone."""

SAY_WHERE = signal.SIGUSR1
"""A rank that gets this signal writes where it is, even if it runs no Python."""


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a rank's process has from its parent.

    `channel`: requests and answers. `lifeline`: what comes there, or its end, is the word to end at once. Descriptors:
    `words` takes standard output and errors, `pool` and `order` are the shared host pool's files, None for a private
    one.
    """

    channel: Connection
    lifeline: Connection
    words: Any
    pool: Any
    order: Any


def run_rank(spec: RankSpec, inherited: Inherited) -> NoReturn:
    """The whole life of a rank. Never returns: what fails is said over the channel, and in the exit code."""
    words = inherited.words.detach()
    # Standard output is the parent's: what commands print there is for programs to read.
    os.dup2(words, 1)
    os.dup2(words, 2)
    os.close(words)
    # A rank that crashes, or is sent `SAY_WHERE`, writes where all its threads are.
    faulthandler.enable(file=2)
    faulthandler.register(SAY_WHERE, file=2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Where a whole group of processes gets them, they are for the parent, which then ends the ranks.
        signal.signal(number, signal.SIG_IGN)
    channel = ParentChannel(inherited.channel)
    end_with_parent(spec.parent, inherited.lifeline, lambda: _end(spec, ORPHAN_EXIT))
    if spec.dies_with_parent and os.getppid() == spec.parent:
        die_with_parent()
    channel.forward_warnings()
    at_exit = ExitStack()
    try:
        _Rank(spec, inherited, channel, at_exit).serve()
        at_exit.close()
    except BaseException as error:
        # Nothing is given back in good order: that would wait for other ranks, which wait for this one, and meanwhile
        # nobody would hear what failed.
        at_s = time.monotonic()
        traceback.print_exc()
        sys.stderr.flush()
        channel.say(Failed(_kind_of(error), str(error), at_s))
        _end(spec, 1)
    channel.say(Closed())
    # Nothing is left to do; threads of a communication library that do not end must not keep the process.
    os._exit(0)


def _kind_of(error: BaseException) -> FailureKind:
    if isinstance(error, InputError):
        return FailureKind.INPUT
    return FailureKind.BACKEND if isinstance(error, BackendError) else FailureKind.FAULT


def _end(spec: RankSpec, code: int) -> NoReturn:
    """Give pinned memory back within a bounded time, and end."""
    if spec.device != "cpu":
        from hisparse.worker.cuda import teardown

        teardown.run_all()
    os._exit(code)


class _Rank:
    """What `run_rank` holds. All that has to be given back is left to `at_exit`."""

    def __init__(self, spec: RankSpec, inherited: Inherited, channel: ParentChannel, at_exit: ExitStack) -> None:
        self._spec = spec
        self._channel = channel
        self._inherited = inherited
        self._at_exit = at_exit
        self._store: Any = None
        self._rank: ModelRank | None = None

    def serve(self) -> None:
        """Load, then answer requests until `Close`."""
        self._say("starts")
        if self._spec.prepare is not None:
            self._spec.prepare(self._spec.rank)
        loaded = self._load()
        while not isinstance(request := self._channel.recv(), Close):
            match request:
                case OpenCaches():
                    self._channel.send(self._open(loaded, request))
                case StepWork():
                    self._channel.send(self._step(request))
                case Move(copies):
                    self._say("moves KV")
                    self._channel.send(Moved(self._opened().move(copies)))
                case Count():
                    worker = self._opened().worker
                    self._channel.send(Counted(worker.counters(), int(worker.tables.num_missing())))
                case _:
                    raise InvariantError(
                        f"{self._spec.name} was sent a {type(request).__name__}, which it does not know"
                    )
        self._say("shuts down")

    def _load(self) -> LoadedModel:
        spec = self._spec
        device = _use_device(spec)
        torch.set_num_threads(spec.num_threads)
        self._say("meets the other ranks")
        self._store = _join(spec, device)
        self._at_exit.callback(dist.destroy_process_group)
        self._say("loads the model")
        loaded = load_part(spec.model, spec.dtype, str(device), spec.num_ranks)
        # All of them: what is split is gathered for it.
        revision = weights_revision(loaded.model) if spec.wants_revision else None
        self._channel.send(Ready(revision))
        return loaded

    def _open(self, loaded: LoadedModel, request: OpenCaches) -> Opened:
        spec, offload = self._spec, request.caches.offload
        regions = attach_regions(offload, spec.rank, self._at_exit) if offload is not None else None
        self._say("takes its memory")
        sharing = self._sharing(loaded) if request.backing is HostBacking.SHARED else None
        worker = request.caches.make_worker(default_backend(loaded, spec.config), spec.rank, sharing)
        # Other collectives run on the CPU, where a captured graph does not wait for them.
        graphs = spec.config.cuda_graphs and dist.get_backend() == "nccl"
        config = replace(spec.config, cuda_graphs=graphs)
        self._rank = rank = ModelRank(loaded, worker, config, offload, regions=regions)
        self._at_exit.callback(rank.close)
        pool, digests = worker.host_pool, rank.offload.digests if rank.offload is not None else {}
        return Opened(pool.usable_bytes, pool.physical_bytes, mapped_file(pool.storage.data_ptr()), digests)

    def _step(self, work: StepWork) -> Stepped:
        self._say_what(work)
        choices, report = self._opened().run(work)
        logits = None
        if work.keeps_logits and choices:
            logits = torch.stack([choice.logits for choice in choices if choice.logits is not None]).cpu().numpy()
            choices = tuple(replace(choice, logits=None) for choice in choices)
        return Stepped(choices, logits, report)

    def _sharing(self, loaded: LoadedModel) -> PoolSharing:
        spec, inherited = self._spec, self._inherited
        pool, order_file = inherited.pool.detach(), inherited.order.detach()
        self._at_exit.callback(os.close, pool)
        self._at_exit.callback(os.close, order_file)
        order = HostOrder(order_file, spec.rank, spec.num_ranks, spec.timeout_s)
        if loaded.model.device.type == "cpu":
            return CpuPoolSharing(pool, order)
        from hisparse.engine.tp.exchange import exchange_events
        from hisparse.worker.cuda.shared_pool import CudaPoolSharing

        if self._store is None:
            raise InvariantError(f"{spec.name} opens its caches before it met the others")
        return CudaPoolSharing(pool, order, loaded.model.device, exchange_events(self._store))

    def _opened(self) -> ModelRank:
        if self._rank is None:
            raise InvariantError(f"{self._spec.name} was asked for work before its caches were opened")
        return self._rank

    def _say_what(self, work: StepWork) -> None:
        """Only when it changes: most steps are like the one before."""
        kinds = {item.is_decode for item in work.items}
        self._say("decodes" if kinds == {True} else "prefills" if kinds else "moves pages")

    def _say(self, phase: str) -> None:
        if phase != getattr(self, "_phase", None):
            self._phase = phase
            self._channel.send(Phase(phase))


def _use_device(spec: RankSpec) -> torch.device:
    """This rank's device. Ranks are spread over the GPUs there are, and share them when there are more ranks."""
    os.environ.update(RANK=str(spec.rank), WORLD_SIZE=str(spec.num_ranks), LOCAL_RANK="0")
    if spec.device == "cpu":
        # transformers shards over GPUs wherever it sees any.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    index = spec.rank % torch.cuda.device_count()
    os.environ["LOCAL_RANK"] = str(index)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join(spec: RankSpec, device: torch.device) -> Any:
    """Meet the other ranks, all on this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # That of a step is seen to by the parent.
    timeout = timedelta(seconds=max(spec.start_s, spec.timeout_s))
    store = dist.TCPStore(LOOPBACK, spec.store_port, is_master=False, timeout=timeout)
    backend = backend_for(device, spec.num_ranks)
    if backend == host_group.NAME:
        host_group.register()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("ranks", store),
        rank=spec.rank,
        world_size=spec.num_ranks,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return store


def backend_for(device: torch.device, num_ranks: int) -> str:
    """What carries out the collectives of `num_ranks` ranks, one of which computes on `device`."""
    if device.type == "cpu":
        return "gloo"
    return "nccl" if num_ranks <= torch.cuda.device_count() else host_group.NAME


def mapped_file(address: int) -> tuple[str, int] | None:
    """Device and inode of the file that is mapped at an address of this process, None for memory of its own."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            span, _, _, device, inode, *_ = line.split()
            start, end = (int(bound, 16) for bound in span.split("-"))
            if start <= address < end:
                return (device, int(inode)) if inode != "0" else None
    raise InvariantError(f"nothing is mapped at {address:#x}")
