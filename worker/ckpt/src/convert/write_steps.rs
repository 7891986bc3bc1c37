//! [`WriteStep`]: one step of writing tensor data to a torch file, such as to convert and append at
//! most 2 MiB of F32 values.
use super::file_plan::StorageSpan;
use crate::tensor::Dtype;
use std::ops::Range;

/// Maximum number of elements that one write step converts: 2 MiB of F32.
pub(super) const WINDOW_ELEMENTS: usize = 512 << 10;

/// A range of elements of the source tensor with a given index, or a number of zeros (index
/// `None`), which one [`WriteStep`] appends to a file.
pub(super) type WriteStepPart = (Option<usize>, Range<u64>);

/// A step of writing tensor data to a torch file: begin a storage, append elements or bytes, or end
/// the storage.
pub(super) enum WriteStep<'p> {
    /// Begin the storage.
    Begin,
    /// Write the elements of a window, converted to `dtype`.
    Window { dtype: Dtype, parts: Vec<WriteStepPart>, elements: usize },
    /// Write `bytes` bytes of a source tensor starting at element `start`, in the stored dtype.
    Raw { tensor: usize, start: u64, bytes: usize },
    /// Write literal bytes.
    Bytes(&'p [u8]),
    /// End the storage.
    End,
}

/// The elements or bytes of source tensors that were read to execute one [`WriteStep`].
pub(super) enum WriteStepData {
    Values(Vec<f32>),
    Bytes(Vec<u8>),
    Nothing,
}

impl WriteStep<'_> {
    /// Returns the amount of tensor data that this step writes: elements if their dtype is
    /// converted, or bytes if they are copied unchanged. Returns 0 for other steps.
    pub(super) fn element_count(&self) -> usize {
        match self {
            WriteStep::Window { elements, .. } => *elements,
            WriteStep::Raw { bytes, .. } => *bytes,
            _ => 0,
        }
    }

    /// Returns the number of bytes that this step appends to the torch file.
    pub(super) fn size_in_bytes(&self) -> u64 {
        match self {
            WriteStep::Window { dtype, elements, .. } => *elements as u64 * dtype.size(),
            WriteStep::Raw { bytes, .. } => *bytes as u64,
            WriteStep::Bytes(bytes) => bytes.len() as u64,
            WriteStep::Begin | WriteStep::End => 0,
        }
    }
}

/// Plans the steps that write one tensor storage with the elements `spans` and the dtype `dtype` to
/// a torch file.
pub(super) fn plan_storage_steps(dtype: Dtype, spans: &[StorageSpan]) -> Vec<WriteStep<'_>> {
    let mut steps = vec![WriteStep::Begin];
    for span in spans {
        match span {
            StorageSpan::Bytes(bytes) => steps.push(WriteStep::Bytes(bytes)),
            StorageSpan::Raw(tensor, count) => {
                let size = dtype.size();
                let mut start = 0;
                while start < *count {
                    let n = (count - start).min(WINDOW_ELEMENTS as u64 / size);
                    steps.push(WriteStep::Raw { tensor: *tensor, start, bytes: (n * size) as usize });
                    start += n;
                }
            }
            StorageSpan::Elements(tensor, range) => {
                push_element_steps(&mut steps, dtype, Some(*tensor), range.clone())
            }
            StorageSpan::Zeros(count) => push_element_steps(&mut steps, dtype, None, 0..*count),
        }
    }
    steps.push(WriteStep::End);
    steps
}

/// Appends to `steps` the steps that write the elements `rest` of a source tensor, or zeros if
/// `tensor` is `None`, with the dtype `dtype`. Fills the last step first, if it is not full.
fn push_element_steps(
    steps: &mut Vec<WriteStep<'_>>,
    dtype: Dtype,
    tensor: Option<usize>,
    mut rest: Range<u64>,
) {
    while !rest.is_empty() {
        if !matches!(steps.last(), Some(WriteStep::Window { elements, .. }) if *elements < WINDOW_ELEMENTS) {
            steps.push(WriteStep::Window { dtype, parts: Vec::new(), elements: 0 });
        }
        let Some(WriteStep::Window { parts, elements, .. }) = steps.last_mut() else { return };
        let end = rest.end.min(rest.start + (WINDOW_ELEMENTS - *elements) as u64);
        *elements += (end - rest.start) as usize;
        parts.push((tensor, rest.start..end));
        rest.start = end;
    }
}
