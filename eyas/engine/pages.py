"""Pages of the key-value caches: who holds them, which prefixes are kept, what is evicted.

A full page is known by its tokens, the page before it and the request's salt: kept pages are a tree
of prefixes for each salt, and no timing tells one tenant what another has asked.

    free        in _free
    held        _holders[page] requests count on it; theirs to write while it is not kept
    kept        full, found by match(); without holders in _idle, of which the longest idle goes

A request releases the last page of its prefix first, so a page is never idle longer than one that
follows it: eviction takes leaves only. Tokens are compared, not hashes: a hit is exact.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

ROOT = -1  # the page before the first
Key = tuple[int, str | None, tuple[int, ...]]  # the page before, the salt, the tokens


class PagePool:
    """num_pages pages of page_size tokens, for target and draft alike. is_drafted: whether all of a
    page's columns have the draft's entries.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.num_evicted = 0
        self.is_drafted = [False] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that allocate() can give."""
        return len(self._free) + len(self._idle)

    @property
    def num_kept(self) -> int:
        return len(self._key_of)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, each held once; evicts idle ones if needed. None, and no change, if too
        few.
        """
        if count > self.num_available:
            return None
        while len(self._free) < count:
            page, _ = self._idle.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._free.append(page)
            self.num_evicted += 1
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page], self.is_drafted[page] = 1, False
        return pages

    def num_drafted(self, pages: Sequence[int]) -> int:
        """How many of these pages, from the first on, are drafted."""
        return sum(1 for _ in takewhile(self.is_drafted.__getitem__, pages))

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[int]:
        """The kept pages of the longest prefix of `tokens` under this salt, held once more each."""
        pages: list[int] = []
        page, size = ROOT, self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            found = self._page_of.get((page, salt, tuple(tokens[start : start + size])))
            if found is None:
                break
            page = found
            pages.append(page)
            self._hold(page)
        return pages

    def keep(self, before: int, tokens: Sequence[int], page: int, salt: str | None = None) -> int:
        """Offer a full page to other requests; its only holder must not write it again.

        before: the kept page before it, of this salt, or ROOT. Returns the page to use from now on:
        the same prefix's, if it is kept already; this page is then released.
        """
        assert len(tokens) == self.page_size
        assert before == ROOT or before in self._key_of, f"page {before} is not kept"
        key = (before, salt, tuple(tokens))
        known = self._page_of.get(key)
        if known is None:
            self._page_of[key], self._key_of[page] = page, key
            return page
        self._hold(known)
        self.release([page])
        return known

    def release(self, pages: Sequence[int]) -> None:
        """Pages in the order of the request's tokens."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, f"page {page} let go more often than held"
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every page is accounted for; held: each request's pages."""
        holders = [0] * self.num_pages
        for pages in held:
            for page in pages:
                holders[page] += 1
        assert holders == self._holders, "pages are held by other requests than is counted"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            is_kept = page in self._key_of
            states = (page in self._free) + (page in self._idle) + (holders[page] > 0)
            assert states == 1, f"page {page} is in {states} states"
            assert not (page in self._free and is_kept), f"page {page} is free and kept"
            assert is_kept or page not in self._idle, f"page {page} is idle and not kept"
        for page, key in self._key_of.items():
            assert self._page_of[key] == page, f"page {page} is not found under its tokens"
            assert key[0] == ROOT or key[0] in self._key_of, (
                f"page {page} follows a page that is gone"
            )

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._idle.pop(page, None)
