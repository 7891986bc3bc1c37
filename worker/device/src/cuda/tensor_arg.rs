//! A tensor in GPU memory in the form that kernels take as an argument ([`TensorArg`]).
use super::bindings::Address;
use super::launch::KernelArg;
use crate::buffer::{Dtype, View, ViewMut};

/// Kernel argument for a tensor in GPU memory: its address, and its element type as a number that
/// the kernels know.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct TensorArg {
    pub(super) at: Address,
    pub(super) dtype: i64,
}

// SAFETY: struct Tensor of common.cuh.
unsafe impl KernelArg for TensorArg {}

impl TensorArg {
    /// Kernel argument for an optional tensor that is absent.
    pub(super) const NONE: TensorArg = TensorArg { at: 0, dtype: 0 };

    /// Returns this kernel argument, or `other` if this is the argument for an absent tensor
    /// (address 0).
    pub(super) fn or(self, other: TensorArg) -> TensorArg {
        if self.at == 0 { other } else { self }
    }
}

impl From<View<'_>> for TensorArg {
    #[track_caller]
    fn from(v: View) -> Self {
        TensorArg { at: gpu_address(v), dtype: dtype_code(v.dtype()) }
    }
}

impl From<&ViewMut<'_>> for TensorArg {
    #[track_caller]
    fn from(v: &ViewMut) -> Self {
        v.as_view().into()
    }
}

/// Returns the number that represents an element type in kernel arguments, as common.cuh defines
/// it.
pub(super) fn dtype_code(dtype: Dtype) -> i64 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

/// Returns the GPU address of the first element of `v`, a range of a buffer in GPU memory. Panics
/// if the view is in host memory.
#[track_caller]
pub(super) fn gpu_address(v: View) -> Address {
    assert!(!v.is_on_host() || v.is_empty(), "a buffer in host memory is used as GPU memory");
    v.address()
}

/// Returns the GPU address of the first element of a view of `f32`. Panics if the view has another
/// element type or is in host memory.
#[track_caller]
pub(super) fn f32_gpu_address(v: View) -> Address {
    assert!(v.dtype() == Dtype::F32, "a buffer of {:?} is used as f32", v.dtype());
    gpu_address(v)
}

/// Returns true if kernels can read and write each of the tensors in vectors of eight elements of
/// the type that is paired with the tensor. Each tensor must begin at a multiple of 16 bytes, and
/// have rows of a multiple of eight elements. The name of a kernel that requires this ends in the
/// type.
pub(super) fn are_vectorizable(width: usize, tensors: &[(TensorArg, Dtype)]) -> bool {
    let is_aligned = |(tensor, dtype): &(TensorArg, Dtype)| {
        tensor.at.is_multiple_of(16) && tensor.dtype == dtype_code(*dtype)
    };
    width.is_multiple_of(8) && tensors.iter().all(is_aligned)
}
