"""Compiles kernel sources and launches them: the only file that speaks to the CUDA driver.

A kernel is a source file of `kernels/`, the numbers that are compiled in, and its name; `Device.kernel` keeps what was compiled, in
memory and, given a folder, on disk.
Sources need no header and no compiler at the user's side: NVRTC comes with torch's CUDA build. Launches overlap their predecessor
(programmatic dependent launch), which the kernels expect; see `kernels/device.cuh`. Knows no operation.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from triblade.errors import UnsupportedError

log = logging.getLogger(__name__)

Grid = tuple[int, int, int]
_MAGIC = b"\x7fELF"  # of machine code
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
    "copy_rows.cu": ("row_sums.cuh",),
    "quantize_rows.cu": ("row_sums.cuh",),
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

    def gather(self, run: Callable[[], None]) -> int:
        """Compile what `run` launches, several at a time, and launch nothing of it; the number of sources."""
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
        cache: folder of compiled kernels; None keeps none. Where it cannot be written kernels are compiled anew.

    Raises:
        UnsupportedError: the run-time compiler is not there.
    """

    def __init__(self, device: torch.device, cache: Path | None = None) -> None:
        self._device = device
        self._cache = cache
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
        self._wanted: set[_Source] | None = None  # while nothing is launched

    def gather(self, run: Callable[[], None]) -> int:
        """See `Device`."""
        self._wanted = set()
        try:
            run()
            wanted = self._wanted
        finally:
            self._wanted = None
        self.compile([(source, dict(constants)) for source, constants in wanted])
        return len(wanted)

    def kernel(self, source: str, name: str, constants: Mapping[str, int]) -> _Kernel:
        """See `Device`."""
        key = (source, tuple(sorted(constants.items())))
        if self._wanted is not None:
            self._wanted.add(key)
            return _Kernel(name, ctypes.c_void_p())
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
        if self._wanted is not None:
            return
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
        """Machine code of a source file, from the disk if it is there."""
        source, constants = key
        device = (resources.files("triblade.ops.cuda") / "kernels" / "device.cuh").read_text(encoding="utf-8")
        text = device + source_text(source)
        major, minor = self._capability
        options = [f"--gpu-architecture=sm_{major}{minor}{'a' if self.has_warpgroups else ''}", "--std=c++17"]
        options += [f"-D{name}={value}" for name, value in constants]
        if self._cache is None:
            return self._compile(source, text, options)
        identity = "\n".join((str(torch.version.cuda), *options, text))
        path = self._cache / f"{source}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
        return _kept(path) or _keep(path, self._compile(source, text, options))

    def _compile(self, source: str, text: str, options: Sequence[str]) -> bytes:
        nvrtc = self._nvrtc
        program = self._check(nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], []))
        result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            messages = b" " * self._check(nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, messages)
            raise RuntimeError(f"kernels/{source} does not compile with {options}: {messages.decode()}")
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


def _kept(path: Path) -> bytes | None:
    """Code that an earlier process compiled; a file that is cut short is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if code.startswith(_MAGIC) and hashlib.sha256(code).digest() == digest else None


def _keep(path: Path, code: bytes) -> bytes:
    """Write code for later processes, whole or not at all; gives it back."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, path)
    except OSError as error:
        log.info("compiled kernels are not kept: %s", error)
    return code
