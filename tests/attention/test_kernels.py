"""Triton's kernels without a GPU: run by its interpreter, and compiled to machine code."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HELPER = Path(__file__).parents[1] / "helpers" / "kernel_parity.py"

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or sys.platform != "linux",
        reason="Triton is not installed: pip install 'sdattn[kernels]', on Linux",
    ),
    # how Triton 3.7 makes syntax trees, on Python 3.13
    pytest.mark.filterwarnings("ignore:AnnAssign.__init__ missing:DeprecationWarning"),
]

QUICK = ["float32, heads of 40", "float16, heads of 80", "chosen columns of several rows"]


def parity(*names):
    paths = [path for path in sys.path if path]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **settings, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(HELPER), *names], capture_output=True, text=True, env=environment
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def check(found):
    for name, errors in found.items():
        # half types are multiplied as they are, exactly, so that the law of float32 holds for them
        most = 1e-5 if name == "large scores" else 2e-6
        off = {kernel: error for kernel, error in errors.items() if not error <= most}
        assert not off, f"{name}: {off}"


def test_the_kernels_agree_with_float64():
    check(parity(*QUICK))


@pytest.mark.slow
def test_the_kernels_agree_with_float64_in_every_case():
    found = parity()
    assert len(found) == 29
    check(found)


# What a launch of torch's tensors makes of the arguments: the last strides are 1.
KERNELS = {
    "softmax_sums": {"block_n": 16, "block_t": 128, "chosen": False},
    "share_sums": {"block_n": 32, "block_t": 64, "chosen": True},
    "row_logsumexp": {},  # by dtype
}
POINTERS = {"total": "*fp32", "columns": "*i32", "logsumexp": "*fp32", "out": "*fp32"}
ALIGNED = {"query_b", "query_n", "key_b", "key_t"}  # widths of layers, in multiples of 16
HALVES = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}


def compiled(name, dtype, width, capability, masked):
    """Shared memory, registers and bytes spilled, by the compiler's own figures."""
    triton = pytest.importorskip("triton", minversion="3.5")  # earlier, sources were said otherwise
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sdattn.attention.cuda import kernels, launching

    kernel = getattr(kernels, name)
    constants = {**KERNELS[name], "masked": masked, "widened": False}
    if name == "row_logsumexp":
        tile = launching.logsumexp_tile(getattr(torch, dtype))
        constants |= dict(zip(("block_n", "block_t"), tile, strict=True))
    constants |= {"chunk": launching.CHUNK, "query_d": 1, "key_d": 1, "mask_t": 1, "total_t": 1}
    given = {**POINTERS, "query": HALVES[dtype], "key": HALVES[dtype], "mask": HALVES[dtype]}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        argument: "constexpr" if argument in constants else given.get(argument, "i32")
        for argument in kernel.arg_names
    }
    signature["scale"] = "fp32"
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, (argument, kind) in enumerate(signature.items())
        if kind.startswith("*") or argument in ALIGNED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=launching.OPTIONS
    )
    return made.metadata.shared, *assembled(made.asm["ptx"], capability)


def assembled(ptx, capability):
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"\.target (\w+)", ptx)[1]
    assert str(capability) in arch
    command = [
        get_ptxas(capability).path,
        "-v",
        f"--gpu-name={arch}",
        "-o",
        os.devnull,
        "/dev/stdin",
    ]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert not done.returncode, said
    registers = int(re.search(r"Used (\d+) registers", said)[1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return registers, spills


def check_compiled(capability, cases):
    most = {80: 163, 89: 99, 90: 227}[capability] * 1024  # a program's, by CUDA's guide
    for name, dtype, width, masked in cases:
        shared, registers, spills = compiled(name, dtype, width, capability, masked)
        print(
            f"sm_{capability} {name:13} {dtype:8} d={width:3} {'masked' if masked else '':6} "
            f"{shared:6} bytes shared, {registers:3} registers, {spills} bytes spilled"
        )
        assert spills == 0
        assert shared <= most


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_without_spills(name):
    check_compiled(90, [(name, "float16", 40, False)])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles_without_spills(capability):
    cases = [
        (name, dtype, width, masked)
        for name in KERNELS
        for dtype in HALVES
        for width in (40, 64, 80, 128, 160)
        for masked in (False, True)
        if not masked or width in (40, 160)
    ]
    check_compiled(capability, cases)


def test_a_tile_of_many_keys_compiles_without_spills():
    from sdattn.attention.cuda import launching
    from sdattn.attention.cuda.dispatch import MOST_KEYS

    block_t = launching.tiling(MOST_KEYS)
    assert block_t == MOST_KEYS
    KERNELS["softmax_sums"] |= {"block_n": max(16, launching.TILE // block_t), "block_t": block_t}
    try:
        check_compiled(90, [("softmax_sums", "float16", 160, True)])
    finally:
        KERNELS["softmax_sums"] |= {"block_n": 16, "block_t": 128}
