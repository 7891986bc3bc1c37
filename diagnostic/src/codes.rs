//! Every code of the product, by area, each with its category, summary, cause and remedy.
//!
//! A code that is released keeps its name. Texts are sentences in plain text; `docs/errors.md` is
//! generated from them (`LAUNCH_UPDATE_DOCS=1 cargo test -p diagnostic`).
use crate::Code;

/// Declares codes as constants, and the list `ALL` of them.
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
        /// Every code of this area.
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
pub mod training;

/// The areas in the order of docs/errors.md, each with its title.
pub(crate) const AREAS: &[(&str, &[Code])] = &[
    ("Command line", command::ALL),
    ("Job file", job::ALL),
    ("Hosts and transports", host::ALL),
    ("Runs and workers", run::ALL),
    ("Data", data::ALL),
    ("Models", model::ALL),
    ("Training", training::ALL),
    ("Checkpoints", checkpoint::ALL),
    ("Devices", device::ALL),
    ("Collectives", collective::ALL),
];

/// Every code, area by area.
pub fn all_codes() -> impl Iterator<Item = Code> {
    AREAS.iter().flat_map(|(_, list)| list.iter().copied())
}
