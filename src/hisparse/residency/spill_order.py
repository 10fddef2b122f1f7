"""Whose pages leave the device next.

First the requests that read from the host already, in the order in which they got pages to give; then the others,
longest known first. One request gives all it can before the next one is asked, so that as few requests as possible
need a hot lease.
"""

from hisparse.residency.page_states import RequestPages


class SpillOrder:
    """Requests with spillable pages. `refresh` after every change of a request's pages keeps it true."""

    def __init__(self) -> None:
        self._backed: dict[RequestPages, int] = {}
        self._whole: dict[RequestPages, int] = {}
        self._num_spillable = 0

    def refresh(self, pages: RequestPages) -> None:
        """Enter, move or leave the order as the request's pages now say."""
        count = pages.num_spillable
        known = self._backed if pages in self._backed else self._whole
        fits = self._backed if pages.num_host_backed else self._whole
        before = known.get(pages, 0)
        self._num_spillable += count - before
        if known is not fits or not count:
            known.pop(pages, None)
        if count:
            fits[pages] = count

    def forget(self, pages: RequestPages) -> None:
        self._num_spillable -= self._backed.pop(pages, 0) + self._whole.pop(pages, 0)

    def next_victim(self) -> RequestPages | None:
        for order in (self._backed, self._whole):
            for pages in order:
                return pages
        return None

    def num_spillable(self) -> int:
        """Pages that may leave the device, over all requests."""
        return self._num_spillable
