//! Reads and writes the pickles in torch files. Reading executes no Python code.
//!
//! The caller lists the classes and functions that a pickle may name. Any other name is rejected.
//! The result is a tree of plain values in which dicts keep their order. Shared values stay shared,
//! so that a small file cannot expand into a large tree. A value that contains itself is rejected.
mod machine;
mod object;
mod plain;
#[cfg(test)]
mod tests;
mod tree;
mod write;

pub(crate) use machine::{parse_first_pickle, parse_pickle};
pub use object::PythonObject;
pub(crate) use object::StoredTensor;
pub use plain::parse_plain_pickle;
pub(crate) use tree::{PickleItems, PickleTree, PickleView, parse_shape};
pub(crate) use write::{encode_pickle, torch_storage_class};
