//! Computes medians of measured values, and how much larger each value is than the median of the
//! others.

/// Returns, for each value, the value minus the upper median of all other values, or 0 if that is
/// negative.
pub(super) fn compute_excesses(values: &[u64]) -> Vec<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let excess = |value: &u64| {
        // Without the value, the later ones move to the front by one.
        let position = sorted.partition_point(|v| v < value);
        let middle = (values.len() - 1) / 2;
        let middle = if position <= middle { middle + 1 } else { middle };
        value.saturating_sub(sorted.get(middle).copied().unwrap_or(*value))
    };
    values.iter().map(excess).collect()
}

/// Returns the lower median of the values; 0 if there are none.
pub(super) fn find_lower_median(mut values: Vec<u64>) -> u64 {
    if values.is_empty() {
        return 0;
    }
    let middle = (values.len() - 1) / 2;
    *values.select_nth_unstable(middle).1
}
