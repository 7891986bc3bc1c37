//! Calls every parser of untrusted input in the launcher, for fuzz targets and robustness tests.
//! Crate `ckpt` has the parsers of checkpoints.
//!
//! Each function runs one parser and returns the parser's first error. No parser may panic, loop
//! forever, or use more memory than the parser's limits allow.
use crate::{
    connection::tree::{LinkId, TreeFrame, TreeRouter},
    import::{self, ImportOptions, ImportedJob},
};
use jobspec::{
    Document, DocumentSyntax, JobSource,
    hosts::{self, HostSlots},
};
use protocol::{
    control::{ExitStatus, FromAgent, FromWorker, HostInventory, PROTOCOL_VERSION, ToAgent, ToWorker},
    event::{EventSchema, TimedEvent},
    frame::{self, FrameError, HEADER_BYTES},
};
use serde::{Serialize, de::DeserializeOwned};
use std::error::Error;

/// The result of parsing untrusted input: success, or the first error.
pub type ParseResult = Result<(), Box<dyn Error + Send + Sync>>;

/// The number of lines at the start of an untrusted hostfile that are also parsed as DeepSpeed's
/// host filters (`--include`, `--exclude`).
const MAX_FILTER_LINES: usize = 8;

/// Parses untrusted bytes as messages from or to an agent, and as messages from or to a worker, and
/// fails if no parser accepts them. Fails if the bytes do not match any of the four message types.
pub fn parse_control_stream(bytes: &[u8]) -> ParseResult {
    let parsers: [fn(&[u8]) -> ParseResult; 4] = [
        |bytes| parse_frames(bytes, |_: FromAgent| ()),
        |bytes| parse_frames(bytes, |_: ToAgent| ()),
        |bytes| parse_frames(bytes, |_: FromWorker| ()),
        |bytes| parse_frames(bytes, |_: ToWorker| ()),
    ];
    // A stream is valid if its frames parse as one of the message types.
    parsers.iter().map(|parse| parse(bytes)).reduce(|one, other| one.or(other)).unwrap_or(Ok(()))
}

/// Parses untrusted bytes as messages between agents, and lets the message routers of a controller
/// and of an agent process each message.
pub fn parse_tree_frames(bytes: &[u8]) -> ParseResult {
    /// The numbers of the two simulated connections between agents from which the message routers
    /// receive the untrusted messages.
    const LINK_IDS: [LinkId; 2] = [1, 2];
    let mut controller = TreeRouter::new_controller();
    controller.open_stream(1);
    let mut agent = TreeRouter::new_agent(1);
    agent.set_uplink(LINK_IDS[0]);
    parse_frames(bytes, |frame: TreeFrame| {
        for link in LINK_IDS {
            controller.process_child_frame(link, frame.clone());
        }
        agent.process_child_frame(LINK_IDS[1], frame.clone());
        agent.process_uplink_frame(frame);
        drop((controller.take_actions(), agent.take_actions()));
    })
}

/// Creates valid messages of an agent, of a controller and of the tree of agents, from which
/// fuzzing of the message parsers starts. They are not files, because they change with the
/// messages.
pub fn create_control_streams() -> [(&'static str, Vec<u8>); 3] {
    let inventory = HostInventory { host: "n1".into(), cpus: vec![0, 1], ..HostInventory::default() };
    let exited = FromAgent::Exited {
        attempt: 0,
        rank: 1,
        pid: 2,
        status: ExitStatus::Signal(11, true),
        oom: false,
        tail: vec!["last".into()],
        error: None,
        gpu: None,
        timeout: None,
        lost_connection: None,
    };
    let agent = [
        FromAgent::Hello { version: PROTOCOL_VERSION, pid: 77, stream: 5, inventory },
        exited,
        FromAgent::Heartbeat,
    ];
    let reason = "a peer failed".into();
    let kill = ToAgent::Kill { attempt: 0, reason, grace_ms: 5, stacks: false, leave_ms: Some(7) };
    let controller = [ToAgent::Hello { version: PROTOCOL_VERSION, terms: None }, kill, ToAgent::Heartbeat];
    [
        ("agent.control", encode_frames(&agent)),
        ("controller.control", encode_frames(&controller)),
        ("neighbour.tree", encode_frames(&TreeFrame::build_test_frames())),
    ]
}

/// Encodes messages in the format of the connection between controller and agent, in which the
/// length precedes each message. Leaves out messages that are too long.
fn encode_frames(messages: &[impl Serialize]) -> Vec<u8> {
    messages.iter().filter_map(|message| frame::encode_frame(message).ok()).flatten().collect()
}

/// Parses untrusted bytes as messages of the type `T`, each after its length, and passes every
/// message to the function `receive`.
fn parse_frames<T: Serialize + DeserializeOwned>(
    mut bytes: &[u8],
    mut receive: impl FnMut(T),
) -> ParseResult {
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() {
        let length = frame::decode_body_length(*header)? as usize;
        let body = rest.get(..length).ok_or(FrameError::Truncated)?;
        let message = frame::decode_body::<T>(body)?;
        frame::encode_frame(&message)?;
        receive(message);
        bytes = &rest[length..];
    }
    if bytes.is_empty() { Ok(()) } else { Err(FrameError::Truncated.into()) }
}

/// Parses untrusted text as a hostfile, and also tries its first lines as DeepSpeed's host filters
/// (`--include` and `--exclude`).
pub fn parse_hostfile(bytes: &[u8]) -> ParseResult {
    let text = str::from_utf8(bytes)?;
    if text.len() > hosts::MAX_HOSTFILE_BYTES {
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

/// Parses untrusted text as an item of the job.yaml key `cluster.hosts`, such as a host name with a
/// user, a port and a range of numbers.
pub fn parse_host_list(bytes: &[u8]) -> ParseResult {
    hosts::parse_hosts(str::from_utf8(bytes)?)?;
    Ok(())
}

/// Parses untrusted text as the environment variables in which a scheduler such as Slurm describes
/// an allocation. Each line of the input is the value of one variable.
pub fn parse_allocation_variables(bytes: &[u8]) -> ParseResult {
    crate::cluster::parse_allocation_variables(str::from_utf8(bytes)?)?;
    Ok(())
}

/// Loads untrusted text as a job.yaml. Converts a valid job to YAML, loads the YAML as a second
/// job, and panics if the two jobs differ.
pub fn parse_job(bytes: &[u8]) -> ParseResult {
    let load = |text: String| {
        let source = JobSource::Text { name: "job.yaml".to_owned(), text };
        jobspec::load_job(source, &[]).map_err(take_first_error)
    };
    let (spec, ..) = load(str::from_utf8(bytes)?.to_owned())?;
    let (again, ..) =
        load(spec.to_yaml()).unwrap_or_else(|error| panic!("a printed job is rejected: {error}"));
    assert_eq!(spec, again, "a printed job differs from the original");
    Ok(())
}

/// Parses untrusted bytes as requests to the rendezvous store (launch's server for torch's
/// `TCPStore` clients), and executes them on an empty store. The files in `tests/corpus` are
/// examples.
pub fn parse_store_requests(bytes: &[u8]) -> ParseResult {
    Ok(crate::rendezvous::serve_untrusted_clients(bytes)?)
}

/// Converts untrusted text as a configuration of Accelerate to a job.yaml, and checks that launch
/// accepts the job.yaml.
pub fn parse_accelerate_config(bytes: &[u8]) -> ParseResult {
    let document = Document::parse("config.yaml", str::from_utf8(bytes)?, DocumentSyntax::Yaml)?;
    let converted = import::convert_accelerate_config(&document, &ImportOptions::default());
    expect_valid_imported_job(converted.map_err(take_first_error)?)
}

/// Converts untrusted text as a configuration of DeepSpeed to a job.yaml, and checks that launch
/// accepts the job.yaml.
pub fn parse_deepspeed_config(bytes: &[u8]) -> ParseResult {
    let document = Document::parse("config.json", str::from_utf8(bytes)?, DocumentSyntax::Json)?;
    let converted = import::convert_deepspeed_config(&document, None, &ImportOptions::default());
    expect_valid_imported_job(converted.map_err(take_first_error)?)
}

/// Loads the job.yaml to which a configuration of Accelerate or DeepSpeed was converted, and panics
/// if launch rejects it.
fn expect_valid_imported_job(imported: ImportedJob) -> ParseResult {
    let source = JobSource::Text { name: "job.yaml".to_owned(), text: imported.job };
    match jobspec::load_job(source, &[]) {
        Ok(_) => Ok(()),
        Err(errors) => panic!("an imported job is rejected: {errors:?}"),
    }
}

/// Parses untrusted text as a `run.json`, the file in a run directory that describes the run and
/// its controller.
pub fn parse_run_record(bytes: &[u8]) -> ParseResult {
    match crate::runs::parse_run_record(bytes) {
        Some(_) => Ok(()),
        None => Err("not a record of a run".into()),
    }
}

/// Parses untrusted text as lines of a run's journal (its file of events), and formats each event
/// as text and JSON. Panics if an event cannot be parsed again.
pub fn parse_journal(bytes: &[u8]) -> ParseResult {
    for line in str::from_utf8(bytes)?.lines() {
        let event = TimedEvent::from_json(line)?;
        drop(crate::report::format_event(&event.event));
        for schema in [EventSchema::V1, EventSchema::V2] {
            let again = event.to_json(schema)?;
            TimedEvent::from_json(&again)
                .unwrap_or_else(|error| panic!("a printed event is rejected: {error}: {again}"));
        }
    }
    Ok(())
}

/// Parses untrusted text as an answer of an MLflow server to a request: a line with the HTTP
/// status, and the body.
pub fn parse_mlflow_answer(bytes: &[u8]) -> ParseResult {
    Ok(crate::mlflow::parse_untrusted_answer(str::from_utf8(bytes)?)?)
}

/// Parses untrusted bytes as the kernel's answer to the question which user owns a socket
/// (sock_diag).
pub fn parse_socket_answer(bytes: &[u8]) -> ParseResult {
    crate::rendezvous::parse_socket_answer(bytes, 0)?;
    Ok(())
}

/// Parses untrusted bytes as a dump of torch's flight recorder.
pub fn parse_flight_recorder(bytes: &[u8]) -> ParseResult {
    let is_dump = crate::agent::is_flight_recorder_dump(bytes);
    if is_dump { Ok(()) } else { Err("not a dump of a flight recorder".into()) }
}

/// Parses untrusted bytes as the file in which a failed program has recorded its error
/// (`TORCHELASTIC_ERROR_FILE`).
pub fn parse_error_file(bytes: &[u8]) -> ParseResult {
    match crate::agent::parse_error_message(bytes) {
        Some(_) => Ok(()),
        None => Err("not a file with an error message".into()),
    }
}

/// Parses untrusted text as the invitation of an agent, a line with the controller's addresses and
/// the key of the job.
pub fn parse_invitation(bytes: &[u8]) -> ParseResult {
    crate::connection::handshake::Invitation::read(&mut &bytes[..])?;
    Ok(())
}

/// Checks that launch rejects untrusted bytes as a handshake and as encrypted records, because
/// their sender lacks the job's key. Panics if the bytes are accepted.
pub fn parse_encrypted_connection(bytes: &[u8]) -> ParseResult {
    Ok(crate::connection::handshake::fuzz_untrusted_connection(bytes)?)
}

/// Returns the first of several errors that a parser has returned.
fn take_first_error<E: Error + Send + Sync + 'static>(errors: Vec<E>) -> Box<dyn Error + Send + Sync> {
    errors.into_iter().next().map_or_else(|| "the parser reported no error".into(), Into::into)
}
