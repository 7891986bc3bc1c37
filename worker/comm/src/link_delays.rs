//! [`LinkDelays`]: the longest and shortest time, over a rank's connections to other hosts, for
//! which sent data stayed unacknowledged.
use std::time::Duration;

/// The longest and shortest time, over one rank's connections to other hosts, for which sent data
/// stayed unacknowledged since the previous measurement. Time in which the peer had no space for
/// the data is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkDelays {
    /// The rank to which data was on its way for the longest time.
    pub slowest_peer: usize,
    /// The time for that rank.
    pub slowest: Duration,
    /// The shortest time of a connection on which data was sent.
    pub fastest: Duration,
}
