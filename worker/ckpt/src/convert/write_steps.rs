//! The steps that write a planned file: its storages, divided into windows of a fixed size.
use super::file_plan::StorageSpan;
use crate::dtype::Dtype;

/// Elements of one window: 2 MiB of f32.
pub(super) const WINDOW: usize = 512 << 10;

/// Consecutive elements of one tensor in a window.
pub(super) struct WindowPart {
    /// Index of the source tensor; `None` for zeros.
    pub(super) tensor: Option<usize>,
    pub(super) start: u64,
    pub(super) count: u64,
}

/// One step of writing a storage.
pub(super) enum WriteStep<'p> {
    /// A storage begins.
    Begin,
    /// Numbers, converted to `dtype`.
    Window { dtype: Dtype, parts: Vec<WindowPart>, elements: usize },
    /// Elements of a source tensor in their stored dtype, from element `start`.
    Raw { tensor: usize, start: u64, bytes: usize },
    /// Literal bytes.
    Bytes(&'p [u8]),
    /// The storage ends.
    End,
}

/// The source data that a step needs.
pub(super) enum StepData {
    Values(Vec<f32>),
    Bytes(Vec<u8>),
    Nothing,
}

impl WriteStep<'_> {
    pub(super) fn elements(&self) -> usize {
        match self {
            WriteStep::Window { elements, .. } => *elements,
            WriteStep::Raw { bytes, .. } => *bytes,
            _ => 0,
        }
    }

    /// Bytes that the step writes.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            WriteStep::Window { dtype, elements, .. } => *elements as u64 * dtype.size(),
            WriteStep::Raw { bytes, .. } => *bytes as u64,
            WriteStep::Bytes(bytes) => bytes.len() as u64,
            WriteStep::Begin | WriteStep::End => 0,
        }
    }
}

/// The steps that write one storage.
pub(super) fn storage_steps(dtype: Dtype, spans: &[StorageSpan]) -> Vec<WriteStep<'_>> {
    let mut steps = vec![WriteStep::Begin];
    for span in spans {
        match span {
            StorageSpan::Bytes(bytes) => steps.push(WriteStep::Bytes(bytes)),
            StorageSpan::Raw(tensor, count) => {
                let size = dtype.size();
                let mut start = 0;
                while start < *count {
                    let n = (count - start).min(WINDOW as u64 / size);
                    steps.push(WriteStep::Raw { tensor: *tensor, start, bytes: (n * size) as usize });
                    start += n;
                }
            }
            StorageSpan::Elements(tensor, range) => {
                push_elements(&mut steps, dtype, Some(*tensor), range.start, range.end - range.start)
            }
            StorageSpan::Zeros(count) => push_elements(&mut steps, dtype, None, 0, *count),
        }
    }
    steps.push(WriteStep::End);
    steps
}

/// Adds elements to the last window while it has free space, then to new windows.
fn push_elements(
    steps: &mut Vec<WriteStep<'_>>,
    dtype: Dtype,
    tensor: Option<usize>,
    mut start: u64,
    mut count: u64,
) {
    while count > 0 {
        if !matches!(steps.last(), Some(WriteStep::Window { elements, .. }) if *elements < WINDOW) {
            steps.push(WriteStep::Window { dtype, parts: Vec::new(), elements: 0 });
        }
        let Some(WriteStep::Window { parts: spans, elements, .. }) = steps.last_mut() else { return };
        let n = count.min((WINDOW - *elements) as u64);
        spans.push(WindowPart { tensor, start, count: n });
        *elements += n as usize;
        start += n;
        count -= n;
    }
}
