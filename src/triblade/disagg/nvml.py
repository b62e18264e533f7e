"""What NVIDIA's driver knows of its devices, through the optional package nvidia-ml-py. Implements `topology.Driver`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType, TracebackType

from triblade.errors import UnsupportedError


class Nvml:
    """A session with the driver; a context manager.

    Raises:
        UnsupportedError: the package is missing, or there is no driver.
    """

    def __init__(self) -> None:
        try:
            self._nvml: ModuleType = import_module("pynvml")
        except ImportError as error:
            raise UnsupportedError(
                "devices are unknown: the package nvidia-ml-py is not installed", hint="pip install nvidia-ml-py"
            ) from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise UnsupportedError(f"devices are unknown: {error}", hint="is an NVIDIA driver installed?") from error
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def __enter__(self) -> Nvml:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._nvml.nvmlShutdown()

    def devices(self) -> Sequence[tuple[str, str]]:
        """See `topology.Driver`."""
        nvml = self._nvml
        return [(_text(nvml.nvmlDeviceGetName(h)), _text(nvml.nvmlDeviceGetPciInfo(h).busId)) for h in self._handles]

    def are_linked(self, first: int, second: int) -> bool:
        """See `topology.Driver`; asked of peer access, which knows switches as well as direct links."""
        nvml = self._nvml
        try:
            status = nvml.nvmlDeviceGetP2PStatus(
                self._handles[first], self._handles[second], nvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
        except nvml.NVMLError:  # devices and drivers without NVLink do not know the question
            return False
        return bool(status == nvml.NVML_P2P_STATUS_OK)


def _text(value: str | bytes) -> str:
    """Older versions of the package give bytes."""
    return value.decode() if isinstance(value, bytes) else value
