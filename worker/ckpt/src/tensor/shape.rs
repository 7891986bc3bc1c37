//! Counts the elements of tensors.

/// Counts the elements of a shape. Returns `None` if their size in bytes could overflow an `i64`,
/// for elements of up to 8 bytes.
pub(crate) fn count_elements(shape: &[u64]) -> Option<u64> {
    // a dimension of size 0 must not hide an overflow from readers that multiply in another order
    let nonzero = shape.iter().filter(|&&d| d > 0).try_fold(1u64, |n, &d| n.checked_mul(d))?;
    nonzero.checked_mul(8).filter(|&b| b <= i64::MAX as u64)?;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflowing_shapes_have_no_element_count() {
        assert_eq!(count_elements(&[]), Some(1));
        assert_eq!(count_elements(&[3, 0]), Some(0));
        assert_eq!(count_elements(&[1 << 40, 1 << 40]), None);
        assert_eq!(count_elements(&[0, u64::MAX, 3]), None);
    }
}
