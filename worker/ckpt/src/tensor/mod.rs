//! Describes tensors in files: dtypes, roles, names, shapes and ranges of elements.
mod dtype;
pub(crate) mod element_ranges;
mod name;
mod role;
mod shape;

pub use dtype::Dtype;
pub use element_ranges::CoverageError;
pub use name::InvalidTensorName;
pub(crate) use name::{check_tensor_name, tensor_label};
pub use role::TensorRole;
pub(crate) use shape::{DIMENSIONS_MAX, count_elements, deserialize_shape};
