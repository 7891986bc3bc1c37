//! Describes tensors in checkpoint files: element types, names, shapes, ranges of elements, and
//! whether a tensor is a weight or an optimizer state.
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
