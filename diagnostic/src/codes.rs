//! Declares every code of the product, by area, each with its category, summary, cause and remedy.
//!
//! A released code keeps its name. The texts are sentences in plain text, from which
//! `LAUNCH_UPDATE_DOCS=1 cargo test -p diagnostic` generates `docs/errors.md`.
use crate::Code;

/// Declares the codes of one area: a constant for each code, and the list `ALL` of these codes.
macro_rules! codes {
    ($($constant:ident: $category:ident = $name:literal {
        summary: $summary:literal, cause: $cause:literal, remedy: $remedy:literal $(,)?
    })*) => {
        $(
            #[doc = $summary]
            pub const $constant: $crate::Code = $crate::Code::new(&$crate::CodeInfo {
                name: $name,
                category: $crate::Category::$category,
                summary: $summary,
                cause: $cause,
                remedy: $remedy,
            });
        )*
        /// The codes that this module declares, in the order of docs/errors.md.
        pub(crate) const ALL: &[$crate::Code] = &[$($constant),*];
    };
}

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

/// The title and the codes of each area, in the order of docs/errors.md.
pub(crate) const AREAS: &[(&str, &[Code])] = &[
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

/// Returns an iterator over every code, in the order of docs/errors.md.
pub fn all_codes() -> impl Iterator<Item = Code> {
    AREAS.iter().flat_map(|(_, list)| list.iter().copied())
}
