//! [`PythonObject`]: a Python value in memory, which was read from a torch file or will be written
//! to one.
use super::tree::{PickleCall, PickleNode, PickleValue, PickleView, parse_shape};
use crate::tensor::Dtype;
use serde_json::Value as Json;
use std::sync::Arc;

/// A Python value of one of the kinds that torch files contain.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum PythonObject {
    /// `None`.
    #[default]
    None,
    /// `bool`.
    Bool(bool),
    /// `int`, limited to 64 bits.
    Int(i64),
    /// `float`.
    Float(f64),
    /// `str`.
    Str(String),
    /// `list`.
    List(Vec<PythonObject>),
    /// `tuple`.
    Tuple(Vec<PythonObject>),
    /// `dict`, as keys and values in the order of insertion.
    Dict(Vec<(PythonObject, PythonObject)>),
    /// `collections.OrderedDict`.
    OrderedDict(Vec<(PythonObject, PythonObject)>),
    /// `set`, in the order of the pickle.
    Set(Vec<PythonObject>),
    /// `torch.Size`.
    Size(Vec<u64>),
    /// A class or function, as `module.name`.
    Global(String),
    /// The result of calling a function or class. The call is recorded, not made.
    Call {
        /// The callable as `module.name`.
        function: String,
        /// Positional arguments.
        args: Vec<PythonObject>,
    },
    /// An instance that `__new__` makes without arguments, and the state that the instance gets
    /// afterwards.
    Instance {
        /// The class as `module.name`.
        class: String,
        /// The argument of `__setstate__`, usually the dict of attributes.
        state: Box<PythonObject>,
    },
    /// A tensor in a storage of the same file.
    Tensor(StoredTensor),
    /// A small tensor whose elements are in memory instead of in a storage.
    Literal {
        /// Dtype of the elements.
        dtype: Dtype,
        /// Size of each dimension.
        shape: Vec<u64>,
        /// The little-endian elements in row-major order.
        bytes: Arc<[u8]>,
    },
}

/// A reference to a contiguous tensor in a torch file, whose elements begin at the start of the
/// tensor storage with the index `storage`.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Index of the storage in its file.
    pub(crate) storage: usize,
    pub(crate) dtype: Dtype,
    /// Number of elements of the whole storage.
    pub(crate) storage_elements: u64,
    pub(crate) shape: Vec<u64>,
}

/// Names of those Python classes whose objects a pickle may create by `__new__` without constructor
/// arguments. Objects of all other classes become recorded calls.
const NEW_WITHOUT_ARGS_CLASSES: [&str; 3] = [
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
];

impl PythonObject {
    /// Converts text to a Python `str`.
    pub(crate) fn from_text(text: impl Into<String>) -> PythonObject {
        PythonObject::Str(text.into())
    }

    /// Converts a count below 2^63 to a Python `int`.
    pub(crate) fn from_count(n: u64) -> PythonObject {
        PythonObject::Int(n as i64)
    }

    /// Creates a Python `dict` from pairs of a string key and a value.
    pub(crate) fn dict_from_pairs<K: Into<String>>(
        pairs: impl IntoIterator<Item = (K, PythonObject)>,
    ) -> PythonObject {
        PythonObject::Dict(pairs.into_iter().map(|(k, v)| (PythonObject::Str(k.into()), v)).collect())
    }

    /// Creates a Python `OrderedDict` from pairs of a string key and a value.
    pub(crate) fn ordered_dict_from_pairs<K: Into<String>>(
        pairs: impl IntoIterator<Item = (K, PythonObject)>,
    ) -> PythonObject {
        PythonObject::OrderedDict(pairs.into_iter().map(|(k, v)| (PythonObject::Str(k.into()), v)).collect())
    }

    /// Creates a [`PythonObject`] that stands for an instance of the Python class `class`, given as
    /// `module.name`, with the attributes `attributes`.
    pub(crate) fn new_instance<K: Into<String>>(
        class: &str,
        attributes: impl IntoIterator<Item = (K, PythonObject)>,
    ) -> PythonObject {
        let state = Box::new(PythonObject::dict_from_pairs(attributes));
        PythonObject::Instance { class: class.to_owned(), state }
    }

    /// Returns the value that a Python dict has for the string key `key`, or `None` if the key is
    /// missing or the object is not a dict.
    pub(crate) fn get(&self, key: &str) -> Option<&PythonObject> {
        match self {
            PythonObject::Dict(pairs) | PythonObject::OrderedDict(pairs) => pairs
                .iter()
                .rev()
                .find(|(k, _)| matches!(k, PythonObject::Str(s) if s == key))
                .map(|(_, v)| v),
            _ => None,
        }
    }

    /// Sets the value of the string key `key` of a Python dict. Does nothing if the object is not a
    /// dict.
    pub(crate) fn set(&mut self, key: &str, value: PythonObject) {
        if let PythonObject::Dict(pairs) | PythonObject::OrderedDict(pairs) = self {
            match pairs.iter_mut().find(|(k, _)| matches!(k, PythonObject::Str(s) if s == key)) {
                Some((_, old)) => *old = value,
                None => pairs.push((PythonObject::from_text(key), value)),
            }
        }
    }

    /// Converts JSON to a Python value. Arrays become lists. Numbers that fit in an i64 become
    /// `int`, and other numbers become `float`.
    pub(crate) fn from_json(value: &Json) -> PythonObject {
        match value {
            Json::Null => PythonObject::None,
            Json::Bool(b) => PythonObject::Bool(*b),
            Json::Number(n) => match n.as_i64() {
                Some(i) => PythonObject::Int(i),
                None => PythonObject::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(s) => PythonObject::from_text(s),
            Json::Array(items) => PythonObject::List(items.iter().map(PythonObject::from_json).collect()),
            Json::Object(map) => {
                PythonObject::dict_from_pairs(map.iter().map(|(k, v)| (k, PythonObject::from_json(v))))
            }
        }
    }

    /// Converts the Python value to JSON, for messages and for the manifest of a converted
    /// checkpoint. Tensors become null, and recorded calls become the name of the function or
    /// class.
    pub(crate) fn to_json(&self) -> Json {
        let array = |v: &[PythonObject]| v.iter().map(PythonObject::to_json).collect();
        match self {
            PythonObject::None | PythonObject::Tensor(_) | PythonObject::Literal { .. } => Json::Null,
            PythonObject::Bool(b) => (*b).into(),
            PythonObject::Int(i) => (*i).into(),
            PythonObject::Float(f) => {
                serde_json::Number::from_f64(*f).map_or_else(|| f.to_string().into(), Json::Number)
            }
            PythonObject::Str(s) => s.as_str().into(),
            PythonObject::List(v) | PythonObject::Tuple(v) | PythonObject::Set(v) => array(v),
            PythonObject::Dict(pairs) | PythonObject::OrderedDict(pairs) => {
                let key = |k: &PythonObject| match k {
                    PythonObject::Str(s) => s.clone(),
                    other => other.to_json().to_string(),
                };
                Json::Object(pairs.iter().map(|(k, v)| (key(k), v.to_json())).collect())
            }
            PythonObject::Size(sizes) => sizes.as_slice().into(),
            PythonObject::Global(name) | PythonObject::Call { function: name, .. } => name.as_str().into(),
            PythonObject::Instance { state, .. } => state.to_json(),
        }
    }
}

impl PickleView<'_> {
    /// Copies this value of a parsed pickle to a [`PythonObject`], and subtracts the number of
    /// copied values from `left`, the remaining limit. `tensor` converts the objects that represent
    /// tensors. Returns `None` if a part was dropped on reading (bytes, integers beyond 64 bits),
    /// if a part cannot be converted, or if more than `left` values would be copied.
    pub(crate) fn to_object(
        self,
        left: &mut usize,
        tensor: &dyn Fn(PickleView<'_>) -> Option<PythonObject>,
    ) -> Option<PythonObject> {
        *left = left.checked_sub(1)?;
        let Some(node) = self.node() else {
            return Some(match self.value {
                PickleValue::None => PythonObject::None,
                PickleValue::Bool(b) => PythonObject::Bool(b),
                PickleValue::Int(i) => PythonObject::Int(i),
                PickleValue::Float(f) => PythonObject::Float(f),
                PickleValue::Node(_) => return None,
            });
        };
        let mut copy_all = |values: &[PickleValue]| -> Option<Vec<PythonObject>> {
            values.iter().map(|&v| self.with_value(v).to_object(left, tensor)).collect()
        };
        Some(match node {
            PickleNode::Str(_) => PythonObject::from_text(self.as_str()?),
            PickleNode::List(v) => PythonObject::List(copy_all(v)?),
            PickleNode::Tuple(v) => PythonObject::Tuple(copy_all(v)?),
            PickleNode::Set(v) => PythonObject::Set(copy_all(v)?),
            PickleNode::Dict(pairs) => {
                let (keys, values): (Vec<PickleValue>, Vec<PickleValue>) = pairs.iter().copied().unzip();
                PythonObject::Dict(copy_all(&keys)?.into_iter().zip(copy_all(&values)?).collect())
            }
            PickleNode::Global(name) => PythonObject::Global((*name).into()),
            PickleNode::Object(call) => self.call_to_object(call, left, tensor)?,
            PickleNode::Bytes | PickleNode::BigInt | PickleNode::Persistent(_) => return None,
        })
    }

    /// Converts a call of a Python class or function in a parsed pickle to a [`PythonObject`], and
    /// subtracts the number of copied values from `left`.
    fn call_to_object(
        self,
        call: &PickleCall,
        left: &mut usize,
        tensor: &dyn Fn(PickleView<'_>) -> Option<PythonObject>,
    ) -> Option<PythonObject> {
        let class = call.class;
        if class == "torch.Size" {
            return parse_shape(self).map(PythonObject::Size);
        }
        if NEW_WITHOUT_ARGS_CLASSES.contains(&class) {
            let state = Box::new(self.with_value(call.state).to_object(left, tensor)?);
            return Some(PythonObject::Instance { class: class.into(), state });
        }
        if call.state != PickleValue::None || class.starts_with("torch._") {
            return tensor(self);
        }
        match self.with_value(call.args).to_object(left, tensor)? {
            PythonObject::Tuple(args) => Some(PythonObject::Call { function: class.into(), args }),
            _ => None,
        }
    }
}
