"""The gather of rows out of an arena and a cache: on the host, and as the GPU's kernel has it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from clients.device.devices import Device  # noqa: E402
from tests.clients.device.gathers import case, expected  # noqa: E402


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 40), cached=st.booleans())
def test_the_host_gathers_as_a_loop_would(seed, width, cached):
    given_case = case(seed, rows=30, width=width, cached=cached)
    device = Device()
    assert device.lend(given_case.arena) == ""
    out = torch.full((30, width), 77, dtype=torch.uint8)
    device.gather(given_case.addresses, out, given_case.slots, given_case.cache)
    np.testing.assert_array_equal(out.numpy(), expected(given_case))


def test_the_kernel_gathers_as_a_loop_would():
    """In Triton's interpreter, in a process of its own: it is chosen before Triton is imported."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.clients.device.gathers"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_kernel_compiles_for_a_gpu():
    """To machine code, which needs no GPU; in a process of its own, without the interpreter."""
    pytest.importorskip("triton")
    script = [sys.executable, "-m", "tests.clients.device.gathers", "compile"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
