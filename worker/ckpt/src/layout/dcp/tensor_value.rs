//! [`read_tensor_value`]: reads a small tensor of a torch distributed checkpoint, such as a
//! learning rate, as a number or as a list of numbers.
use crate::catalog::{ExternalCheckpointBuilder, TensorPart};
use crate::error::Result;
use crate::tensor::{Dtype, count_elements};
use half::{bf16, f16};
use serde_json::{Number, Value as Json};

/// Maximum number of elements of a tensor that is read as a hyper-parameter.
const VALUE_ELEMENTS_MAX: u64 = 1024;

/// Why a tensor of a torch distributed checkpoint has no value that a hyper-parameter or a step can
/// have. The text completes the sentence "ignoring NAME: …".
#[derive(Debug, thiserror::Error)]
pub(super) enum UnusableValue {
    /// The tensor has too many elements.
    #[error("the tensor has {count} elements, at most {VALUE_ELEMENTS_MAX} are read")]
    TooManyElements {
        /// Number of elements of the tensor.
        count: u64,
    },
    /// The chunks of the tensor lack elements, or contain elements twice. Holds the number of
    /// elements of the tensor.
    #[error("the chunks do not contain each of the {0} elements once")]
    IncompleteChunks(u64),
    /// Hyper-parameters are not of this element type.
    #[error("the elements are of the dtype {0}")]
    Dtype(Dtype),
    /// The value of a step is no number.
    #[error("the step is {0}")]
    StepNotANumber(Json),
}

/// Reads a tensor of a torch distributed checkpoint as a JSON value: a number if the tensor has one
/// element, and otherwise the list of its elements in row-major order. Values that are not finite
/// become text. `parts` are the stored parts of the tensor, in ascending order.
///
/// The inner error states why the tensor has no such value, for example because its chunks lack
/// elements.
///
/// # Errors
/// Fails if the file cannot be read or is damaged.
pub(super) fn read_tensor_value(
    builder: &ExternalCheckpointBuilder,
    dtype: Dtype,
    shape: &[u64],
    parts: &[TensorPart],
) -> Result<std::result::Result<Json, UnusableValue>> {
    let count = count_elements(shape).unwrap_or(u64::MAX);
    if count > VALUE_ELEMENTS_MAX {
        return Ok(Err(UnusableValue::TooManyElements { count }));
    }
    let mut end = 0;
    let mut numbers = Vec::with_capacity(count as usize);
    for part in parts {
        if part.start != end {
            break;
        }
        end += part.count;
        let mut bytes = vec![0; (part.count * dtype.size()) as usize];
        builder.store.read_raw(part, dtype, part.element_range(), &mut bytes, &[])?;
        numbers.extend(bytes.chunks_exact(dtype.size() as usize).map(|bytes| decode_number(dtype, bytes)));
    }
    if end != count || numbers.len() as u64 != count {
        return Ok(Err(UnusableValue::IncompleteChunks(count)));
    }
    let Some(mut numbers) = numbers.into_iter().collect::<Option<Vec<Json>>>() else {
        return Ok(Err(UnusableValue::Dtype(dtype)));
    };
    Ok(Ok(match numbers.len() {
        1 => numbers.swap_remove(0),
        _ => Json::Array(numbers),
    }))
}

/// Converts the little-endian bytes of one element to a JSON value. Returns `None` for dtypes that
/// hyper-parameters do not have.
fn decode_number(dtype: Dtype, bytes: &[u8]) -> Option<Json> {
    fn array<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
        bytes.try_into().ok()
    }
    Some(match dtype {
        Dtype::F64 => make_float(f64::from_le_bytes(array(bytes)?)),
        // The shortest decimal number that the element is nearest to is the one that the user
        // wrote.
        Dtype::F32 => make_float(f32::from_le_bytes(array(bytes)?).to_string().parse().ok()?),
        Dtype::F16 => make_float(f16::from_le_bytes(array(bytes)?).to_f64()),
        Dtype::BF16 => make_float(bf16::from_le_bytes(array(bytes)?).to_f64()),
        Dtype::I64 => i64::from_le_bytes(array(bytes)?).into(),
        Dtype::I32 => i32::from_le_bytes(array(bytes)?).into(),
        Dtype::I16 => i16::from_le_bytes(array(bytes)?).into(),
        Dtype::I8 => i8::from_le_bytes(array(bytes)?).into(),
        Dtype::U64 => u64::from_le_bytes(array(bytes)?).into(),
        Dtype::U32 => u32::from_le_bytes(array(bytes)?).into(),
        Dtype::U16 => u16::from_le_bytes(array(bytes)?).into(),
        Dtype::U8 => u8::from_le_bytes(array(bytes)?).into(),
        Dtype::BOOL => Json::Bool(bytes != [0]),
        Dtype::F8_E4M3 | Dtype::F8_E5M2 => return None,
    })
}

/// Converts a float to a JSON number, or to text such as `inf` if the float is not finite.
fn make_float(value: f64) -> Json {
    Number::from_f64(value).map_or_else(|| value.to_string().into(), Json::Number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn elements_of_every_dtype_become_json() {
        for (dtype, bytes, expected) in [
            (Dtype::F64, &0.1f64.to_le_bytes()[..], Some(json!(0.1))),
            (Dtype::F32, &0.1f32.to_le_bytes(), Some(json!(0.1))),
            (Dtype::F32, &f32::INFINITY.to_le_bytes(), Some(json!("inf"))),
            (Dtype::F32, &f32::NAN.to_le_bytes(), Some(json!("NaN"))),
            (Dtype::F16, &f16::from_f32(0.5).to_le_bytes(), Some(json!(0.5))),
            (Dtype::BF16, &bf16::from_f32(-2.0).to_le_bytes(), Some(json!(-2.0))),
            (Dtype::I64, &(-3i64).to_le_bytes(), Some(json!(-3))),
            (Dtype::U64, &u64::MAX.to_le_bytes(), Some(json!(u64::MAX))),
            (Dtype::I8, &[0xff], Some(json!(-1))),
            (Dtype::BOOL, &[1], Some(json!(true))),
            (Dtype::BOOL, &[0], Some(json!(false))),
            (Dtype::F8_E4M3, &[1], None),
        ] {
            assert_eq!(decode_number(dtype, bytes), expected, "{dtype}");
        }
    }
}
