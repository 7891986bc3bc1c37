//! Compares each family of ops on the GPU with the CPU, on random shapes.
use super::comparison::{Backends, CaseResult, CaseRng};
use super::{cases, epilogue_cases, expert_cases, fp8_cases};
use crate::ops::{AttentionShape, ClassifierShape};

/// Function that compares a family of ops on the GPU with the CPU for one random shape, and returns
/// the largest errors.
type RandomCaseFn = fn(&Backends, &mut CaseRng) -> CaseResult;

/// The families of ops (such as norms) that are compared on random shapes, each with its name and
/// the function that compares GPU and CPU. The position of a family contributes to the seed of its
/// shapes and values.
pub(super) const RANDOM_CASE_FAMILIES: [(&str, RandomCaseFn); 10] = [
    ("matmul", compare_random_matmuls),
    ("norms, bias", compare_random_norms),
    ("norms of heads, RoPE", compare_random_head_norm_and_rope),
    ("activations", compare_random_activations),
    ("attention", compare_random_attention),
    ("classifier", compare_random_classifier),
    ("experts", compare_random_expert_ops),
    ("embedding", compare_random_embedding),
    ("vectors, optimizers", compare_random_vectors_and_optimizers),
    ("matmul epilogues", compare_random_matmul_epilogues),
];

/// Compares matmuls of a random shape on the GPU with the CPU as the reference.
fn compare_random_matmuls(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [m, n, k]) = rng.draw_seed_and_dims([40, 40, 40]);
    cases::compare_matmuls(backends, seed, m, n, k)
}

/// Compares RMSNorm, LayerNorm and the addition of a bias on the GPU with the CPU, on a matrix of
/// random size.
fn compare_random_norms(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [m, d]) = rng.draw_seed_and_dims([150, 90]);
    cases::compare_norms(backends, seed, m, d)
}

/// Compares RMSNorm of attention heads and rotary position embedding on the GPU with the CPU as the
/// reference, for a random shape.
fn compare_random_head_norm_and_rope(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [rows, heads, head_dim, b]) = rng.draw_seed_and_dims([40, 5, 40, 3]);
    cases::compare_head_norm_and_rope(backends, seed, rows, heads, head_dim, b)
}

/// Compares SwiGLU, GeGLU and GELU of a random shape on the GPU with the CPU as the reference.
fn compare_random_activations(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [m, f]) = rng.draw_seed_and_dims([20, 300]);
    cases::compare_activations(backends, seed, m, f)
}

/// Compares attention on the GPU with attention on the CPU for one random shape, over documents of
/// random lengths. Some shapes also use softcap or dropout, and some have wide heads.
fn compare_random_attention(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let kv_heads = rng.draw_in_range(1, 3);
    let head_dims = match rng.draw_below(4) {
        0 => (129, cases::find_widest_head_in_f32(backends) + 1),
        _ => (1, 40),
    };
    let shape = AttentionShape::new(
        rng.draw_in_range(1, 3),
        rng.draw_in_range(1, 80),
        kv_heads * rng.draw_in_range(1, 3),
        kv_heads,
        rng.draw_in_range(head_dims.0, head_dims.1),
    );
    let softcap = shape.t.is_multiple_of(2).then_some(2.0);
    let dropout = shape.t.is_multiple_of(3).then(|| cases::derive_dropout(rng.draw_48_bits()));
    let shape = AttentionShape { softcap, dropout, ..shape };
    cases::compare_document_attention(backends, rng.draw_48_bits(), shape)
}

/// Compares the classifier op (output layer and cross-entropy loss in one op) on the GPU with the
/// CPU as the reference, for a random shape. Some shapes also use softcap.
fn compare_random_classifier(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let softcap = (rng.draw_below(2) == 0).then_some(3.0);
    let (seed, [m, d, v]) = rng.draw_seed_and_dims([40, 40, 200]);
    cases::compare_classifier(backends, seed, ClassifierShape { m, d, v, softcap })
}

/// Compares the ops of mixture-of-experts layers (router, row ops, grouped matmuls) on the GPU with
/// the CPU, for random shapes.
fn compare_random_expert_ops(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let count = rng.draw_in_range(1, 70);
    let (seed, [m, per_token, d]) = rng.draw_seed_and_dims([30, 5, 50]);
    let mut errors = expert_cases::compare_expert_ops(backends, seed, m, count, per_token.min(count), d)?;
    let sizes: Vec<usize> = (0..rng.draw_in_range(1, 5)).map(|_| rng.draw_below(9)).collect();
    let (seed, [n, k]) = rng.draw_seed_and_dims([30, 30]);
    errors += expert_cases::compare_grouped_matmul(backends, seed, &sizes, n, k)?;
    Ok(errors)
}

/// Compares the token embedding of a random shape on the GPU with the CPU as the reference.
fn compare_random_embedding(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [m, d, v]) = rng.draw_seed_and_dims([120, 70, 50]);
    cases::compare_embedding(backends, seed, m, d, v)
}

/// Compares elementwise ops and optimizers on vectors of a random length on the GPU with the CPU as
/// the reference.
fn compare_random_vectors_and_optimizers(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [n]) = rng.draw_seed_and_dims([9000]);
    cases::compare_vectors_and_optimizers(backends, seed, n)
}

/// Compares matmuls of a random shape with epilogues on the GPU with the CPU as the reference. Most
/// sizes are multiples of eight, as epilogues require.
fn compare_random_matmul_epilogues(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [m, inp, out]) = rng.draw_seed_and_dims([40, 6, 6]);
    let factor = if rng.draw_below(4) == 0 { 7 } else { 8 };
    epilogue_cases::compare_epilogues(backends, seed, [m, factor * inp, factor * out])
}

/// Compares the fp8 matmuls of a random shape on the GPU with the CPU as the reference.
pub(super) fn compare_random_fp8_matmuls(backends: &Backends, rng: &mut CaseRng) -> CaseResult {
    let (seed, [m, n, k]) = rng.draw_seed_and_dims([70, 4, 50]);
    fp8_cases::compare_matmuls(backends, seed, m, 16 * n, k)
}
