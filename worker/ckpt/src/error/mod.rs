//! The error types of this crate, in particular [`CkptError`].
//!
//! Every error has a stable code ([`CkptError::code`]). Callers of this crate convert an error to a
//! [`diagnostic::Diagnostic`], which has the message, structured fields, and advice as help texts.
mod adapter_config;
mod ckpt_error;
mod cloneable_io_error;
mod conversions;
mod convert;
mod damage;
mod dcp;
mod deepspeed;
mod diagnosis;
mod diagnostic_conversion;
mod manifest;
mod missing_part;
mod optimizer_state;
mod options;
mod param_matching;
mod pickle;
mod placeholder;
mod rng_files;
mod safetensors;
mod save_problem;
mod text;
mod torch_file;
mod unsupported_feature;
mod zip;

pub use adapter_config::AdapterConfigError;
pub use ckpt_error::{CkptError, Result};
pub use cloneable_io_error::CloneableIoError;
pub use convert::ConvertError;
pub use damage::{Damage, DamageReason};
pub use dcp::DcpError;
pub use deepspeed::{DeepSpeedError, LayoutError};
pub use diagnosis::Diagnosis;
pub use manifest::ManifestError;
pub use missing_part::{MissingPart, RemoteShard};
pub use optimizer_state::{InvalidStep, OptimizerStateError};
pub use options::{OptionProblem, OutputProblem};
pub use param_matching::MatchError;
pub use pickle::{EncodeError, PickleError};
pub use placeholder::PlaceholderFile;
pub use rng_files::{ReconcileError, RescaleError, RngFilesError, RngStateError};
pub use safetensors::SafetensorsError;
pub use save_problem::SaveProblem;
pub(crate) use text::{RANKS_LISTED_MAX, format_names, shorten_text};
pub use torch_file::TorchFileError;
pub use unsupported_feature::UnsupportedFeature;
pub use zip::ZipError;

pub use crate::tensor::{CoverageError, InvalidTensorName};
