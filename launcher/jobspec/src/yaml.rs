//! YAML texts: trees of values with the spans that they were read from, and errors about them.
pub(crate) mod document;
pub(crate) mod format;
pub(crate) mod parse;
pub(crate) mod scalar;
pub(crate) mod source_map;
pub(crate) mod text_file;
pub(crate) mod tree;
pub(crate) mod value_error;
