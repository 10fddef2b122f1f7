"""How much of a chain a request can load: what is in the CPU tier, and what the tier below can bring there.

A look-up takes up what has happened since the last one and begins what can be begun now. Its cost is what is new, not
how long the chain is. It never waits; it says what the request should wait for:

    take answers of the tier below ──► bring up what it has, in order ──► see what is ready ──► ask about the rest

Waiting is worth it while something gets further. A request whose turn has not come, because others use what there is
of probes, loads or room, waits as one does whose chunks are on their way; it is not told that there is nothing. It
waits for `lookup_deadline_s` without progress, and for `lookup_limit_s` all in all.
"""

from collections.abc import Callable, Sequence
from enum import Enum

from hisparse.offload.config import OffloadConfig
from hisparse.offload.cpu_tier import CpuTier, Entry, EntryState
from hisparse.offload.messages import Lookup, LookupStatus
from hisparse.offload.policies import MAX_ASKED
from hisparse.offload.request_state import Search
from hisparse.offload.stats import OffloadStats
from hisparse.offload.tier_traffic import TierTraffic

MIN_WAITS = 2
"""Look-ups in a row that may find nothing new, however long steps are: a copy takes a step to be seen."""
MAX_ASKED_AHEAD = 64
"""Chunks in use that a search for room looks at when the request does not run yet."""


class _HeldUp(Enum):
    """Why the next chunk is not brought up: it cannot be, too many are on their way, there is no room."""

    ENDS = "ends"
    TURN = "turn"
    ROOM = "room"


class Lookups:
    """The look-ups of all requests. `is_wanted`: whether a running request has loaded or stored a key."""

    def __init__(
        self,
        cpu: CpuTier,
        traffic: TierTraffic | None,
        config: OffloadConfig,
        stats: OffloadStats,
        clock: Callable[[], float],
        is_wanted: Callable[[bytes], bool],
    ) -> None:
        self._cpu = cpu
        self._traffic = traffic
        self._config = config
        self._stats = stats
        self._clock = clock
        self._is_wanted = is_wanted
        self._max_ahead = cpu.num_blocks // 2

    def look(self, search: Search, keys: Sequence[bytes], limit: int, *, ahead: bool) -> Lookup:
        """Go on with a search. See `OffloadManager.lookup`."""
        now_s = self._clock()
        if keys is not search.keys and keys == search.keys:
            search.keys = keys
        if keys is not search.keys or ahead != search.ahead:
            search.start(self._cpu, keys, limit, ahead)
        elif limit < len(search.run):
            search.cut(self._cpu, limit)
        search.limit = limit
        search.waited_s += now_s - search.asked_s if search.is_waiting else 0.0
        search.asked_s = now_s
        held_up, has_progress = self._go_on(search)
        if has_progress or search.progress_s is None:
            search.progress_s, search.num_waits = now_s, 0
        status = self._status(search, held_up)
        if ahead:
            search.is_waiting = False
            return Lookup(status or _found(search), search.num_ready)
        if status is not None and self._is_late(search, now_s):
            self._stats.late_lookups += search.is_waiting
            status = None
        search.is_waiting = status is not None
        search.num_waits += search.is_waiting
        if status is None:
            search.cut(self._cpu, search.num_ready)
            status = _found(search)
        return Lookup(status, search.num_ready)

    def _go_on(self, search: Search) -> tuple[_HeldUp, bool]:
        """Take up what has happened. Returns what holds up the next chunk, and whether anything has got further."""
        num_ready = search.num_ready
        has_answers = self._take_answers(search)
        self._drop_withdrawn(search)
        held_up = self._extend(search)
        search.advance()
        self._ask(search)
        return held_up, has_answers or search.has_begun or search.num_ready > num_ready

    def _take_answers(self, search: Search) -> bool:
        probe = search.probe
        if probe is None:
            return False
        # In this order: what it has found counts once it is over.
        is_over, num_found = probe.is_over, probe.num_found
        has_new = is_over or num_found > search.num_taken
        search.found.update(probe.keys[search.num_taken : num_found])
        search.num_taken = num_found
        if is_over:
            search.missing.update(probe.keys[num_found : num_found + 1])
            search.probe, search.num_taken = None, 0
        return has_new

    def _drop_withdrawn(self, search: Search) -> None:
        """Cut the run before the first chunk whose bytes did not come, or are not to be trusted."""
        if search.num_dropped == self._cpu.num_dropped:
            return
        search.num_dropped = self._cpu.num_dropped
        first = search.num_ready if search.ahead else 0
        for number in range(first, len(search.run)):
            entry = search.run[number]
            if entry.state is EntryState.WITHDRAWN:
                if entry.came_from_below:
                    # It is brought up once: a file that cannot be read is not asked for again and again.
                    search.found.discard(entry.key)
                    search.missing.add(entry.key)
                search.cut(self._cpu, number)
                return

    def _extend(self, search: Search) -> _HeldUp:
        """Add to the run what is there, and bring up what the tier below has, as far as both goes."""
        search.fills_itself = search.has_begun = False
        while len(search.run) < search.limit:
            key = search.keys[len(search.run)]
            entry = self._cpu.get(key)
            if entry is None:
                if self._traffic is None or key not in search.found:
                    return _HeldUp.ENDS
                brought = self._bring(self._traffic, search, key)
                if isinstance(brought, _HeldUp):
                    return brought
                entry = brought
            search.add(self._cpu, entry)
        return _HeldUp.ENDS

    def _bring(self, traffic: TierTraffic, search: Search, key: bytes) -> Entry | _HeldUp:
        if not traffic.can_load(ahead=search.ahead):
            return _HeldUp.TURN
        entry = self._reserve(search, key)
        if entry is None:
            return _HeldUp.ROOM
        entry.came_from_below = True
        if search.ahead:
            self._cpu.bring_ahead(entry)
        # A tier that refuses at once costs no more than one chunk its place.
        if not traffic.load(entry):
            search.found.discard(key)
            search.missing.add(key)
            return _HeldUp.ENDS
        search.has_begun = True
        return entry

    def _reserve(self, search: Search, key: bytes) -> Entry | None:
        cpu = self._cpu
        if search.key_set is None:
            search.key_set = frozenset(search.keys)
        own = search.key_set
        if search.ahead:
            if cpu.num_ahead >= self._max_ahead:
                return None

            def nobody_wants(entry: Entry) -> bool:
                return not (entry.is_ahead or entry.key in own or self._is_wanted(entry.key))

            return cpu.reserve(key, nobody_wants, MAX_ASKED_AHEAD)
        entry = None
        if not search.fills_itself:
            entry = cpu.reserve(key, lambda entry: entry.key not in own, MAX_ASKED)
        if entry is None:
            # What comes later in the prompt is of no use before this; what comes before is claimed.
            search.fills_itself = True
            entry = cpu.reserve(key, lambda entry: True)
        return entry

    def _ask(self, search: Search) -> None:
        """Ask the tier below about the rest of the chain, unless it is known to end."""
        traffic, first = self._traffic, len(search.run)
        if traffic is None or search.probe is not None or not self._is_unknown(search):
            return
        if traffic.probes.is_stuck() or not traffic.probes.may_begin(ahead=search.ahead):
            return
        cpu, found = self._cpu, search.found
        rest = search.keys[first : search.limit]
        search.probe = traffic.probes.begin(
            [key for key in rest if key not in found and cpu.get(key) is None], ahead=search.ahead
        )
        search.num_taken = 0

    def _is_unknown(self, search: Search) -> bool:
        """Whether the tier below could have the chunk at which the run ends."""
        if len(search.run) >= search.limit:
            return False
        key = search.keys[len(search.run)]
        return key not in search.found and (search.probe is not None or key not in search.missing)

    def _status(self, search: Search, held_up: _HeldUp) -> LookupStatus | None:
        """What is worth waiting for; None when nothing is."""
        traffic, run = self._traffic, search.run
        if traffic is not None and self._is_unknown(search) and not traffic.probes.is_stuck():
            if search.probe is None:
                self._stand_in_line(search, traffic.probes.progress_s)
            return LookupStatus.RETRY
        is_stuck = traffic is not None and traffic.is_stuck()
        if search.num_ready < len(run):
            return None if is_stuck and run[search.num_ready].came_from_below else LookupStatus.PENDING
        if held_up is _HeldUp.TURN and traffic is not None and not is_stuck:
            self._stand_in_line(search, traffic.progress_s)
            return LookupStatus.PENDING
        # With something to load there is no reason to wait for room: to load it makes some.
        if held_up is _HeldUp.ROOM and (search.ahead or not search.num_ready):
            return LookupStatus.PENDING
        return None

    def _stand_in_line(self, search: Search, progress_s: float) -> None:
        """It waits for others, so what they get done is its progress."""
        assert search.progress_s is not None
        if progress_s > search.progress_s:
            search.progress_s, search.num_waits = progress_s, 0

    def _is_late(self, search: Search, now_s: float) -> bool:
        config = self._config
        assert search.progress_s is not None
        is_due = now_s >= search.progress_s + config.lookup_deadline_s and search.num_waits >= MIN_WAITS
        return is_due or search.waited_s >= max(config.lookup_limit_s, config.lookup_deadline_s)


def _found(search: Search) -> LookupStatus:
    return LookupStatus.HIT if search.num_ready else LookupStatus.MISS
