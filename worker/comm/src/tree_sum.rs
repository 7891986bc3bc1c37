//! Sums the values of several ranks in one fixed order, so that every transport gives the same
//! bits.
//!
//! The order is a binary tree over n ranks, built like a binary counter. Ranks are pushed one after
//! the other. As soon as two neighbouring subtrees cover equally many ranks, they are added. The
//! subtrees that remain at the end are added from the right. Stated recursively, the left child
//! covers the largest power of two that is smaller than n, and the right child covers the rest.
//!
//! ```text
//! n = 4: (0+1)+(2+3)      n = 5: ((0+1)+(2+3))+4      n = 7: ((0+1)+(2+3))+((4+5)+6)
//! ```
//!
//! Additions are in f32 and none is skipped. So the bits of a sum depend only on the ranks' values,
//! and not on how messages are divided into chunks or which rank computes the sum.

/// Number of elements per block when vectors of several ranks are summed block by block, so that
/// intermediate sums stay in the L1 cache.
const BLOCK_LEN: usize = 512;

/// Stores the sum of `parts[r][i]` over all ranks r in `out[i]`, in the fixed order of a binary
/// tree over ranks. Every part is as long as `out`.
pub(crate) fn tree_sum(out: &mut [f32], parts: &[&[f32]]) {
    match parts {
        [] => out.fill(0.0),
        [a] => out.copy_from_slice(a),
        [a, b] => store_sum(out, a, b),
        _ => {
            for (i, out) in out.chunks_mut(BLOCK_LEN).enumerate() {
                sum_block(out, parts, i * BLOCK_LEN);
            }
        }
    }
}

/// Sums one block of at most [`BLOCK_LEN`] elements of all ranks' vectors, beginning at index
/// `start`, in the fixed order of a binary tree over ranks. `out` has at most [`BLOCK_LEN`]
/// elements.
fn sum_block(out: &mut [f32], parts: &[&[f32]], start: usize) {
    let n = out.len();
    let block = |r: usize| &parts[r][start..start + n];
    match parts.len() {
        0 => out.fill(0.0),
        1 => out.copy_from_slice(block(0)),
        2 => store_sum(out, block(0), block(1)),
        ranks => {
            let (left, right) = parts.split_at(ranks.next_power_of_two() / 2);
            sum_block(out, left, start);
            if right.len() == 1 {
                add_to_slice(out, &right[0][start..start + n]);
            } else {
                let mut sum = [0.0; BLOCK_LEN];
                sum_block(&mut sum[..n], right, start);
                add_to_slice(out, &sum[..n]);
            }
        }
    }
}

/// Stores the elementwise sum of `a` and `b` in `out`. Panics if the lengths differ.
fn store_sum(out: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(out.len() == a.len() && out.len() == b.len(), "addends must be equally long");
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = a + b;
    }
}

/// Adds the elements of `b` to the elements of `out`, in place. Panics if the lengths differ.
fn add_to_slice(out: &mut [f32], b: &[f32]) {
    assert!(out.len() == b.len(), "addends must be equally long");
    for (o, b) in out.iter_mut().zip(b) {
        *o += b;
    }
}

#[cfg(test)]
mod tests {
    use super::tree_sum;

    /// Computes the sum of `values` in the fixed order of a binary tree, with a different
    /// algorithm, as the reference for [`tree_sum`].
    fn compute_binary_counter_sum(values: &[f32]) -> f32 {
        let mut stack: Vec<(usize, f32)> = Vec::new();
        for &v in values {
            let mut top = (1, v);
            while let Some(&(size, left)) = stack.last()
                && size == top.0
            {
                stack.pop();
                top = (2 * size, left + top.1);
            }
            stack.push(top);
        }
        stack.into_iter().map(|(_, v)| v).rev().reduce(|right, left| left + right).unwrap_or(0.0)
    }

    #[test]
    fn the_tree_equals_a_binary_counter_for_every_world_and_length() {
        for world in 1..=17 {
            for len in [0, 1, 7, 511, 512, 513, 1500] {
                // values of very different magnitude, so that another order gives other bits
                let value = |r: usize, i: usize| {
                    let scale = [1.0, 1e-4, 1e6, -1e6][(r + i) % 4];
                    (1.0 + ((r * 7919 + i * 104_729) % 1000) as f32 / 997.0) * scale
                };
                let parts: Vec<Vec<f32>> =
                    (0..world).map(|r| (0..len).map(|i| value(r, i)).collect()).collect();
                let refs: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
                let mut out = vec![f32::NAN; len];
                tree_sum(&mut out, &refs);
                for i in 0..len {
                    let column: Vec<f32> = parts.iter().map(|p| p[i]).collect();
                    assert_eq!(
                        out[i].to_bits(),
                        compute_binary_counter_sum(&column).to_bits(),
                        "world {world} element {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_sum_over_no_rank_is_zero() {
        let mut out = [1.0, 2.0];
        tree_sum(&mut out, &[]);
        assert_eq!(out, [0.0, 0.0]);
    }
}
