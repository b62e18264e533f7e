"""Compiles kernel sources and launches them: the only file that speaks to the CUDA driver.

A kernel is a source file of `kernels/`, the numbers that are compiled in, and its name; `Device.kernel` keeps what was compiled.
Sources need no header and no compiler at the user's side: NVRTC comes with torch's CUDA build. Launches overlap their predecessor
(programmatic dependent launch), which the kernels expect; see `kernels/device.cuh`. Knows no operation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, resources
from typing import Any, Protocol

import torch
from torch import Tensor

from triblade.errors import UnsupportedError

Grid = tuple[int, int, int]
_Source = tuple[str, tuple[tuple[str, int], ...]]  # a file and the constants compiled in
COMPILERS = 16  # threads
LEAST_CAPABILITY = (
    9,
    0,
)  # the sources use what older processors do not have: kernels that start before their predecessor ended
_MAX_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of a CUtensorMap
_UINT8, _NO_INTERLEAVE, _SWIZZLE_128B, _NO_PROMOTION, _ZEROS_OUTSIDE = 0, 0, 3, 0, 0  # how boxes arrive
_PARTS = {
    "linear.cu": ("weights.cuh",),
    "wide.cu": ("weights.cuh",),
    "attention.cu": ("attend.cuh", "keys.cuh", "boxes.cuh"),
    "norm.cu": ("eights.cuh",),
    "vectors.cu": ("eights.cuh",),
}
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class Device(Protocol):
    """Where kernels run."""

    @property
    def has_warpgroups(self) -> bool:
        """Whether there are matrix instructions of whole warpgroups (`kernels/wide.cu`) and boxes (`kernels/boxes.cuh`)."""
        ...

    def kernel(self, source: str, name: str, constants: Mapping[str, int]) -> Any:
        """A kernel of a source file with constants compiled in; compiled once."""
        ...

    def box_map(
        self, tensor: Tensor, first: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> Any:
        """A tensor's bytes from `first` on as five dimensions of `sizes`, `strides` bytes apart (four: the first one is dense).

        An argument of kernels, which copy boxes out of it: 128 bytes of the first dimension, `box` elements of the others.
        """
        ...

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        overlaps: bool = True,
    ) -> None:
        """Queue a kernel; arguments are ctypes values, in order. One that does not overlap starts when all before it are done."""
        ...


def why_no_compiler() -> str | None:
    """What keeps kernels from being compiled at run time here, or None."""
    try:
        import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        return f"no run-time compiler ({error}); CUDA builds of torch bring cuda-bindings along"
    return None


def source_text(name: str) -> str:
    """A kernel source of `kernels/` with the files it builds on, but without `device.cuh`."""
    folder = resources.files("triblade.ops.cuda") / "kernels"
    parts = ("layout.cuh", *_PARTS.get(name, ()), name)
    return "".join((folder / part).read_text(encoding="utf-8") for part in parts)


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """A tensor's memory as an argument; None is a null pointer."""
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


class _AttributeValue(ctypes.Union):
    _fields_ = (("padding", ctypes.c_char * 64), ("allowed", ctypes.c_int))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", _AttributeValue))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@dataclass(slots=True)
class _Kernel:
    name: str
    function: ctypes.c_void_p
    most_shared_bytes: int = 0  # that launches may ask for


class CudaDevice:
    """One GPU.

    Args:
        device: of torch, whose context and current stream are used.

    Raises:
        UnsupportedError: the run-time compiler is not there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if reason := why_no_compiler():
            raise UnsupportedError(f"CUDA kernels cannot be compiled: {reason}", hint="use --backend reference")
        self._nvrtc = import_module("cuda.bindings.nvrtc")
        self._driver = ctypes.CDLL("libcuda.so.1")
        torch.cuda.current_stream(device)  # makes the context
        self._capability = torch.cuda.get_device_capability(device)
        self.has_warpgroups = self._capability == (9, 0)
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=_AttributeValue(allowed=1))
        self._codes: dict[_Source, bytes] = {}
        self._kernels: dict[tuple[_Source, str], _Kernel] = {}
        self._modules: list[ctypes.c_void_p] = []

    def kernel(self, source: str, name: str, constants: Mapping[str, int]) -> _Kernel:
        """See `Device`."""
        key = (source, tuple(sorted(constants.items())))
        if (key, name) not in self._kernels:
            self.compile([(source, constants)])
            self._kernels[key, name] = self._load(self._codes[key], name)
        return self._kernels[key, name]

    def compile(self, wanted: Iterable[tuple[str, Mapping[str, int]]]) -> None:
        """Compile sources with constants, several at a time."""
        keys = {(source, tuple(sorted(constants.items()))) for source, constants in wanted} - self._codes.keys()
        with ThreadPoolExecutor(COMPILERS) as pool:
            self._codes.update(zip(keys, pool.map(self._compiled, keys), strict=True))

    def box_map(
        self, tensor: Tensor, first: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> ctypes.Array[ctypes.c_char]:
        """See `Device`."""
        room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        made = (ctypes.c_char * _MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % _MAP_ALIGNMENT)
        code = self._driver.cuTensorMapEncodeTiled(
            made, _UINT8, 5, ctypes.c_void_p(tensor.data_ptr() + first), (ctypes.c_uint64 * 5)(*sizes),
            (ctypes.c_uint64 * 4)(*strides), (ctypes.c_uint32 * 5)(*box), (ctypes.c_uint32 * 5)(*[1] * 5),
            _NO_INTERLEAVE, _SWIZZLE_128B, _NO_PROMOTION, _ZEROS_OUTSIDE,
        )  # fmt: skip
        if code:
            raise RuntimeError(
                f"a tensor of {sizes}, {strides} bytes apart, cannot be copied in boxes of {box}: error {code}"
            )
        return made

    def launch(
        self,
        kernel: _Kernel,
        grid: Grid,
        threads: int,
        arguments: Sequence[Any],
        *,
        shared_bytes: int = 0,
        overlaps: bool = True,
    ) -> None:
        """See `Device`."""
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        config = _LaunchConfig(
            grid=grid,
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=int(overlaps),
        )
        if shared_bytes > kernel.most_shared_bytes:
            kernel.most_shared_bytes = shared_bytes
            self._driver.cuFuncSetAttribute(kernel.function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        code = self._driver.cuLaunchKernelEx(ctypes.byref(config), kernel.function, addresses, None)
        if code:
            raise RuntimeError(f"CUDA kernel {kernel.name} was not launched: error {code}, grid {grid}")

    def _compiled(self, key: _Source) -> bytes:
        """Machine code of a source file."""
        nvrtc = self._nvrtc
        source, constants = key
        device = (resources.files("triblade.ops.cuda") / "kernels" / "device.cuh").read_text(encoding="utf-8")
        text = device + source_text(source)
        program = self._check(nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], []))
        major, minor = self._capability
        options = [f"--gpu-architecture=sm_{major}{minor}{'a' if self.has_warpgroups else ''}", "--std=c++17"]
        options += [f"-D{name}={value}" for name, value in constants]
        result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * self._check(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"kernels/{source} does not compile with {dict(constants)}: {log.decode()}")
        code: bytes = b" " * self._check(nvrtc.nvrtcGetCUBINSize(program))
        nvrtc.nvrtcGetCUBIN(program, code)
        nvrtc.nvrtcDestroyProgram(program)
        return code

    def _check(self, result: tuple[Any, ...]) -> Any:
        if result[0] != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"run-time compiler: {result[0]}")
        return result[1]

    def _load(self, code: bytes, name: str) -> _Kernel:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self._device):
            error = self._driver.cuModuleLoadData(ctypes.byref(module), code)
        error = error or self._driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
        if error:
            raise RuntimeError(f"CUDA kernel {name} was not loaded: error {error}")
        self._modules.append(module)
        return _Kernel(name, function)
