"""Which requests share a call, with times that the tests choose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiooffload.service.batching import Batcher


def taken(batcher: Batcher[str], now: float) -> list[list[str]]:
    """Return everything that may start at a time."""
    batches = []
    while (batch := batcher.take(now)) is not None:
        batches.append(batch.items)
    return batches


def test_requests_that_are_never_joined() -> None:
    """Without a batch size every request is a call of its own, at once, in order."""
    batcher: Batcher[str] = Batcher(0, 0.0)
    assert batcher.next_due() is None
    for item in "abc":
        batcher.put(item, 1, "key", 5.0)
    assert batcher.next_due() == 0.0
    assert taken(batcher, 5.0) == [["a"], ["b"], ["c"]]


def test_what_waits_is_joined() -> None:
    """Without a delay a request may start at once; those that come before it does join it."""
    batcher: Batcher[str] = Batcher(4, 0.0)
    batcher.put("a", 1, "key", 1.0)
    assert batcher.next_due() == 1.0
    batcher.put("b", 2, "key", 1.5)
    assert taken(batcher, 2.0) == [["a", "b"]]
    assert taken(batcher, 2.0) == []


def test_delay() -> None:
    """A call is due when its first request has waited long enough, and not before."""
    batcher: Batcher[str] = Batcher(4, 0.5)
    batcher.put("a", 1, "key", 1.0)
    batcher.put("b", 1, "key", 1.4)
    assert taken(batcher, 1.49) == []
    assert batcher.next_due() == 1.5
    assert taken(batcher, 1.5) == [["a", "b"]]


def test_full_call_does_not_wait() -> None:
    """A call with all its rows is due at once."""
    batcher: Batcher[str] = Batcher(4, 10.0)
    batcher.put("a", 3, "key", 1.0)
    batcher.put("b", 1, "key", 1.0)
    assert taken(batcher, 1.0) == [["a", "b"]]


def test_request_that_does_not_fit_begins_another() -> None:
    """Rows of one request are never spread over two calls, and order is kept."""
    batcher: Batcher[str] = Batcher(4, 10.0)
    batcher.put("a", 3, "key", 1.0)
    batcher.put("b", 2, "key", 1.1)
    batcher.put("c", 1, "key", 1.2)
    assert taken(batcher, 1.2) == [["a"]]
    assert taken(batcher, 11.2) == [["b", "c"]]


def test_keys_are_apart() -> None:
    """Requests of different shapes are not joined; the older call comes first."""
    batcher: Batcher[str] = Batcher(2, 1.0)
    batcher.put("a", 1, "one", 0.0)
    batcher.put("b", 1, "two", 0.1)
    batcher.put("c", 1, "two", 0.2)
    assert batcher.next_due() == 0.0
    assert taken(batcher, 0.5) == [["b", "c"]]
    batcher.put("d", 2, "two", 0.9)
    assert taken(batcher, 1.0) == [["a"], ["d"]]


def test_clear() -> None:
    """Clearing returns everything that waits."""
    batcher: Batcher[str] = Batcher(2, 1.0)
    for item, key in (("a", 1), ("b", 1), ("c", 1), ("d", 2)):
        batcher.put(item, 1, key, 0.0)
    assert sorted(batcher.clear()) == ["a", "b", "c", "d"]
    assert batcher.next_due() is None
    assert taken(batcher, 9.0) == []


REQUESTS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2), st.floats(0, 1), st.booleans()), max_size=40)


@given(REQUESTS, st.integers(0, 5), st.floats(0, 2))
def test_nothing_is_lost_or_mixed(requests: list[tuple[int, int, float, bool]], max_rows: int, delay_s: float) -> None:
    """Every request is in one call, in order within its key, none over the limit, none later than its delay."""
    batcher: Batcher[tuple[int, int, int, float]] = Batcher(max_rows, delay_s)
    now, batches = 0.0, []
    for number, (rows, key, wait, look) in enumerate(requests):
        now += wait
        rows = min(rows, max_rows or rows)
        batcher.put((number, rows, key, now), rows, key, now)
        while look and (batch := batcher.take(now)) is not None:
            batches.append(batch)
        if look:
            due = batcher.next_due()
            assert due is None or due > now
    while (batch := batcher.take(now + delay_s)) is not None:
        batches.append(batch)
    assert batcher.next_due() is None
    items = [item for batch in batches for item in batch.items]
    assert sorted(number for number, *_ in items) == list(range(len(requests)))
    for batch in batches:
        assert len({key for _, _, key, _ in batch.items}) == 1
        assert batch.rows == sum(rows for _, rows, _, _ in batch.items)
        assert len(batch.items) == 1 if not max_rows else batch.rows <= max_rows
    for key in range(3):
        numbers = [number for number, _, one, _ in items if one == key]
        assert numbers == sorted(numbers)
