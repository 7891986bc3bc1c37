//! Conversions (`From`) of texts and library errors to this crate's error types.
use super::adapter_config::AdapterConfigError;
use super::damage::DamageReason;
use super::dcp::DcpError;
use super::manifest::ManifestError;
use super::missing_part::MissingPart;
use super::safetensors::SafetensorsError;
use super::save_problem::SaveProblem;
use super::text::shorten_text;
use super::torch_file::TorchFileError;
use super::unsupported_feature::UnsupportedFeature;
use super::zip::ZipError;
use std::io;

/// A macro that implements `From<S> for T`, with the function `f` as the conversion, for each of
/// its arguments `S => T: f`.
macro_rules! conversions {
    ($($source:ty => $target:ty: $convert:expr;)*) => {
        $(impl From<$source> for $target {
            fn from(source: $source) -> Self {
                let convert: fn($source) -> Self = $convert;
                convert(source)
            }
        })*
    };
}

conversions! {
    String => DamageReason: DamageReason::Inconsistent;
    &str => DamageReason: |detail| DamageReason::Inconsistent(detail.to_owned());
    serde_json::Error => DamageReason: |error| DamageReason::Json(shorten_text(error.to_string()));
    ZipError => DamageReason: |error| DamageReason::TorchFile(error.into());
    String => MissingPart: MissingPart::Other;
    &str => MissingPart: |phrase| MissingPart::Other(phrase.to_owned());
    String => UnsupportedFeature: UnsupportedFeature::Other;
    &str => UnsupportedFeature: |detail| UnsupportedFeature::Other(detail.to_owned());
    String => SaveProblem: SaveProblem::Inconsistent;
    serde_json::Error => SaveProblem: |error| SaveProblem::Json(shorten_text(error.to_string()));
    serde_json::Error => ManifestError: |error| ManifestError::Json(shorten_text(error.to_string()));
    serde_json::Error => AdapterConfigError: |error| AdapterConfigError::Json(shorten_text(error.to_string()));
    io::Error => SafetensorsError: |error| SafetensorsError::Read(error.into());
    io::Error => TorchFileError: |error| TorchFileError::Read(error.into());
    io::Error => ZipError: |error| ZipError::Read(error.into());
}

impl From<TorchFileError> for DamageReason {
    fn from(error: TorchFileError) -> Self {
        match error {
            TorchFileError::CrcMismatch { member } => DamageReason::CrcMismatch { member },
            TorchFileError::Truncated { .. } => DamageReason::Truncated,
            other => DamageReason::TorchFile(other),
        }
    }
}

impl From<DcpError> for DamageReason {
    fn from(error: DcpError) -> Self {
        match error {
            DcpError::Pickle(error) => DamageReason::TorchFile(error.into()),
            other => DamageReason::Dcp(other),
        }
    }
}

impl From<io::Error> for DamageReason {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => DamageReason::Truncated,
            _ => DamageReason::Read(error.into()),
        }
    }
}
