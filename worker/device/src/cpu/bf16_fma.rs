//! Micro-kernels of bf16 matmuls with fused multiply-adds: [`Bf16Tile`] and its implementations for
//! AVX-512, AVX2 and the baseline.
//!
//! The kernels for vector instructions are written in assembly, because they set the flags of
//! MXCSR that replace subnormal inputs and results by zeros (DAZ and FTZ). An `asm!` block must
//! restore MXCSR before it ends, so a kernel is one block, and no other code ever runs with these
//! flags.
#[cfg(target_arch = "x86_64")]
use super::bf16_rule::BF16_BLOCK;
use super::bf16_rule::Bf16Panels;
use super::instruction_set::InstructionSet;
use super::simd::MAX_TILE_LEN;

/// A tile of the result of a bf16 matmul, and the scratch memory with which a micro-kernel computes
/// it.
#[repr(C, align(64))]
pub(crate) struct Bf16Tile {
    /// Elements of the tile: rows of as many elements as the tile has columns.
    pub(crate) c: [f32; MAX_TILE_LEN],
    /// Sums of the even terms of a block.
    even: [f32; MAX_TILE_LEN],
    /// MXCSR of the thread, and MXCSR with the flags that replace subnormal numbers by zeros.
    mxcsr: [u32; 2],
}

impl Bf16Tile {
    /// Creates a tile of zeros.
    pub(crate) fn new() -> Self {
        Bf16Tile { c: [0.0; MAX_TILE_LEN], even: [0.0; MAX_TILE_LEN], mxcsr: [0; 2] }
    }

    /// Adds the matmul of two panels to the tile, by the rule of [`super::bf16_rule`]. The tile has
    /// as many rows as the micro tile of `instruction_set`, and `vectors` vectors of 16 columns.
    ///
    /// # Safety
    ///
    /// The caller must ensure that the panels are complete, and have `vectors` vectors for each
    /// term.
    pub(crate) unsafe fn add_product(
        &mut self,
        instruction_set: InstructionSet,
        panels: Bf16Panels,
        vectors: usize,
    ) {
        match instruction_set {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the machine has the instructions, and the caller guarantees the panels.
            InstructionSet::Avx512 => unsafe { x86::add_product_avx512(self, panels, vectors) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            InstructionSet::Avx2 => unsafe { x86::add_product_avx2(self, panels) },
            InstructionSet::Portable => {
                use super::simd::{LANES, Simd};
                let rows = super::portable::Portable::TILE_ROWS;
                // SAFETY: guaranteed by the caller.
                unsafe { super::bf16_rule::multiply_panels(panels, rows, vectors * LANES, &mut self.c) }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BF16_BLOCK, Bf16Panels, Bf16Tile};
    use core::arch::asm;
    use core::mem::offset_of;

    /// Flags of MXCSR that replace subnormal results (bit 15) and inputs (bit 6) by zeros.
    const FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO: u32 = 1 << 15 | 1 << 6;

    /// Assembly of the whole micro-kernel. `$step` computes one term, `$zero` clears the sums, and
    /// the other arguments store, load and add all sums. See the comments in the text.
    macro_rules! kernel_text {
        ($zero:expr, $step:expr, $unrolled:expr, $add_zero:expr, $store_even:expr, $add_even:expr, $add_c:expr) => {
            concat!(
                "stmxcsr [{buf} + {mxcsr}]\n",
                "mov {n:e}, [{buf} + {mxcsr}]\n",
                "or {n:e}, {flags}\n",
                "mov [{buf} + {mxcsr} + 4], {n:e}\n",
                "ldmxcsr [{buf} + {mxcsr} + 4]\n",
                "2:\n", // One block. {d} is the number of remaining terms.
                "mov {l:e}, {block}\n",
                "cmp {d}, {l}\n",
                "cmovb {l}, {d}\n",
                "mov {a0}, {a}\n",
                "mov {b0}, {b}\n",
                "lea {n}, [{l} + 1]\n",
                "shr {n}, 1\n",
                chain_text!($zero, $step, $unrolled, $add_zero, "3", "4", "5", "6"),
                $store_even,
                "mov {n}, {l}\n",
                "shr {n}, 1\n",
                "lea {a0}, [{a} + {a_step}]\n",
                "lea {b0}, [{b} + {b_stride}]\n",
                chain_text!($zero, $step, $unrolled, $add_zero, "7", "8", "9", "20"),
                $add_even,
                $add_c,
                "lea {a}, [{a} + {a_step} * {block}]\n",
                "lea {b}, [{b} + {b_step} * 8]\n",
                "lea {b}, [{b} + {b_step} * 8]\n",
                "sub {d}, {l}\n",
                "jnz 2b\n",
                "ldmxcsr [{buf} + {mxcsr}]\n",
            )
        };
    }

    /// Assembly of one chain: the sum of every second term. `{n}` is the number of terms. If the
    /// block is not complete, zeros are added.
    macro_rules! chain_text {
        ($zero:expr, $step:expr, $unrolled:expr, $add_zero:expr, $loop:literal, $single:literal, $pad:literal, $end:literal) => {
            concat!(
                $zero,
                "sub {n}, 4\n",
                "jb ",
                $single,
                "f\n",
                $loop,
                ":\n", // Four terms at a time.
                $unrolled,
                "add {a0}, {a_step} * 8\n",
                "lea {b0}, [{b0} + {b_step} * 4]\n",
                "sub {n}, 4\n",
                "jae ",
                $loop,
                "b\n",
                $single,
                ":\n", // {n} is the number of remaining terms − 4.
                "cmp {n}, -4\n",
                "je ",
                $pad,
                "f\n",
                $step,
                "add {a0}, {a_step} * 2\n",
                "add {b0}, {b_step}\n",
                "dec {n}\n",
                "jmp ",
                $single,
                "b\n",
                $pad,
                ":\n",
                "cmp {l}, {block}\n",
                "je ",
                $end,
                "f\n",
                $add_zero,
                $end,
                ":\n",
            )
        };
    }

    /// Repeats a piece of assembly that contains a register number three times.
    macro_rules! each_thrice {
        ($before:literal, $second:literal, $third:literal, $after:literal: $($register:literal),+) => {
            concat!($($before, $register, $second, $register, $third, $register, $after, "\n"),+)
        };
    }

    /// Assembly of one row of one term with AVX-512 and 1, 2 or 3 vectors per row.
    macro_rules! zmm_row {
        ($row:literal, $at:literal, $x:literal, $($b:literal $c:literal),+) => {
            concat!(
                "vbroadcastss zmm", $x, ", [{a0} + ", $at, " + 4 * ", $row, "]\n",
                $("vfmadd231ps zmm", $c, ", zmm", $b, ", zmm", $x, "\n"),+
            )
        };
    }

    /// Assembly of one term with AVX-512 and three vectors per row. `$a` is the offset in the left
    /// panel, and `$b` the address in the right panel.
    macro_rules! zmm_step {
        (1, $a:literal, $b:literal) => { concat!(
            "vmovups zmm0, [", $b, "]\n",
            zmm_row!("0", $a, "3", "0" "8"), zmm_row!("1", $a, "4", "0" "9"),
            zmm_row!("2", $a, "5", "0" "10"), zmm_row!("3", $a, "6", "0" "11"),
            zmm_row!("4", $a, "3", "0" "12"), zmm_row!("5", $a, "4", "0" "13"),
            zmm_row!("6", $a, "5", "0" "14"), zmm_row!("7", $a, "6", "0" "15"),
        ) };
        (2, $a:literal, $b:literal) => { concat!(
            "vmovups zmm0, [", $b, "]\nvmovups zmm1, [", $b, " + 64]\n",
            zmm_row!("0", $a, "3", "0" "8", "1" "9"), zmm_row!("1", $a, "4", "0" "10", "1" "11"),
            zmm_row!("2", $a, "5", "0" "12", "1" "13"), zmm_row!("3", $a, "6", "0" "14", "1" "15"),
            zmm_row!("4", $a, "3", "0" "16", "1" "17"), zmm_row!("5", $a, "4", "0" "18", "1" "19"),
            zmm_row!("6", $a, "5", "0" "20", "1" "21"), zmm_row!("7", $a, "6", "0" "22", "1" "23"),
        ) };
        (3, $a:literal, $b:literal) => { concat!(
            "vmovups zmm0, [", $b, "]\nvmovups zmm1, [", $b, " + 64]\nvmovups zmm2, [", $b, " + 128]\n",
            zmm_row!("0", $a, "3", "0" "8", "1" "9", "2" "10"), zmm_row!("1", $a, "4", "0" "11", "1" "12", "2" "13"),
            zmm_row!("2", $a, "5", "0" "14", "1" "15", "2" "16"), zmm_row!("3", $a, "6", "0" "17", "1" "18", "2" "19"),
            zmm_row!("4", $a, "3", "0" "20", "1" "21", "2" "22"), zmm_row!("5", $a, "4", "0" "23", "1" "24", "2" "25"),
            zmm_row!("6", $a, "5", "0" "26", "1" "27", "2" "28"), zmm_row!("7", $a, "6", "0" "29", "1" "30", "2" "31"),
        ) };
    }

    /// Defines the AVX-512 micro-kernel for a number of vectors per row.
    macro_rules! avx512_kernel {
        ($name:ident, $vectors:tt, [$($register:literal $at:literal),+]) => {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
            unsafe fn $name(tile: &mut Bf16Tile, panels: Bf16Panels) {
                // SAFETY: the text reads the panels and the tile, and writes the tile.
                unsafe {
                    asm!(
                        kernel_text!(
                            each_thrice!("vpxord zmm", ", zmm", ", zmm", "": $($register),+),
                            concat!("", zmm_step!($vectors, "0", "{b0}")),
                            concat!(
                                zmm_step!($vectors, "0", "{b0}"),
                                zmm_step!($vectors, "64", "{b0} + {b_step}"),
                                zmm_step!($vectors, "128", "{b0} + {b_step} * 2"),
                                "add {b0}, {b_step}\n",
                                zmm_step!($vectors, "192", "{b0} + {b_step} * 2"),
                                "sub {b0}, {b_step}\n",
                            ),
                            concat!(
                                "vpxord zmm0, zmm0, zmm0\n",
                                $("vaddps zmm", $register, ", zmm", $register, ", zmm0\n"),+
                            ),
                            concat!($("vmovaps [{buf} + {even} + ", $at, "], zmm", $register, "\n"),+),
                            concat!($("vaddps zmm", $register, ", zmm", $register, ", [{buf} + {even} + ", $at, "]\n"),+),
                            concat!(
                                $("vaddps zmm", $register, ", zmm", $register, ", [{buf} + ", $at, "]\n",
                                "vmovaps [{buf} + ", $at, "], zmm", $register, "\n"),+
                            )
                        ),
                        buf = in(reg) tile as *mut Bf16Tile,
                        a = inout(reg) panels.a => _,
                        b = inout(reg) panels.b => _,
                        a0 = out(reg) _,
                        b0 = out(reg) _,
                        n = out(reg) _,
                        l = out(reg) _,
                        d = inout(reg) panels.depth => _,
                        b_stride = in(reg) panels.b_stride * 4,
                        b_step = in(reg) panels.b_stride * 8,
                        a_step = const 32,
                        block = const BF16_BLOCK,
                        mxcsr = const offset_of!(Bf16Tile, mxcsr),
                        even = const offset_of!(Bf16Tile, even),
                        flags = const FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO,
                        out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                        out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                        out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _,
                        out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _,
                        out("zmm22") _, out("zmm23") _, out("zmm24") _, out("zmm25") _, out("zmm26") _,
                        out("zmm27") _, out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
                        options(nostack)
                    );
                }
            }
        };
    }

    avx512_kernel!(add_1_vector, 1, [
        "8" "64*0", "9" "64*1", "10" "64*2", "11" "64*3", "12" "64*4", "13" "64*5", "14" "64*6", "15" "64*7"
    ]);
    avx512_kernel!(add_2_vectors, 2, [
        "8" "64*0", "9" "64*1", "10" "64*2", "11" "64*3", "12" "64*4", "13" "64*5", "14" "64*6", "15" "64*7",
        "16" "64*8", "17" "64*9", "18" "64*10", "19" "64*11", "20" "64*12", "21" "64*13", "22" "64*14", "23" "64*15"
    ]);
    avx512_kernel!(add_3_vectors, 3, [
        "8" "64*0", "9" "64*1", "10" "64*2", "11" "64*3", "12" "64*4", "13" "64*5", "14" "64*6", "15" "64*7",
        "16" "64*8", "17" "64*9", "18" "64*10", "19" "64*11", "20" "64*12", "21" "64*13", "22" "64*14", "23" "64*15",
        "24" "64*16", "25" "64*17", "26" "64*18", "27" "64*19", "28" "64*20", "29" "64*21", "30" "64*22", "31" "64*23"
    ]);

    /// Computes [`Bf16Tile::add_product`] with AVX-512.
    ///
    /// # Safety
    ///
    /// The machine must have AVX-512, and the caller must meet the requirements of
    /// [`Bf16Tile::add_product`].
    pub(super) unsafe fn add_product_avx512(tile: &mut Bf16Tile, panels: Bf16Panels, vectors: usize) {
        if panels.depth == 0 {
            return;
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            match vectors {
                1 => add_1_vector(tile, panels),
                2 => add_2_vectors(tile, panels),
                _ => add_3_vectors(tile, panels),
            }
        }
    }

    /// Assembly of one row of one term with AVX2 and two ymm registers per row.
    macro_rules! ymm_row {
        ($row:literal, $at:literal, $x:literal, $c:literal, $d:literal) => {
            concat!(
                "vbroadcastss ymm",
                $x,
                ", [{a0} + ",
                $at,
                " + 4 * ",
                $row,
                "]\n",
                "vfmadd231ps ymm",
                $c,
                ", ymm0, ymm",
                $x,
                "\n",
                "vfmadd231ps ymm",
                $d,
                ", ymm1, ymm",
                $x,
                "\n",
            )
        };
    }

    /// Assembly of one term with AVX2.
    macro_rules! ymm_step {
        ($a:literal, $b:literal) => {
            concat!(
                "vmovups ymm0, [",
                $b,
                "]\nvmovups ymm1, [",
                $b,
                " + 32]\n",
                ymm_row!("0", $a, "2", "4", "5"),
                ymm_row!("1", $a, "3", "6", "7"),
                ymm_row!("2", $a, "2", "8", "9"),
                ymm_row!("3", $a, "3", "10", "11"),
                ymm_row!("4", $a, "2", "12", "13"),
                ymm_row!("5", $a, "3", "14", "15"),
            )
        };
    }

    /// Defines the AVX2 micro-kernel.
    macro_rules! avx2_kernel {
        ($name:ident, [$($register:literal $at:literal),+]) => {
            /// Computes [`Bf16Tile::add_product`] with AVX2.
            ///
            /// # Safety
            ///
            /// The machine must have AVX2 and FMA, and the caller must meet the requirements of
            /// [`Bf16Tile::add_product`].
            #[target_feature(enable = "avx2,fma")]
            pub(super) unsafe fn $name(tile: &mut Bf16Tile, panels: Bf16Panels) {
                if panels.depth == 0 {
                    return;
                }
                // SAFETY: the text reads the panels and the tile, and writes the tile.
                unsafe {
                    asm!(
                        kernel_text!(
                            each_thrice!("vxorps ymm", ", ymm", ", ymm", "": $($register),+),
                            concat!("", ymm_step!("0", "{b0}")),
                            concat!(
                                ymm_step!("0", "{b0}"),
                                ymm_step!("48", "{b0} + {b_step}"),
                                ymm_step!("96", "{b0} + {b_step} * 2"),
                                "add {b0}, {b_step}\n",
                                ymm_step!("144", "{b0} + {b_step} * 2"),
                                "sub {b0}, {b_step}\n",
                            ),
                            concat!(
                                "vxorps ymm0, ymm0, ymm0\n",
                                $("vaddps ymm", $register, ", ymm", $register, ", ymm0\n"),+
                            ),
                            concat!($("vmovaps [{buf} + {even} + ", $at, "], ymm", $register, "\n"),+),
                            concat!($("vaddps ymm", $register, ", ymm", $register, ", [{buf} + {even} + ", $at, "]\n"),+),
                            concat!(
                                $("vaddps ymm", $register, ", ymm", $register, ", [{buf} + ", $at, "]\n",
                                "vmovaps [{buf} + ", $at, "], ymm", $register, "\n"),+
                            )
                        ),
                        buf = in(reg) tile as *mut Bf16Tile,
                        a = inout(reg) panels.a => _,
                        b = inout(reg) panels.b => _,
                        a0 = out(reg) _,
                        b0 = out(reg) _,
                        n = out(reg) _,
                        l = out(reg) _,
                        d = inout(reg) panels.depth => _,
                        b_stride = in(reg) panels.b_stride * 4,
                        b_step = in(reg) panels.b_stride * 8,
                        a_step = const 24,
                        block = const BF16_BLOCK,
                        mxcsr = const offset_of!(Bf16Tile, mxcsr),
                        even = const offset_of!(Bf16Tile, even),
                        flags = const FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO,
                        out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _,
                        out("ymm6") _, out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
                        out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                        options(nostack)
                    );
                }
            }
        };
    }

    avx2_kernel!(add_product_avx2, [
        "4" "32*0", "5" "32*1", "6" "32*2", "7" "32*3", "8" "32*4", "9" "32*5",
        "10" "32*6", "11" "32*7", "12" "32*8", "13" "32*9", "14" "32*10", "15" "32*11"
    ]);
}
