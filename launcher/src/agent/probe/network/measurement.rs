//! [`measure_connection`]: measures a network connection to another agent, as the side that opens
//! the TCP connections.
use super::{
    measurement_server::{
        FIRST_DATA_TIMEOUT, TRANSFER_REPORT_BYTES, TransferReport, receive_data, send_data,
    },
    measuring_connection::{
        MeasureCommand, MeasurementEndpoint, open_connection, read_retransmits_and_segment_size,
    },
};
use diagnostic::{Diagnostic, codes::host};
use protocol::network_probe::{
    MAX_MEASURED_PORTS, MAX_STREAMS, MAX_TRANSFER_MS, MeasureRequest, Measurement, Transfer,
};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// The largest number of round trips that are measured between two agents; the shortest one is
/// reported.
const MAX_ROUND_TRIPS: usize = 20;
/// The time after which a measurement of round trips to another agent starts no further round trip.
const ROUND_TRIPS_TIME_LIMIT: Duration = Duration::from_millis(300);
/// The longest permitted timeout for opening a connection for measurements (`launch check
/// --network`). A longer limit in a request is reduced to this value.
const MAX_CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an agent waits for the other agent's report about the bytes that arrived, after the end
/// of a measured transfer.
const TRANSFER_REPORT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long an agent continues to read data that still arrive after the end of a measured transfer.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// The duration of a test transfer with small TCP segments, which shows whether small packets
/// arrive if large ones do not.
const SMALL_SEGMENT_TEST_TIME: Duration = Duration::from_millis(50);

/// Connects to all addresses of another agent in `request`, and measures round trips and throughput
/// over the first address that is reachable. Errors are part of the result.
pub(super) fn measure_connection(end: &MeasurementEndpoint, request: &MeasureRequest) -> Measurement {
    let timeout = Duration::from_millis(request.timeout_ms).min(MAX_CONNECTION_TIMEOUT);
    let open = |address: &SocketAddr| {
        let began = Instant::now();
        let stream = open_connection(end, *address, timeout, false)?;
        Ok((stream, began.elapsed().as_secs_f64() * 1e3))
    };
    let addresses: Vec<SocketAddr> = request.addresses.iter().copied().take(MAX_MEASURED_PORTS).collect();
    let opened: Vec<io::Result<(TcpStream, f64)>> = thread::scope(|scope| {
        let threads: Vec<_> = addresses.iter().map(|address| scope.spawn(move || open(address))).collect();
        let panicked = |_| Err(io::Error::other("the probe panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let mut found = Measurement::default();
    let mut first = None;
    for (address, result) in addresses.iter().zip(opened) {
        found.connections.push(match result {
            Ok((stream, ms)) => {
                first.get_or_insert((*address, stream));
                Ok(ms)
            }
            Err(error) => Err(build_connect_error(*address, &error)),
        });
    }
    let Some((address, stream)) = first else { return found };
    found.round_trip_ms = measure_round_trip(stream, timeout).ok();
    let time = Duration::from_millis(request.transfer_ms.min(MAX_TRANSFER_MS));
    if !time.is_zero() {
        let streams = request.streams.clamp(1, MAX_STREAMS) as usize;
        let open = |small| open_connection(end, address, timeout, small);
        found.sent = Some(measure_throughput(streams, time, open, &send_to_peer));
        found.received = Some(measure_throughput(streams, time, open, &receive_from_peer));
    }
    found
}

/// Builds the error that no TCP connection to another agent at `address` is possible.
fn build_connect_error(address: SocketAddr, error: &io::Error) -> Diagnostic {
    Diagnostic::error(host::PEER_UNREACHABLE, format!("cannot connect to {address}: {error}"))
        .with_field("address", address.to_string())
}

/// Measures several round trips of one byte to another agent, and returns the shortest in
/// milliseconds.
fn measure_round_trip(mut stream: TcpStream, timeout: Duration) -> io::Result<f64> {
    stream.set_read_timeout(Some(timeout))?;
    MeasureCommand::Echo.write(&mut stream)?;
    let (began, mut shortest) = (Instant::now(), f64::INFINITY);
    for number in 0..MAX_ROUND_TRIPS {
        let sent = Instant::now();
        stream.write_all(&[number as u8])?;
        stream.read_exact(&mut [0])?;
        shortest = shortest.min(sent.elapsed().as_secs_f64() * 1e3);
        if began.elapsed() > ROUND_TRIPS_TIME_LIMIT {
            break;
        }
    }
    Ok(shortest)
}

/// Measures the throughput from this host to another agent's host, or in the other direction, over
/// `streams` TCP connections at the same time. If no data arrive, repeats the transfer with small
/// segments. `transfer` transfers data over one connection for a time.
fn measure_throughput(
    streams: usize,
    time: Duration,
    open: impl Fn(bool) -> io::Result<TcpStream> + Sync,
    transfer: &(dyn Fn(TcpStream, Duration) -> io::Result<Transfer> + Sync),
) -> Transfer {
    let run = |small: bool, time: Duration| open(small).and_then(|stream| transfer(stream, time));
    let results: Vec<io::Result<Transfer>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..streams).map(|_| scope.spawn(|| run(false, time))).collect();
        let panicked = |_| Err(io::Error::other("the probe panicked"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let add = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
    let mut sum = Transfer { retransmits: Some(0), segments: Some(0), ..Transfer::default() };
    for result in results {
        let part = result.unwrap_or_default();
        sum.bytes += part.bytes;
        sum.seconds = sum.seconds.max(part.seconds);
        sum.retransmits = add(sum.retransmits, part.retransmits);
        sum.segments = add(sum.segments, part.segments);
    }
    if sum.bytes == 0 {
        let small = run(true, SMALL_SEGMENT_TEST_TIME.min(time));
        sum.small_segments_arrive = Some(small.is_ok_and(|transfer| transfer.bytes > 0));
    }
    sum
}

/// Sends data to another agent for about the time `time` to measure throughput, and returns how
/// many bytes have arrived according to that agent.
fn send_to_peer(mut stream: TcpStream, time: Duration) -> io::Result<Transfer> {
    MeasureCommand::Receive(time.as_millis() as u64).write(&mut stream)?;
    stream.set_read_timeout(Some(FIRST_DATA_TIMEOUT + time + TRANSFER_REPORT_TIMEOUT))?;
    let is_done = AtomicBool::new(false);
    let mut writer = stream.try_clone()?;
    let trailer = thread::scope(|scope| {
        scope.spawn(|| send_data(&mut writer, &is_done));
        let trailer = TransferReport::read(&mut stream);
        is_done.store(true, Ordering::Relaxed);
        // Also ends a write that waits for the other side.
        let retransmits = read_retransmits_and_segment_size(&stream);
        _ = stream.shutdown(Shutdown::Both);
        trailer.map(|trailer| (trailer, retransmits))
    });
    let (TransferReport { bytes, nanoseconds, .. }, retransmits) = trailer?;
    let segments = retransmits.map(|(_, size)| bytes / size + 1);
    Ok(Transfer {
        bytes,
        seconds: nanoseconds as f64 / 1e9,
        retransmits: retransmits.map(|(count, _)| count),
        segments,
        small_segments_arrive: None,
    })
}

/// Measures the throughput from another agent to this one by receiving data for about the time
/// `time`, and returns bytes, seconds and retransmits.
fn receive_from_peer(mut stream: TcpStream, time: Duration) -> io::Result<Transfer> {
    MeasureCommand::Send(time.as_millis() as u64).write(&mut stream)?;
    let (bytes, elapsed) = receive_data(&mut stream, time)?;
    let mut found = Transfer { bytes, seconds: elapsed.as_secs_f64(), ..Transfer::default() };
    stream.shutdown(Shutdown::Write)?;
    if let Some(trailer) = drain_and_read_report(&mut stream) {
        found.retransmits = Some(trailer.retransmits);
        found.segments = Some(bytes / trailer.segment_bytes.max(1) + 1);
    }
    Ok(found)
}

/// Reads the data that still arrive after a measured transfer, and returns the report
/// ([`TransferReport`]) that follows the data. Returns `None` if the end does not arrive within
/// [`DRAIN_TIMEOUT`].
fn drain_and_read_report(stream: &mut TcpStream) -> Option<TransferReport> {
    let deadline = Instant::now() + DRAIN_TIMEOUT;
    let mut buffer = vec![0; 256 << 10];
    let mut tail: Vec<u8> = Vec::new();
    loop {
        let rest = deadline.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())?;
        stream.set_read_timeout(Some(rest)).ok()?;
        match stream.read(&mut buffer).ok()? {
            0 => return TransferReport::parse(tail.get(tail.len().checked_sub(TRANSFER_REPORT_BYTES)?..)?),
            count => {
                tail.extend_from_slice(&buffer[count.saturating_sub(TRANSFER_REPORT_BYTES)..count]);
                tail.drain(..tail.len().saturating_sub(TRANSFER_REPORT_BYTES));
            }
        }
    }
}
