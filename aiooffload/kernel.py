"""Kernels and their parameters: what is launched, before any device is involved."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NoReturn,
    Protocol,
    TypeVar,
    final,
    get_args,
    get_origin,
    overload,
)

import numpy as np

from aiooffload.buffer import Buffer, no_buffer
from aiooffload.errors import UsageError
from aiooffload.scalars import scalar
from aiooffload.types import Access

if TYPE_CHECKING:
    from cuda.core import Kernel as CoreKernel

__all__ = [
    "In",
    "InOut",
    "Kernel",
    "Launch",
    "Out",
    "Parameter",
    "PendingCall",
    "Scratch",
    "Signature",
    "called",
    "kernel",
    "parameter_of",
    "signature_of",
]

_T = TypeVar("_T", bound=np.generic)

In = Annotated[np.ndarray[Any, np.dtype[_T]], Access.READ]
"""``ao.In[np.float32]``: an array that the kernel only reads."""
Out = Annotated[np.ndarray[Any, np.dtype[_T]], Access.WRITE]
"""``ao.Out[np.float32]``: an array that the kernel writes."""
InOut = Annotated[np.ndarray[Any, np.dtype[_T]], Access.READ_WRITE]
"""``ao.InOut[np.float32]``: an array that the kernel reads and writes."""

_SUSPENDING: Final = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
_PACKABLE: Final = {"f4": "f", "f8": "d", "i4": "i", "u4": "I", "i8": "q", "u8": "Q"}


@final
class Scratch:
    """A launch argument: workspace for one launch, where the kernel takes a pointer.

    Parameters
    ----------
    nbytes
        Its size in bytes, at least 0.
    per_thread
        Instead of ``nbytes``: bytes for each thread of the grid, the threads' pieces one behind the other.

    Raises
    ------
    UsageError
        A size is negative or no integer, or both or neither were given.

    Notes
    -----
    *Content.* Undefined, at least that many bytes, aligned to 256. Several in one launch do not overlap. A host
    kernel gets a NumPy array of that size, of the annotated dtype or uint8.
    *Lifetime.* The memory is the launch's until it is done. It comes from a cache of one block per lane, which
    ``Offload(scratch_keep_bytes=)`` bounds; a launch that cannot get it fails with OutOfMemoryError.
    *Source.* The idea is the soft-stack cache of GCC's libgomp.
    """

    __slots__ = ("_each", "_per_thread")

    def __init__(self, nbytes: int | None = None, *, per_thread: int | None = None) -> None:
        each = per_thread if nbytes is None else nbytes
        if each is None or (nbytes is not None and per_thread is not None):
            raise UsageError("Scratch takes nbytes or per_thread=, one of them")
        try:
            self._each = operator.index(each)
        except TypeError:
            raise UsageError(f"the size of a Scratch is an integer, not {each!r}") from None
        if self._each < 0:
            raise UsageError(f"the size of a Scratch is at least 0, not {each}")
        self._per_thread = nbytes is None

    def size(self, threads: int) -> int:
        """Return its size in bytes in a launch of so many threads."""
        return self._each * threads if self._per_thread else self._each

    def __repr__(self) -> str:
        return f"Scratch({'per_thread=' if self._per_thread else ''}{self._each})"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel; ``dtype`` None means that anything of the right size goes."""

    name: str
    dtype: np.dtype[Any] | None
    access: Access | None
    """None for a scalar."""

    @property
    def annotated(self) -> bool:
        """Whether anything is known of it."""
        return self.dtype is not None or self.access is not None

    @property
    def format(self) -> str:
        """Its letter for ``_native.pack``, or ``"?"`` where only the slow path will do."""
        if self.access is not None:
            return "P"
        return "?" if self.dtype is None else _PACKABLE.get(self.dtype.str[1:], "?")

    def check(self, value: object) -> Buffer | Scratch | np.generic:
        """Return ``value`` as this parameter takes it; raises UsageError otherwise."""
        if isinstance(value, Buffer):
            return self._check_buffer(value)
        if isinstance(value, Scratch):
            if self.access is None and self.dtype is not None:
                raise UsageError(f"argument {self.name} is a scalar of {self.dtype}, not a Scratch")
            return value
        if self.access is not None:
            raise UsageError(f"argument {self.name} is an array: pass a Buffer or a Scratch, not {no_buffer(value)}")
        if self.dtype is not None:
            return scalar(value, self.dtype, f"argument {self.name}")
        if isinstance(value, np.ndarray) and value.shape == ():
            value = value[()]
        if isinstance(value, np.generic):
            return value
        raise UsageError(
            f"argument {self.name} is {type(value).__name__}: without an annotation it needs a NumPy type, "
            f"such as np.float32({value!r})"
        )

    def _check_buffer(self, buffer: Buffer) -> Buffer:
        if self.access is None and self.dtype is not None:
            raise UsageError(f"argument {self.name} is a scalar of {self.dtype}, not a Buffer")
        if self.dtype is not None and buffer.dtype != self.dtype:
            raise UsageError(f"argument {self.name} has dtype {buffer.dtype}, the kernel takes {self.dtype}")
        buffer.check_open()
        return buffer


class Signature:
    """The parameters of a kernel, from its annotations.

    Parameters
    ----------
    parameters
        In order, without the leading ``launch``; None if nothing is known, not even the count.
    """

    __slots__ = ("dtypes", "formats", "letters", "parameters", "reads")

    def __init__(self, parameters: Sequence[Parameter] | None) -> None:
        self.parameters: Final = None if parameters is None else tuple(parameters)
        # Per parameter: the dtype, whether the kernel only reads it, its letter.
        self.dtypes: Final = tuple(p.dtype for p in parameters or ())
        self.reads: Final = bytes(p.access is Access.READ for p in parameters or ())
        self.letters: Final = "".join(p.format for p in parameters or ()).encode()
        # None: some argument needs the slow path whatever it is.
        self.formats: Final = None if parameters is None or b"?" in self.letters else self.letters

    @classmethod
    def of(cls, function: Callable[..., object]) -> Signature:
        """Read the parameters after the first (``launch``) of a host implementation."""
        parameters = list(signature_of(function).parameters.values())
        if not parameters:
            raise UsageError(f"{called(function)} takes `launch` as its first parameter")
        for p in parameters:
            if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                raise UsageError(f"{called(function)}: a kernel has positional parameters only, not {p}")
        return cls([parameter_of(p.name, p.annotation) for p in parameters[1:]])

    def takes_nothing(self, sizes: tuple[int, ...] | None) -> bool:
        """Whether the kernel has no parameters, where the driver says ``sizes`` (None: it cannot know)."""
        return sizes == () if self.parameters is None else not self.parameters

    def read_only(self, index: int) -> bool:
        """Whether the kernel only reads argument ``index``."""
        return index < len(self.reads) and bool(self.reads[index])

    def check_count(self, name: str, arguments: Sequence[object]) -> None:
        """Raise UsageError unless there are as many arguments as parameters, where those are known."""
        if self.parameters is not None and len(arguments) != len(self.parameters):
            raise UsageError(f"kernel {name} takes {len(self.parameters)} arguments, {len(arguments)} were given")

    def check(self, name: str, arguments: Sequence[object]) -> tuple[Buffer | Scratch | np.generic, ...]:
        """Check the count and every argument, and convert Python numbers; raises UsageError."""
        if self.parameters is None:
            return tuple(Parameter(f"{i}", None, None).check(value) for i, value in enumerate(arguments))
        self.check_count(name, arguments)
        return tuple(p.check(value) for p, value in zip(self.parameters, arguments, strict=True))


def called(function: Callable[..., object]) -> str:
    """Return what a message calls a function."""
    return getattr(function, "__qualname__", None) or repr(function)


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature, with annotations that are text resolved; raises UsageError if one stands for nothing."""
    try:
        return inspect.signature(function, eval_str=True)
    except (AttributeError, NameError, SyntaxError, TypeError) as error:
        raise UsageError(f"an annotation of {called(function)} cannot be resolved: {error}") from error


def parameter_of(name: str, annotation: Any) -> Parameter:
    """Return the parameter that an annotation describes; raises UsageError if it describes none."""
    if annotation is inspect.Parameter.empty:
        return Parameter(name, None, None)
    element, access = annotation, None
    if get_origin(annotation) is Annotated:
        base, *metadata = get_args(annotation)
        access = next((m for m in metadata if isinstance(m, Access)), None)
        if access is not None:
            (element,) = get_args(get_args(base)[1])
            if element in (_T, Any):
                return Parameter(name, None, access)
    try:
        dtype = np.dtype(element)
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.hasobject or dtype.itemsize == 0:  # NumPy takes any class for the first, and str for the second
        raise UsageError(
            f"{name} is annotated {annotation!r}: a kernel takes numbers (int, float, bool, a NumPy type), structs "
            "(a structured dtype), and arrays, as ao.In, ao.Out or ao.InOut of one of these"
        )
    return Parameter(name, dtype, access)


class Launch(Protocol):
    """The first argument of a host implementation, in place of a GPU's built-in variables."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks in x, y and z."""

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a block in x, y and z."""

    @property
    def shared(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The launch's dynamic shared memory, ``(shared_bytes,) uint8``, zeroed."""

    # The rest is for kernels that call (``calls=True``); elsewhere it raises UsageError.

    def call(self, function: str | int, *arguments: object, dtype: np.dtype[Any] | None = None) -> Any:
        """Call a host function and wait for its result.

        Parameters
        ----------
        function
            Its name, or the number it was registered with.
        *arguments
            Numbers (a Python ``int`` goes as int64, a ``float`` as float64), NumPy scalars, and
            mapped arrays made by ``to``, ``from_``, ``tofrom`` and ``alloc``.
        dtype
            Of the result, where that is a struct; without it a struct comes as bytes.

        Raises
        ------
        HostFunctionError
            The function raised, does not exist, or takes other arguments; ``code`` says which.
        OffloadTimeout
            There was no answer within the deadline.
        asyncio.CancelledError
            The launch was asked to stop.
        """

    def call_async(self, function: str | int, *arguments: object, dtype: np.dtype[Any] | None = None) -> PendingCall:
        """Call a host function without waiting; see :meth:`call`."""

    def call_each(self, function: str | int, *columns: Any, dtype: np.dtype[Any] | None = None) -> Any:
        """Call it once per row of ``columns``, as the lanes of a warp do together.

        It is one request, of which all rows succeed or fail, unless 32 rows of such arguments or of
        results with this ``dtype`` have more than 256 bytes; then it is a request for each row.

        Parameters
        ----------
        function
            Its name, or the number it was registered with.
        *columns
            Arrays of the same length, 1 to 32, one for each argument.
        dtype
            Of the result of a row. Without it structs come as ``V`` elements, and it is an error if
            the results of one request have more than 256 bytes.

        Returns
        -------
        ndarray or None
            The results, one for each row, in an array that can be written to; None if the function has
            no result.

        Raises
        ------
        HostFunctionError, OffloadTimeout, asyncio.CancelledError
            As :meth:`call`. Where each row is a request, from the first one that failed; the replies to
            later ones are dropped.
        """

    def post(self, function: str | int, *arguments: object) -> None:
        """Tell a host function something, without a reply.

        What it maps has to be in a Buffer: nothing keeps an array of the kernel's own until the function is over.
        """

    def cancelled(self) -> bool:
        """Whether the launch was asked to stop."""

    def progress(self, done: int, total: int) -> None:
        """Say how far the launch is; see ``Operation.progress``."""

    def set_timeout_s(self, timeout_s: float) -> None:
        """Let later waits end after so many seconds instead of ``call_timeout_s``."""

    def abort(self, code: int, text: str) -> NoReturn:
        """Give up: the launch fails with a LaunchError that has this code and text."""

    def to(self, array: np.ndarray[Any, Any]) -> object:
        """Map ``array``, C-contiguous, as an argument: the host function gets its content."""

    def from_(self, array: np.ndarray[Any, Any]) -> object:
        """Map it: what the host function leaves there is copied back."""

    def tofrom(self, array: np.ndarray[Any, Any]) -> object:
        """Map it, in both directions."""

    def alloc(self, array: np.ndarray[Any, Any]) -> object:
        """Map it, in neither direction: the host function gets memory of that size."""


class PendingCall(Protocol):
    """A call under way, from a host kernel's ``launch.call_async``."""

    def poll(self) -> bool:
        """Whether it is over."""

    def wait(self) -> Any:
        """Wait for its result; raises what ``launch.call`` raises. Any number of times, in any thread."""


class Kernel:
    """A kernel: CUDA source or compiled code, a host implementation, or both.

    Parameters
    ----------
    name
        The entry point in the CUDA code (``extern "C"``).
    cuda
        CUDA C++ source, compiled when it is first loaded and cached on disk.
    image
        PTX or cubin instead of source.
    host
        ``host(launch, *arguments)``: the implementation for the host device, run once per launch.
        Arrays arrive as NumPy arrays (read-only for ``ao.In``), scalars as NumPy scalars.
    options
        Options for the runtime compiler: fields of ``cuda.core.ProgramOptions``, such as
        ``{"use_fast_math": True}``.
    signature
        Parameters; by default those of ``host``.
    core
        A ``cuda.core`` kernel that is loaded already, instead of source or an image.
    calls
        Whether it calls host functions: then its first parameter in CUDA is an ``ao::Launch``
        (``#include <aiooffload.cuh>``), which is not among ``args``.

    Notes
    -----
    A kernel belongs to no device and may be launched on any number of them, from any loop.
    """

    __slots__ = (
        "__weakref__",
        "calls",
        "core",
        "cuda_source",
        "host_function",
        "image",
        "name",
        "options",
        "signature",
    )

    def __init__(
        self,
        name: str,
        *,
        cuda: str | None = None,
        image: bytes | None = None,
        host: Callable[..., object] | None = None,
        options: Mapping[str, Any] | None = None,
        signature: Signature | None = None,
        core: CoreKernel | None = None,
        calls: bool = False,
    ) -> None:
        if cuda is not None and image is not None:
            raise UsageError("give a kernel cuda= or image=, not both")
        if host is not None and any(suspends(host) for suspends in _SUSPENDING):
            raise UsageError(f"{called(host)}: the host implementation of a kernel is a plain function: calling blocks")
        self.name: Final = name
        self.cuda_source: Final = cuda
        self.image: Final = image
        self.host_function: Final = host
        self.options: Final[Mapping[str, Any]] = dict(options or {})
        self.core: Final = core
        self.calls: Final = calls
        self.signature: Final = signature or (Signature(None) if host is None else Signature.of(host))

    @classmethod
    def from_core(cls, kernel: CoreKernel, name: str = "kernel", *, calls: bool = False) -> Kernel:
        """Wrap a ``cuda.core`` kernel that is loaded already; it runs on CUDA devices only."""
        return cls(name, core=kernel, calls=calls)

    def __repr__(self) -> str:
        return f"<aiooffload.Kernel {self.name}>"


@overload
def kernel(function: Callable[..., object], /) -> Kernel: ...
@overload
def kernel(
    *, cuda: str | None = None, name: str | None = None, options: Mapping[str, Any] | None = None, calls: bool = False
) -> Callable[[Callable[..., object]], Kernel]: ...
def kernel(
    function: Callable[..., object] | None = None,
    /,
    *,
    cuda: str | None = None,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    calls: bool = False,
) -> Kernel | Callable[[Callable[..., object]], Kernel]:
    """Make a kernel of a host implementation and, with ``cuda=``, of CUDA source.

    Parameters
    ----------
    function
        ``function(launch, *arguments)``, run once per launch on the host device. ``launch`` has
        ``grid``, ``block`` and ``shared``. Annotations (``np.float32``, ``ao.In[np.float32]``)
        are optional; they give dtype checks, read-only arguments and conversion of numbers.
    cuda
        CUDA C++ source with an ``extern "C" __global__`` function. Without it the kernel runs on
        the host device only.
    name
        The entry point in ``cuda``; by default the name of ``function``.
    options
        Options for the runtime compiler: fields of ``cuda.core.ProgramOptions``.
    calls
        Whether the kernel calls host functions (``Offload.host_function``).

    Raises
    ------
    UsageError
        An annotation is not a NumPy type or ``ao.In``, ``ao.Out``, ``ao.InOut``; or source was given as the function.
    """

    def decorate(implementation: Callable[..., object]) -> Kernel:
        if isinstance(implementation, str):
            raise UsageError("@ao.kernel takes source as cuda=: @ao.kernel(cuda=...) on the Python function")
        return Kernel(name or implementation.__name__, cuda=cuda, host=implementation, options=options, calls=calls)

    return decorate if function is None else decorate(function)
