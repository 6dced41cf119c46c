"""Pages: whatever requests do, none is lost, none has two owners, and a prefix that is found is the
prefix asked for.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.pages import ROOT, PagePool


def keep_all(
    pool: PagePool, pages: list[int], tokens: list[int], salt: str | None = None
) -> list[int]:
    kept = list(pages)
    for number in range(len(tokens) // pool.page_size):
        own = tokens[number * pool.page_size : (number + 1) * pool.page_size]
        kept[number] = pool.keep(kept[number - 1] if number else ROOT, own, kept[number], salt)
    return kept


def test_a_kept_prefix_is_found_and_shared():
    pool = PagePool(8, 4)
    pages = keep_all(pool, pool.allocate(3), list(range(10)))
    assert pool.match(list(range(12))) == pages[:2]
    assert pool.match([0, 1, 2, 3, 9, 9, 9, 9]) == pages[:1]
    assert pool.match([1, 1, 2, 3]) == []
    pool.check([pages, pages[:2], pages[:1]])


def test_equal_pages_after_other_prefixes_differ():
    pool = PagePool(8, 2)
    first = keep_all(pool, pool.allocate(2), [1, 1, 5, 5])
    assert pool.match([2, 2, 5, 5]) == []
    assert pool.match([5, 5]) == []
    assert pool.match([1, 1, 5, 5]) == first


def test_salts_share_nothing():
    pool = PagePool(8, 2)
    of_nobody = keep_all(pool, pool.allocate(2), [1, 1, 5, 5])
    of_one = keep_all(pool, pool.allocate(2), [1, 1, 5, 5], "one")
    assert not set(of_nobody) & set(of_one)
    assert pool.match([1, 1, 5, 5]) == of_nobody
    assert pool.match([1, 1, 5, 5], "one") == of_one
    assert pool.match([1, 1, 5, 5], "other") == []
    pool.check([of_nobody, of_one, of_nobody, of_one])


def test_equal_pages_are_held_once():
    pool = PagePool(4, 2)
    first, second = pool.allocate(1), pool.allocate(1)
    assert keep_all(pool, first, [7, 7]) == first
    assert keep_all(pool, second, [7, 7]) == first
    assert pool.num_available == 3
    pool.check([first, first])


def test_idle_pages_go_last_one_first_and_leaves_first():
    pool = PagePool(4, 1)
    pages = keep_all(pool, pool.allocate(3), [1, 2, 3])
    pool.release(pages)
    assert pool.num_available == 4
    pool.allocate(2)
    assert pool.match([1, 2, 3]) == pages[:2]
    assert pool.num_evicted == 1


def test_too_many_pages_change_nothing():
    pool = PagePool(3, 4)
    held = pool.allocate(2)
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.check([held])


def test_the_check_finds_lost_and_shared_pages():
    pool = PagePool(3, 4)
    held = pool.allocate(2)
    for wrong in ([], [held, held], [held[:1]], [[*held, 0 if 0 not in held else 2]]):
        with pytest.raises(AssertionError):
            pool.check(wrong)
    pool.check([held])


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 14), st.integers(1, 3))
def test_requests_that_come_and_go_lose_no_page(seed, num_pages, page_size):
    rng, pool = random.Random(seed), PagePool(num_pages, page_size)
    content: dict[int, tuple[str | None, list[int]]] = {}
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(40):
        if live and rng.random() < 0.4:
            pages, _ = live.pop(rng.randrange(len(live)))
            pool.release(pages)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * page_size))]
            salt = rng.choice([None, "a", "b"])
            found = pool.match(tokens, salt)
            for number, page in enumerate(found):
                assert content[page] == (salt, tokens[: (number + 1) * page_size]), (
                    "a page of another prefix"
                )
            rest = pool.allocate(pool.pages_for(len(tokens)) - len(found))
            if rest is None:
                pool.release(found)
            else:
                pages = found + rest
                for number, page in enumerate(pages):
                    if page in rest:
                        content[page] = salt, tokens[: (number + 1) * page_size]
                live.append((keep_all(pool, pages, tokens, salt), tokens))
        pool.check([pages for pages, _ in live])
    for pages, _ in live:
        pool.release(pages)
    pool.check([])
    assert pool.num_available == num_pages
