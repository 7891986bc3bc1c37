//! Compares ops on the GPU with the CPU on fixed shapes, which are chosen to reach the special
//! cases of GPU kernels.
use super::comparison::{Backends, CaseResult};
use super::{cases, expert_cases};
use crate::ops::{AttentionShape, ClassifierShape};

/// A fixed shape on which one op or family of ops on the GPU is compared with the CPU.
pub(super) enum FixedCase {
    /// RMSNorm, LayerNorm and bias of `m` rows of `d` elements.
    Norms { m: usize, d: usize },
    /// RMSNorm of each attention head, and rotary position embeddings. The values are the numbers
    /// of rows, heads, elements per head, and sequences.
    HeadNormAndRope([usize; 4]),
    /// SwiGLU, GeGLU and GELU of `m` rows of `f` elements.
    Activations { m: usize, f: usize },
    /// Attention over documents of random lengths.
    Documents(AttentionShape),
    /// Attention in which every query attends to a window of this size.
    Window(usize, AttentionShape),
    /// Attention in which every query attends to a random number of positions.
    Ragged(AttentionShape),
    /// The output layer with the cross-entropy loss (the classifier).
    Classifier(ClassifierShape),
    /// The router of a mixture-of-experts layer, and ops on rows of tokens. The values are the
    /// numbers of tokens, experts, experts per token, and elements of a row.
    Experts([usize; 4]),
    /// Grouped matmul of groups with these numbers of rows. The two sizes are the numbers of
    /// columns of the result (n) and of the input (k).
    Grouped(&'static [usize], [usize; 2]),
    /// The token embedding. The values are the numbers of tokens, elements of a row, and tokens in
    /// the vocabulary.
    Embedding([usize; 3]),
    /// Elementwise ops and optimizers on vectors of this length.
    Vectors(usize),
}

impl FixedCase {
    /// Runs the ops of this case on the GPU and on the CPU, with values that `seed` determines, and
    /// compares the results.
    pub(super) fn compare(&self, backends: &Backends, seed: u64) -> CaseResult {
        match *self {
            FixedCase::Norms { m, d } => cases::compare_norms(backends, seed, m, d),
            FixedCase::HeadNormAndRope([rows, heads, head_dim, b]) => {
                cases::compare_head_norm_and_rope(backends, seed, rows, heads, head_dim, b)
            }
            FixedCase::Activations { m, f } => cases::compare_activations(backends, seed, m, f),
            FixedCase::Documents(shape) => cases::compare_document_attention(backends, seed, shape),
            FixedCase::Window(window, shape) => {
                cases::compare_windowed_attention(backends, seed, window, shape)
            }
            FixedCase::Ragged(shape) => cases::compare_attention_with_random_starts(backends, seed, shape),
            FixedCase::Classifier(shape) => cases::compare_classifier(backends, seed, shape),
            FixedCase::Experts([m, count, per_token, d]) => {
                expert_cases::compare_expert_ops(backends, seed, m, count, per_token, d)
            }
            FixedCase::Grouped(sizes, [n, k]) => {
                expert_cases::compare_grouped_matmul(backends, seed, sizes, n, k)
            }
            FixedCase::Embedding([m, d, v]) => cases::compare_embedding(backends, seed, m, d, v),
            FixedCase::Vectors(n) => cases::compare_vectors_and_optimizers(backends, seed, n),
        }
    }
}

/// Returns an iterator that yields the results of comparing ops on the GPU with the CPU, one for
/// each shape of a fixed list.
pub(super) fn compare_fixed_cases(backends: &Backends) -> impl Iterator<Item = CaseResult> {
    let cases = list_boundary_cases(backends)
        .into_iter()
        .chain(list_tiled_attention_cases())
        .chain(list_vectorised_cases());
    cases.map(|(seed, case)| case.compare(backends, seed))
}

/// Returns an iterator that yields the results of comparing attention with heads of more than 128
/// elements on the GPU with the CPU, one for each shape of a fixed list. `backends` should have
/// 16-bit types only: not every GPU has enough shared memory for such heads in f32.
pub(super) fn compare_wide_head_cases(backends: &Backends) -> impl Iterator<Item = CaseResult> {
    list_wide_head_cases().into_iter().map(|(seed, case)| case.compare(backends, seed))
}

/// Lists shapes that GPU kernels easily get wrong (such as odd lengths or empty groups), each with
/// the random seed of its input values.
fn list_boundary_cases(backends: &Backends) -> Vec<(u64, FixedCase)> {
    let widest = cases::find_widest_head_in_f32(backends);
    let shape = AttentionShape::new;
    let dropout = |first| Some(cases::derive_dropout(first));
    let classifier = ClassifierShape { m: 130, d: 3, v: 700, softcap: None };
    vec![
        (1, FixedCase::Norms { m: 2, d: 1000 }),
        (2, FixedCase::Norms { m: 129, d: 33 }),
        (3, FixedCase::Documents(shape(1, 33, 2, 1, widest))),
        (4, FixedCase::Documents(AttentionShape { scale: 0.7, ..shape(2, 100, 2, 2, 8) })),
        (12, FixedCase::Documents(shape(1, 70, 2, 1, 128))),
        (13, FixedCase::Documents(shape(1, 130, 2, 2, 96))),
        (15, FixedCase::Documents(AttentionShape { dropout: dropout(u64::MAX), ..shape(2, 130, 4, 2, 40) })),
        (
            16,
            FixedCase::Documents(AttentionShape { dropout: dropout(1 << 60), ..shape(1, 100, 2, 1, widest) }),
        ),
        (14, FixedCase::Documents(shape(1, 40, 2, 1, 64))),
        (5, FixedCase::Classifier(classifier)),
        (6, FixedCase::Experts([3, 1024, 9, 4])),
        (7, FixedCase::Grouped(&[3, 0, 17, 1], [9, 14])),
        (8, FixedCase::Grouped(&[0, 0], [4, 4])),
        (9, FixedCase::Embedding([300, 3, 2])),
        (10, FixedCase::Vectors(40_000)),
        (11, FixedCase::Activations { m: 1, f: 700 }),
    ]
}

/// Lists shapes that test GPU kernels which load eight elements at once, each with the random seed
/// of its input values. The length of their rows is a multiple of eight.
///
/// The lengths cover one warp, each thread of a block, several vectors per thread, and rows that do
/// not fit into registers. Further cases have heads of such lengths, and sums over more rows than a
/// block has.
fn list_vectorised_cases() -> Vec<(u64, FixedCase)> {
    let classifier = |m, v, softcap| FixedCase::Classifier(ClassifierShape { m, d: 8, v, softcap });
    vec![
        (40, FixedCase::Norms { m: 3, d: 8 }),
        (41, FixedCase::Norms { m: 131, d: 64 }),
        (42, FixedCase::Norms { m: 5, d: 1016 }),
        (43, FixedCase::Norms { m: 2, d: 2056 }),
        (44, FixedCase::Norms { m: 2, d: 8192 }),
        (45, FixedCase::Norms { m: 1, d: 8200 }),
        (46, FixedCase::HeadNormAndRope([21, 3, 64, 2])),
        (47, FixedCase::HeadNormAndRope([3, 40, 8, 1])),
        (48, FixedCase::HeadNormAndRope([2, 1, 264, 3])),
        (49, FixedCase::Activations { m: 3, f: 2056 }),
        (50, FixedCase::Activations { m: 17, f: 8 }),
        (51, classifier(5, 2088, None)),
        (52, classifier(3, 2051, Some(2.0))),
    ]
}

/// Lists attention shapes in which a query attends to all, some or no keys of the block of keys
/// that a kernel processes at a time. Each case has the random seed of its input values.
///
/// The heads have every size for which a kernel exists and sizes between them. The cases cover
/// groups of 1 to 8 heads, softcap and dropout. With windows of 95 and 79, the mask must hide
/// exactly one position of a chunk.
fn list_tiled_attention_cases() -> Vec<(u64, FixedCase)> {
    let no_window = usize::MAX;
    let shape = AttentionShape::new;
    let (softcap, dropout) = (Some(3.0), Some(cases::derive_dropout(1 << 30)));
    let shape_with_both = |shape| AttentionShape { softcap, dropout, ..shape };
    vec![
        (20, FixedCase::Window(no_window, shape(1, 256, 2, 1, 64))),
        (21, FixedCase::Window(no_window, shape(1, 290, 1, 1, 128))),
        (22, FixedCase::Window(95, shape(1, 300, 3, 1, 40))),
        (23, FixedCase::Window(79, shape(2, 210, 2, 1, 72))),
        (24, FixedCase::Window(1, shape(1, 150, 8, 1, 16))),
        (25, FixedCase::Documents(shape(1, 257, 4, 2, 96))),
        (26, FixedCase::Documents(shape(2, 129, 8, 1, 64))),
        (27, FixedCase::Ragged(shape(1, 270, 2, 2, 63))),
        (28, FixedCase::Ragged(shape(1, 200, 2, 1, 127))),
        (29, FixedCase::Window(no_window, AttentionShape { softcap, ..shape(1, 260, 1, 1, 128) })),
        (30, FixedCase::Window(150, shape_with_both(shape(1, 260, 2, 1, 64)))),
        (31, FixedCase::Ragged(shape_with_both(shape(1, 230, 2, 1, 120)))),
        (32, FixedCase::Ragged(shape(1, 270, 2, 1, 64))),
        (33, FixedCase::Ragged(shape(2, 200, 3, 1, 128))),
    ]
}

/// Lists attention shapes with heads of more than 128 elements, for the kernels that use tensor
/// cores. Each case has the random seed of its input values. Some heads have rows that are not
/// aligned. The lengths are not multiples of the kernels' tiles of 64 and 128 rows.
fn list_wide_head_cases() -> Vec<(u64, FixedCase)> {
    let shape = AttentionShape::new;
    let (softcap, dropout) = (Some(3.0), Some(cases::derive_dropout(1 << 30)));
    vec![
        (60, FixedCase::Window(usize::MAX, shape(1, 150, 2, 1, 256))),
        (61, FixedCase::Documents(shape(2, 90, 2, 2, 192))),
        (62, FixedCase::Window(47, shape(1, 200, 1, 1, 136))),
        (63, FixedCase::Ragged(AttentionShape { softcap, dropout, ..shape(1, 140, 2, 1, 130) })),
        (64, FixedCase::Window(95, AttentionShape { softcap, ..shape(1, 170, 1, 1, 256) })),
    ]
}
