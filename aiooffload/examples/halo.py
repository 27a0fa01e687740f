"""Relax a field that is split over MPI ranks, with the exchange between them as a step of each rank's graph.

Every rank has a band of rows on a device of its own Offload. In each step every inner value becomes the mean
of its four neighbours; the first and the last row of a band need a row of the next rank, its *halo*::

    get edges --- exchange (host task) --- put halo --- relax the edges --- next step
        \\                                                /
         `------- relax all other rows -----------------'

All steps are submitted at once and only the result is awaited: buffers order the device's part, ``after=``
the host's. While rows travel between the ranks, the device works on those that need none.

The exchange is nonblocking and polled. MPI makes progress only inside its own calls, so a thread that waits
would spin in one, on a core that the loop or a host kernel could use, and would need MPI_THREAD_MULTIPLE, which
not every MPI has. A ``Testall`` every now and then does the same work from the loop, in a microsecond.

``mpirun -n 2 python -m mpi4py -m aiooffload.examples.halo`` runs it (``-m mpi4py`` ends all ranks if one fails),
and ``scripts/demo halo`` does that for you.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

import aiooffload as ao

__all__ = ["Communicator", "band", "jacobi", "main", "plain", "relax"]

BLOCK: Final = 128
EAGER_POLLS: Final = 20
"""How often an exchange lets the loop go round before it sleeps between two looks."""
NAP_S: Final = 0.0001
UP, DOWN = 1, 2
"""Tags: the way that a row goes."""

# The sum is taken in NumPy's order and a quarter is exact, so that every device has the same bits.
SOURCE: Final = r"""
extern "C" __global__ void jacobi(const double* old, const double* halo, double* fresh, int rows, int columns,
                                  int first, int step)
{
    const int i = first + blockIdx.y * step, j = blockIdx.x * blockDim.x + threadIdx.x;
    if (j < 1 || j >= columns - 1)
        return;
    const double* const row = old + (long long)i * columns;
    const double above = i == 0 ? halo[j] : row[j - columns];
    const double below = i == rows - 1 ? halo[columns + j] : row[j + columns];
    fresh[(long long)i * columns + j] = 0.25 * (above + below + row[j - 1] + row[j + 1]);
}
"""


@ao.kernel(cuda=SOURCE)
def jacobi(
    launch: ao.Launch,
    old: ao.In[np.float64],
    halo: ao.In[np.float64],
    fresh: ao.InOut[np.float64],
    rows: np.int32,
    columns: np.int32,
    first: np.int32,
    step: np.int32,
) -> None:
    """Relax the rows ``first``, ``first + step`` and so on of a band, one for each ``blockIdx.y``."""
    chosen = int(first) + int(step) * np.arange(launch.grid[1])
    above = np.array([old[i - 1] if i else halo[0] for i in chosen])
    below = np.array([old[i + 1] if i < rows - 1 else halo[1] for i in chosen])
    middle = old[chosen]
    fresh[chosen, 1:-1] = 0.25 * (above[:, 1:-1] + below[:, 1:-1] + middle[:, :-2] + middle[:, 2:])


class Communicator(Protocol):
    """What is used of mpi4py's ``Comm``; its requests have ``Test()``, ``Cancel()`` and ``Wait()``."""

    rank: int
    size: int

    def Isend(self, array: NDArray[Any], dest: int, tag: int) -> Any: ...
    def Irecv(self, array: NDArray[Any], source: int, tag: int) -> Any: ...


def band(rows: int, rank: int, size: int) -> slice:
    """Return which of a field's ``rows`` a rank has; the first and the last are fixed and nobody's."""
    return slice(1 + (rows - 2) * rank // size, 1 + (rows - 2) * (rank + 1) // size)


async def exchange(comm: Communicator, edges: NDArray[np.float64], halo: NDArray[np.float64]) -> None:
    """Send the first row of ``edges`` up and the last down; get the neighbours' rows, where there are any, in ``halo``.

    Notes
    -----
    *Cancellation.* It waits for no row any more. The rank beside it does: end that, too.
    """
    receives, sends = [], []
    for place, other, there, back in ((0, comm.rank - 1, UP, DOWN), (1, comm.rank + 1, DOWN, UP)):
        if 0 <= other < comm.size:
            receives.append(comm.Irecv(halo[place], source=other, tag=back))
            sends.append(comm.Isend(edges[place], dest=other, tag=there))
    pending, polls = receives + sends, 0
    try:
        while pending := [request for request in pending if not request.Test()]:
            polls += 1
            await asyncio.sleep(0 if polls < EAGER_POLLS else NAP_S)
    except asyncio.CancelledError:
        for request in receives:
            if request in pending:
                request.Cancel()
                request.Wait()  # until then MPI may write into the array
        raise


async def relax(off: ao.Offload, comm: Communicator, field: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Relax a field together with the other ranks; returns this rank's rows of it.

    Parameters
    ----------
    off
        Where this rank computes. It is left open.
    comm
        ``mpi4py.MPI.COMM_WORLD`` or the like. Nobody else may use the tags 1 and 2 on it meanwhile.
    field
        The whole field, ``(rows, columns)``, the same on all ranks. Its border stays as it is.
    steps
        How many; they are one graph, of 5 operations each.

    Raises
    ------
    ValueError
        The field has less than 3 columns, or less than 2 inner rows for each rank.
    aiooffload.WouldBlock
        The graph has more operations than the Offload's ``max_pending``.
    aiooffload.OffloadError
        The device failed. The other ranks are waiting: end them.

    Notes
    -----
    *Failure.* What an exchange raises is the root of the DependencyError that this raises.
    *Cancellation.* Cancelling the call leaves the steps that were submitted alone, and with them the other ranks.
    """
    own = band(len(field), comm.rank, comm.size)
    rows, columns = own.stop - own.start, field.shape[1]
    if (len(field) - 2) // comm.size < 2 or columns < 3:
        raise ValueError("a rank has at least 2 inner rows, and a row 3 columns")
    await off.load(jacobi)
    edges = await off.pinned((2, columns), np.float64)
    received = await off.pinned((2, columns), np.float64)
    # Beside the border the halo is the border, and stays it.
    received.array[:] = field[own.start - 1], field[own.stop]
    # Copies are for all that follows: an array that is given to put() may not change before it is done.
    old, fresh, halo = await off.put(field[own]), await off.put(field[own]), await off.put(received.array.copy())
    with old, fresh, halo:
        across = -(-columns // BLOCK)
        last: list[ao.Operation[Any]] = []
        for _ in range(steps):
            get = off.get(old[:: rows - 1], out=edges, after=last)
            swap = off.host_task(partial(exchange, comm, edges.array, received.array), after=[get])
            args = (old, halo, fresh, rows, columns)
            if rows > 2:
                off.launch(jacobi, grid=(across, rows - 2), block=BLOCK, args=(*args, 1, 1))
            put = off.copy(halo, received, after=[swap])
            # The buffers give that order already. Named in after=, a failed exchange ends all that follows.
            last = [off.launch(jacobi, grid=(across, 2), block=BLOCK, args=(*args, 0, rows - 1), after=[put])]
            old, fresh = fresh, old
        return await off.get(old, after=last)


def plain(field: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Relax a whole field with NumPy alone."""
    old, fresh = field.copy(), field.copy()
    for _ in range(steps):
        fresh[1:-1, 1:-1] = 0.25 * (old[:-2, 1:-1] + old[2:, 1:-1] + old[1:-1, :-2] + old[1:-1, 2:])
        old, fresh = fresh, old
    return old


def sample(rows: int, columns: int) -> NDArray[np.float64]:
    """Make a field: noise inside, a hot edge, cold ones otherwise."""
    field = np.zeros((rows, columns))
    field[0] = 100
    field[1:-1, 1:-1] = np.random.default_rng(0).random((rows - 2, columns - 2)) * 100
    return field


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; rank 0 compares the whole with plain NumPy and prints the figures as JSON."""
    parser = argparse.ArgumentParser(description="One rank; mpirun starts it.")
    parser.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")
    parser.add_argument("--rows", type=int, default=514, help="of the field, two of them fixed (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=1024, help="of the field (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="(default: %(default)s)")
    options = parser.parse_args(argv)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    field = sample(options.rows, options.columns)

    async def work() -> tuple[str, float, NDArray[np.float64]]:
        async with ao.Offload(options.device) as off:
            comm.Barrier()  # nothing else is going on yet, and the time is that of all ranks
            start = time.perf_counter()
            found = await relax(off, comm, field, options.steps)
            return off.properties.label, time.perf_counter() - start, found

    try:
        device, wall_s, found = asyncio.run(work())
    except (ao.OffloadError, ValueError) as error:
        print(f"rank {comm.rank}: {error}", file=sys.stderr, flush=True)
        comm.Abort(2)  # the others would wait for its rows
    parts = comm.gather((device, wall_s, found))
    if parts is None:
        return 0
    devices, walls, bands = zip(*parts, strict=True)
    whole = np.concatenate([field[:1], *bands, field[-1:]])
    mismatches = int(np.count_nonzero(whole != plain(field, options.steps)))
    figures = {
        "ranks": comm.size,
        "devices": devices,
        "steps": options.steps,
        "sum": float(whole.sum()),
        "mismatches": mismatches,
        "wall_s": round(max(walls), 4),
    }
    print(json.dumps(figures), flush=True)
    return 1 if mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
