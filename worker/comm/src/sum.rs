//! The one order in which ranks are summed.
//!
//! The tree over n ranks is a binary counter: ranks are pushed one after the other, two neighbours that cover equally
//! many ranks are added at once, and what remains is folded from the right. Said recursively: the left child covers the
//! largest power of two that is smaller than n, the right child the rest.
//!
//! ```text
//! n = 4: (0+1)+(2+3)      n = 5: ((0+1)+(2+3))+4      n = 7: ((0+1)+(2+3))+((4+5)+6)
//! ```
//!
//! Additions are f32 and nothing is skipped, so an element's bits depend on the ranks' values alone: not on how a message
//! is cut into chunks, not on which rank does the sum.

/// Elements summed at a time when the tree needs intermediate nodes: one node's values stay in the first-level cache.
const BLOCK: usize = 512;

/// `out[i]` becomes the tree sum of `parts[r][i]` over r. Every part is as long as `out`.
pub(crate) fn tree_sum(out: &mut [f32], parts: &[&[f32]]) {
    match parts {
        [] => out.fill(0.0),
        [a] => out.copy_from_slice(a),
        [a, b] => add(out, a, b),
        _ => {
            for (i, out) in out.chunks_mut(BLOCK).enumerate() {
                node(out, parts, i * BLOCK);
            }
        }
    }
}

/// `out` (at most BLOCK long) becomes the tree sum of `parts[..][at..at + out.len()]`.
fn node(out: &mut [f32], parts: &[&[f32]], at: usize) {
    let n = out.len();
    let piece = |r: usize| &parts[r][at..at + n];
    match parts.len() {
        0 => out.fill(0.0),
        1 => out.copy_from_slice(piece(0)),
        2 => add(out, piece(0), piece(1)),
        ranks => {
            let (left, right) = parts.split_at(ranks.next_power_of_two() / 2);
            node(out, left, at);
            if right.len() == 1 {
                add_to(out, &right[0][at..at + n]);
            } else {
                let mut sum = [0.0; BLOCK];
                node(&mut sum[..n], right, at);
                add_to(out, &sum[..n]);
            }
        }
    }
}

fn add(out: &mut [f32], a: &[f32], b: &[f32]) {
    assert!(out.len() == a.len() && out.len() == b.len(), "parts of a sum are equally long");
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = a + b;
    }
}

fn add_to(out: &mut [f32], b: &[f32]) {
    assert!(out.len() == b.len(), "parts of a sum are equally long");
    for (o, b) in out.iter_mut().zip(b) {
        *o += b;
    }
}

#[cfg(test)]
mod tests {
    use super::tree_sum;

    /// The binary counter, literally.
    fn counter(values: &[f32]) -> f32 {
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
    fn is_the_binary_counter_at_every_world_and_length() {
        for world in 1..=17 {
            for len in [0, 1, 7, 511, 512, 513, 1500] {
                // values of very different size, so that another order gives other bits
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
                    assert_eq!(out[i].to_bits(), counter(&column).to_bits(), "world {world} element {i}");
                }
            }
        }
    }

    #[test]
    fn no_rank_sums_to_zero() {
        let mut out = [1.0, 2.0];
        tree_sum(&mut out, &[]);
        assert_eq!(out, [0.0, 0.0]);
    }
}
