//! [`PickleTree`]: all values of a parsed pickle, and views through which they are read.
use crate::error::PickleError;
use crate::format_constants::{NAME_BYTES_MAX, PICKLE_DEPTH_MAX};
use crate::tensor::DIMENSIONS_MAX;
use serde_json::{Map, Number, Value as Json};

/// Limit on the number of values that one pickle may push to the stack of the machine that parses
/// it.
pub(crate) const VALUES_MAX: usize = 8 << 20;
/// Limit on the number of values that a pickle may store in its memo for later use.
pub(crate) const MEMO_ENTRIES_MAX: usize = 4 << 20;
/// Limit on the number of values that a reader of a pickle meets if it visits a shared value again
/// for each reference to it. The unit is a value, or 8 bytes of text. The limit bounds the work of
/// every reader that follows the values from the root.
const EXPANDED_VALUES_MAX: usize = 16 << 20;
/// Number of bytes of text that count as one value in the limit [`EXPANDED_VALUES_MAX`].
const TEXT_BYTES_PER_VALUE: u32 = 8;
/// Maximum number of values of a pickle that one conversion to JSON may produce.
const JSON_VALUES_MAX: usize = 100_000;

/// The index of a list, dict or other composite value in a [`PickleTree`]'s array of all composite
/// values.
pub(crate) type NodeIndex = u32;

/// A value in a parsed pickle: a None, bool, integer or float itself, or for other types the index
/// of a [`PickleNode`] with the content.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PickleValue {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Node(NodeIndex),
}

/// A value of a pickle that does not fit into a machine word, such as a list.
#[derive(Debug)]
pub(crate) enum PickleNode {
    /// A text, as a range of the texts of the tree.
    Str(TextRange),
    /// A byte string, whose content is dropped.
    Bytes,
    /// An integer beyond 64 bits, whose value is dropped.
    BigInt,
    List(Vec<PickleValue>),
    Tuple(Vec<PickleValue>),
    Dict(Vec<(PickleValue, PickleValue)>),
    Set(Vec<PickleValue>),
    /// A class or function, as `module.name`.
    Global(&'static str),
    /// The result of calling a class or function.
    Object(Box<PickleCall>),
    /// A reference to data outside of the pickle: in torch files, to a storage.
    Persistent(PickleValue),
}

/// A call of a Python class or function in a pickle, which is only recorded and never executed.
#[derive(Debug)]
pub(crate) struct PickleCall {
    /// The class or function, as `module.name`.
    pub(super) class: &'static str,
    pub(super) args: PickleValue,
    /// The state that the pickle sets on the result of the call, or Python's `None`.
    pub(super) state: PickleValue,
}

/// The byte range of a string within the buffer that holds all texts of a parsed pickle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextRange {
    pub(super) start: u32,
    pub(super) length: u32,
}

impl TextRange {
    /// Returns the part of `texts` that this byte range covers.
    pub(super) fn slice_text(self, texts: &str) -> &str {
        texts.get(self.start as usize..(self.start + self.length) as usize).unwrap_or_default()
    }
}

/// All values of one parsed pickle. Nodes refer to each other by their numbers.
#[derive(Debug)]
pub(crate) struct PickleTree {
    pub(super) nodes: Vec<PickleNode>,
    /// All texts, one after another.
    pub(super) texts: String,
    pub(super) root: PickleValue,
}

impl PickleTree {
    /// Returns the value that was pickled, which contains all other values of the tree.
    pub(crate) fn root_value(&self) -> PickleView<'_> {
        PickleView { tree: self, value: self.root }
    }

    /// Iterates over the persistent ids of the pickle, by which it refers to external data such as
    /// tensor storages.
    pub(crate) fn persistent_ids(&self) -> impl Iterator<Item = PickleView<'_>> {
        self.nodes.iter().filter_map(|node| match node {
            PickleNode::Persistent(value) => Some(PickleView { tree: self, value: *value }),
            _ => None,
        })
    }

    /// Fails if a value of the pickle contains itself, or if the nesting depth or the number of
    /// values, counted with repetitions, exceeds its limit.
    pub(super) fn check_structure(&self) -> Result<(), PickleError> {
        let PickleValue::Node(root) = self.root else { return Ok(()) };
        let mut extents = vec![NodeExtent::Unvisited; self.nodes.len()];
        let mut path: Vec<(NodeIndex, usize)> = vec![(root, 0)];
        extents[root as usize] = NodeExtent::OnPath;
        while let Some((id, next)) = path.last_mut() {
            let id = *id;
            if let Some(child) = self.nodes[id as usize].child(*next) {
                *next += 1;
                let PickleValue::Node(child) = child else { continue };
                match extents[child as usize] {
                    NodeExtent::OnPath => return Err(PickleError::Cycle),
                    NodeExtent::Unvisited if path.len() as u32 >= PICKLE_DEPTH_MAX => {
                        return Err(PickleError::TooDeep);
                    }
                    NodeExtent::Unvisited => {
                        extents[child as usize] = NodeExtent::OnPath;
                        path.push((child, 0));
                    }
                    NodeExtent::Known { height, .. } if path.len() as u32 + height > PICKLE_DEPTH_MAX => {
                        return Err(PickleError::TooDeep);
                    }
                    NodeExtent::Known { .. } => {}
                }
                continue;
            }
            path.pop();
            extents[id as usize] = self.compute_extent(&self.nodes[id as usize], &extents)?;
        }
        Ok(())
    }

    /// Computes the nesting depth and the number of values of a composite value, such as a list, by
    /// adding up the `extents` of its items. Fails if the size exceeds [`EXPANDED_VALUES_MAX`].
    fn compute_extent(&self, node: &PickleNode, extents: &[NodeExtent]) -> Result<NodeExtent, PickleError> {
        let text = match node {
            PickleNode::Str(range) => range.length / TEXT_BYTES_PER_VALUE,
            _ => 0,
        };
        let (mut height, mut size) = (0, 1 + text as usize);
        for child in (0..).map_while(|i| node.child(i)) {
            let inner = match child {
                PickleValue::Node(n) => extents[n as usize],
                _ => NodeExtent::Known { height: 0, size: 1 },
            };
            if let NodeExtent::Known { height: h, size: s } = inner {
                (height, size) = (height.max(h), size + s as usize);
            }
            if size > EXPANDED_VALUES_MAX {
                let what = "values, counting each use of a shared one";
                return Err(PickleError::Limit { what, limit: EXPANDED_VALUES_MAX });
            }
        }
        Ok(NodeExtent::Known { height: height + 1, size: size as u32 })
    }
}

/// What [`PickleTree::check_structure`] knows about a composite value: not visited yet, being
/// visited, or its nesting depth and number of values.
#[derive(Clone, Copy)]
enum NodeExtent {
    Unvisited,
    /// Not known yet: the node is on the path from the root to the node that is being visited.
    OnPath,
    /// All values in the node were visited.
    Known {
        /// Number of nodes on the longest path downwards.
        height: u32,
        /// Size of the value, in the unit of [`EXPANDED_VALUES_MAX`].
        size: u32,
    },
}

impl PickleNode {
    /// Returns item number `i` of a composite value, such as a list, where the keys and values of a
    /// dict count as alternating items.
    fn child(&self, i: usize) -> Option<PickleValue> {
        match self {
            PickleNode::Str(_) | PickleNode::Bytes | PickleNode::BigInt | PickleNode::Global(_) => None,
            PickleNode::List(v) | PickleNode::Tuple(v) | PickleNode::Set(v) => v.get(i).copied(),
            PickleNode::Dict(v) => v.get(i / 2).map(|&(key, value)| if i & 1 == 0 { key } else { value }),
            PickleNode::Object(call) => [call.args, call.state].get(i).copied(),
            PickleNode::Persistent(v) => (i == 0).then_some(*v),
        }
    }
}

/// A view of one value of a parsed pickle, through which the value and the values in it are read.
/// Accessors return `None` if the value has another type.
#[derive(Clone, Copy)]
pub(crate) struct PickleView<'t> {
    tree: &'t PickleTree,
    pub(super) value: PickleValue,
}

impl<'t> PickleView<'t> {
    /// Returns a view of another value of the pickle, `value`, such as an item of the list that
    /// this view shows.
    pub(super) fn with_value(self, value: PickleValue) -> PickleView<'t> {
        PickleView { value, ..self }
    }

    /// Returns the node of the tree to which the value refers, or `None` if the value itself fits
    /// into a machine word.
    pub(super) fn node(self) -> Option<&'t PickleNode> {
        match self.value {
            PickleValue::Node(id) => self.tree.nodes.get(id as usize),
            _ => None,
        }
    }

    /// Returns true if the value is Python's `None`.
    pub(crate) fn is_none(self) -> bool {
        self.value == PickleValue::None
    }

    /// Returns the value as an integer, or `None` if the value is not an integer of 64 bits.
    pub(crate) fn as_int(self) -> Option<i64> {
        match self.value {
            PickleValue::Int(i) => Some(i),
            _ => None,
        }
    }

    /// Returns the value as a float, or `None` for other types. Integers are not converted.
    pub(crate) fn as_float(self) -> Option<f64> {
        match self.value {
            PickleValue::Float(f) => Some(f),
            _ => None,
        }
    }

    /// Returns the value as a size, count or index, or `None` if the value is not a non-negative
    /// integer.
    pub(crate) fn as_count(self) -> Option<u64> {
        self.as_int().and_then(|i| u64::try_from(i).ok())
    }

    /// Returns the text of a `str`, or `None` for other types.
    pub(crate) fn as_str(self) -> Option<&'t str> {
        match self.node()? {
            PickleNode::Str(range) => Some(range.slice_text(&self.tree.texts)),
            _ => None,
        }
    }

    /// Returns the text of a `str` that is short enough for a name, at most [`NAME_BYTES_MAX`]
    /// bytes. Returns `None` for longer texts and other types.
    pub(crate) fn as_short_str(self) -> Option<&'t str> {
        self.as_str().filter(|text| text.len() <= NAME_BYTES_MAX)
    }

    /// Returns the name (`module.name`) of a pickled Python class or function, or `None` for other
    /// types.
    pub(crate) fn as_global(self) -> Option<&'static str> {
        match self.node()? {
            PickleNode::Global(name) => Some(name),
            _ => None,
        }
    }

    /// Returns the id by which the pickle refers to data outside of it, such as a tensor storage,
    /// or `None` for other types. In torch files, the id describes a storage.
    pub(crate) fn as_persistent_id(self) -> Option<PickleView<'t>> {
        match self.node()? {
            PickleNode::Persistent(v) => Some(self.with_value(*v)),
            _ => None,
        }
    }

    /// Returns the items of a list or tuple, or `None` for other types.
    pub(crate) fn as_items(self) -> Option<PickleItems<'t>> {
        match self.node()? {
            PickleNode::List(values) | PickleNode::Tuple(values) => {
                Some(PickleItems { tree: self.tree, values })
            }
            _ => None,
        }
    }

    /// Iterates over the keys and values of a dict in insertion order. Returns `None` for other
    /// types.
    pub(crate) fn as_pairs(self) -> Option<impl Iterator<Item = (PickleView<'t>, PickleView<'t>)>> {
        match self.node()? {
            PickleNode::Dict(pairs) => {
                Some(pairs.iter().map(move |&(k, v)| (self.with_value(k), self.with_value(v))))
            }
            _ => None,
        }
    }

    /// Returns the value of the string key `key` of a dict, or `None` if the key is missing or the
    /// value is not a dict. The last of several equal keys wins, as in Python.
    pub(crate) fn get(self, key: &str) -> Option<PickleView<'t>> {
        match self.node()? {
            PickleNode::Dict(p) => p
                .iter()
                .rev()
                .find(|(k, _)| self.with_value(*k).as_str() == Some(key))
                .map(|&(_, v)| self.with_value(v)),
            _ => None,
        }
    }

    /// Returns the class or function, the arguments and the state of an object in the pickle, or
    /// `None` for a value of another kind.
    pub(crate) fn as_object(self) -> Option<(&'static str, PickleView<'t>, PickleView<'t>)> {
        match self.node()? {
            PickleNode::Object(call) => {
                Some((call.class, self.with_value(call.args), self.with_value(call.state)))
            }
            _ => None,
        }
    }

    /// Converts the value to JSON, for display. Objects become the name of their class. After
    /// [`JSON_VALUES_MAX`] values, the rest becomes null or is left out.
    pub(crate) fn to_json(self) -> Json {
        let mut left = JSON_VALUES_MAX;
        self.to_json_limited(&mut left)
    }

    /// Converts a Python dict to a JSON object, and leaves out the entry with the key `skipped`.
    /// Subtracts the number of converted values from `left`. Returns `None` for other types, and
    /// for a dict of `left` or more values.
    pub(crate) fn to_json_map(self, skipped: &str, left: &mut usize) -> Option<Map<String, Json>> {
        let mut map = Map::new();
        for (key, value) in self.as_pairs()?.filter(|(key, _)| key.as_str() != Some(skipped)) {
            map.insert(key.to_json_key(), value.to_json_limited(left));
            (*left > 0).then_some(())?;
        }
        Some(map)
    }

    /// Converts the key of a dict to text, because keys of JSON objects are strings.
    pub(super) fn to_json_key(self) -> String {
        match self.as_str() {
            Some(text) => text.to_owned(),
            None => self.to_json_limited(&mut 1).to_string(),
        }
    }

    /// Converts the value to JSON, up to `left` values, and subtracts the number of converted
    /// values from `left`. Values beyond `left` become null or are left out.
    pub(crate) fn to_json_limited(self, left: &mut usize) -> Json {
        if *left == 0 {
            return Json::Null;
        }
        *left -= 1;
        match (self.value, self.node()) {
            (PickleValue::Bool(b), _) => b.into(),
            (PickleValue::Int(i), _) => i.into(),
            (PickleValue::Float(f), _) => {
                Number::from_f64(f).map_or_else(|| f.to_string().into(), Json::Number)
            }
            (_, Some(PickleNode::Str(range))) => range.slice_text(&self.tree.texts).into(),
            (_, Some(PickleNode::List(v) | PickleNode::Tuple(v) | PickleNode::Set(v))) => v
                .iter()
                .map_while(|&v| (*left > 0).then(|| self.with_value(v).to_json_limited(left)))
                .collect(),
            (_, Some(PickleNode::Dict(pairs))) => {
                let pair = |&(k, v): &(PickleValue, PickleValue)| {
                    let (key, value) = (self.with_value(k), self.with_value(v));
                    (*left > 0).then(|| (key.to_json_key(), value.to_json_limited(left)))
                };
                Json::Object(pairs.iter().map_while(pair).collect::<Map<_, _>>())
            }
            (_, Some(PickleNode::Global(class))) => Json::String((*class).into()),
            (_, Some(PickleNode::Object(call))) => Json::String(call.class.into()),
            _ => Json::Null,
        }
    }
}

/// The items of a list or tuple in a parsed pickle.
#[derive(Clone, Copy)]
pub(crate) struct PickleItems<'t> {
    tree: &'t PickleTree,
    values: &'t [PickleValue],
}

impl<'t> PickleItems<'t> {
    /// Returns the item with index `i`, or `None` if there are fewer items.
    pub(crate) fn get(self, i: usize) -> Option<PickleView<'t>> {
        self.values.get(i).map(|&value| PickleView { tree: self.tree, value })
    }

    /// Returns the number of items.
    pub(crate) fn len(self) -> usize {
        self.values.len()
    }

    /// Iterates over the items in order.
    pub(crate) fn iter(self) -> impl Iterator<Item = PickleView<'t>> {
        self.values.iter().map(move |&value| PickleView { tree: self.tree, value })
    }

    /// Returns all items as non-negative integers (sizes or counts), or `None` if one of them is
    /// not such a number.
    pub(crate) fn to_counts(self) -> Option<Vec<u64>> {
        self.iter().map(PickleView::as_count).collect()
    }
}

/// Returns the sizes of the dimensions in a `torch.Size`, list or tuple. Returns `None` for other
/// values, and for more than [`DIMENSIONS_MAX`] sizes.
pub(crate) fn parse_shape(value: PickleView<'_>) -> Option<Vec<u64>> {
    let sizes = match value.as_object() {
        Some(("torch.Size", args, _)) => args.as_items()?.get(0)?.as_items()?,
        Some(_) => return None,
        None => value.as_items()?,
    };
    sizes.get(DIMENSIONS_MAX).is_none().then(|| sizes.to_counts()).flatten()
}
