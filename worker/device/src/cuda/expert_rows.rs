//! Ops on the rows of matrices on a GPU: the token embedding, and gathering and combining the rows
//! of tokens that experts process.
use super::backend::{Cuda, LaunchSize};
use super::compile::EXPERT_ROWS_SOURCE;
use super::tensor_arg::TensorArg;
use crate::buffer::{View, ViewMut};
use crate::ops::{EmbeddingOps, RowOps, WriteMode, expect_lens};

impl EmbeddingOps for Cuda {
    fn embedding_forward(&self, x: ViewMut, w: View, tokens: &[u32], d: usize) {
        gather_selected_rows(self, "embedding_forward", x, w, tokens, d);
    }

    /// Adds row `i` of `dx`, the gradient of the embedding of token `tokens[i]`, to row `tokens[i]`
    /// of `dw`, the gradient of the embedding table. One block of threads sums all rows of a token,
    /// in their order.
    fn embedding_backward(&self, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
        let op = "embedding_backward";
        expect_lens(op, [("dx", dx.len(), tokens.len() * d)]);
        check_row_indices(op, tokens, dw.len(), d);
        let RowsByToken { ids, starts, order } = group_by_token(tokens);
        let rows = LaunchSize::RowBlocks { rows: ids.len(), width: d };
        let inputs = [("ids", ids), ("ids' rows", starts), ("rows by id", order)];
        let [ids, starts, order] = inputs.map(|(name, input)| self.upload_input(name, &input));
        let (dw, dx) = (TensorArg::from(&dw), TensorArg::from(dx));
        self.launch(EXPERT_ROWS_SOURCE, c"embedding_backward", rows, &[&dw, &dx, &ids, &starts, &order, &d]);
    }
}

impl RowOps for Cuda {
    fn gather_rows(&self, y: ViewMut, x: View, rows: &[u32], d: usize) {
        gather_selected_rows(self, "gather_rows", y, x, rows, d);
    }

    fn combine_rows(
        &self,
        y: ViewMut,
        x: View,
        weights: Option<View>,
        row_indices: &[u32],
        m: usize,
        d: usize,
        write: WriteMode,
    ) {
        let (op, terms) = ("combine_rows", row_indices.len());
        let per_row = terms.checked_div(m).unwrap_or(0);
        expect_lens(op, [("y", y.len(), m * d), ("row_indices", terms, m * per_row)]);
        expect_lens(op, [("weights", weights.map_or(terms, |w| w.len()), terms)]);
        check_row_indices(op, row_indices, x.len(), d);
        let indices = self.upload_input("indices", row_indices);
        let weights = weights.map_or(TensorArg::NONE, TensorArg::from);
        let (y, x, add) =
            (TensorArg::from(&y), TensorArg::from(x), i64::from(write == WriteMode::Accumulate));
        let rows = LaunchSize::RowBlocks { rows: m, width: d };
        self.launch(
            EXPERT_ROWS_SOURCE,
            c"combine_rows",
            rows,
            &[&y, &x, &weights, &indices, &per_row, &d, &add],
        );
    }

    fn dot_rows(&self, out: ViewMut, a: View, b: View, d: usize) {
        let rows = out.len();
        expect_lens("dot_rows", [("a", a.len(), rows * d), ("b", b.len(), rows * d)]);
        let (out, a, b) = (TensorArg::from(&out), TensorArg::from(a), TensorArg::from(b));
        let rows = LaunchSize::RowBlocks { rows, width: d };
        self.launch(EXPERT_ROWS_SOURCE, c"dot_rows", rows, &[&out, &a, &b, &d]);
    }

    fn scale_rows(&self, x: ViewMut, factors: View, d: usize) {
        expect_lens("scale_rows", [("x", x.len(), factors.len() * d)]);
        let rows = LaunchSize::RowBlocks { rows: factors.len(), width: d };
        self.launch(
            EXPERT_ROWS_SOURCE,
            c"scale_rows",
            rows,
            &[&TensorArg::from(&x), &TensorArg::from(factors), &d],
        );
    }
}

/// Copies the rows of `x` with the indices `rows` to consecutive rows of `y` on the GPU: `y[i] =
/// x[rows[i]]`. `op` is the op's name in errors.
fn gather_selected_rows(cuda: &Cuda, op: &'static str, y: ViewMut, x: View, rows: &[u32], d: usize) {
    expect_lens(op, [("y", y.len(), rows.len() * d)]);
    check_row_indices(op, rows, x.len(), d);
    let work = LaunchSize::RowBlocks { rows: rows.len(), width: d };
    let (y, x, rows) = (TensorArg::from(&y), TensorArg::from(x), cuda.upload_input(op, rows));
    cuda.launch(EXPERT_ROWS_SOURCE, c"gather_rows", work, &[&y, &x, &rows, &d]);
}

/// Panics if a row index in `indices` is too large for a matrix with `len` elements and `d`
/// elements per row.
fn check_row_indices(op: &str, indices: &[u32], len: usize, d: usize) {
    let available = len.checked_div(d).unwrap_or(0);
    let outside = indices.iter().find(|index| **index as usize >= available);
    assert!(outside.is_none() || d == 0, "{op}: row {outside:?} is not below {available}");
}

/// For each distinct token of a batch, the ascending indices of the rows that contain this token.
/// The gradients of a token's embedding are summed in this order.
#[derive(Debug, PartialEq)]
struct RowsByToken {
    /// The tokens of the batch, each once, in increasing order.
    ids: Vec<u32>,
    /// Position in `order` at which each token's rows begin. The last element is the length of
    /// `order`.
    starts: Vec<u32>,
    /// Row indices, sorted by token. Rows of one token are in increasing order.
    order: Vec<u32>,
}

/// Returns for each distinct token of a batch the ascending indices of the rows that contain this
/// token. `tokens[i]` is the token of row `i`.
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
