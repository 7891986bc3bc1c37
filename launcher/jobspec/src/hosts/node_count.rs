//! [`NodeCount`]: the number of nodes on which launch is started.
use super::limits::MAX_HOSTS;
use std::{fmt, str::FromStr};

/// The number of nodes (machines on which the user starts launch) that form one job: exactly `N`,
/// or from `MIN` to `MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeCount {
    /// The smallest number of nodes with which the job can begin.
    pub min: u32,
    /// The largest number of nodes.
    pub max: u32,
}

/// The error for a text that is not a valid number of nodes (machines on which the user starts
/// launch). The message describes the expected form, `N` or `MIN:MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidNodeCount;

impl fmt::Display for InvalidNodeCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected a number from 1 to {MAX_HOSTS}, or a range such as 1:4")
    }
}

impl std::error::Error for InvalidNodeCount {}

impl NodeCount {
    /// Creates the count of exactly `n` nodes.
    pub fn from_exact_count(n: u32) -> NodeCount {
        NodeCount { min: n, max: n }
    }
}

impl FromStr for NodeCount {
    type Err = InvalidNodeCount;

    /// Parses a number of nodes that is written as `N` or `MIN:MAX`.
    fn from_str(text: &str) -> Result<NodeCount, InvalidNodeCount> {
        let (min, max) = text.split_once(':').unwrap_or((text, text));
        let parse = |text: &str| text.trim().parse().ok().filter(|n| (1..=MAX_HOSTS as u32).contains(n));
        match (parse(min), parse(max)) {
            (Some(min), Some(max)) if min <= max => Ok(NodeCount { min, max }),
            _ => Err(InvalidNodeCount),
        }
    }
}
