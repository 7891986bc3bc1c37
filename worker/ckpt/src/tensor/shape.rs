//! Counts the elements of tensors, and deserializes shapes with a limited number of dimensions.
use serde::{Deserializer, de};
use std::fmt;

/// Limit on the number of dimensions of a tensor.
pub(crate) const DIMENSIONS_MAX: usize = 16;

/// Returns the number of elements of a tensor with the shape `shape`. Returns `None` if the shape
/// has more than [`DIMENSIONS_MAX`] dimensions, or if the size of the elements in bytes could
/// overflow an `i64`, for elements of up to 8 bytes.
pub(crate) fn count_elements(shape: &[u64]) -> Option<u64> {
    if shape.len() > DIMENSIONS_MAX {
        return None;
    }
    // a dimension of size 0 must not hide an overflow from readers that multiply in another order
    let nonzero = shape.iter().filter(|&&d| d > 0).try_fold(1u64, |n, &d| n.checked_mul(d))?;
    nonzero.checked_mul(8).filter(|&b| b <= i64::MAX as u64)?;
    Some(if shape.contains(&0) { 0 } else { nonzero })
}

/// Deserializes the shape of a tensor, which may have at most [`DIMENSIONS_MAX`] dimensions. Fails
/// at the first dimension beyond [`DIMENSIONS_MAX`], so that an untrusted file cannot make a long
/// list.
pub(crate) fn deserialize_shape<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u64>, D::Error> {
    /// A serde visitor that collects the dimensions of a shape, and fails if there are too many.
    struct ShapeVisitor;
    impl<'de> de::Visitor<'de> for ShapeVisitor {
        type Value = Vec<u64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {DIMENSIONS_MAX} dimensions")
        }

        fn visit_seq<A: de::SeqAccess<'de>>(self, mut items: A) -> Result<Vec<u64>, A::Error> {
            let mut shape = Vec::new();
            while let Some(size) = items.next_element()? {
                if shape.len() == DIMENSIONS_MAX {
                    return Err(de::Error::invalid_length(DIMENSIONS_MAX + 1, &self));
                }
                shape.push(size);
            }
            Ok(shape)
        }
    }
    d.deserialize_seq(ShapeVisitor)
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
        assert_eq!(count_elements(&[1; 16]), Some(1));
        assert_eq!(count_elements(&[1; 17]), None);
    }

    #[test]
    fn a_shape_with_too_many_dimensions_is_rejected() {
        let parse = |n: usize| {
            let text = format!("[{}]", vec!["1"; n].join(","));
            deserialize_shape(&mut serde_json::Deserializer::from_str(&text)).map_err(|e| e.to_string())
        };
        assert_eq!(parse(16), Ok(vec![1; 16]));
        let error = parse(17).expect_err("rejected");
        assert!(error.contains("at most 16 dimensions"), "{error}");
    }
}
