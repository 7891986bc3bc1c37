//! Identities of workers and runs, which do not depend on a hostname or an address.
use serde::{Deserialize, Serialize};

/// The global rank of a worker, from 0 to one less than the world size.
pub type Rank = u32;

/// The name of a run, e.g. `20261120-223145-7f3a`. Names sort by time and are unique on a file
/// system.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunId(pub String);

impl std::fmt::Display for RunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
