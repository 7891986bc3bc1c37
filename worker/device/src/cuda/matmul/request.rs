//! A request for a matmul by cuBLASLt ([`Matmul`]), and the key (sizes, strides, types) under which
//! the algorithm for such requests is stored.
use super::super::bindings::{Address, cublas_lt_sys::cudaDataType};
use super::super::launch_log::log_non_kernel_call;
use super::descriptors::CallPointers;
use super::epilogue::Epilogue;
use crate::buffer::Dtype;
use crate::fp8::Fp8Format;
use std::ffi::c_int;

/// Largest alignment in bytes of an operand's address that is taken into account when an algorithm
/// is chosen for a matmul. A larger alignment makes no algorithm faster.
const MAX_ALIGNMENT: u64 = 256;
/// Largest alignment in bytes of an operand's address that affects the choice of an algorithm for a
/// matmul with a varying size.
const MAX_VARYING_ALIGNMENT: u32 = 16;

/// Address and layout of a matrix in GPU memory that a matmul reads or writes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct MatrixRef {
    pub(in super::super) at: Address,
    /// Number of elements from row to row in memory.
    pub(in super::super) stride: usize,
    /// True if the matrix is stored transposed.
    pub(in super::super) transposed: bool,
}

/// A description of the matmul `c[m, n] (=|+=) a[m, k] · b[k, n]` and its epilogue for cuBLASLt.
/// Matrices are row-major unless they are transposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) struct Matmul {
    pub(in super::super) m: usize,
    pub(in super::super) n: usize,
    pub(in super::super) k: usize,
    pub(in super::super) a: MatrixRef,
    pub(in super::super) b: MatrixRef,
    pub(in super::super) c: MatrixRef,
    pub(in super::super) inputs: OperandFormat,
    pub(in super::super) output: Dtype,
    /// True if the matmul is added to `c`, false if it overwrites `c`.
    pub(in super::super) add: bool,
    /// What is computed in addition, such as GELU. Must be `None` if `add` is true.
    pub(in super::super) epilogue: Epilogue,
    /// The size that differs from call to call, if there is one.
    pub(in super::super) varying: Option<VaryingSize>,
}

/// The size of a matmul that changes from call to call: `M` (rows of the result) or `K` (terms of
/// each sum). An algorithm is chosen for a range of such sizes (a size bucket) instead of each of
/// them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum VaryingSize {
    M,
    K,
}

/// Smallest number to which a varying size of a matmul is rounded up when the algorithm for the
/// matmul is chosen. Sizes up to this number share an algorithm.
const MIN_SIZE_BUCKET: usize = 16;

/// Rounds a varying size of a matmul up to a power of two, so that one algorithm is chosen for all
/// sizes that round to it.
fn choose_size_bucket(size: usize) -> usize {
    size.max(MIN_SIZE_BUCKET).next_power_of_two()
}

/// Element types of the two operands of a matmul: one type for both, or for each an fp8 format and
/// the address of its scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum OperandFormat {
    /// Both operands have this type.
    Same(Dtype),
    /// fp8 format and GPU address of the scale, for each operand. Both operands must be contiguous
    /// along `k`: `a` is not transposed, and `b` is.
    Fp8([(Fp8Format, Address); 2]),
}

impl Matmul {
    /// Returns the sizes of the matmul: m rows, n columns, and k terms of each sum.
    pub(super) fn sizes(&self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }

    /// Returns the key under which the algorithm for this matmul is stored: sizes (a varying size
    /// rounded up), strides, types and alignments. They contain the size bucket in place of a
    /// varying size. The rows of an expert begin anywhere, so the alignments are then limited to 16
    /// bytes.
    pub(super) fn plan_key(&self) -> Key {
        let key = self.exact_key();
        let [m, n, k, strides @ ..] = key.sizes;
        let (m, k) = match self.varying {
            None => return key,
            Some(VaryingSize::M) => (choose_size_bucket(m), k),
            Some(VaryingSize::K) => (m, choose_size_bucket(k)),
        };
        let [a, b, c] = strides;
        let alignments = key.alignments.map(|bytes| bytes.min(MAX_VARYING_ALIGNMENT));
        Key { sizes: [m, n, k, a, b, c], alignments, ..key }
    }

    /// Returns the sizes, strides, types and alignments of this matmul, without rounding a varying
    /// size up.
    pub(super) fn exact_key(&self) -> Key {
        Key {
            sizes: [self.m, self.n, self.k, self.a.stride, self.b.stride, self.c.stride],
            transposed: [self.a.transposed, self.b.transposed],
            types: self.cuda_types().map(|data_type| data_type as c_int),
            add: self.add,
            alignments: [self.a.at, self.b.at, self.c.at].map(compute_alignment),
            epilogue: self.epilogue.kind() as u32,
            epilogue_alignments: [self.epilogue.vector(), self.epilogue.aux()]
                .map(|at| at.map(compute_alignment)),
        }
    }

    /// Writes the matmul to this process's launch log (a file with its last GPU calls), with its
    /// sizes, addresses, strides and types.
    pub(super) fn write_to_launch_log(&self) {
        let [m, n, k] = [self.m, self.n, self.k].map(|size| size as u64);
        let matrices = [self.a, self.b, self.c].map(|matrix| [matrix.at, matrix.stride as u64]);
        let [[a, a_stride], [b, b_stride], [c, c_stride]] = matrices;
        let [a_type, b_type, c_type] = self.cuda_types().map(|data_type| data_type as u64);
        log_non_kernel_call(
            "matmul",
            &[m, n, k, a, b, c, a_stride, b_stride, c_stride, a_type, b_type, c_type],
        );
    }

    /// Describes the matmul's shape and types for profiles: `matmul 8192 × 4096 × 1024 (bf16 · bf16
    /// → f32)`.
    pub(in super::super) fn describe(&self) -> String {
        let [a, b, c] = self.cuda_types().map(|data_type| match data_type {
            cudaDataType::CUDA_R_16F => "f16",
            cudaDataType::CUDA_R_16BF => "bf16",
            cudaDataType::CUDA_R_8F_E4M3 => "e4m3",
            cudaDataType::CUDA_R_8F_E5M2 => "e5m2",
            _ => "f32",
        });
        let suffix = if self.add { ", accumulating" } else { self.epilogue.describe() };
        format!("matmul {} × {} × {} ({a} · {b} → {c}{suffix})", self.m, self.n, self.k)
    }

    /// Returns CUDA's numbers for the element types of the two operands `a` and `b` and of the
    /// result `c`.
    pub(super) fn cuda_types(&self) -> [cudaDataType; 3] {
        let cuda_type = |dtype| match dtype {
            Dtype::F32 => cudaDataType::CUDA_R_32F,
            Dtype::F16 => cudaDataType::CUDA_R_16F,
            Dtype::Bf16 => cudaDataType::CUDA_R_16BF,
        };
        let [a, b] = match self.inputs {
            OperandFormat::Same(dtype) => [cuda_type(dtype); 2],
            OperandFormat::Fp8(operands) => operands.map(|(kind, _)| match kind {
                Fp8Format::E4M3 => cudaDataType::CUDA_R_8F_E4M3,
                Fp8Format::E5M2 => cudaDataType::CUDA_R_8F_E5M2,
            }),
        };
        [a, b, cuda_type(self.output)]
    }

    /// Returns the epilogue and the addresses of scales, which may differ from call to call.
    pub(super) fn call_pointers(&self) -> CallPointers {
        let (scales, epilogue, aux_stride) = (self.inputs.scales(), self.epilogue, self.c.stride);
        CallPointers { scales, epilogue, aux_stride }
    }
}

impl OperandFormat {
    /// Returns the GPU addresses of the scales of fp8 operands, or `None` if the operands are not
    /// fp8.
    fn scales(self) -> Option<[Address; 2]> {
        match self {
            OperandFormat::Same(_) => None,
            OperandFormat::Fp8(operands) => Some(operands.map(|(_, scale)| scale)),
        }
    }
}

/// The sizes, strides, types and alignments of a matmul, under which the fastest algorithm for the
/// matmul is stored.
///
/// The `Debug` text of the key is hashed into the names of stored choices. Renaming the type or a
/// field would discard all stored choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// m, n, k, and the strides of `a`, `b` and `c`.
    pub(super) sizes: [usize; 6],
    pub(super) transposed: [bool; 2],
    /// CUDA's numbers of the types of `a`, `b` and `c`.
    pub(super) types: [c_int; 3],
    pub(super) add: bool,
    /// Alignments of `a`, `b` and `c`, in bytes.
    pub(super) alignments: [u32; 3],
    /// cuBLASLt's number of the epilogue.
    pub(super) epilogue: u32,
    /// Alignments of the epilogue's vector and matrix, in bytes, if it has them.
    pub(super) epilogue_alignments: [Option<u32>; 2],
}

/// Returns the largest power of two that divides the address `at`, but at most [`MAX_ALIGNMENT`].
fn compute_alignment(at: Address) -> u32 {
    (1u64 << at.trailing_zeros().min(63)).min(MAX_ALIGNMENT) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varying_sizes_share_the_key_of_their_bucket() {
        let matrix = |at| MatrixRef { at, stride: 64, transposed: false };
        let matmul = |m, at, varying| Matmul {
            m,
            n: 64,
            k: 64,
            a: matrix(at),
            b: matrix(4096),
            c: matrix(8192),
            inputs: OperandFormat::Same(Dtype::Bf16),
            output: Dtype::Bf16,
            add: false,
            epilogue: Epilogue::None,
            varying,
        };
        let key = |m, at| matmul(m, at, Some(VaryingSize::M)).plan_key();
        assert_eq!(key(1, 16), key(16, 4096));
        assert_eq!((key(17, 32), key(33, 32).sizes[0]), (key(32, 256), 64));
        assert_ne!(key(16, 16), key(17, 16));
        assert_ne!(key(32, 8), key(32, 16), "unaligned rows need another algorithm");
        assert_ne!(matmul(31, 4096, None).plan_key(), matmul(32, 4096, None).plan_key());
    }
}
