//! [`NarrowingBuffers`]: converts F32 values to 16-bit dtypes, in reusable buffers.
use crate::tensor::Dtype;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Reusable buffers in which F32 values are converted to 16-bit dtypes.
#[derive(Default)]
pub(crate) struct NarrowingBuffers {
    bf16: Vec<bf16>,
    f16: Vec<f16>,
}

impl NarrowingBuffers {
    /// Converts values to BF16 or F16 as torch does, rounding to nearest with ties to even. Returns
    /// the converted bytes. For other dtypes returns the bytes of the F32 values.
    pub(crate) fn convert_values<'a>(&'a mut self, dtype: Dtype, values: &'a [f32]) -> &'a [u8] {
        match dtype {
            Dtype::BF16 => {
                self.bf16.resize(values.len(), bf16::ZERO);
                self.bf16.convert_from_f32_slice(values);
                bytemuck::cast_slice(&self.bf16)
            }
            Dtype::F16 => {
                self.f16.resize(values.len(), f16::ZERO);
                self.f16.convert_from_f32_slice(values);
                bytemuck::cast_slice(&self.f16)
            }
            _ => bytemuck::cast_slice(values),
        }
    }
}

/// Returns the index of the first value that is finite in `wide`, but became infinite in `narrow`
/// by the conversion to the 16-bit dtype `dtype`. Returns `None` if there is no such value, or the
/// dtype does not have 16 bits.
pub(crate) fn find_overflow(dtype: Dtype, wide: &[f32], narrow: &[u8]) -> Option<usize> {
    let infinity = match dtype {
        Dtype::BF16 => bf16::INFINITY.to_bits(),
        Dtype::F16 => f16::INFINITY.to_bits(),
        _ => return None,
    };
    let narrow: &[u16] = bytemuck::cast_slice(narrow);
    wide.iter().zip(narrow).position(|(w, n)| n & 0x7fff == infinity && w.is_finite())
}
