//! [`LinkDelays`]: how long the data that a rank sent to other hosts stayed unacknowledged.
use std::time::Duration;

/// How long the data that a rank sent to other hosts stayed unacknowledged since the previous
/// measurement, on the slowest and on the fastest connection. Time in which the peer had no space
/// for the data is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkDelays {
    /// The rank to which data was on its way for the longest time.
    pub slowest_peer: usize,
    /// The time for that rank.
    pub slowest: Duration,
    /// The shortest time of a connection on which data was sent.
    pub fastest: Duration,
}
