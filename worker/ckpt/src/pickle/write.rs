//! Writes pickles as `torch.save` does: protocol 2, with the opcodes that `torch.save` uses.
use super::error::EncodeError;
use super::object::{Object, StoredTensor};
use crate::dtype::Dtype;

/// Items per SETITEMS or APPENDS opcode, as in Python's pickler.
const BATCH: usize = 1000;

type Result<T> = std::result::Result<T, EncodeError>;

/// Pickles a value.
pub(crate) fn encode(value: &Object) -> Result<Vec<u8>> {
    let mut out = vec![0x80, 2];
    write_object(&mut out, value)?;
    out.push(b'.');
    Ok(out)
}

/// The torch storage class of a dtype; `None` when torch has none.
pub(crate) fn storage_class(dtype: Dtype) -> Option<&'static str> {
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

fn write_object(out: &mut Vec<u8>, value: &Object) -> Result<()> {
    match value {
        Object::None => out.push(b'N'),
        Object::Bool(b) => out.push(if *b { 0x88 } else { 0x89 }),
        Object::Int(i) => write_int(out, *i),
        Object::Float(f) => {
            out.push(b'G');
            out.extend(f.to_be_bytes());
        }
        Object::Str(s) => write_text(out, s)?,
        Object::List(items) => write_list(out, items)?,
        Object::Tuple(items) => write_tuple(out, items)?,
        Object::Dict(pairs) => {
            out.push(b'}');
            set_items(out, pairs)?;
        }
        Object::OrderedDict(pairs) => {
            write_call(out, "collections.OrderedDict", &[])?;
            set_items(out, pairs)?;
        }
        Object::Set(items) => {
            write_global(out, "__builtin__.set")?;
            write_list(out, items)?;
            out.extend([0x85, b'R']);
        }
        Object::Size(sizes) => {
            write_global(out, "torch.Size")?;
            write_counts(out, sizes)?;
            out.extend([0x85, b'R']);
        }
        Object::Global(name) => write_global(out, name)?,
        Object::Call { function, args } => write_call(out, function, args)?,
        Object::Instance { class, state } => {
            write_global(out, class)?;
            out.extend(*b")\x81");
            write_object(out, state)?;
            out.push(b'b');
        }
        Object::Tensor(t) => tensor(out, t)?,
        Object::Literal { .. } => return Err(EncodeError::TensorWithoutStorage),
    }
    Ok(())
}

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

fn write_text(out: &mut Vec<u8>, s: &str) -> Result<()> {
    let len = u32::try_from(s.len()).map_err(|_| EncodeError::TextTooLong)?;
    out.push(b'X');
    out.extend(len.to_le_bytes());
    out.extend(s.as_bytes());
    Ok(())
}

fn write_list(out: &mut Vec<u8>, items: &[Object]) -> Result<()> {
    out.push(b']');
    for batch in items.chunks(BATCH) {
        out.push(b'(');
        for item in batch {
            write_object(out, item)?;
        }
        out.push(b'e');
    }
    Ok(())
}

fn write_tuple(out: &mut Vec<u8>, items: &[Object]) -> Result<()> {
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

fn set_items(out: &mut Vec<u8>, pairs: &[(Object, Object)]) -> Result<()> {
    for batch in pairs.chunks(BATCH) {
        out.push(b'(');
        for (key, value) in batch {
            write_object(out, key)?;
            write_object(out, value)?;
        }
        out.push(b'u');
    }
    Ok(())
}

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

fn write_call(out: &mut Vec<u8>, function: &str, args: &[Object]) -> Result<()> {
    write_global(out, function)?;
    write_tuple(out, args)?;
    out.push(b'R');
    Ok(())
}

fn write_counts(out: &mut Vec<u8>, sizes: &[u64]) -> Result<()> {
    write_tuple(out, &sizes.iter().map(|&n| Object::count(n)).collect::<Vec<_>>())
}

/// Writes `_rebuild_tensor_v2(storage, 0, size, stride, False, OrderedDict())`.
fn tensor(out: &mut Vec<u8>, t: &StoredTensor) -> Result<()> {
    let class = storage_class(t.dtype).ok_or(EncodeError::NoStorageClass(t.dtype))?;
    write_global(out, "torch._utils._rebuild_tensor_v2")?;
    out.extend(*b"((");
    write_text(out, "storage")?;
    write_global(out, class)?;
    write_text(out, &t.storage.to_string())?;
    write_text(out, "cpu")?;
    write_int(out, t.stored as i64);
    out.extend(*b"tQ");
    write_int(out, 0);
    write_counts(out, &t.shape)?;
    let mut strides = vec![1u64; t.shape.len()];
    for i in (1..t.shape.len()).rev() {
        strides[i - 1] = strides[i].saturating_mul(t.shape[i].max(1));
    }
    write_counts(out, &strides)?;
    write_object(out, &Object::Bool(false))?;
    write_call(out, "collections.OrderedDict", &[])?;
    out.extend(*b"tR");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pickle::load;
    use proptest::prelude::*;

    const GLOBALS: &[&[&str]] = &[&[
        "collections.OrderedDict",
        "__builtin__.set",
        "torch.Size",
        "torch.float16",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    ]];

    fn round_trip(value: &Object) -> Option<Object> {
        let bytes = encode(value).expect("encode");
        let tree = load(&bytes, GLOBALS).expect("decode");
        let mut left = 1 << 20;
        tree.root().to_object(&mut left, &|_| None)
    }

    fn plain_value() -> impl Strategy<Value = Object> {
        let leaf = prop_oneof![
            Just(Object::None),
            any::<bool>().prop_map(Object::Bool),
            any::<i64>().prop_map(Object::Int),
            (-70_000i64..70_000).prop_map(Object::Int),
            any::<f64>().prop_filter("NaN is not equal to itself", |f| !f.is_nan()).prop_map(Object::Float),
            ".{0,9}".prop_map(Object::Str),
            proptest::collection::vec(0u64..1 << 40, 0..5).prop_map(Object::Size),
            Just(Object::Global("torch.float16".into())),
            (0i64..4).prop_map(|i| Object::Call {
                function: "deepspeed.runtime.zero.config.ZeroStageEnum".into(),
                args: vec![Object::Int(i)],
            }),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            let many = || proptest::collection::vec(inner.clone(), 0..6);
            prop_oneof![
                many().prop_map(Object::List),
                many().prop_map(Object::Tuple),
                proptest::collection::vec(("[a-z]{1,5}", inner.clone()), 0..6).prop_map(Object::dict),
                inner.clone().prop_map(|state| Object::Instance {
                    class: "deepspeed.runtime.fp16.loss_scaler.LossScaler".into(),
                    state: Box::new(Object::dict([("x", state)])),
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_round_trip(value in plain_value()) {
            prop_assert_eq!(round_trip(&value), Some(value));
        }
    }

    #[test]
    fn long_lists_and_dicts_round_trip() {
        let list = Object::List((0..2500).map(Object::Int).collect());
        assert_eq!(round_trip(&list), Some(list));
        let dict = Object::dict((0..2500).map(|i| (format!("k{i}"), Object::Int(i))));
        assert_eq!(round_trip(&dict), Some(dict));
    }

    #[test]
    fn invalid_names_and_tensors_without_storage_are_rejected() {
        assert!(encode(&Object::Global("os.sys\ntem".into())).is_err());
        assert!(encode(&Object::Literal { dtype: Dtype::F32, shape: vec![], bytes: [0; 4].into() }).is_err());
    }
}
