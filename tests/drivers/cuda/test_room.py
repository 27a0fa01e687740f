"""Room for what the driver would allocate at a kernel's first launch: when it is made, and what makes it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aiooffload.drivers.cuda import room
from aiooffload.drivers.cuda.room import NOTHING, NOTHING_IMAGE, make_room


class Context:
    """A context's limit, and what was done to it in order."""

    def __init__(self) -> None:
        self.limit = 1024
        self.done: list[int | str] = []

    def cuCtxGetLimit(self, which: object) -> tuple[int, int]:
        return 0, self.limit

    def cuCtxSetLimit(self, which: object, nbytes: int) -> tuple[int]:
        assert nbytes != self.limit  # the driver would do nothing
        self.limit = nbytes
        self.done.append(nbytes)
        return (0,)

    def run_nothing(self) -> None:
        self.done.append("run")


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Context:
    made = Context()
    limits = SimpleNamespace(CU_LIMIT_STACK_SIZE=0)
    calls = {"cuCtxGetLimit": made.cuCtxGetLimit, "cuCtxSetLimit": made.cuCtxSetLimit, "CUlimit": limits}
    monkeypatch.setattr(room, "driver", SimpleNamespace(**calls))
    monkeypatch.setattr(room, "unwrap", lambda name, result: result[-1])
    monkeypatch.setattr(room, "_rooms", {})
    return made


def test_room_is_made_once_and_enlarged(context: Context) -> None:
    """Each time the limit grows, by whole steps, something is launched after it; a context has its own."""
    for nbytes in (1, 1500, 1537, 1540, 12_000, 300):
        make_room(1, nbytes, context.run_nothing)
    assert context.done == [1536, "run", 2048, "run", 12_288, "run"]
    make_room(2, 300, context.run_nothing)
    assert context.done[-2:] == [12_800, "run"]


def test_room_that_could_not_be_made_is_tried_again(context: Context) -> None:
    """A launch that fails leaves the context as one without room."""

    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        make_room(1, 1, fail)
    make_room(1, 1, context.run_nothing)
    assert context.done == [1536, 2048, "run"]


def test_the_kernel_is_in_its_module() -> None:
    """What is loaded by name has an entry of that name, and names all that the driver allocates for."""
    assert f".visible .entry {NOTHING}(".encode() in NOTHING_IMAGE
    assert all(f"call.uni {name}".encode() in NOTHING_IMAGE for name in ("free", "__assertfail"))
    assert all(f", {name}, (".encode() in NOTHING_IMAGE for name in ("malloc", "vprintf"))
