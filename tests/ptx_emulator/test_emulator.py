"""The emulator itself, with programs written by hand: its results, and the faults that it reports."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from tests.ptx_emulator.machine import Machine
from tests.ptx_emulator.memory import Fault, Region
from tests.ptx_emulator.program import read
from tests.ptx_emulator.scalar import bf16_of, number_of

pytestmark = pytest.mark.slow
KERNEL = """
.version 8.8
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u32 kernel_param_1
)
.reqntid %d
{
    .reg .pred %%p<9>;
    .reg .b16 %%rs<9>;
    .reg .b32 %%r<40>;
    .reg .b64 %%rd<9>;
    ld.param.b64 %%rd0, [kernel_param_0];
    ld.param.b32 %%r0, [kernel_param_1];
    mov.u32 %%r1, %%tid.x;
    mul.wide.u32 %%rd1, %%r1, 4;
    add.s64 %%rd2, %%rd0, %%rd1;
    mov.u32 %%r8, %%ctaid.x;
    shl.b32 %%r2, %%r1, 2;
    %s
    ret;
}
"""
"""%rd2: the thread's word, %r0: the number, %r1: the thread, %r2: four times that, %r8: the program."""


def run(body: str, words: np.ndarray, number: int = 0, threads: int = 32, programs: int = 1, shared: int = 256) -> None:  # type: ignore[type-arg]
    """``body`` on ``words``, in place."""
    machine = Machine(read(KERNEL % (threads, body)), threads, shared)
    parameters = {"kernel_param_0": struct.pack("<Q", words.ctypes.data), "kernel_param_1": struct.pack("<I", number)}
    region = Region(words.ctypes.data, words.ctypes.data + words.nbytes)
    machine.launch((programs, 1, 1), parameters, {}, [region])


def words(count: int = 32) -> np.ndarray:  # type: ignore[type-arg]
    return torch.zeros(count, dtype=torch.int32).numpy().view(np.uint32)


def test_threads_that_part_meet_again() -> None:
    """Every thread has a loop of its own length, then takes one of two ways."""
    held = words()
    run("""
        mov.b32 %r3, 0;
        mov.b32 %r4, 0;
    $again:
        add.s32 %r3, %r3, %r4;
        add.s32 %r4, %r4, 1;
        setp.le.s32 %p1, %r4, %r1;
        @%p1 bra $again;
        and.b32 %r5, %r1, 1;
        setp.eq.b32 %p2, %r5, 0;
        @%p2 bra $even;
        neg.s32 %r3, %r3;
        bra.uni $end;
    $even:
        add.s32 %r3, %r3, 1000;
    $end:
        bar.sync 0;
        shfl.sync.bfly.b32 %r6, %r3, 1, 31, -1;
        st.global.b32 [%rd2], %r6;
    """, held)  # fmt: skip
    sums = [at * (at + 1) // 2 for at in range(32)]
    ways = [total + 1000 if at % 2 == 0 else -total for at, total in enumerate(sums)]
    assert held.view(np.int32).tolist() == [ways[at ^ 1] for at in range(32)]


def test_programs_are_apart_and_count_together() -> None:
    """Shared memory is a program's own; what is added to a word of all is added one after another."""
    held = words(5 * 64)
    run("""
        mov.b32 %r3, global_smem;
        add.s32 %r3, %r3, %r2;
        mad.lo.s32 %r4, %r8, 100, %r1;
        st.shared.b32 [%r3], %r4;
        bar.sync 0;
        xor.b32 %r5, %r2, 252;
        ld.shared.b32 %r6, [%r5];
        mad.lo.s32 %r7, %r8, 64, %r1;
        mul.wide.u32 %rd3, %r7, 4;
        add.s64 %rd4, %rd0, %rd3;
        st.global.b32 [%rd4], %r6;
        setp.eq.b32 %p1, %r1, 0;
        @%p1 atom.global.gpu.acq_rel.add.u32 %r9, [%rd0], 1;
    """, held, threads=64, programs=5)  # fmt: skip
    wanted = np.array([[100 * program + (63 - at) for at in range(64)] for program in range(5)])
    wanted[0, 0] += 5
    assert np.array_equal(held.reshape(5, 64), wanted)


def test_halves_are_rounded_once() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8, 2.0**-133, 3e38, 4e38, -0.0, np.nan, 65519.0])
    wanted = torch.tensor(values).to(torch.bfloat16)
    wanted[2] = 1 + 2**-7  # a tie no more, which float32 does not see
    with np.errstate(over="ignore"):
        found = bf16_of(values)
    assert torch.equal(torch.from_numpy(found.view(np.int16))[:8], wanted.view(torch.int16)[:8])
    assert np.isnan(number_of(found, "bf16")[8])


FAULTS = {
    "touch memory of no argument": "add.s64 %rd3, %rd2, 4; ld.global.b32 %r3, [%rd3];",
    "not aligned": "add.s64 %rd3, %rd0, 2; ld.global.b32 %r3, [%rd3];",
    "nothing has written": "ld.shared.b32 %r3, [%r2];",
    "past its end": "add.s32 %r3, %r2, 256; st.shared.b32 [%r3], %r1;",
    "shared memory that is not aligned": "mov.b32 %r3, 4; st.shared.v2.b32 [%r3], {%r1, %r1};",
    "some threads miss": "setp.lt.s32 %p1, %r1, 7; @%p1 bra $out; bar.sync 0; $out: mov.b32 %r3, 0;",
    "a thread that is not there": """
        setp.lt.s32 %p1, %r1, 7;
        @%p1 shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1;
    """,
    "a part of a warp": "setp.lt.s32 %p1, %r1, 7; @%p1 redux.sync.max.s32 %r3, %r1, -1;",
    "wait for what does not come": """
        setp.eq.b32 %p1, %r1, 0;
        @%p1 mbarrier.init.shared::cta.b64 [global_smem], 1;
        {
            .reg .pred complete;
            waitLoop:
            mbarrier.try_wait.parity.shared::cta.b64 complete, [global_smem], 0;
            @!complete bra.uni waitLoop;
        }
    """,
    "no barrier was made": """
        setp.eq.b32 %p1, %r1, 0;
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [global_smem], 128;
    """,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_gpu_would_not_do_is_refused(fault: str) -> None:
    with pytest.raises(Fault, match=f"kernel: .*{fault}"):
        run(FAULTS[fault], words())


COPY = """
    and.b32 %r3, %r1, 15;
    mul.wide.u32 %rd3, %r3, 16;
    add.s64 %rd4, %rd0, %rd3;
    shl.b32 %r4, %r3, 4;
    setp.lt.u32 %p1, %r1, 16;
    selp.b32 %r5, 16, 0, %p1;
    add.s32 %r6, %r4, 256;
    @%p1 cp.async.cg.shared.global [ %r4 + 0 ], [ %rd4 + 0 ], 0x10, %r5;
    cp.async.commit_group;
    @%p1 cp.async.cg.shared.global [ %r6 + 0 ], [ %rd4 + 0 ], 0x10, 0;
    cp.async.commit_group;
    cp.async.wait_group {left};
    bar.sync 0;
    ld.shared.b32 %r7, [%r2+{place}];
    add.s32 %r7, %r7, 1;
    st.global.b32 [%rd2], %r7;
"""


@pytest.mark.parametrize(("left", "place", "arrived"), [(1, 0, True), (0, 256, True), (2, 0, False), (1, 256, False)])
def test_copies_arrive_when_they_are_waited_for(left: int, place: int, arrived: bool) -> None:
    held = words(64)
    held[:] = np.arange(64)
    body = COPY.format(left=left, place=place)
    if not arrived:
        with pytest.raises(Fault, match="nothing has written"):
            run(body, held, shared=512)
        return
    run(body, held, shared=512)
    assert held[:32].tolist() == ([at + 1 for at in range(32)] if place == 0 else [1] * 32)


def test_a_matrix_instruction_multiplies_fragments() -> None:
    """16 x 8 of 16: fragments as the PTX ISA deals them out, written out element by element."""
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).half(), torch.randn(16, 8).half()
    packed = torch.zeros(32, 12, dtype=torch.int32)
    for lane in range(32):
        row, pair = lane // 4, lane % 4 * 2
        left = [a[row + 8 * (i % 2), pair + 8 * (i // 2) :][:2] for i in range(4)]
        right = [b[pair + 8 * i :, row][:2] for i in range(2)]
        packed[lane, :6] = torch.cat([each.contiguous().view(torch.int32) for each in (*left, *right)])
    held = packed.reshape(-1).numpy().view(np.uint32)
    run("""
        mul.wide.u32 %rd3, %r1, 48;
        add.s64 %rd4, %rd0, %rd3;
        ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd4];
        ld.global.v2.b32 {%r14, %r15}, [%rd4+16];
        mov.b32 %r20, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
            {%r30, %r31, %r32, %r33}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r20, %r20, %r20, %r20};
        st.global.v2.b32 [%rd4+32], {%r30, %r31};
        st.global.v2.b32 [%rd4+40], {%r32, %r33};
    """, held)  # fmt: skip
    got = torch.from_numpy(held.view(np.float32)).view(32, 12)[:, 8:]
    wanted = a.double() @ b.double() + 1
    for lane in range(32):
        row, pair = lane // 4, lane % 4 * 2
        want = torch.cat([wanted[row, pair : pair + 2], wanted[row + 8, pair : pair + 2]])
        torch.testing.assert_close(got[lane].double(), want, rtol=1e-6, atol=1e-6)
