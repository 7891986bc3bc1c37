//! [`LinkDelayMeter`]: measures how long the data that a rank sends over its TCP connections stays
//! unacknowledged.
use crate::LinkDelays;
use std::{net::TcpStream, os::fd::AsRawFd, time::Duration};

/// Maximum number of a rank's TCP connections on which [`LinkDelayMeter`] measures delays, because
/// each measurement takes time. A measurement takes about a microsecond per connection.
const MAX_MEASURED_LINKS: usize = 64;
/// The number of bytes that are read from the start of the kernel's `struct tcp_info`.
const TCP_INFO_BYTES: usize = 184;
/// Byte offset of the number of sent data segments (`tcpi_data_segs_out`) in the kernel's `struct
/// tcp_info` (linux/tcp.h).
const DATA_SEGMENTS_OFFSET: usize = 156;
/// Byte offset of the time with unacknowledged data (`tcpi_busy_time`) in the kernel's `struct
/// tcp_info` (linux/tcp.h).
const BUSY_TIME_OFFSET: usize = 168;
/// Byte offset of the time during which the receiver's window was full (`tcpi_rwnd_limited`) in the
/// kernel's `struct tcp_info` (linux/tcp.h).
const WINDOW_LIMITED_OFFSET: usize = 176;

/// The kernel's counters of one TCP connection: the segments sent so far, and how long sent data
/// stayed unacknowledged in total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LinkCounters {
    /// The number of segments with data that were sent.
    segments: u32,
    /// The time for which sent data was not acknowledged, in microseconds.
    busy_us: u64,
    /// The part of `busy_us` in which the peer had no space for more data, in microseconds.
    window_limited_us: u64,
}

/// Meter that computes from the kernel's TCP counters how long a rank's sent data stayed
/// unacknowledged on each connection since the previous measurement.
#[derive(Debug, Default)]
pub(super) struct LinkDelayMeter {
    /// By rank.
    counters: Vec<LinkCounters>,
}

impl LinkDelayMeter {
    /// Returns the longest and shortest time, over this rank's measured connections, for which sent
    /// data stayed unacknowledged since the previous call. `streams` has the rank and the stream of
    /// each connection. Returns `None` if nothing was sent, or if the kernel does not measure the
    /// time.
    pub(super) fn take_delays<'s>(
        &mut self,
        streams: impl Iterator<Item = (usize, &'s TcpStream)>,
    ) -> Option<LinkDelays> {
        let mut delays: Option<LinkDelays> = None;
        for (peer, stream) in streams.take(MAX_MEASURED_LINKS) {
            let Some(now) = read_counters(stream) else { continue };
            if self.counters.len() <= peer {
                self.counters.resize(peer + 1, LinkCounters::default());
            }
            let before = std::mem::replace(&mut self.counters[peer], now);
            if now.segments == before.segments {
                continue;
            }
            let busy = now.busy_us.saturating_sub(before.busy_us);
            let limited = now.window_limited_us.saturating_sub(before.window_limited_us);
            let delay = Duration::from_micros(busy.saturating_sub(limited));
            let first = LinkDelays { slowest_peer: peer, slowest: delay, fastest: delay };
            let sum = delays.get_or_insert(first);
            sum.fastest = sum.fastest.min(delay);
            if delay > sum.slowest {
                (sum.slowest_peer, sum.slowest) = (peer, delay);
            }
        }
        delays
    }
}

/// Reads the kernel's counters of sent segments and unacknowledged time of a TCP connection.
/// Returns `None` if the kernel does not have them.
fn read_counters(stream: &TcpStream) -> Option<LinkCounters> {
    let mut info = [0u8; TCP_INFO_BYTES];
    let mut length = TCP_INFO_BYTES as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to the buffer, which has this size.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut length,
        )
    };
    if result != 0 || (length as usize) < TCP_INFO_BYTES {
        return None;
    }
    let number = |at: usize| info[at..].first_chunk().map(|bytes| u64::from_ne_bytes(*bytes));
    let segments = info[DATA_SEGMENTS_OFFSET..].first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))?;
    Some(LinkCounters {
        segments,
        busy_us: number(BUSY_TIME_OFFSET)?,
        window_limited_us: number(WINDOW_LIMITED_OFFSET)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        net::TcpListener,
        thread,
    };

    #[test]
    fn only_connections_on_which_data_was_sent_are_measured() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let connect = || {
            let stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
            (stream, listener.accept().expect("a connection").0)
        };
        let [(mut used, mut peer), (idle, _idle_peer)] = [connect(), connect()];
        let mut clock = LinkDelayMeter::default();
        assert_eq!(clock.take_delays([(3, &used), (5, &idle)].into_iter()), None, "nothing was sent");
        let reader = thread::spawn(move || {
            let mut received = vec![0; 1 << 20];
            peer.read_exact(&mut received).expect("received");
            peer
        });
        used.write_all(&vec![7; 1 << 20]).expect("sent");
        let _peer = reader.join().expect("read");
        // Kernels before 4.10 do not measure the time.
        if read_counters(&used).is_some() {
            let delays = clock.take_delays([(3, &used), (5, &idle)].into_iter()).expect("a measurement");
            assert_eq!((delays.slowest_peer, delays.slowest), (3, delays.fastest));
            assert_eq!(
                clock.take_delays([(3, &used), (5, &idle)].into_iter()),
                None,
                "nothing was sent since"
            );
        }
    }
}
