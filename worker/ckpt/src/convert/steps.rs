//! What is done with a planned file, one after the other: storages in windows of fixed size.
use super::file::Span;
use crate::dtype::Dtype;

/// Elements in flight at a time: 2 MiB of f32.
pub(super) const WINDOW: usize = 512 << 10;

/// Consecutive elements in a window.
pub(super) struct Part {
    /// `None`: zeros.
    pub(super) tensor: Option<usize>,
    pub(super) start: u64,
    pub(super) count: u64,
}

/// What is done with a file, one after the other.
pub(super) enum Step<'p> {
    /// A storage begins.
    Begin,
    Window {
        dtype: Dtype,
        spans: Vec<Part>,
        elements: usize,
    },
    Raw {
        tensor: usize,
        start: u64,
        bytes: usize,
    },
    Bytes(&'p [u8]),
    End,
}

/// What was read for a step.
pub(super) enum Loaded {
    Values(Vec<f32>),
    Bytes(Vec<u8>),
    Nothing,
}

impl Step<'_> {
    pub(super) fn elements(&self) -> usize {
        match self {
            Step::Window { elements, .. } => *elements,
            Step::Raw { bytes, .. } => *bytes,
            _ => 0,
        }
    }

    /// Bytes of the result.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Step::Window { dtype, elements, .. } => *elements as u64 * dtype.size(),
            Step::Raw { bytes, .. } => *bytes as u64,
            Step::Bytes(bytes) => bytes.len() as u64,
            Step::Begin | Step::End => 0,
        }
    }
}

/// The steps of one storage.
pub(super) fn steps(dtype: Dtype, spans: &[Span]) -> Vec<Step<'_>> {
    let mut steps = vec![Step::Begin];
    for span in spans {
        match span {
            Span::Bytes(bytes) => steps.push(Step::Bytes(bytes)),
            Span::Raw(tensor, count) => {
                let size = dtype.size();
                let mut start = 0;
                while start < *count {
                    let n = (count - start).min(WINDOW as u64 / size);
                    steps.push(Step::Raw { tensor: *tensor, start, bytes: (n * size) as usize });
                    start += n;
                }
            }
            Span::Of(tensor, range) => {
                add(&mut steps, dtype, Some(*tensor), range.start, range.end - range.start)
            }
            Span::Zeros(count) => add(&mut steps, dtype, None, 0, *count),
        }
    }
    steps.push(Step::End);
    steps
}

/// Adds elements to the last window, and further windows as needed.
fn add(steps: &mut Vec<Step<'_>>, dtype: Dtype, tensor: Option<usize>, mut start: u64, mut count: u64) {
    while count > 0 {
        if !matches!(steps.last(), Some(Step::Window { elements, .. }) if *elements < WINDOW) {
            steps.push(Step::Window { dtype, spans: Vec::new(), elements: 0 });
        }
        let Some(Step::Window { spans, elements, .. }) = steps.last_mut() else { return };
        let n = count.min((WINDOW - *elements) as u64);
        spans.push(Part { tensor, start, count: n });
        *elements += n as usize;
        start += n;
        count -= n;
    }
}
