//! Checks the names of tensors, and joins the kind and the name of a tensor into a label such as
//! `exp_avg/lm_head.weight`.
use super::role::TensorRole;

/// Maximum length of a tensor's name in bytes.
const TENSOR_NAME_MAX: usize = 1024;

/// The error that the name of a tensor is empty, longer than 1024 bytes, or has control characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a valid tensor name (1 to {TENSOR_NAME_MAX} bytes, no control characters)")]
pub struct InvalidTensorName {
    /// The first 60 characters of the invalid name.
    pub name: String,
}

/// Fails if a tensor name is empty, longer than [`TENSOR_NAME_MAX`], or has control characters.
pub(crate) fn check_tensor_name(name: &str) -> std::result::Result<(), InvalidTensorName> {
    if name.is_empty() || name.len() > TENSOR_NAME_MAX || name.chars().any(char::is_control) {
        return Err(InvalidTensorName { name: name.chars().take(60).collect() });
    }
    Ok(())
}

/// Returns the label of a tensor for error messages and keys of files, its kind and its name, such
/// as `exp_avg/lm_head.weight`.
pub(crate) fn tensor_label(role: TensorRole, name: &str) -> String {
    format!("{role}/{name}")
}
