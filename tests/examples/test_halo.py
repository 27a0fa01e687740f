"""A field over several ranks: the same bits as in plain NumPy, with ranks in one process and with real ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections import defaultdict
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import aiooffload as ao
from aiooffload.examples import halo
from aiooffload.examples.halo import band, exchange, plain, relax, sample


class Request:
    """Of a message between ranks of this process."""

    def __init__(self, messages: list[NDArray[Any]], array: NDArray[Any] | None, delay: int = 0) -> None:
        self.messages, self.array, self.delay = messages, array, delay
        self.cancelled = False

    def Test(self) -> bool:
        self.delay -= 1
        if self.array is None or self.delay >= 0 or not self.messages:
            return self.array is None
        self.array[:], self.array = self.messages.pop(0), None
        return True

    def Cancel(self) -> None:
        self.cancelled = True

    def Wait(self) -> None:
        assert self.cancelled


class World:
    """Ranks in one process; what they send arrives a few looks later."""

    def __init__(self, size: int, delay: int = 0) -> None:
        self.size, self.delay = size, delay
        self.messages: dict[tuple[int, int, int], list[NDArray[Any]]] = defaultdict(list)
        self.requests: list[Request] = []

    def ranks(self) -> list[Rank]:
        return [Rank(self, rank) for rank in range(self.size)]


class Rank:
    """One rank's communicator."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def Isend(self, array: NDArray[Any], dest: int, tag: int) -> Request:
        self.world.messages[self.rank, dest, tag].append(array.copy())
        return Request([], None)

    def Irecv(self, array: NDArray[Any], source: int, tag: int) -> Request:
        request = Request(self.world.messages[source, self.rank, tag], array, self.world.delay)
        self.world.requests.append(request)
        return request


async def solve(device_label: str, world: World, field: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Run all ranks of ``world`` on this loop and put their bands together."""

    async def one(comm: Rank) -> NDArray[np.float64]:
        async with ao.Offload(device_label, lanes=3) as off:
            return await relax(off, comm, field, steps)

    bands = await asyncio.gather(*(one(comm) for comm in world.ranks()))
    return np.concatenate([field[:1], *bands, field[-1:]])


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "steps"),
    [(1, 4, 3, 1), (1, 12, 9, 7), (2, 6, 5, 6), (2, 31, 200, 20), (3, 15, 33, 9)],
)
async def test_same_bits_as_numpy(device_label: str, ranks: int, rows: int, columns: int, steps: int) -> None:
    """However the rows are split, with bands of only two as well, the field is NumPy's."""
    field = sample(rows, columns)
    found = await solve(device_label, World(ranks, delay=2), field, steps)
    assert found.tolist() == plain(field, steps).tolist()
    assert found.tolist() != plain(field, steps + 1).tolist()


async def test_rows_that_come_late(device_label: str) -> None:
    """An exchange that takes many looks ends all the same."""
    field = sample(8, 16)
    assert (await solve(device_label, World(2, delay=40), field, 3)).tolist() == plain(field, 3).tolist()


async def test_no_step_changes_nothing(device_label: str) -> None:
    """Without a step the field comes back as it was."""
    field = sample(6, 8)
    assert (await solve(device_label, World(2), field, 0)).tolist() == field.tolist()


def test_bands_are_the_inner_rows() -> None:
    """Bands follow each other, differ by one row at most, and leave out the border."""
    for rows in range(8, 40):
        for size in range(1, (rows - 2) // 2 + 1):
            bands = [band(rows, rank, size) for rank in range(size)]
            assert [i for one in bands for i in range(rows)[one]] == list(range(1, rows - 1))
            lengths = [one.stop - one.start for one in bands]
            assert max(lengths) - min(lengths) <= 1
            assert min(lengths) >= 2


@pytest.mark.parametrize(("rows", "columns"), [(5, 8), (6, 2)])
async def test_field_that_is_too_small(rows: int, columns: int) -> None:
    """Too few rows for the ranks, or columns for a stencil, are refused."""
    async with ao.Offload("host") as off:
        with pytest.raises(ValueError, match="at least 2 inner rows"):
            await relax(off, World(2).ranks()[0], sample(rows, columns), 1)


async def test_failed_exchange_is_no_success(device_label: str) -> None:
    """If a message cannot be sent, nothing after it runs, and the cause is told once."""
    rank = World(2).ranks()[0]

    def fail(*args: Any, **options: Any) -> Any:
        raise ConnectionError("the other rank is gone")

    rank.Isend = fail  # type: ignore[method-assign]
    async with ao.Offload(device_label) as off:
        with pytest.raises(ao.DependencyError) as caught:
            await relax(off, rank, sample(10, 10), 5)
    cause: BaseException | None = caught.value
    while isinstance(cause, ao.DependencyError):
        cause = cause.__cause__
    assert isinstance(cause, ConnectionError)


async def test_cancelled_exchange_gives_its_arrays_back() -> None:
    """A row that does not come is not waited for, and MPI is told before the array goes."""
    world = World(2)
    edges, received = np.zeros((2, 4)), np.zeros((2, 4))
    task = asyncio.create_task(exchange(world.ranks()[0], edges, received))
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [request.cancelled for request in world.requests] == [True]


@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_kernel_compiles(arch: str) -> None:
    """Its CUDA code compiles, which needs no GPU."""
    from cuda.core import Program, ProgramOptions

    assert Program(halo.SOURCE, "c++", ProgramOptions(arch=arch)).compile("cubin").code


# Real ranks, and the demo around them.


def why_no_mpi() -> str:
    """Return what is missing to start ranks, if anything is."""
    lacks = {"mpirun": shutil.which("mpirun") is None, "mpi4py": importlib.util.find_spec("mpi4py") is None}
    return " and ".join(name for name, lacking in lacks.items() if lacking)


with_mpi = pytest.mark.skipif(bool(why_no_mpi()), reason=f"no {why_no_mpi()}")
SMALL = ["halo", "--device", "host", "--rows", "40", "--columns", "2000", "--steps", "30"]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the ranks before the test's own time limit does."""
    monkeypatch.setenv("MPIEXEC_TIMEOUT", "40")


@with_mpi
@pytest.mark.usefixtures("limited")
def test_two_ranks(demo: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """Two processes under mpirun have the field that NumPy has here; standard output is JSON and nothing else."""
    assert demo.main([*SMALL, "--json", "-"]) == 0
    captured = capfd.readouterr()
    figures = json.loads(captured.out)
    assert (figures["ranks"], figures["devices"], figures["mismatches"]) == (2, ["host", "host"], 0)
    assert figures["sum"] == plain(sample(40, 2000), 30).sum()
    assert "ok: 30 steps" in captured.err


@with_mpi
@pytest.mark.usefixtures("limited")
def test_failure_ends_all_ranks(demo: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    """What a rank raises is shown, no rank is left waiting, and the exit code is 2."""
    assert demo.main(["halo", "--device", "host", "--rows", "5"]) == 2
    assert "at least 2 inner rows" in capfd.readouterr().err


def test_says_what_to_install(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without mpirun the demo names the package, and exits with 2."""
    monkeypatch.setenv("PATH", "")
    assert demo.main(SMALL) == 2
    assert "apt-get install openmpi-bin" in capsys.readouterr().err
