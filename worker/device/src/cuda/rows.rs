//! Rows: embedding, gathering and adding up for experts, the router.
use super::card::{Launch, Param};
use super::compile::ROWS;
use super::{Cuda, Tensor, expect_len, floats, must};
use crate::mem::{View, ViewMut};
use crate::ops::{RouterGradient, RouterShape, Write};

/// Experts that a router's warp can remember.
const MOST_EXPERTS: usize = 1024;

/// `y[i] = x[rows[i]]`
pub(super) fn gather(cuda: &Cuda, op: &'static str, y: ViewMut, x: View, rows: &[u32], d: usize) {
    expect_len(op, "y", y.len(), rows.len() * d);
    let have = x.len().checked_div(d).unwrap_or(0);
    let outside = rows.iter().find(|r| **r as usize >= have);
    assert!(outside.is_none() || d == 0, "{op}: row {outside:?} of {have}");
    let count = rows.len();
    let rows = cuda.numbers(op, rows);
    cuda.each_row(ROWS, c"gather_rows", count, d, &[&Tensor::from(&y), &Tensor::from(x), &rows, &(d as i64)]);
}

/// Rows of the same token are added up by one block, in their order.
pub(super) fn embedding_backward(cuda: &Cuda, dw: ViewMut, dx: View, tokens: &[u32], d: usize) {
    expect_len("embedding_backward", "dx", dx.len(), tokens.len() * d);
    let have = dw.len().checked_div(d).unwrap_or(0);
    let outside = tokens.iter().find(|t| **t as usize >= have);
    assert!(outside.is_none() || d == 0, "embedding_backward: token {outside:?} of {have}");
    let (ids, starts, order) = grouped(tokens);
    let count = ids.len();
    let all = [("ids", ids), ("ids' rows", starts), ("rows by id", order)];
    let [ids, starts, order] = all.map(|(name, list)| cuda.numbers(name, &list));
    let (dw, dx) = (Tensor::from(&dw), Tensor::from(dx));
    let arguments: [&dyn Param; 6] = [&dw, &dx, &ids, &starts, &order, &(d as i64)];
    cuda.each_row(ROWS, c"embedding_backward", count, d, &arguments);
}

/// Each token once; where its rows begin in the third list; rows by token, in their order.
fn grouped(tokens: &[u32]) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
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
    (ids, starts, order)
}

pub(super) fn combine(
    cuda: &Cuda,
    y: ViewMut,
    x: View,
    weights: Option<View>,
    places: &[u32],
    m: usize,
    d: usize,
    write: Write,
) {
    let op = "combine_rows";
    let per_row = places.len().checked_div(m).unwrap_or(0);
    expect_len(op, "y", y.len(), m * d);
    expect_len(op, "places", places.len(), m * per_row);
    if let Some(w) = weights {
        expect_len(op, "weights", w.len(), places.len());
    }
    let have = x.len().checked_div(d).unwrap_or(0);
    let outside = places.iter().find(|p| **p as usize >= have);
    assert!(outside.is_none() || d == 0, "{op}: row {outside:?} of {have}");
    let places = cuda.numbers("places", places);
    let (y, x, weights) = (Tensor::from(&y), Tensor::from(x), weights.map_or(Tensor::NONE, Tensor::from));
    let [per_row, width, add] = [per_row as i64, d as i64, i64::from(write == Write::Add)];
    cuda.each_row(ROWS, c"combine_rows", m, d, &[&y, &x, &weights, &places, &per_row, &width, &add]);
}

pub(super) fn dots(cuda: &Cuda, out: ViewMut, a: View, b: View, d: usize) {
    let rows = out.len();
    expect_len("row_dots", "a", a.len(), rows * d);
    expect_len("row_dots", "b", b.len(), rows * d);
    let (out, a, b) = (Tensor::from(&out), Tensor::from(a), Tensor::from(b));
    cuda.each_row(ROWS, c"row_dots", rows, d, &[&out, &a, &b, &(d as i64)]);
}

pub(super) fn scale(cuda: &Cuda, x: ViewMut, factors: View, d: usize) {
    let rows = factors.len();
    expect_len("scale_rows", "x", x.len(), rows * d);
    cuda.each_row(ROWS, c"scale_rows", rows, d, &[&Tensor::from(&x), &Tensor::from(factors), &(d as i64)]);
}

fn warps(m: usize, shape: RouterShape) -> Launch {
    let RouterShape { experts, per_token, .. } = shape;
    assert!((1..=experts).contains(&per_token), "router: {per_token} of {experts} experts");
    assert!(experts <= MOST_EXPERTS, "router: {experts} experts; at most {MOST_EXPERTS} on a GPU");
    Launch { grid: [m as u32, 1, 1], block: [32, 1, 1], shared: 0 }
}

pub(super) fn router(
    cuda: &Cuda,
    probs: ViewMut,
    weights: ViewMut,
    lse: ViewMut,
    chosen: &mut [u32],
    logits: View,
    shape: RouterShape,
) {
    let (op, RouterShape { m, experts, per_token, normalise }) = ("router_forward", shape);
    expect_len(op, "logits", logits.len(), m * experts);
    expect_len(op, "probs", probs.len(), m * experts);
    expect_len(op, "weights", weights.len(), m * per_token);
    expect_len(op, "lse", lse.len(), m);
    expect_len(op, "chosen", chosen.len(), m * per_token);
    let [probs, weights, lse] = [probs, weights, lse].map(|v| floats(v.as_view()));
    let numbers = cuda.scratch(size_of_val(chosen));
    let [experts, per_token, normalise] = [experts as i64, per_token as i64, i64::from(normalise)];
    let logits = Tensor::from(logits);
    let arguments: [&dyn Param; 8] =
        [&probs, &weights, &lse, &numbers.at(), &logits, &experts, &per_token, &normalise];
    cuda.launch(ROWS, c"router_forward", warps(m, shape), &arguments);
    must(cuda.card.download(bytemuck::cast_slice_mut(chosen), numbers.at()));
}

pub(super) fn router_backward(
    cuda: &Cuda,
    dlogits: ViewMut,
    dweights: View,
    given: RouterGradient,
    shape: RouterShape,
) {
    let (op, RouterShape { m, experts, per_token, normalise }) = ("router_backward", shape);
    expect_len(op, "dlogits", dlogits.len(), m * experts);
    expect_len(op, "dweights", dweights.len(), m * per_token);
    expect_len(op, "probs", given.probs.len(), m * experts);
    expect_len(op, "lse", given.lse.len(), m);
    expect_len(op, "chosen", given.chosen.len(), m * per_token);
    expect_len(op, "balance", given.balance.len(), experts);
    let (chosen, balance) = (cuda.numbers("chosen", given.chosen), cuda.numbers("balance", given.balance));
    let [dweights, probs, lse] = [dweights, given.probs, given.lse].map(floats);
    let [experts, per_token, normalise] = [experts as i64, per_token as i64, i64::from(normalise)];
    let (dlogits, twice_z) = (Tensor::from(&dlogits), 2.0 * given.z);
    let arguments: [&dyn Param; 10] =
        [&dlogits, &dweights, &probs, &lse, &chosen, &balance, &experts, &per_token, &normalise, &twice_z];
    cuda.launch(ROWS, c"router_backward", warps(m, shape), &arguments);
}

#[cfg(test)]
mod tests {
    #[test]
    fn rows_are_grouped_by_token_in_their_order() {
        let (ids, starts, order) = super::grouped(&[7, 3, 7, 0, 3, 7]);
        assert_eq!((ids, starts, order), (vec![0, 3, 7], vec![0, 1, 3, 6], vec![3, 1, 4, 0, 2, 5]));
        assert_eq!(super::grouped(&[]), (vec![], vec![0], vec![]));
    }
}
