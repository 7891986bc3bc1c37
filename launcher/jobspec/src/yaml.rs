//! Reads and writes YAML: job files, and configuration files of other programs. Values are trees
//! with the spans of text that they were read from, so that errors can point at the text.
pub(crate) mod document;
pub(crate) mod format;
pub(crate) mod parse;
pub(crate) mod scalar;
pub(crate) mod source_map;
pub(crate) mod text_file;
pub(crate) mod tree;
pub(crate) mod value_error;
