//! Writes pickles of protocol 2 with the opcodes that `torch.save` also uses.
use super::object::{PythonObject, StoredTensor};
use crate::error::EncodeError;
use crate::tensor::Dtype;

/// Number of items that one SETITEMS or APPENDS opcode adds. Python's pickler uses the same number.
const ITEMS_PER_APPEND_OPCODE: usize = 1000;

/// The result of encoding a value as a pickle.
type Result<T> = std::result::Result<T, EncodeError>;

/// Encodes a value as a complete pickle.
///
/// # Errors
/// Fails if a tensor has no storage, a dtype has no storage class, a name is invalid, or a text is
/// larger than 4 GiB.
pub(crate) fn encode_pickle(value: &PythonObject) -> Result<Vec<u8>> {
    let mut out = vec![0x80, 2];
    write_object(&mut out, value)?;
    out.push(b'.');
    Ok(out)
}

/// Returns the name of torch's storage class for a dtype, such as `FloatStorage`, or `None` if
/// torch has none.
pub(crate) fn torch_storage_class(dtype: Dtype) -> Option<&'static str> {
    Some(match dtype {
        Dtype::BF16 => "torch.BFloat16Storage",
        Dtype::BOOL => "torch.BoolStorage",
        Dtype::U8 => "torch.ByteStorage",
        Dtype::I8 => "torch.CharStorage",
        Dtype::F64 => "torch.DoubleStorage",
        Dtype::F32 => "torch.FloatStorage",
        Dtype::F16 => "torch.HalfStorage",
        Dtype::I32 => "torch.IntStorage",
        Dtype::I64 => "torch.LongStorage",
        Dtype::I16 => "torch.ShortStorage",
        _ => return None,
    })
}

/// Writes a Python value to a pickle, and fails for tensors that are not references to a tensor
/// storage of the torch file.
fn write_object(out: &mut Vec<u8>, value: &PythonObject) -> Result<()> {
    match value {
        PythonObject::None => out.push(b'N'),
        PythonObject::Bool(b) => out.push(if *b { 0x88 } else { 0x89 }),
        PythonObject::Int(i) => write_int(out, *i),
        PythonObject::Float(f) => {
            out.push(b'G');
            out.extend(f.to_be_bytes());
        }
        PythonObject::Str(s) => write_text(out, s)?,
        PythonObject::List(items) => write_list(out, items)?,
        PythonObject::Tuple(items) => write_tuple(out, items)?,
        PythonObject::Dict(pairs) => {
            out.push(b'}');
            write_dict_items(out, pairs)?;
        }
        PythonObject::OrderedDict(pairs) => {
            write_call(out, "collections.OrderedDict", &[])?;
            write_dict_items(out, pairs)?;
        }
        PythonObject::Set(items) => {
            write_global(out, "__builtin__.set")?;
            write_list(out, items)?;
            out.extend([0x85, b'R']);
        }
        PythonObject::Size(sizes) => {
            write_global(out, "torch.Size")?;
            write_integer_tuple(out, sizes)?;
            out.extend([0x85, b'R']);
        }
        PythonObject::Global(name) => write_global(out, name)?,
        PythonObject::Call { function, args } => write_call(out, function, args)?,
        PythonObject::Instance { class, state } => {
            write_global(out, class)?;
            out.extend(*b")\x81");
            write_object(out, state)?;
            out.push(b'b');
        }
        PythonObject::Tensor(t) => write_tensor(out, t)?,
        PythonObject::Literal { .. } => return Err(EncodeError::TensorWithoutStorage),
    }
    Ok(())
}

/// Writes an integer to a pickle with the shortest opcode that can encode it.
fn write_int(out: &mut Vec<u8>, i: i64) {
    if let Ok(b) = u8::try_from(i) {
        out.extend([b'K', b]);
    } else if let Ok(s) = u16::try_from(i) {
        out.push(b'M');
        out.extend(s.to_le_bytes());
    } else if let Ok(s) = i32::try_from(i) {
        out.push(b'J');
        out.extend(s.to_le_bytes());
    } else {
        out.extend([0x8a, 8]);
        out.extend(i.to_le_bytes());
    }
}

/// Writes a string to a pickle. Fails if it has more than 4 GiB.
fn write_text(out: &mut Vec<u8>, s: &str) -> Result<()> {
    let len = u32::try_from(s.len()).map_err(|_| EncodeError::TextTooLong)?;
    out.push(b'X');
    out.extend(len.to_le_bytes());
    out.extend(s.as_bytes());
    Ok(())
}

/// Writes a list to a pickle, whose items are appended in batches of [`ITEMS_PER_APPEND_OPCODE`]
/// items.
fn write_list(out: &mut Vec<u8>, items: &[PythonObject]) -> Result<()> {
    out.push(b']');
    for batch in items.chunks(ITEMS_PER_APPEND_OPCODE) {
        out.push(b'(');
        for item in batch {
            write_object(out, item)?;
        }
        out.push(b'e');
    }
    Ok(())
}

/// Writes a tuple to a pickle. Tuples of up to three items have a short opcode without a mark.
fn write_tuple(out: &mut Vec<u8>, items: &[PythonObject]) -> Result<()> {
    if items.len() > 3 {
        out.push(b'(');
    }
    for item in items {
        write_object(out, item)?;
    }
    out.push(match items.len() {
        0 => b')',
        1 => 0x85,
        2 => 0x86,
        3 => 0x87,
        _ => b't',
    });
    Ok(())
}

/// Writes the opcodes that add the pairs `pairs` to the dict on top of the unpickler's stack.
fn write_dict_items(out: &mut Vec<u8>, pairs: &[(PythonObject, PythonObject)]) -> Result<()> {
    for batch in pairs.chunks(ITEMS_PER_APPEND_OPCODE) {
        out.push(b'(');
        for (key, value) in batch {
            write_object(out, key)?;
            write_object(out, value)?;
        }
        out.push(b'u');
    }
    Ok(())
}

/// Writes a reference to the Python class or function `module.name` to a pickle.
fn write_global(out: &mut Vec<u8>, name: &str) -> Result<()> {
    let (module, name) = name
        .rsplit_once('.')
        .filter(|_| !name.contains(['\n', '\r']))
        .ok_or_else(|| EncodeError::InvalidGlobal(name.to_owned()))?;
    out.push(b'c');
    out.extend(module.as_bytes());
    out.push(b'\n');
    out.extend(name.as_bytes());
    out.push(b'\n');
    Ok(())
}

/// Writes the call of the Python function `function` with positional arguments to a pickle.
fn write_call(out: &mut Vec<u8>, function: &str, args: &[PythonObject]) -> Result<()> {
    write_global(out, function)?;
    write_tuple(out, args)?;
    out.push(b'R');
    Ok(())
}

/// Writes a tuple of unsigned integers, such as the shape or the strides of a tensor, to a pickle.
fn write_integer_tuple(out: &mut Vec<u8>, sizes: &[u64]) -> Result<()> {
    write_tuple(out, &sizes.iter().map(|&n| PythonObject::from_count(n)).collect::<Vec<_>>())
}

/// Writes a reference to a tensor to a pickle: the call
/// `_rebuild_tensor_v2(storage, 0, size, stride, False, OrderedDict())`.
fn write_tensor(out: &mut Vec<u8>, t: &StoredTensor) -> Result<()> {
    let class = torch_storage_class(t.dtype).ok_or(EncodeError::NoStorageClass(t.dtype))?;
    write_global(out, "torch._utils._rebuild_tensor_v2")?;
    out.extend(*b"((");
    write_text(out, "storage")?;
    write_global(out, class)?;
    write_text(out, &t.storage.to_string())?;
    write_text(out, "cpu")?;
    write_int(out, t.storage_elements as i64);
    out.extend(*b"tQ");
    write_int(out, 0);
    write_integer_tuple(out, &t.shape)?;
    let mut strides = vec![1u64; t.shape.len()];
    for i in (1..t.shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(t.shape[i].max(1));
    }
    write_integer_tuple(out, &strides)?;
    write_object(out, &PythonObject::Bool(false))?;
    write_call(out, "collections.OrderedDict", &[])?;
    out.extend(*b"tR");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::pickle::machine::parse_pickle;
    use proptest::prelude::*;

    const GLOBALS: &[&[&str]] = &[&[
        "collections.OrderedDict",
        "__builtin__.set",
        "torch.Size",
        "torch.float16",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    ]];

    /// Encodes a value as a pickle, parses it, and converts the result back to a [`PythonObject`].
    /// Returns `None` if the result cannot be converted.
    fn encode_and_parse(value: &PythonObject) -> Option<PythonObject> {
        let bytes = encode_pickle(value).expect("encode");
        let tree = parse_pickle(&bytes, GLOBALS).expect("decode");
        let mut left = 1 << 20;
        tree.root_value().to_object(&mut left, &|_| None)
    }

    /// Returns a proptest strategy that generates nested values without tensors.
    fn plain_value_strategy() -> impl Strategy<Value = PythonObject> {
        let leaf = prop_oneof![
            Just(PythonObject::None),
            any::<bool>().prop_map(PythonObject::Bool),
            any::<i64>().prop_map(PythonObject::Int),
            (-70_000i64..70_000).prop_map(PythonObject::Int),
            any::<f64>()
                .prop_filter("NaN is not equal to itself", |f| !f.is_nan())
                .prop_map(PythonObject::Float),
            ".{0,9}".prop_map(PythonObject::Str),
            proptest::collection::vec(0u64..1 << 40, 0..5).prop_map(PythonObject::Size),
            Just(PythonObject::Global("torch.float16".into())),
            (0i64..4).prop_map(|i| PythonObject::Call {
                function: "deepspeed.runtime.zero.config.ZeroStageEnum".into(),
                args: vec![PythonObject::Int(i)],
            }),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            let many = || proptest::collection::vec(inner.clone(), 0..6);
            prop_oneof![
                many().prop_map(PythonObject::List),
                many().prop_map(PythonObject::Tuple),
                proptest::collection::vec(("[a-z]{1,5}", inner.clone()), 0..6)
                    .prop_map(PythonObject::dict_from_pairs),
                inner.clone().prop_map(|state| PythonObject::Instance {
                    class: "deepspeed.runtime.fp16.loss_scaler.LossScaler".into(),
                    state: Box::new(PythonObject::dict_from_pairs([("x", state)])),
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn written_values_read_back_equal(value in plain_value_strategy()) {
            prop_assert_eq!(encode_and_parse(&value), Some(value));
        }
    }

    #[test]
    fn long_lists_and_dicts_round_trip() {
        let list = PythonObject::List((0..2500).map(PythonObject::Int).collect());
        assert_eq!(encode_and_parse(&list), Some(list));
        let dict = PythonObject::dict_from_pairs((0..2500).map(|i| (format!("k{i}"), PythonObject::Int(i))));
        assert_eq!(encode_and_parse(&dict), Some(dict));
    }

    #[test]
    fn invalid_names_and_tensors_without_storage_are_rejected() {
        assert!(encode_pickle(&PythonObject::Global("os.sys\ntem".into())).is_err());
        assert!(
            encode_pickle(&PythonObject::Literal { dtype: Dtype::F32, shape: vec![], bytes: [0; 4].into() })
                .is_err()
        );
    }
}
