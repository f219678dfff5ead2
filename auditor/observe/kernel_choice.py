"""Which kernels are taken: the compiled ones where they are there and worth their loading."""

from __future__ import annotations

from auditor.observe.kernels import Kernels

WORTH_COMPILED_BYTES = 512 << 20
"""From so many bytes on, the compiled kernels save more time than loading them takes."""


def choose(num_bytes: int, wanted: str = "auto") -> Kernels:
    """The kernels for reading ``num_bytes`` of weights: the compiled ones where numba is there and loading them pays.

    Raises:
        ValueError: no kernels have the ``wanted`` name.
        ImportError: ``numba`` is wanted and not installed.
    """
    if wanted not in ("auto", "numpy", "numba"):
        raise ValueError(f"no kernels are called {wanted!r}; there are auto, numpy and numba")
    if wanted == "numba" or (wanted == "auto" and num_bytes >= WORTH_COMPILED_BYTES):
        try:
            from auditor.observe.compiled_kernels import CompiledKernels

            return CompiledKernels()
        except ImportError:
            if wanted == "numba":
                raise
    from auditor.observe.numpy_kernels import NumpyKernels

    return NumpyKernels()
