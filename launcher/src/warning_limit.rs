//! [`WarningLimit`]: limits how often the user is warned about each network address that connects
//! to this process.
use std::{
    collections::HashMap,
    net::IpAddr,
    time::{Duration, Instant},
};

/// The time after a warning about a network address in which further warnings about this address
/// are omitted.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// The largest number of network addresses for which the time of the last warning is remembered.
const MAX_WARNED_PEERS: usize = 1024;

/// Limits the warnings about a network address to one per [`WARNING_INTERVAL`].
#[derive(Default)]
pub(crate) struct WarningLimit {
    /// The time of the last warning about each address, and the number of warnings since then that
    /// were not printed.
    peers: HashMap<IpAddr, (Instant, u64)>,
}

impl WarningLimit {
    /// Returns how many warnings about the address `peer` were omitted since the last printed one,
    /// or `None` if the next warning must be omitted, too.
    pub(crate) fn admit_warning(&mut self, peer: IpAddr, now: Instant) -> Option<u64> {
        if let Some((last, omitted)) = self.peers.get_mut(&peer) {
            if now.saturating_duration_since(*last) < WARNING_INTERVAL {
                *omitted += 1;
                return None;
            }
            *last = now;
            return Some(std::mem::take(omitted));
        }
        if self.peers.len() >= MAX_WARNED_PEERS {
            self.peers.retain(|_, (last, _)| now.saturating_duration_since(*last) < WARNING_INTERVAL);
        }
        if self.peers.len() >= MAX_WARNED_PEERS {
            return None;
        }
        self.peers.insert(peer, (now, 0));
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_limited_per_address() {
        let mut limit = WarningLimit::default();
        let (began, peer) = (Instant::now(), IpAddr::from([192, 0, 2, 7]));
        let at = |seconds| began + Duration::from_secs(seconds);
        assert_eq!(limit.admit_warning(peer, at(0)), Some(0));
        for second in 1..60 {
            assert_eq!(limit.admit_warning(peer, at(second)), None);
        }
        assert_eq!(limit.admit_warning(IpAddr::from([192, 0, 2, 8]), at(30)), Some(0));
        assert_eq!(limit.admit_warning(peer, at(60)), Some(59));
        assert_eq!(limit.admit_warning(peer, at(121)), Some(0));
        let addresses =
            (0..2 * MAX_WARNED_PEERS as u32).map(|n| IpAddr::from((n + (10 << 24)).to_be_bytes()));
        let printed = addresses.filter(|ip| limit.admit_warning(*ip, at(300)).is_some()).count();
        assert_eq!(printed, MAX_WARNED_PEERS);
        assert_eq!(limit.admit_warning(peer, at(361)), Some(0), "old addresses are forgotten");
    }
}
