//! Finds tensors that contain NaN or infinite values.
use crate::catalog::{F32ReadRequest, TensorSource};
use crate::error::Result;

/// Number of elements that are read and checked for NaN and infinite values at a time.
const CHUNK_ELEMENTS: u64 = 1 << 20;

/// Reads every floating-point tensor of a checkpoint, and returns one warning for each tensor with
/// NaN or infinite values.
pub(crate) fn find_non_finite_values(source: &dyn TensorSource) -> Result<Vec<String>> {
    let (mut lines, mut buffer) = (Vec::new(), Vec::new());
    for info in source.tensors().iter().filter(|i| i.dtype.is_float()) {
        let (mut nans, mut infinite, mut at) = (0u64, 0u64, 0);
        loop {
            at = source.skip_file_holes(info, at)?;
            if at >= info.element_count() {
                break;
            }
            buffer.resize((info.element_count() - at).min(CHUNK_ELEMENTS) as usize, 0.0);
            let (name, role, out) = (info.name.as_str(), info.role, buffer.as_mut_slice());
            source.read_verified(&mut [F32ReadRequest { name, role, start_element: at, out }])?;
            nans += buffer.iter().filter(|x| x.is_nan()).count() as u64;
            infinite += buffer.iter().filter(|x| x.is_infinite()).count() as u64;
            at += buffer.len() as u64;
        }
        if nans + infinite > 0 {
            let (label, count) = (info.label(), info.element_count());
            lines.push(format!("{label} has {nans} NaN and {infinite} infinite of {count} values"));
        }
    }
    Ok(lines)
}
