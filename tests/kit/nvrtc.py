"""The compiler of kernels; a file of tests that imports it is skipped where NVRTC is missing."""

import pytest

pytest.importorskip("cupy")
try:
    from thdattn.jit import compiler as compiler

    compiler.nvrtc.getVersion()
except Exception as error:
    pytest.skip(f"needs NVRTC: {error}", allow_module_level=True)
