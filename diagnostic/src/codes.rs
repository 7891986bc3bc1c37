//! Declares a code for every kind of error that the product reports, with its category, summary,
//! cause and remedy. There is one module for each area, such as checkpoints.
//!
//! A released code keeps its name. The texts are sentences in plain text, from which
//! `LAUNCH_UPDATE_DOCS=1 cargo test -p diagnostic` generates `docs/errors.md`.
use crate::code::Code;
use serde::{Deserialize, Deserializer, de};

#[macro_use]
mod declaration;

pub mod checkpoint;
pub mod collective;
pub mod command;
pub mod data;
pub mod device;
pub mod host;
pub mod job;
pub mod model;
pub mod run;
pub mod slurm;
pub mod ssh;
pub mod training;

/// All diagnostic codes, grouped by area of the product such as "Slurm" or "Data", in the order of
/// docs/errors.md.
pub(crate) const CODES_BY_AREA: &[(&str, &[Code])] = &[
    ("Command line", command::ALL),
    ("Job file", job::ALL),
    ("Hosts and agents", host::ALL),
    ("SSH", ssh::ALL),
    ("Slurm", slurm::ALL),
    ("Runs and workers", run::ALL),
    ("Data", data::ALL),
    ("Models", model::ALL),
    ("Training", training::ALL),
    ("Checkpoints", checkpoint::ALL),
    ("Devices", device::ALL),
    ("Collectives", collective::ALL),
];

/// Returns an iterator over all diagnostic codes, in the order of docs/errors.md.
pub fn all_codes() -> impl Iterator<Item = Code> {
    CODES_BY_AREA.iter().flat_map(|(_, list)| list.iter().copied())
}

impl Code {
    /// Returns the diagnostic code whose kebab-case name is `name`. Returns `None` if no table
    /// contains such a code.
    pub fn from_name(name: &str) -> Option<Self> {
        all_codes().find(|code| code.name() == name)
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Code::from_name(&name).ok_or_else(|| de::Error::custom(format!("unknown diagnostic code {name:?}")))
    }
}
