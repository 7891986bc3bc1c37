//! Values that are no finite numbers.
use crate::error::Result;
use crate::source::{Request, Source};

/// Elements looked at in one go.
const VALUES_AT_A_TIME: u64 = 1 << 20;

/// A line for each tensor with values that are no finite numbers.
pub(crate) fn not_finite(source: &dyn Source) -> Result<Vec<String>> {
    let (mut lines, mut buffer) = (Vec::new(), Vec::new());
    for info in source.tensors().iter().filter(|i| i.dtype.is_float()) {
        let (mut nans, mut infinite, mut at) = (0u64, 0u64, 0);
        while at < info.elements() {
            buffer.resize((info.elements() - at).min(VALUES_AT_A_TIME) as usize, 0.0);
            let (name, role, out) = (info.name.as_str(), info.role, buffer.as_mut_slice());
            source.read_many(&mut [Request { name, role, start_element: at, out }])?;
            nans += buffer.iter().filter(|x| x.is_nan()).count() as u64;
            infinite += buffer.iter().filter(|x| x.is_infinite()).count() as u64;
            at += buffer.len() as u64;
        }
        if nans + infinite > 0 {
            let label = format!("{}/{}", info.role, info.name);
            lines.push(format!(
                "{label} has {nans} NaN and {infinite} infinite of {} values",
                info.elements()
            ));
        }
    }
    Ok(lines)
}
