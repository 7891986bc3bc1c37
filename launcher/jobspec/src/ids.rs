//! The types that identify workers and runs: ranks and run names. They do not depend on hostnames
//! and addresses.
use serde::{Deserialize, Serialize};

/// The global rank of a worker, from 0 to one less than the world size.
pub type Rank = u32;

/// The name of a run, such as `20261120-223145-7f3a`. Sorting names sorts runs by time. Two runs on
/// one file system never have the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunId(pub String);

impl std::fmt::Display for RunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
