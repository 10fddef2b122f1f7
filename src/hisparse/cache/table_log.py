"""What changed in the block tables since the last command, in the order in which it changed."""

from collections.abc import Sequence

from hisparse.protocol import Table, TableUpdate


class TableLog:
    """Collects table updates of one step. The managers and the coordinator write to it, the connector drains it.

    Give the same log to all three of a replica. It takes what it is given and raises nothing: a slot, a page or a block
    that does not exist is found by the workers (`WorkerTables.apply`, `ProtocolError`).
    """

    def __init__(self) -> None:
        self._updates: list[TableUpdate] = []
        self._resets: list[int] = []

    def write(self, table: Table, slot: int, first_page: int, blocks: Sequence[int]) -> None:
        """Overwrite a run of one slot's entries: page `first_page + i` is in `blocks[i]` from now on, 0 for nowhere."""
        self._updates.append(TableUpdate(table, slot, first_page, tuple(blocks)))

    def reset(self, slot: int) -> None:
        """The slot changes hands: what was logged for its former request no longer matters."""
        self._updates = [update for update in self._updates if update.slot != slot]
        self._resets.append(slot)

    def drain(self) -> tuple[tuple[int, ...], tuple[TableUpdate, ...]]:
        """Slots that were reset and updates since the last call. Resets come first; an update after one is kept."""
        resets, updates = tuple(self._resets), tuple(self._updates)
        self._resets.clear()
        self._updates.clear()
        return resets, updates
