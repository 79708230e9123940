"""The only writer of PTX instructions: an `Emitter` of single GPU instructions.

An intrinsic's *body* is a Python function `body(e, *arguments)` that asks an emitter for instructions and returns
values. Run with this file's `Emitter` it writes IR into the kernel being compiled (`intrinsics.py`); run with
`emulator.Emitter` the same body computes on NumPy arrays over the threads of a block. So there is one source for the
address arithmetic, the fragment maps and the order of instructions, and the machine's own semantics are written once
per instruction.

Values: `u32` (also two packed float16 or bfloat16, and addresses in shared memory), `f32`, `f64` (optimizers alone
compute in it), `u64` (addresses in global memory) and predicates. Instructions follow the PTX ISA; which need a newer
chip than sm_75 is decided in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

from llvmlite import ir
from numba.core import cgutils

from .wgmma import WARPGROUP, Chain, batch_text

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
VOID = ir.VoidType()
HALF2 = ir.VectorType(F16, 2)

ALL_LANES = -1

_VECTORS = {
    "u32": ("b32", "r", I32), "u64": ("b64", "l", I64), "f32": ("f32", "f", F32), "f64": ("f64", "d", F64),
    "u16": ("u16", "h", I16),
}  # fmt: skip


class Emitter:
    """Writes one instruction after another at an llvmlite builder's position, for compute capability `cc` (e.g. 90)."""

    def __init__(self, builder: ir.IRBuilder, cc: int):
        self.builder = builder
        self.cc = cc

    # ------------------------------------------------------------------------------------ assembly
    def asm(
        self, outputs: Sequence[ir.Type], text: str, constraints: str, arguments=(), *, pure=False, collective=False
    ):
        """Inline PTX. `pure`: same inputs, same outputs, so it may be moved or merged. `collective`: by whole warps."""
        if not outputs:
            result = VOID
        elif len(outputs) == 1:
            result = outputs[0]
        else:
            result = ir.LiteralStructType(outputs)
        function = ir.FunctionType(result, [a.type for a in arguments])
        call = self.builder.call(
            ir.InlineAsm(function, text, constraints, side_effect=not pure),
            list(arguments),
            attrs=("convergent",) if collective else (),
        )
        if len(outputs) <= 1:
            return call
        return [self.builder.extract_value(call, i) for i in range(len(outputs))]

    # ------------------------------------------------------------------------- constants, integers
    def u32(self, value):
        return I32(value & 0xFFFFFFFF) if isinstance(value, int) else value

    def f32(self, value: float):
        return F32(float(value))

    def add(self, a, b):
        return self.builder.add(self.u32(a), self.u32(b))

    def sub(self, a, b):
        return self.builder.sub(self.u32(a), self.u32(b))

    def mul(self, a, b):
        return self.builder.mul(self.u32(a), self.u32(b))

    def and_(self, a, b):
        return self.builder.and_(self.u32(a), self.u32(b))

    def or_(self, a, b):
        return self.builder.or_(self.u32(a), self.u32(b))

    def xor(self, a, b):
        return self.builder.xor(self.u32(a), self.u32(b))

    def shl(self, a, n: int):
        return self.builder.shl(self.u32(a), self.u32(n))

    def shr(self, a, n: int):
        return self.builder.lshr(self.u32(a), self.u32(n))

    def div(self, a, n: int):
        return self.builder.udiv(self.u32(a), self.u32(n))

    def mod(self, a, n: int):
        return self.builder.urem(self.u32(a), self.u32(n))

    def remainders(self, values, divisor):
        """Each value modulo `divisor`. One branch for all: divisions are left out where, in this thread, every value is
        below twice the divisor."""
        values = [self.minimum(value, self.sub(value, divisor)) for value in values]
        largest = values[0]
        for value in values[1:]:
            largest = self.maximum(largest, value)
        n = len(values)
        divisions = " ".join(f"rem.u32 ${i}, ${i}, ${2 * n};" for i in range(n))
        text = f"{{ .reg .pred p; setp.lt.u32 p, ${2 * n + 1}, ${2 * n}; @p bra done; {divisions} done: }}"
        constraints = ",".join(["=r"] * n + [str(i) for i in range(n)] + ["r", "r"])
        reduced = self.asm([I32] * n, text, constraints, [*values, self.u32(divisor), largest], pure=True)
        return [reduced] if n == 1 else list(reduced)

    def minimum(self, a, b):
        a, b = self.u32(a), self.u32(b)
        return self.builder.select(self.builder.icmp_unsigned("<", a, b), a, b)

    def maximum(self, a, b):
        a, b = self.u32(a), self.u32(b)
        return self.builder.select(self.builder.icmp_unsigned(">", a, b), a, b)

    def address(self, base, index, stride: int, offset: int = 0):
        """base + index * stride + offset bytes in global memory; the product is taken in 64 bits."""
        product = self.builder.mul(self.builder.zext(self.u32(index), I64), I64(stride))
        return self.builder.add(base, self.builder.add(product, I64(offset)) if offset else product)

    def address_by(self, base, index, stride):
        """base + index * stride bytes, with a stride known only at run time."""
        wide = self.builder.mul(self.builder.zext(self.u32(index), I64), self.builder.zext(self.u32(stride), I64))
        return self.builder.add(base, wide)

    def low_word(self, a):
        """The lower 32 bits of a u64."""
        return self.builder.trunc(a, I32)

    # -------------------------------------------------------------------------- predicates, choice
    def less(self, a, b):
        return self.builder.icmp_unsigned("<", self.u32(a), self.u32(b))

    def equal(self, a, b):
        return self.builder.icmp_unsigned("==", self.u32(a), self.u32(b))

    def both(self, p, q):
        return self.builder.and_(p, q)

    def select(self, p, a, b):
        return self.builder.select(p, a, b)

    @contextmanager
    def when(self, predicate):
        """Instructions inside run only in the threads where `predicate` holds."""
        with self.builder.if_then(predicate):
            yield

    # ------------------------------------------------------------------------------------- floats
    def fadd(self, a, b):
        return self.builder.fadd(a, b)

    def fsub(self, a, b):
        return self.builder.fsub(a, b)

    def fmul(self, a, b):
        return self.builder.fmul(a, b)

    def fdiv(self, a, b):
        return self.builder.fdiv(a, b)

    def fma(self, a, b, c):
        """a b + c with one rounding."""
        return self.builder.fma(a, b, c)

    def f64(self, value: float):
        return F64(float(value))

    def widen(self, a):
        """float32 to float64."""
        return self.builder.fpext(a, F64)

    def narrow(self, a):
        """float64 to float32, rounded to nearest."""
        return self.builder.fptrunc(a, F32)

    def to_f64(self, a):
        """u32 to float64."""
        return self.builder.uitofp(self.u32(a), F64)

    def square_root(self, a):
        """Of a float64, rounded to nearest."""
        return self.asm([F64], "sqrt.rn.f64 $0, $1;", "=d,d", [a], pure=True)

    def less_than(self, a, b):
        """a < b of two float64; false where one is NaN."""
        text = "{ .reg .pred p; setp.lt.f64 p, $1, $2; selp.u32 $0, 1, 0, p; }"  # opaque to fast mathematics
        return self.equal(self.asm([I32], text, "=r,d,d", [a, b], pure=True), 1)

    def multiply_add(self, a, b, c):
        """a b + c with one rounding."""
        return self.asm([F32], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], pure=True)

    def is_finite(self, a):
        bits = self.builder.bitcast(a, I32)
        exponent = self.builder.and_(bits, I32(0x7F800000))
        return self.builder.icmp_unsigned("!=", exponent, I32(0x7F800000))

    def float_to_bits(self, a):
        return self.builder.bitcast(a, I32)

    def bits_to_float(self, a):
        return self.builder.bitcast(a, F32)

    def pack_half2(self, low, high):
        """Two float32 to two float16 in one register, rounded to nearest even; `low` in the lower half."""
        if self.cc >= 80:
            return self.asm([I32], "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], pure=True)
        vector = HALF2(ir.Undefined)
        for i, value in enumerate((low, high)):
            vector = self.builder.insert_element(vector, self.builder.fptrunc(value, F16), I32(i))
        return self.builder.bitcast(vector, I32)

    def pack_positive_half2(self, low, high):
        """`pack_half2` of what is larger than 0, else 0 (sm_80); NaN stays NaN."""
        return self.asm([I32], "cvt.rn.relu.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], pure=True)

    def where_positive_half2(self, values, gates):
        """Two float16 times 1 where the other two are larger than 0, subnormal numbers too, else times 0."""
        text = (
            "{ .reg .b32 zero, gate; mov.b32 zero, 0; set.gt.f16x2.f16x2 gate, $2, zero; mul.rn.f16x2 $0, $1, gate; }"
        )
        return self.asm([I32], text, "=r,r,r", [values, gates], pure=True)

    def unpack_half2(self, packed):
        """Two float16 to two float32. Opaque to LLVM, which would turn a later comparison with 0 into one of float16,
        where fast mathematics takes subnormal numbers for 0."""
        text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
        return tuple(self.asm([F32, F32], text, "=f,=f,r", [packed], pure=True))

    def float_to_half(self, a):
        """float32 to float16, in the low half of a u32."""
        return self.builder.zext(self.builder.bitcast(self.builder.fptrunc(a, F16), I16), I32)

    def half_to_float(self, a):
        """float16 in the low half of a u32 to float32; opaque as `unpack_half2`."""
        return self.asm([F32], "cvt.f32.f16 $0, $1;", "=f,h", [self.builder.trunc(a, I16)], pure=True)

    def pack_bfloat2(self, low, high):
        """Two float32 to two bfloat16 in one register, rounded to nearest even; `low` in the lower half (sm_80)."""
        return self.asm([I32], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], pure=True)

    def upper_halves(self, low, high):
        """The upper 16 bits of two registers in one."""
        return self.asm([I32], "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [self.u32(low), self.u32(high)], pure=True)

    def round_to_int64(self, a):
        """The nearest int64 of a float32 that has one, in a u64."""
        return self.asm([I64], "cvt.rni.s64.f32 $0, $1;", "=l,f", [a], pure=True)

    def low_bits_of_floor(self, a):
        """The last 32 bits of floor(a), of a float32: 0 from 2^62 and below -2^63 on, as it should be, and for NaN."""
        text = (
            "{ .reg .f32 bounded; .reg .b64 whole; .reg .b32 high; min.f32 bounded, $1, 0f5E800000; "
            "cvt.rmi.s64.f32 whole, bounded; mov.b64 {$0, high}, whole; }"
        )
        return self.asm([I32], text, "=r,f", [a], pure=True)

    def int64_to_float(self, a):
        return self.asm([F32], "cvt.rn.f32.s64 $0, $1;", "=f,l", [a], pure=True)

    def floor_to_int(self, a):
        """floor as int32 in a u32: saturates, NaN gives 0 (LLVM's own conversion would be undefined there)."""
        return self.asm([I32], "cvt.rmi.s32.f32 $0, $1;", "=r,f", [a], pure=True)

    def round_to_int(self, a):
        """To the nearest int32, in a u32; saturates, NaN gives 0."""
        return self.asm([I32], "cvt.rni.s32.f32 $0, $1;", "=r,f", [a], pure=True)

    def int_to_float(self, a):
        """An int32 in a u32 to float32."""
        return self.builder.sitofp(a, F32)

    # ------------------------------------------------------------------------------------ identity
    def special(self, name: str):
        """A special register, through LLVM's own intrinsic: the compiler may then read it once for a whole kernel."""
        function = ir.FunctionType(I32, [])
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, function, f"llvm.nvvm.read.ptx.sreg.{name}"), []
        )

    def thread(self):
        return self.special("tid.x")

    def lane(self):
        return self.special("laneid")

    def warp(self):
        return self.shr(self.thread(), 5)

    def warp_of_block(self):
        """As `warp`, in a block of up to three dimensions."""
        row = self.add(self.special("tid.y"), self.mul(self.special("ntid.y"), self.special("tid.z")))
        return self.shr(self.add(self.thread(), self.mul(self.special("ntid.x"), row)), 5)

    def block(self):
        return self.special("ctaid.x")

    def block_row(self):
        return self.special("ctaid.y")

    def n_blocks(self):
        return self.special("nctaid.x")

    def zero_at_run_time(self):
        """0.0 that the assembler can't see through (grids have no third axis): nvJitLink 13.5 was seen to write one of
        two constant zeros of a stmatrix after the instruction that stores them."""
        return self.builder.bitcast(self.special("ctaid.z"), F32)

    # ------------------------------------------------------------------------------ warp, barriers
    def settle(self, value):
        """A u32, computed here: LLVM can neither move that nor look through it for what a later use needs of it."""
        return self.asm([I32], "mov.b32 $0, $1;", "=r,r", [value])

    def shuffle_xor(self, value, mask: int):
        if value.type == F64:
            text = (
                "{ .reg .b32 l, h; mov.b64 {l, h}, $1; "
                f"shfl.sync.bfly.b32 l, l, {mask}, 31, {ALL_LANES}; shfl.sync.bfly.b32 h, h, {mask}, 31, {ALL_LANES}; "
                "mov.b64 $0, {l, h}; }"
            )
            return self.asm([F64], text, "=d,d", [value], collective=True)
        kind = "=f,f" if value.type == F32 else "=r,r"
        text = f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, {ALL_LANES};"
        return self.asm([value.type], text, kind, [value], collective=True)

    def barrier(self):
        self.asm([], "bar.sync 0;", "~{memory}", collective=True)

    def warpgroup(self):
        """Index of this thread's warpgroup, by a shuffle: so the assembler knows that it is the same in a warp."""
        text = f"shfl.sync.idx.b32 $0, $1, 0, 31, {ALL_LANES};"
        return self.asm([I32], text, "=r,r", [self.shr(self.thread(), 7)], pure=True, collective=True)

    def warpgroup_barrier(self):
        """Of the 128 threads of a warpgroup; barrier 0 is the block's."""
        number = self.add(self.warpgroup(), 1)
        self.asm([], f"bar.sync $0, {32 * WARPGROUP};", "r,~{memory}", [number], collective=True)

    def fence_async(self):
        """What this thread has written to shared memory so far can be read by wgmma behind the next barrier."""
        self.asm([], "fence.proxy.async.shared::cta;", "~{memory}")

    def warp_barrier(self):
        self.asm([], f"bar.warp.sync {ALL_LANES};", "~{memory}", collective=True)

    # ------------------------------------------------------------------------------ tensor cores
    def mma(self, a, b, c, *, bfloat: bool = False):
        """One m16n8k16 product (sm_80): a (16x16 float16, or with `bfloat` bfloat16, 4 registers) times b (16x8, 2
        registers) plus c (16x8 float32, 4)."""
        kind = "bf16" if bfloat else "f16"
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        return self.asm([F32] * 4, text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [*a, *b, *c], pure=True, collective=True)

    def mma_k8(self, a, b, c):
        """One m16n8k8 product (sm_75): a (16x8 float16, 2 registers) times b (8x8, 1 register) plus c (16x8, 4)."""
        text = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5}, {$6}, {$7,$8,$9,$10};"
        return self.asm([F32] * 4, text, "=f,=f,=f,=f,r,r,r,f,f,f,f", [*a, b, *c], pure=True, collective=True)

    def wgmma(self, chains: list[Chain]) -> list[list]:
        """Products of a warpgroup (sm_90a), waited for; the registers of each chain's sums."""
        text, constraints, inputs = batch_text(chains)
        n_outputs = [chain.n // 2 for chain in chains]
        constraints = ",".join(["=&f"] * sum(n_outputs) + constraints + ["~{memory}"])
        registers = iter(self.asm([F32] * sum(n_outputs), text, constraints, inputs, collective=True))
        return [[next(registers) for _ in range(n)] for n in n_outputs]

    def ldmatrix(self, address, offset: int = 0, *, transposed: bool = False):
        """Four 8x8 float16 matrices; lane i gives the address of row i % 8 of matrix i / 8. Four registers."""
        suffix = ".trans" if transposed else ""
        text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return self.asm([I32] * 4, text, "=r,=r,=r,=r,r,~{memory}", [address], collective=True)

    def stmatrix(self, address, registers, offset: int = 0):
        """The inverse of ldmatrix. Before sm_90 each lane stores its own words, at row addresses found by shuffle."""
        if self.cc >= 90:
            text = f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0+{offset}], {{$1,$2,$3,$4}};"
            self.asm([], text, "r,r,r,r,r,~{memory}", [address, *registers], collective=True)
            return
        lane = self.lane()
        for matrix, register in enumerate(registers):
            source = self.add(self.shr(lane, 2), 8 * matrix)
            text = f"shfl.sync.idx.b32 $0, $1, $2, 31, {ALL_LANES};"
            row = self.asm([I32], text, "=r,r,r", [address, source], collective=True)
            word = self.add(row, self.shl(self.and_(lane, 3), 2))
            self.asm([], f"st.shared.b32 [$0+{offset}], $1;", "r,r,~{memory}", [word, register])

    # ------------------------------------------------------------------------------------- memory
    @staticmethod
    def _vector(kind: str, count: int) -> tuple[str, str, ir.Type]:
        """PTX suffix, constraint letter and LLVM type of `count` values of `kind`."""
        suffix, letter, llvm = _VECTORS[kind]
        return (f".v{count}" if count > 1 else "") + "." + suffix, letter, llvm

    def _load(self, space: str, address, letter_of_address: str, offset: int, kind: str, count: int, pure: bool):
        suffix, letter, llvm = self._vector(kind, count)
        registers = ",".join(f"${i}" for i in range(count))
        target = f"{{{registers}}}" if count > 1 else registers
        text = f"ld.{space}{suffix} {target}, [${count}+{offset}];"
        constraints = ",".join([f"={letter}"] * count + [letter_of_address] + ([] if pure else ["~{memory}"]))
        loaded = self.asm([llvm] * count, text, constraints, [address], pure=pure)
        values = [loaded] if count == 1 else loaded
        return [self.builder.zext(v, I32) for v in values] if kind == "u16" else list(values)

    def _store(self, instruction: str, address, letter_of_address: str, offset: int, kind: str, values):
        suffix, letter, llvm = self._vector(kind, len(values))
        registers = ",".join(f"${i + 1}" for i in range(len(values)))
        source = f"{{{registers}}}" if len(values) > 1 else registers
        if kind == "u16":
            values = [self.builder.trunc(v, I16) for v in values]
        text = f"{instruction}{suffix} [$0+{offset}], {source};"
        self.asm([], text, ",".join([letter_of_address] + [letter] * len(values) + ["~{memory}"]), [address, *values])

    def load_shared(self, address, kind: str, count: int = 1, offset: int = 0):
        return self._load("shared", address, "r", offset, kind, count, pure=False)

    def store_shared(self, address, kind: str, values, offset: int = 0):
        self._store("st.shared", address, "r", offset, kind, values)

    def add_shared_u32(self, address, value, offset: int = 0):
        self.asm([], f"red.shared.add.u32 [$0+{offset}], $1;", "r,r,~{memory}", [address, value])

    def load_global(self, address, kind: str, count: int = 1, offset: int = 0, *, constant: bool = True):
        """`constant`: nothing writes this memory while the kernel runs (the read-only path, and free to be moved)."""
        space = "global.nc" if constant else "global"
        return self._load(space, address, "l", offset, kind, count, pure=constant)

    def prefetch(self, address):
        """The line that `address` lies in, to the L2 cache."""
        self.asm([], "prefetch.global.L2 [$0];", "l", [address])

    def prefetch_closer(self, shared_address, address):
        """The sector that `address` lies in, to the L1 cache (sm_80): an asynchronous copy passes it on its way to
        shared memory, where a word is written that is of no use. `copy_wait` waits for it, too."""
        text = "{ .reg .b64 word; and.b64 word, $1, -4; cp.async.ca.shared.global [$0], [word], 4; }"
        self.asm([], text, "r,l,~{memory}", [shared_address, address])

    def load_global_where(self, predicate, address, kind: str, count: int = 1, offset: int = 0):
        """A load that happens only where `predicate` holds, and gives 0 elsewhere; the memory may change meanwhile."""
        suffix, letter, llvm = self._vector(kind, count)
        registers = ",".join(f"${i}" for i in range(count))
        target = f"{{{registers}}}" if count > 1 else registers
        zero = {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(kind, "0")
        clear = " ".join(f"mov.{suffix.rsplit('.', 1)[1]} ${i}, {zero};" for i in range(count))
        text = (
            f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, 0; {clear} "
            f"@p ld.global{suffix} {target}, [${count}+{offset}]; }}"
        )
        constraints = ",".join([f"=&{letter}"] * count + ["l", "r", "~{memory}"])
        flag = self.builder.zext(predicate, I32)
        loaded = self.asm([llvm] * count, text, constraints, [address, flag])
        values = [loaded] if count == 1 else loaded
        return [self.builder.zext(v, I32) for v in values] if kind == "u16" else list(values)

    def store_global(self, address, kind: str, values, offset: int = 0):
        self._store("st.global", address, "l", offset, kind, values)

    def add_global(self, address, values, offset: int = 0):
        """Float32 reductions into global memory, as wide as the chip has them (1, 2 or 4 values, aligned)."""
        if self.cc >= 90 or len(values) == 1:
            self._store("red.global.add", address, "l", offset, "f32", values)
            return
        for i, value in enumerate(values):
            self._store("red.global.add", address, "l", offset + 4 * i, "f32", [value])

    def maximum_global(self, address, value):
        """Unsigned maximum into global memory."""
        self.asm([], "red.global.max.u32 [$0], $1;", "l,r,~{memory}", [address, value])

    def add_global_u32(self, address, value):
        self.asm([], "red.global.add.u32 [$0], $1;", "l,r,~{memory}", [address, self.u32(value)])

    def add_global_u64(self, address, value):
        self.asm([], "red.global.add.u64 [$0], $1;", "l,l,~{memory}", [address, value])

    def copy_async(self, shared_address, global_address, offset: int = 0, *, where=None, constant: bool = True):
        """16 bytes from global to shared memory without passing registers (sm_80); both addresses 16-byte aligned.

        where      a predicate: elsewhere nothing is read and zeros are written
        constant   whether nothing writes this memory while the kernel runs; no matter to the machine
        """
        text = f"cp.async.cg.shared.global [$0+{offset}], [$1], 16"
        if where is not None and self.cc >= 80:
            read = self.builder.select(where, I32(16), I32(0))
            self.asm([], f"{text}, $2;", "r,l,r,~{memory}", [shared_address, global_address, read])
        elif where is not None:
            words = self.load_global_where(where, global_address, "u32", 4)
            self.store_shared(shared_address, "u32", words, offset)
        elif self.cc >= 80:
            self.asm([], f"{text};", "r,l,~{memory}", [shared_address, global_address])
        else:
            words = self.load_global(global_address, "u32", 4, constant=False)
            self.store_shared(shared_address, "u32", words, offset)

    def copy_async_of(
        self, shared_address, global_address, offset: int, *, flip: int, item, further: int, stride, n_bytes: int
    ):
        """As `copy_async` (sm_80), of 4, 8 or 16 bytes: item number `item + further` of those that lie `stride` bytes
        apart, to where the bits `flip` are xored to the shared address. Addresses are put together within the assembly:
        LLVM would compute them in front of a loop, and keep all of them in registers."""
        text = (
            "{ .reg .b32 place, number; .reg .b64 source; "
            f"xor.b32 place, $0, {flip}; add.u32 number, $2, {further}; mad.wide.u32 source, number, $3, $1; "
            f"cp.async.{'cg' if n_bytes == 16 else 'ca'}.shared.global [place+{offset}], [source], {n_bytes}; }}"
        )
        self.asm([], text, "r,l,r,r,~{memory}", [shared_address, global_address, item, stride])

    def copy_commit(self):
        """This thread's copies since the last commit become a group, maybe an empty one (sm_80)."""
        self.asm([], "cp.async.commit_group;", "~{memory}")

    def copy_wait(self, groups_left: int | None = None):
        """Wait for this thread's asynchronous copies; or for all groups of them but so many, the latest."""
        if groups_left is not None:
            self.asm([], f"cp.async.wait_group {groups_left};", "~{memory}")
        elif self.cc >= 80:
            self.asm([], "cp.async.wait_all;", "~{memory}")
