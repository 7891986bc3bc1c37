//! Calls every parser of untrusted input in the launcher, for fuzz targets and robustness tests.
//! Crate `ckpt` has the parsers of checkpoints.
//!
//! Each function runs one parser and returns the parser's first error. No parser may panic, loop
//! forever, or use more memory than the parser's limits allow.
use jobspec::hosts::{self, HostSlots};
use protocol::{
    control::{FromAgent, FromWorker, ToAgent, ToWorker},
    frame::{self, FrameError, HEADER_BYTES},
};
use serde::{Serialize, de::DeserializeOwned};
use std::error::Error;

/// The result of a parser: success, or its first error.
pub type ParseResult = Result<(), Box<dyn Error + Send + Sync>>;

/// The largest number of lines of a hostfile that are also parsed as host filters.
const MAX_FILTER_LINES: usize = 8;

/// Parses bytes as the stream of a control connection: a sequence of frames, all of one of the four
/// message types. Fails if no message type matches.
pub fn parse_control_stream(bytes: &[u8]) -> ParseResult {
    let parsers = [
        parse_frames::<FromAgent>,
        parse_frames::<ToAgent>,
        parse_frames::<FromWorker>,
        parse_frames::<ToWorker>,
    ];
    // A stream is valid if its frames parse as one of the message types.
    parsers.iter().map(|parse| parse(bytes)).reduce(|one, other| one.or(other)).unwrap_or(Ok(()))
}

/// Parses a sequence of frames of the message type `T`, and encodes each message again.
fn parse_frames<T: Serialize + DeserializeOwned>(mut bytes: &[u8]) -> ParseResult {
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let length = frame::decode_body_length(*header)? as usize;
        let body = rest.get(..length).ok_or(FrameError::Truncated)?;
        frame::encode_frame(&frame::decode_body::<T>(body)?)?;
        bytes = &rest[length..];
    }
    if bytes.is_empty() { Ok(()) } else { Err(FrameError::Truncated.into()) }
}

/// Parses a hostfile, and applies the first lines as host filters of DeepSpeed (include and
/// exclude) to the hosts.
pub fn parse_hostfile(bytes: &[u8]) -> ParseResult {
    let text = str::from_utf8(bytes)?;
    if text.len() > hosts::MAX_HOSTFILE {
        return Err("the hostfile is larger than 4 MiB".into());
    }
    let entries = hosts::parse_hostfile(text).map_err(take_first_error)?;
    let slots = |slots: Option<u32>| slots.map_or(HostSlots::Auto, HostSlots::Count);
    let named: Vec<_> =
        entries.into_iter().map(|entry| (entry.host.name_with_port(), slots(entry.slots))).collect();
    for line in text.lines().take(MAX_FILTER_LINES) {
        for (include, exclude) in [(vec![line.to_owned()], vec![]), (vec![], vec![line.to_owned()])] {
            // A line of a hostfile is rarely a valid filter.
            _ = hosts::filter_hosts(&named, &include, &exclude);
        }
    }
    Ok(())
}

/// Parses an item of `cluster.hosts`, which may have a user, a port and ranges of host numbers.
pub fn parse_host_list(bytes: &[u8]) -> ParseResult {
    hosts::parse_hosts(str::from_utf8(bytes)?)?;
    Ok(())
}

/// Parses the environment variables in which a scheduler describes an allocation. Each line of the
/// input is the value of one variable.
pub fn parse_allocation_variables(bytes: &[u8]) -> ParseResult {
    crate::cluster::parse_allocation_variables(str::from_utf8(bytes)?)?;
    Ok(())
}

/// Loads a job.yaml. Converts a valid job to YAML, loads the YAML as a second job, and panics if
/// the two jobs differ.
pub fn parse_job(bytes: &[u8]) -> ParseResult {
    let load = |text: String| {
        let source = jobspec::JobSource::Text { name: "job.yaml".to_owned(), text };
        jobspec::load_job(source, &[]).map_err(take_first_error)
    };
    let (spec, ..) = load(str::from_utf8(bytes)?.to_owned())?;
    let (again, ..) =
        load(spec.to_yaml()).unwrap_or_else(|error| panic!("a printed job is rejected: {error}"));
    assert_eq!(spec, again, "a printed job differs from the original");
    Ok(())
}

/// Parses requests to the rendezvous store and executes them on an empty store. The files in
/// `tests/corpus` are examples.
pub fn parse_store_requests(bytes: &[u8]) -> ParseResult {
    Ok(crate::rendezvous::serve_untrusted_clients(bytes)?)
}

/// Parses an answer of the kernel about the owner of a socket, which the rendezvous store requests.
pub fn parse_socket_answer(bytes: &[u8]) -> ParseResult {
    crate::rendezvous::parse_socket_answer(bytes, 0)?;
    Ok(())
}

/// Parses the invitation that an agent reads from stdin before the agent connects to its
/// controller.
pub fn parse_invitation(bytes: &[u8]) -> ParseResult {
    crate::connection::handshake::Invitation::read(&mut &bytes[..])?;
    Ok(())
}

/// Parses the bytes of a peer that connects to the port of the agents and does not hold the key: as
/// a handshake, and as encrypted records after a handshake. Panics if the bytes are accepted.
pub fn parse_encrypted_connection(bytes: &[u8]) -> ParseResult {
    Ok(crate::connection::handshake::read_untrusted_connection(bytes)?)
}

/// Returns the first of several errors of a parser.
fn take_first_error<E: Error + Send + Sync + 'static>(errors: Vec<E>) -> Box<dyn Error + Send + Sync> {
    errors.into_iter().next().map_or_else(|| "the parser reported no error".into(), Into::into)
}
