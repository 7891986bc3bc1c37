//! Conformance cases of fixed shapes, which select the special cases of kernels.
use super::comparison::{Backends, CaseResult};
use super::{cases, expert_cases};
use crate::ops::AttentionShape;

/// Function that runs a conformance case of one shape.
type FixedCase<'a> = Box<dyn Fn() -> CaseResult + 'a>;

/// Returns conformance cases at the limits of kernels: rows longer than a thread block, the widest
/// heads, documents that cross tiles, and more blocks than one launch has.
pub(super) fn list_boundary_cases<'a>(backends: &'a Backends) -> Vec<FixedCase<'a>> {
    // The tiles of the backward kernel take 137 KiB of shared memory for heads of 256 elements.
    // Only data-centre GPUs have that much; others have 99 KiB.
    let widest = if backends.cuda.properties().shared_memory_per_block < 144 << 10 { 176 } else { 256 };
    vec![
        Box::new(move || cases::compare_norms(backends, 1, 2, 1000)),
        Box::new(move || cases::compare_norms(backends, 2, 129, 33)),
        Box::new(move || {
            cases::compare_document_attention(backends, 3, AttentionShape::new(1, 33, 2, 1, widest))
        }),
        Box::new(|| {
            cases::compare_document_attention(
                backends,
                4,
                AttentionShape { scale: 0.7, ..AttentionShape::new(2, 100, 2, 2, 8) },
            )
        }),
        Box::new(move || {
            cases::compare_document_attention(backends, 12, AttentionShape::new(1, 70, 2, 1, 128))
        }),
        Box::new(move || {
            cases::compare_document_attention(backends, 13, AttentionShape::new(1, 130, 2, 2, 96))
        }),
        Box::new(move || {
            let dropout = Some(cases::derive_dropout(u64::MAX));
            cases::compare_document_attention(
                backends,
                15,
                AttentionShape { dropout, ..AttentionShape::new(2, 130, 4, 2, 40) },
            )
        }),
        Box::new(move || {
            let dropout = Some(cases::derive_dropout(1 << 60));
            cases::compare_document_attention(
                backends,
                16,
                AttentionShape { dropout, ..AttentionShape::new(1, 100, 2, 1, widest) },
            )
        }),
        Box::new(move || {
            cases::compare_document_attention(backends, 14, AttentionShape::new(1, 40, 2, 1, 64))
        }),
        Box::new(move || cases::compare_classifier(backends, 5, 130, 3, 700, None)),
        Box::new(move || expert_cases::compare_expert_ops(backends, 6, 3, 1024, 9, 4)),
        Box::new(move || expert_cases::compare_grouped_matmul(backends, 7, &[3, 0, 17, 1], 9, 14)),
        Box::new(move || expert_cases::compare_grouped_matmul(backends, 8, &[0, 0], 4, 4)),
        Box::new(move || cases::compare_embedding(backends, 9, 300, 3, 2)),
        Box::new(move || cases::compare_vectors_and_optimizers(backends, 10, 40_000)),
        Box::new(move || cases::compare_activations(backends, 11, 1, 700)),
    ]
}

/// Returns conformance cases with rows whose length is a multiple of eight, for which kernels load
/// eight elements at once.
///
/// The lengths cover one warp, each thread of a block, several vectors per thread, and rows that do
/// not fit into registers. Further cases have heads of such lengths, and sums over more rows than a
/// block has.
pub(super) fn list_vectorised_cases<'a>(backends: &'a Backends) -> Vec<FixedCase<'a>> {
    vec![
        Box::new(move || cases::compare_norms(backends, 40, 3, 8)),
        Box::new(move || cases::compare_norms(backends, 41, 131, 64)),
        Box::new(move || cases::compare_norms(backends, 42, 5, 1016)),
        Box::new(move || cases::compare_norms(backends, 43, 2, 2056)),
        Box::new(move || cases::compare_norms(backends, 44, 2, 8192)),
        Box::new(move || cases::compare_norms(backends, 45, 1, 8200)),
        Box::new(move || cases::compare_head_norm_and_rope(backends, 46, 21, 3, 64, 2)),
        Box::new(move || cases::compare_head_norm_and_rope(backends, 47, 3, 40, 8, 1)),
        Box::new(move || cases::compare_head_norm_and_rope(backends, 48, 2, 1, 264, 3)),
        Box::new(move || cases::compare_activations(backends, 49, 3, 2056)),
        Box::new(move || cases::compare_activations(backends, 50, 17, 8)),
        Box::new(move || cases::compare_classifier(backends, 51, 5, 8, 2088, None)),
        Box::new(move || cases::compare_classifier(backends, 52, 3, 8, 2051, Some(2.0))),
    ]
}

/// Returns conformance cases of attention over several tiles that are entirely, partly or not
/// visible.
///
/// The heads have every size for which a kernel exists and sizes between them. The cases cover
/// groups of 1 to 8 heads, softcap and dropout. With windows of 95 and 79, the mask must hide
/// exactly one position of a chunk.
pub(super) fn list_tiled_attention_cases<'a>(backends: &'a Backends) -> Vec<FixedCase<'a>> {
    let no_window = usize::MAX;
    let shape = AttentionShape::new;
    let (softcap, dropout) = (Some(3.0), Some(cases::derive_dropout(1 << 30)));
    vec![
        Box::new(move || cases::compare_windowed_attention(backends, 20, no_window, shape(1, 256, 2, 1, 64))),
        Box::new(move || {
            cases::compare_windowed_attention(backends, 21, no_window, shape(1, 290, 1, 1, 128))
        }),
        Box::new(move || cases::compare_windowed_attention(backends, 22, 95, shape(1, 300, 3, 1, 40))),
        Box::new(move || cases::compare_windowed_attention(backends, 23, 79, shape(2, 210, 2, 1, 72))),
        Box::new(move || cases::compare_windowed_attention(backends, 24, 1, shape(1, 150, 8, 1, 16))),
        Box::new(move || cases::compare_document_attention(backends, 25, shape(1, 257, 4, 2, 96))),
        Box::new(move || cases::compare_document_attention(backends, 26, shape(2, 129, 8, 1, 64))),
        Box::new(move || cases::compare_ragged_attention(backends, 27, shape(1, 270, 2, 2, 63))),
        Box::new(move || cases::compare_ragged_attention(backends, 28, shape(1, 200, 2, 1, 127))),
        Box::new(move || {
            cases::compare_windowed_attention(
                backends,
                29,
                no_window,
                AttentionShape { softcap, ..shape(1, 260, 1, 1, 128) },
            )
        }),
        Box::new(move || {
            cases::compare_windowed_attention(
                backends,
                30,
                150,
                AttentionShape { softcap, dropout, ..shape(1, 260, 2, 1, 64) },
            )
        }),
        Box::new(move || {
            cases::compare_ragged_attention(
                backends,
                31,
                AttentionShape { softcap, dropout, ..shape(1, 230, 2, 1, 120) },
            )
        }),
    ]
}
