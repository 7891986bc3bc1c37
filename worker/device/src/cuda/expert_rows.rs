//! Ops on rows on a GPU: the embedding, gathering and combining the rows of experts, and the
//! router.
use super::backend::Cuda;
use super::compile::EXPERT_ROWS;
use super::launch::{KernelArg, LaunchConfig};
use super::tensor_arg::{TensorArg, f32_gpu_address};
use crate::buffer::{View, ViewMut};
use crate::ops::expect_len;
use crate::ops::{RouterBackwardInputs, RouterShape, WriteMode};

/// Maximum number of experts of a router. A warp of the router kernel holds the scores of all
/// experts in registers.
const MAX_EXPERTS: usize = 1024;

/// Gathers rows for the op `op`: `y[i] = x[rows[i]]`. Panics if an index is out of bounds.
pub(super) fn gather_rows(cuda: &Cuda, op: &'static str, y: ViewMut, x: View, rows: &[u32], d: usize) {
    expect_len(op, "y", y.len(), rows.len() * d);
    let available = x.len().checked_div(d).unwrap_or(0);
    let outside = rows.iter().find(|r| **r as usize >= available);
    assert!(outside.is_none() || d == 0, "{op}: row {outside:?} is not below {available}");
    let count = rows.len();
    let rows = cuda.upload_input(op, rows);
    cuda.launch_row_blocks(
        EXPERT_ROWS,
        c"gather_rows",
        count,
        d,
        &[&TensorArg::from(&y), &TensorArg::from(x), &rows, &(d as i64)],
    );
}

/// Implements [`crate::Ops::embedding_backward`]. One block sums the rows of a token, in their
/// order.
pub(super) fn embedding_backward(cuda: &Cuda, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
    expect_len("embedding_backward", "dx", dx.len(), tokens.len() * d);
    let available = dw.len().checked_div(d).unwrap_or(0);
    let outside = tokens.iter().find(|t| **t as usize >= available);
    assert!(outside.is_none() || d == 0, "embedding_backward: token {outside:?} is not below {available}");
    let RowsByToken { ids, starts, order } = group_by_token(tokens);
    let count = ids.len();
    let inputs = [("ids", ids), ("ids' rows", starts), ("rows by id", order)];
    let [ids, starts, order] = inputs.map(|(name, input)| cuda.upload_input(name, &input));
    let (dw, dx) = (TensorArg::from(&dw), TensorArg::from(dx));
    let arguments: [&dyn KernelArg; 6] = [&dw, &dx, &ids, &starts, &order, &(d as i64)];
    cuda.launch_row_blocks(EXPERT_ROWS, c"embedding_backward", count, d, &arguments);
}

/// Rows of a batch, grouped by their token.
#[derive(Debug, PartialEq)]
struct RowsByToken {
    /// Each token once, in increasing order.
    ids: Vec<u32>,
    /// Position in `order` at which each token's rows begin. The last element is the length of
    /// `order`.
    starts: Vec<u32>,
    /// Row indices, sorted by token. Rows of one token are in increasing order.
    order: Vec<u32>,
}

/// Groups the rows of a batch by token. `tokens[i]` is the token of row `i`.
fn group_by_token(tokens: &[u32]) -> RowsByToken {
    let mut order: Vec<u32> = (0..tokens.len() as u32).collect();
    order.sort_by_key(|&row| tokens[row as usize]); // stable
    let (mut ids, mut starts) = (Vec::new(), Vec::new());
    for (at, &row) in order.iter().enumerate() {
        let token = tokens[row as usize];
        if ids.last() != Some(&token) {
            ids.push(token);
            starts.push(at as u32);
        }
    }
    starts.push(order.len() as u32);
    RowsByToken { ids, starts, order }
}

/// Implements [`crate::Ops::combine_rows`]. Panics if an index is out of bounds.
pub(super) fn combine_rows(
    cuda: &Cuda,
    y: ViewMut,
    x: View,
    weights: Option<View>,
    indices: &[u32],
    m: usize,
    d: usize,
    write: WriteMode,
) {
    let op = "combine_rows";
    let per_row = indices.len().checked_div(m).unwrap_or(0);
    expect_len(op, "y", y.len(), m * d);
    expect_len(op, "indices", indices.len(), m * per_row);
    if let Some(w) = weights {
        expect_len(op, "weights", w.len(), indices.len());
    }
    let available = x.len().checked_div(d).unwrap_or(0);
    let outside = indices.iter().find(|p| **p as usize >= available);
    assert!(outside.is_none() || d == 0, "{op}: row {outside:?} is not below {available}");
    let indices = cuda.upload_input("indices", indices);
    let (y, x, weights) =
        (TensorArg::from(&y), TensorArg::from(x), weights.map_or(TensorArg::NONE, TensorArg::from));
    let [per_row, width, add] = [per_row as i64, d as i64, i64::from(write == WriteMode::Accumulate)];
    cuda.launch_row_blocks(
        EXPERT_ROWS,
        c"combine_rows",
        m,
        d,
        &[&y, &x, &weights, &indices, &per_row, &width, &add],
    );
}

/// Implements [`crate::Ops::dot_rows`].
pub(super) fn dot_rows(cuda: &Cuda, out: ViewMut, a: View, b: View, d: usize) {
    let rows = out.len();
    expect_len("dot_rows", "a", a.len(), rows * d);
    expect_len("dot_rows", "b", b.len(), rows * d);
    let (out, a, b) = (TensorArg::from(&out), TensorArg::from(a), TensorArg::from(b));
    cuda.launch_row_blocks(EXPERT_ROWS, c"dot_rows", rows, d, &[&out, &a, &b, &(d as i64)]);
}

/// Implements [`crate::Ops::scale_rows`].
pub(super) fn scale_rows(cuda: &Cuda, x: ViewMut, factors: View, d: usize) {
    let rows = factors.len();
    expect_len("scale_rows", "x", x.len(), rows * d);
    cuda.launch_row_blocks(
        EXPERT_ROWS,
        c"scale_rows",
        rows,
        d,
        &[&TensorArg::from(&x), &TensorArg::from(factors), &(d as i64)],
    );
}

/// Returns the launch configuration of a router kernel with one warp per row. Panics if the shape
/// is not supported.
fn get_router_launch_config(m: usize, shape: RouterShape) -> LaunchConfig {
    let RouterShape { experts, experts_per_token: per_token, .. } = shape;
    assert!((1..=experts).contains(&per_token), "router: {per_token} experts per token of {experts}");
    assert!(experts <= MAX_EXPERTS, "router: {experts} experts exceed the GPU's maximum of {MAX_EXPERTS}");
    LaunchConfig { grid: [m as u32, 1, 1], block: [32, 1, 1], shared: 0 }
}

/// Implements [`crate::Ops::router_forward`]. Blocks until the chosen experts are on the host.
pub(super) fn router_forward(
    cuda: &Cuda,
    probs: ViewMut,
    weights: ViewMut,
    lse: ViewMut,
    chosen: &mut [u32],
    logits: View,
    shape: RouterShape,
) {
    let (op, RouterShape { m, experts, experts_per_token: per_token, normalize_weights: normalize }) =
        ("router_forward", shape);
    expect_len(op, "logits", logits.len(), m * experts);
    expect_len(op, "probs", probs.len(), m * experts);
    expect_len(op, "weights", weights.len(), m * per_token);
    expect_len(op, "lse", lse.len(), m);
    expect_len(op, "chosen", chosen.len(), m * per_token);
    let [probs, weights, lse] = [probs, weights, lse].map(|v| f32_gpu_address(v.as_view()));
    let indices = cuda.alloc_scratch(size_of_val(chosen));
    let [experts, per_token, normalize] = [experts as i64, per_token as i64, i64::from(normalize)];
    let logits = TensorArg::from(logits);
    let arguments: [&dyn KernelArg; 8] =
        [&probs, &weights, &lse, &indices.address(), &logits, &experts, &per_token, &normalize];
    cuda.launch_kernel(EXPERT_ROWS, c"router_forward", get_router_launch_config(m, shape), &arguments);
    cuda.gpu.attempt(|| cuda.gpu.download_blocking(bytemuck::cast_slice_mut(chosen), indices.address()));
}

/// Implements [`crate::Ops::router_backward`].
pub(super) fn router_backward(
    cuda: &Cuda,
    dlogits: ViewMut,
    dweights: View,
    router: RouterBackwardInputs,
    shape: RouterShape,
) {
    let (op, RouterShape { m, experts, experts_per_token: per_token, normalize_weights: normalize }) =
        ("router_backward", shape);
    expect_len(op, "dlogits", dlogits.len(), m * experts);
    expect_len(op, "dweights", dweights.len(), m * per_token);
    expect_len(op, "probs", router.probs.len(), m * experts);
    expect_len(op, "lse", router.lse.len(), m);
    expect_len(op, "chosen", router.chosen_experts.len(), m * per_token);
    expect_len(op, "balance", router.balance_grad.len(), experts);
    let chosen = cuda.upload_input("chosen", router.chosen_experts);
    let balance = cuda.upload_input("balance", router.balance_grad);
    let [dweights, probs, lse] = [dweights, router.probs, router.lse].map(f32_gpu_address);
    let [experts, per_token, normalize] = [experts as i64, per_token as i64, i64::from(normalize)];
    let (dlogits, twice_z) = (TensorArg::from(&dlogits), 2.0 * router.z_loss_coef);
    let arguments: [&dyn KernelArg; 10] =
        [&dlogits, &dweights, &probs, &lse, &chosen, &balance, &experts, &per_token, &normalize, &twice_z];
    cuda.launch_kernel(EXPERT_ROWS, c"router_backward", get_router_launch_config(m, shape), &arguments);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_grouped_by_token_in_their_order() {
        let expected =
            RowsByToken { ids: vec![0, 3, 7], starts: vec![0, 1, 3, 6], order: vec![3, 1, 4, 0, 2, 5] };
        assert_eq!(group_by_token(&[7, 3, 7, 0, 3, 7]), expected);
        assert_eq!(group_by_token(&[]), RowsByToken { ids: vec![], starts: vec![0], order: vec![] });
    }
}
