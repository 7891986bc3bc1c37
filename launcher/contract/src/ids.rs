//! Identities used on both sides. A rank is a number, a run is a name; neither is ever a hostname or an address.
use serde::{Deserialize, Serialize};

/// Global rank of a worker, `0..world`.
pub type Rank = u32;

/// Name of one run of a job, e.g. `20261120-223145-7f3a`: sorts by time, unique on one file system.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunId(pub String);

impl std::fmt::Display for RunId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
