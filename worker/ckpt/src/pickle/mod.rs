//! Reads and writes pickles as torch files contain them, without executing anything.
//!
//! The caller lists the classes and functions that a pickle may name; any other name is rejected.
//! The result is a tree of plain values in which dicts keep their order. Shared values stay shared,
//! so that a small file cannot expand into a large tree. A value that contains itself is rejected.
mod error;
mod machine;
mod object;
#[cfg(test)]
mod tests;
mod write;

pub use error::{EncodeError, PickleError};
pub(crate) use machine::{load, load_first};
pub use object::Object;
pub(crate) use object::StoredTensor;
use serde_json::{Map, Number, Value as Json};
pub(crate) use write::encode;

/// Limit on the size of one pickle, bytes.
pub(crate) const BYTES_MAX: u64 = 64 << 20;
/// Limit on the values that one pickle may push.
pub(crate) const VALUES_MAX: usize = 8 << 20;
/// Limit on the entries of the memo.
pub(crate) const MEMO_MAX: usize = 4 << 20;
/// Limit on the nesting of values.
pub(crate) const DEPTH_MAX: u32 = 128;
/// Limit on the values of a part that is converted to JSON.
const JSON_MAX: usize = 100_000;

/// Index of a [`Node`].
pub(crate) type NodeIndex = u32;

/// A value of a pickle. Values that do not fit into a word are in a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Node(NodeIndex),
}

/// A value of a pickle that does not fit into a word.
#[derive(Debug)]
pub(crate) enum Node {
    Str(Box<str>),
    /// Bytes. Their content is dropped.
    Bytes,
    /// An integer beyond 64 bits. Its value is dropped.
    BigInt,
    List(Vec<Value>),
    Tuple(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Set(Vec<Value>),
    /// A class or function: `module.name`.
    Global(&'static str),
    /// The result of calling a global with arguments. The call is not made.
    Object {
        class: &'static str,
        args: Value,
        state: Value,
    },
    /// A reference to data outside of the pickle: a storage of the torch file.
    Persistent(Value),
}

/// The values of one pickle.
#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    root: Value,
}

impl Tree {
    /// The pickled value.
    pub(crate) fn root(&self) -> View<'_> {
        View { tree: self, value: self.root }
    }

    /// The references to data outside of the pickle.
    pub(crate) fn persistent(&self) -> impl Iterator<Item = View<'_>> {
        self.nodes.iter().filter_map(|node| match node {
            Node::Persistent(value) => Some(View { tree: self, value: *value }),
            _ => None,
        })
    }

    /// Rejects values that contain themselves and nesting beyond [`DEPTH_MAX`].
    fn check_depth(&self) -> Result<(), PickleError> {
        const NEW: u32 = 0;
        const OPEN: u32 = u32::MAX;
        let mut heights = vec![NEW; self.nodes.len()];
        let Value::Node(root) = self.root else { return Ok(()) };
        let mut path: Vec<(NodeIndex, usize)> = vec![(root, 0)];
        heights[root as usize] = OPEN;
        while let Some((id, next)) = path.last_mut() {
            let id = *id;
            if let Some(child) = self.nodes[id as usize].child(*next) {
                *next += 1;
                if let Value::Node(child) = child {
                    match heights[child as usize] {
                        OPEN => return Err(PickleError::Cycle),
                        NEW if path.len() as u32 >= DEPTH_MAX => return Err(PickleError::TooDeep),
                        NEW => {
                            heights[child as usize] = OPEN;
                            path.push((child, 0));
                        }
                        height if path.len() as u32 + height > DEPTH_MAX => return Err(PickleError::TooDeep),
                        _ => {}
                    }
                }
                continue;
            }
            path.pop();
            let height = |v| match v {
                Value::Node(n) => heights[n as usize],
                _ => 0,
            };
            let children = (0..).map_while(|i| self.nodes[id as usize].child(i));
            heights[id as usize] = 1 + children.map(height).max().unwrap_or(0);
        }
        Ok(())
    }
}

impl Node {
    /// The `i`-th child value, in a fixed order.
    fn child(&self, i: usize) -> Option<Value> {
        match self {
            Node::Str(_) | Node::Bytes | Node::BigInt | Node::Global(_) => None,
            Node::List(v) | Node::Tuple(v) | Node::Set(v) => v.get(i).copied(),
            Node::Dict(v) => v.get(i / 2).map(|&(key, value)| if i & 1 == 0 { key } else { value }),
            Node::Object { args, state, .. } => [*args, *state].get(i).copied(),
            Node::Persistent(v) => (i == 0).then_some(*v),
        }
    }
}

/// A value together with its tree. Accessors return `None` when the value has another type.
#[derive(Clone, Copy)]
pub(crate) struct View<'t> {
    tree: &'t Tree,
    value: Value,
}

impl<'t> View<'t> {
    fn with(self, value: Value) -> View<'t> {
        View { value, ..self }
    }

    fn node(self) -> Option<&'t Node> {
        match self.value {
            Value::Node(id) => self.tree.nodes.get(id as usize),
            _ => None,
        }
    }

    pub(crate) fn is_none(self) -> bool {
        self.value == Value::None
    }

    pub(crate) fn int(self) -> Option<i64> {
        match self.value {
            Value::Int(i) => Some(i),
            _ => None,
        }
    }

    pub(crate) fn float(self) -> Option<f64> {
        match self.value {
            Value::Float(f) => Some(f),
            _ => None,
        }
    }

    /// The value as a size, count or index.
    pub(crate) fn count(self) -> Option<u64> {
        self.int().and_then(|i| u64::try_from(i).ok())
    }

    #[cfg(test)]
    fn bool(self) -> Option<bool> {
        match self.value {
            Value::Bool(b) => Some(b),
            _ => None,
        }
    }

    pub(crate) fn str(self) -> Option<&'t str> {
        match self.node()? {
            Node::Str(s) => Some(s),
            _ => None,
        }
    }

    pub(crate) fn global(self) -> Option<&'static str> {
        match self.node()? {
            Node::Global(name) => Some(name),
            _ => None,
        }
    }

    pub(crate) fn persistent(self) -> Option<View<'t>> {
        match self.node()? {
            Node::Persistent(v) => Some(self.with(*v)),
            _ => None,
        }
    }

    /// The items of a list or tuple.
    pub(crate) fn items(self) -> Option<Items<'t>> {
        match self.node()? {
            Node::List(values) | Node::Tuple(values) => Some(Items { tree: self.tree, values }),
            _ => None,
        }
    }

    /// The pairs of a dict in insertion order.
    pub(crate) fn pairs(self) -> Option<impl Iterator<Item = (View<'t>, View<'t>)>> {
        match self.node()? {
            Node::Dict(pairs) => Some(pairs.iter().map(move |&(k, v)| (self.with(k), self.with(v)))),
            _ => None,
        }
    }

    /// The value of a string key of a dict.
    pub(crate) fn get(self, key: &str) -> Option<View<'t>> {
        match self.node()? {
            // the last duplicate wins, as in Python
            Node::Dict(p) => {
                p.iter().rev().find(|(k, _)| self.with(*k).str() == Some(key)).map(|&(_, v)| self.with(v))
            }
            _ => None,
        }
    }

    /// The value of an integer key of a dict.
    pub(crate) fn get_int(self, key: i64) -> Option<View<'t>> {
        match self.node()? {
            Node::Dict(p) => p.iter().rev().find(|(k, _)| *k == Value::Int(key)).map(|&(_, v)| self.with(v)),
            _ => None,
        }
    }

    /// The class or function, the arguments and the state of an object.
    pub(crate) fn object(self) -> Option<(&'static str, View<'t>, View<'t>)> {
        match self.node()? {
            Node::Object { class, args, state } => Some((class, self.with(*args), self.with(*state))),
            _ => None,
        }
    }

    /// Converts the value to JSON for display. Objects become the name of their class; values
    /// beyond [`JSON_MAX`] become null.
    pub(crate) fn json(self) -> Json {
        let mut left = JSON_MAX;
        self.json_within(&mut left)
    }

    fn json_within(self, left: &mut usize) -> Json {
        if *left == 0 {
            return Json::Null;
        }
        *left -= 1;
        match (self.value, self.node()) {
            (Value::Bool(b), _) => b.into(),
            (Value::Int(i), _) => i.into(),
            (Value::Float(f), _) => Number::from_f64(f).map_or_else(|| f.to_string().into(), Json::Number),
            (_, Some(Node::Str(s))) => Json::String(s.to_string()),
            (_, Some(Node::List(v) | Node::Tuple(v) | Node::Set(v))) => {
                v.iter().map_while(|&v| (*left > 0).then(|| self.with(v).json_within(left))).collect()
            }
            (_, Some(Node::Dict(pairs))) => {
                let key = |k: View<'_>| match k.str() {
                    Some(s) => s.to_owned(),
                    None => k.json_within(&mut 1).to_string(),
                };
                let pair = |&(k, v): &(Value, Value)| {
                    (*left > 0).then(|| (key(self.with(k)), self.with(v).json_within(left)))
                };
                Json::Object(pairs.iter().map_while(pair).collect::<Map<_, _>>())
            }
            (_, Some(Node::Object { class, .. } | Node::Global(class))) => Json::String((*class).into()),
            _ => Json::Null,
        }
    }
}

/// Items of a list or tuple.
#[derive(Clone, Copy)]
pub(crate) struct Items<'t> {
    tree: &'t Tree,
    values: &'t [Value],
}

impl<'t> Items<'t> {
    #[cfg(test)]
    fn len(self) -> usize {
        self.values.len()
    }

    pub(crate) fn get(self, i: usize) -> Option<View<'t>> {
        self.values.get(i).map(|&value| View { tree: self.tree, value })
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = View<'t>> {
        self.values.iter().map(move |&value| View { tree: self.tree, value })
    }

    /// All items as sizes or counts; `None` when one is not.
    pub(crate) fn counts(self) -> Option<Vec<u64>> {
        self.iter().map(View::count).collect()
    }
}
