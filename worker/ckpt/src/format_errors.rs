//! Re-exports the error types of the file formats, which [`crate::DamageReason`] and
//! [`crate::SaveProblem`] contain.
pub use crate::catalog::InvalidTensorName;
pub use crate::element_ranges::CoverageError;
pub use crate::formats::dcp::error::DcpError;
pub use crate::formats::deepspeed::error::{DeepSpeedError, LayoutError};
pub use crate::formats::optimizer_state::{InvalidStep, OptimizerStateError};
pub use crate::formats::param_matching::MatchError;
pub use crate::formats::safetensors::SafetensorsError;
pub use crate::formats::torch_error::TorchFileError;
pub use crate::formats::zip::ZipError;
pub use crate::manifest_error::ManifestError;
pub use crate::peft::AdapterConfigError;
pub use crate::pickle::{EncodeError, PickleError};
