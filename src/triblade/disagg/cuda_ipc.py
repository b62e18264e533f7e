"""Memory of a GPU that another process on the host writes into: offered as a handle, opened, written in a stream of its own.

Only this file speaks to the driver about it. Handles are what `cuIpcGetMemHandle` gives: they go over any link, need no name and
die with their owner; memory that somebody has open stays until that one closes it. Knows no row and no message.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from triblade.config import cache_dir
from triblade.disagg.sockets import UnixConnector
from triblade.errors import UnsupportedError, WireError
from triblade.ops.cuda.device import CudaDevice
from triblade.ops.cuda.rows import RowKernels

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
KERNEL_CACHE = "kernels"  # under the folder of downloads
HIGH_PRIORITY = -1  # rows take few processors and little time: they go before the next products


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Memory as its owner describes it."""

    handle: str  # hex
    offset: int  # of the memory within what the handle opens
    size: int  # bytes
    process: int
    address: int  # in that process

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Offer:
        """What a peer described.

        Raises:
            WireError: it is no offer.
        """
        try:
            return cls(**fields)
        except TypeError as error:
            raise WireError(
                f"the peer offers its memory in other fields: {error}", hint="run equal versions"
            ) from error

    def fields(self) -> dict[str, Any]:
        """As it goes over the wire."""
        return asdict(self)


class RowMemory(Protocol):
    """How one worker's device writes into another's pool, and in which order with what it computes."""

    def offer(self, memory: Tensor) -> Offer:
        """Let others write.

        Raises:
            UnsupportedError: this memory cannot be shared, and why.
        """
        ...

    def open(self, offer: Offer) -> int:
        """The address of somebody's memory.

        Raises:
            UnsupportedError: it cannot be reached from here, and why.
        """
        ...

    def close(self, offer: Offer, address: int) -> None:
        """What was opened at this address is not used any more."""
        ...

    def kernels(self, pool: Tensor) -> RowKernels:
        """What copies rows of a pool of this device."""
        ...

    def mark(self) -> Any:
        """What this thread has launched by now."""
        ...

    def wait(self, mark: Any) -> None:
        """Until all that is done."""
        ...

    def queue(self) -> AbstractContextManager[None]:
        """Launches within go to a stream of their own and are done at the end."""
        ...


class CudaIpc:
    """Implements `RowMemory` for one GPU.

    Raises:
        UnsupportedError: kernels cannot be compiled here.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._kernels = CudaDevice(device, cache_dir() / KERNEL_CACHE)
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def offer(self, memory: Tensor) -> Offer:
        """See `RowMemory`."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.create_string_buffer(HANDLE_BYTES)
        address = memory.data_ptr()
        self._enter()
        code = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        ) or self._driver.cuIpcGetMemHandle(handle, base)
        if code:
            raise UnsupportedError(f"the memory of the KV rows cannot be shared: error {code} of the driver")
        return Offer(
            handle=handle.raw.hex(),
            offset=address - base.value,
            size=memory.nbytes,
            process=os.getpid(),
            address=address,
        )

    def open(self, offer: Offer) -> int:
        """See `RowMemory`. Within a process memory is used as it is."""
        if offer.process == os.getpid():
            return offer.address
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(offer.handle))
        self._enter()
        code = self._driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(LAZY_PEER_ACCESS))
        if code:
            raise UnsupportedError(f"no access to the decode worker's device: error {code} of the driver")
        return address.value + offer.offset

    def close(self, offer: Offer, address: int) -> None:
        """See `RowMemory`. Only then is the memory of a worker that died free again."""
        if offer.process != os.getpid():
            self._enter()
            self._driver.cuIpcCloseMemHandle(ctypes.c_uint64(address - offer.offset))

    def kernels(self, pool: Tensor) -> RowKernels:
        """See `RowMemory`."""
        return RowKernels(self._kernels, pool)

    def mark(self) -> torch.cuda.Event:
        """See `RowMemory`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        """See `RowMemory`."""
        mark.synchronize()

    @contextmanager
    def queue(self) -> Iterator[None]:
        """See `RowMemory`."""
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _enter(self) -> None:
        """Make the device's context the calling thread's, as the driver wants it."""
        torch.cuda.current_stream(self._device).synchronize()


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class CudaIpcConnector(UnixConnector):
    """Links like those of `shm`; beside them, rows of GPUs are written where they belong."""

    def row_memory(self, pool: Tensor) -> RowMemory | None:
        """See `Connector`."""
        return CudaIpc(pool.device) if pool.device.type == "cuda" else None
