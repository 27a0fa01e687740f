"""Plans: the n-th call of some names, and no other."""

from __future__ import annotations

import pytest

import aiooffload as ao
from aiooffload.testing.plan import Plan


def taken(plan: Plan[str], calls: str) -> list[str | None]:
    """Return the effects on calls named by single letters."""
    return [plan.take(name) for name in calls]


def test_the_nth_call_of_a_name() -> None:
    """An effect is on the n-th call of its name, on as many in a row as asked for, and on nothing else."""
    plan: Plan[str] = Plan()
    plan.add("no", "a", at=2, times=2)
    assert taken(plan, "abaabaa") == [None, None, "no", "no", None, None, None]
    assert plan.calls == 7
    assert len(plan) == 0


def test_any_call_and_several_names() -> None:
    """None stands for any call, a collection for each of its names; of two that are due the first planned counts."""
    plan: Plan[str] = Plan()
    plan.add("any", None, at=3)
    plan.add("some", {"a", "b"}, at=2)
    assert taken(plan, "acbab") == [None, None, "any", None, None]


def test_clear() -> None:
    """After clear() everything goes well."""
    plan: Plan[str] = Plan()
    plan.add("no", None, at=1)
    plan.clear()
    assert taken(plan, "ab") == [None, None]


@pytest.mark.parametrize(("at", "times"), [(0, 1), (1, 0), (-1, 1)])
def test_bad_numbers(at: int, times: int) -> None:
    """Places and numbers of calls below 1 are refused."""
    with pytest.raises(ao.UsageError, match="at least 1"):
        Plan[str]().add("no", None, at, times)
