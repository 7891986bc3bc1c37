//! Implements the allocation and copying of buffers ([`Storage`]) in host memory for the CPU
//! backend.
use super::backend::Cpu;
use crate::{
    buffer::{Buf, Dtype, View, ViewMut},
    storage::Storage,
};
use std::ops::Range;

impl Storage for Cpu {
    fn is_host(&self) -> bool {
        true
    }

    fn zeroed_with_purpose(&self, _purpose: &'static str, dtype: Dtype, len: usize) -> Buf {
        Buf::zeroed_as(dtype, len)
    }

    fn alloc_staging(&self, dtype: Dtype, len: usize) -> Buf {
        Buf::zeroed_as(dtype, len)
    }

    fn copy(&self, to: ViewMut, from: View) {
        assert!(
            to.dtype() == from.dtype(),
            "copy: the types differ, {:?} and {:?}; use `cast`",
            from.dtype(),
            to.dtype()
        );
        to.host_bytes_mut().copy_from_slice(from.host_bytes());
    }

    fn fill_with_zeros(&self, x: ViewMut) {
        x.host_bytes_mut().fill(0);
    }

    fn move_elements_to_lower_index(&self, x: ViewMut, from: Range<usize>, to: usize) {
        let size = x.dtype().size();
        x.host_bytes_mut().copy_within(from.start * size..from.end * size, to * size);
    }

    fn peak_memory_bytes(&self) -> u64 {
        0
    }
}
