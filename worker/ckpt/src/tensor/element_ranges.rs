//! Finds gaps, overlaps and intersections in lists of element or byte ranges, such as the parts of
//! a tensor in several files. Does no I/O.
use std::ops::Range;

/// Why the pieces of a tensor do not cover its elements exactly once.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoverageError {
    /// No piece contains the elements of this range.
    #[error("no shard holds elements {}..{}", .0.start, .0.end)]
    Gap(Range<u64>),
    /// More than one piece contains the elements of this range.
    #[error("elements {}..{} are stored twice", .0.start, .0.end)]
    Overlap(Range<u64>),
    /// A piece contains the elements of this range, which are outside of the tensor.
    #[error("elements {}..{} are outside of the tensor", .0.start, .0.end)]
    Outside(Range<u64>),
}

/// Finds the first place where the ranges in `sorted` (sorted by start) do not cover `0..total`
/// exactly once: a gap, an overlap, or a range that ends after `total`. Returns `None` if there is
/// no such place.
pub(crate) fn find_coverage_error(
    total: u64,
    sorted: impl IntoIterator<Item = Range<u64>>,
) -> Option<CoverageError> {
    let mut done = 0;
    for r in sorted {
        if r.end > total || r.start > r.end {
            return Some(CoverageError::Outside(r.start.max(total)..r.end));
        }
        if r.start > done {
            return Some(CoverageError::Gap(done..r.start));
        }
        if r.start < done {
            return Some(CoverageError::Overlap(r.start..done.min(r.end)));
        }
        done = r.end;
    }
    (done < total).then_some(CoverageError::Gap(done..total))
}

/// Iterates over the ranges in `sorted` that overlap the range `wanted`, and yields the index and
/// the overlapping part of each one. `range_of` returns the range of an item. The caller must sort
/// the items by range, and the ranges must have no gaps.
pub(crate) fn intersect_ranges<'a, T>(
    sorted: &'a [T],
    range_of: impl Fn(&T) -> Range<u64> + 'a,
    wanted: Range<u64>,
) -> impl Iterator<Item = (usize, Range<u64>)> + 'a {
    let first = sorted.partition_point(|t| range_of(t).end <= wanted.start);
    (first..sorted.len())
        .map(move |i| (i, range_of(&sorted[i])))
        .take_while({
            let end = wanted.end;
            move |(_, r)| r.start < end
        })
        .map(move |(i, r)| (i, r.start.max(wanted.start)..r.end.min(wanted.end)))
        .filter(|(_, r)| r.start < r.end)
}

/// Returns which blocks of `block` bytes contain at least one byte of the ranges `bytes`, as ranges
/// of block numbers. The ranges `bytes` may be unsorted. Returns the indices of the blocks as
/// sorted ranges, of which no two overlap or touch.
pub(crate) fn find_covering_blocks(mut bytes: Vec<Range<u64>>, block: u64) -> Vec<Range<u64>> {
    bytes.retain(|r| r.start < r.end);
    bytes.sort_by_key(|r| r.start);
    let mut runs: Vec<Range<u64>> = Vec::new();
    for r in bytes {
        let (start, end) = (r.start / block, r.end.div_ceil(block));
        match runs.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ => runs.push(start..end),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init, clippy::reversed_empty_ranges)]
    fn the_first_gap_or_overlap_is_reported() {
        assert_eq!(find_coverage_error(10, [0..4, 4..10]), None);
        assert_eq!(find_coverage_error(0, []), None);
        assert_eq!(find_coverage_error(10, [0..4, 5..10]), Some(CoverageError::Gap(4..5)));
        assert_eq!(find_coverage_error(10, [0..4, 3..10]), Some(CoverageError::Overlap(3..4)));
        assert_eq!(find_coverage_error(10, [0..4]), Some(CoverageError::Gap(4..10)));
        assert_eq!(find_coverage_error(10, [0..11]), Some(CoverageError::Outside(10..11)));
        let reversed = find_coverage_error(10, [5..3]);
        assert!(matches!(reversed, Some(CoverageError::Outside(_))));
    }

    proptest! {
        #[test]
        fn intersections_equal_brute_force(cuts in proptest::collection::vec(0u64..20, 0..8), a in 0u64..160, b in 0u64..160) {
            let mut ranges = Vec::new();
            let mut at = 0;
            for c in cuts { ranges.push(at..at + c); at += c; }
            let wanted = a.min(b).min(at)..a.max(b).min(at);
            let found: Vec<(usize, u64)> = intersect_ranges(&ranges, |r| r.clone(), wanted.clone())
                .flat_map(|(i, r)| { assert!(r.start < r.end); r.map(move |e| (i, e)) }).collect();
            let brute: Vec<(usize, u64)> = wanted
                .map(|e| (ranges.iter().position(|r| r.contains(&e)).expect("gapless"), e)).collect();
            prop_assert_eq!(found, brute);
        }

        #[test]
        fn blocks_contain_every_byte_and_no_other_block(spans in proptest::collection::vec((0u64..300, 0u64..50), 0..12)) {
            let bytes: Vec<Range<u64>> = spans.iter().map(|&(s, n)| s..s + n).collect();
            let runs = find_covering_blocks(bytes.clone(), 16);
            prop_assert!(runs.windows(2).all(|w| w[0].end < w[1].start));
            for b in 0..30 {
                let needed = bytes.iter().any(|r| r.clone().any(|x| x / 16 == b));
                prop_assert_eq!(runs.iter().any(|r| r.contains(&b)), needed);
            }
        }
    }
}
