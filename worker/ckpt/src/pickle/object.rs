//! [`Object`]: an owned Python value that is read from one torch file and written to another.
use super::{Node, Value, View};
use crate::dtype::Dtype;
use serde_json::Value as Json;
use std::sync::Arc;

/// An owned Python value, as a pickle can hold it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Object {
    /// `None`.
    #[default]
    None,
    /// `bool`.
    Bool(bool),
    /// `int`, if it fits into 64 bits.
    Int(i64),
    /// `float`.
    Float(f64),
    /// `str`.
    Str(String),
    /// `list`.
    List(Vec<Object>),
    /// `tuple`.
    Tuple(Vec<Object>),
    /// `dict`: keys and values in the order of insertion.
    Dict(Vec<(Object, Object)>),
    /// `collections.OrderedDict`.
    OrderedDict(Vec<(Object, Object)>),
    /// `set`, in the order of the pickle.
    Set(Vec<Object>),
    /// `torch.Size`.
    Size(Vec<u64>),
    /// A class or function: `module.name`.
    Global(String),
    /// The result of calling a function or class with these arguments.
    Call {
        /// The callable as `module.name`.
        function: String,
        /// Positional arguments.
        args: Vec<Object>,
    },
    /// An instance made by `__new__` without arguments, with its attributes.
    Instance {
        /// The class as `module.name`.
        class: String,
        /// The argument of `__setstate__`, usually the dict of attributes.
        state: Box<Object>,
    },
    /// Consecutive elements of a storage of the same file.
    Tensor(StoredTensor),
    /// A small tensor with its little-endian bytes.
    Literal {
        /// Type of the elements.
        dtype: Dtype,
        /// Size of each dimension.
        shape: Vec<u64>,
        /// The elements in row-major order.
        bytes: Arc<[u8]>,
    },
}

/// A contiguous tensor in a storage of a torch file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Index of the storage in its file.
    pub(crate) storage: usize,
    pub(crate) dtype: Dtype,
    /// Number of elements of the whole storage.
    pub(crate) stored: u64,
    pub(crate) shape: Vec<u64>,
}

/// Classes whose instances are made by `__new__` without arguments. All others are called.
const MADE_BARE: [&str; 3] = [
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
];

impl Object {
    /// A `str`.
    pub(crate) fn text(text: impl Into<String>) -> Object {
        Object::Str(text.into())
    }

    /// An `int` from a count below 2^63.
    pub(crate) fn count(n: u64) -> Object {
        Object::Int(n as i64)
    }

    /// A dict with string keys.
    pub(crate) fn dict<K: Into<String>>(pairs: impl IntoIterator<Item = (K, Object)>) -> Object {
        Object::Dict(pairs.into_iter().map(|(k, v)| (Object::Str(k.into()), v)).collect())
    }

    /// An `OrderedDict` with string keys.
    pub(crate) fn ordered<K: Into<String>>(pairs: impl IntoIterator<Item = (K, Object)>) -> Object {
        Object::OrderedDict(pairs.into_iter().map(|(k, v)| (Object::Str(k.into()), v)).collect())
    }

    /// The value of a string key of a dict.
    pub(crate) fn get(&self, key: &str) -> Option<&Object> {
        match self {
            Object::Dict(pairs) | Object::OrderedDict(pairs) => {
                pairs.iter().rev().find(|(k, _)| matches!(k, Object::Str(s) if s == key)).map(|(_, v)| v)
            }
            _ => None,
        }
    }

    /// Sets the value of a string key of a dict. Does nothing when the value is not a dict.
    pub(crate) fn set(&mut self, key: &str, value: Object) {
        if let Object::Dict(pairs) | Object::OrderedDict(pairs) = self {
            match pairs.iter_mut().find(|(k, _)| matches!(k, Object::Str(s) if s == key)) {
                Some((_, old)) => *old = value,
                None => pairs.push((Object::text(key), value)),
            }
        }
    }

    /// Converts from JSON; arrays become lists.
    pub(crate) fn from_json(value: &Json) -> Object {
        match value {
            Json::Null => Object::None,
            Json::Bool(b) => Object::Bool(*b),
            Json::Number(n) => match n.as_i64() {
                Some(i) => Object::Int(i),
                None => Object::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(s) => Object::text(s),
            Json::Array(items) => Object::List(items.iter().map(Object::from_json).collect()),
            Json::Object(map) => Object::dict(map.iter().map(|(k, v)| (k, Object::from_json(v)))),
        }
    }

    /// Converts to JSON for display and for manifests. Objects that JSON cannot represent become
    /// the name of their class or null.
    pub(crate) fn json(&self) -> Json {
        let array = |v: &[Object]| v.iter().map(Object::json).collect();
        match self {
            Object::None | Object::Tensor(_) | Object::Literal { .. } => Json::Null,
            Object::Bool(b) => (*b).into(),
            Object::Int(i) => (*i).into(),
            Object::Float(f) => {
                serde_json::Number::from_f64(*f).map_or_else(|| f.to_string().into(), Json::Number)
            }
            Object::Str(s) => s.as_str().into(),
            Object::List(v) | Object::Tuple(v) | Object::Set(v) => array(v),
            Object::Dict(pairs) | Object::OrderedDict(pairs) => {
                let key = |k: &Object| match k {
                    Object::Str(s) => s.clone(),
                    other => other.json().to_string(),
                };
                Json::Object(pairs.iter().map(|(k, v)| (key(k), v.json())).collect())
            }
            Object::Size(sizes) => sizes.as_slice().into(),
            Object::Global(name) | Object::Call { function: name, .. } => name.as_str().into(),
            Object::Instance { state, .. } => state.json(),
        }
    }
}

impl View<'_> {
    /// Copies the value into an [`Object`]; `tensor` converts a tensor. `None` when a part was
    /// dropped on reading (bytes, integers beyond 64 bits), is not a plain value, or more than
    /// `left` values are copied.
    pub(crate) fn to_object(
        self,
        left: &mut usize,
        tensor: &dyn Fn(View<'_>) -> Option<Object>,
    ) -> Option<Object> {
        *left = left.checked_sub(1)?;
        let Some(node) = self.node() else {
            return Some(match self.value {
                Value::None => Object::None,
                Value::Bool(b) => Object::Bool(b),
                Value::Int(i) => Object::Int(i),
                Value::Float(f) => Object::Float(f),
                Value::Node(_) => return None,
            });
        };
        let mut copy_all = |values: &[Value]| -> Option<Vec<Object>> {
            values.iter().map(|&v| self.with(v).to_object(left, tensor)).collect()
        };
        Some(match node {
            Node::Str(s) => Object::text(&**s),
            Node::List(v) => Object::List(copy_all(v)?),
            Node::Tuple(v) => Object::Tuple(copy_all(v)?),
            Node::Set(v) => Object::Set(copy_all(v)?),
            Node::Dict(pairs) => {
                let (keys, values): (Vec<Value>, Vec<Value>) = pairs.iter().copied().unzip();
                Object::Dict(copy_all(&keys)?.into_iter().zip(copy_all(&values)?).collect())
            }
            Node::Global(name) => Object::Global((*name).into()),
            Node::Object { class: "torch.Size", .. } => {
                Object::Size(crate::formats::torch_file::shape_of(self)?)
            }
            Node::Object { class, state, .. } if MADE_BARE.contains(class) => Object::Instance {
                class: (*class).into(),
                state: Box::new(self.with(*state).to_object(left, tensor)?),
            },
            Node::Object { class, args, state: Value::None } if !class.starts_with("torch._") => {
                match self.with(*args).to_object(left, tensor)? {
                    Object::Tuple(args) => Object::Call { function: (*class).into(), args },
                    _ => return None,
                }
            }
            Node::Object { .. } => tensor(self)?,
            Node::Bytes | Node::BigInt | Node::Persistent(_) => return None,
        })
    }
}
