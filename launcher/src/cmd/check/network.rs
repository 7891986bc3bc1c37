//! `launch check --network`: lets the agents of the hosts measure the connections between them, and
//! finds the hosts that slow down or block the others.
mod fault_search;
mod network_checks;
mod network_report;
mod pair_measurements;
mod pair_rounds;
mod rdma_checks;

use super::probe::{ProbeSession, choose_error_of_silent_agent};
use diagnostic::{Diagnostic, codes::command};
use jobspec::{HostSelection, JobSpec};
use network_report::NetworkReport;
use pair_measurements::{ConnectionProperty, PairMeasurements};
use pair_rounds::{plan_rounds, select_disjoint_pairs};
use protocol::{
    control::{FromAgent, JobSecretKey, ToAgent},
    network_probe::{MAX_STREAMS, MeasureRequest, Measurement, NetworkInspection, NetworkRequest},
    probe::{ProbeAnswer, ProbeRequest},
};
use std::time::Duration;
use tokio::{task::spawn_local, time::Instant};

pub(super) use network_checks::add_network_checks;

/// The time after which a running `launch check --network` begins no further measurements between
/// hosts.
const MAX_MEASURING_TIME: Duration = Duration::from_secs(180);
/// The largest number of measurement rounds that `launch check --network` runs after the planned
/// rounds, to find out which host is at fault.
const MAX_SEARCH_ROUNDS: usize = 12;
/// For how long a measurement sends data in each direction between two hosts, in milliseconds.
const TRANSFER_MS: u64 = 300;
/// The time limit for an agent's answer to a network inspection or measurement, without the time
/// that its test connections may take in addition.
const MEASUREMENT_TIMEOUT: Duration = Duration::from_secs(15);
/// The number of times that a measurement between two hosts waits for new connections: once to test
/// all ports, and twice for each direction of data.
const SEQUENTIAL_CONNECTIONS_PER_MEASUREMENT: u32 = 5;
/// The number of CPUs of a host for each parallel TCP connection in a measurement of the transfer
/// rate.
const CPUS_PER_STREAM: u32 = 2;

/// The options with which `launch check --network` measures the network of a job.
#[derive(Clone, Debug)]
pub(super) struct NetworkCheckOptions {
    request: NetworkRequest,
    /// For each host, whether it is the machine of the controller.
    are_local: Vec<bool>,
    /// The time limit of each connection, in milliseconds.
    timeout_ms: u64,
}

impl NetworkCheckOptions {
    /// Creates the options of `launch check --network` for the hosts of a job, with a new random
    /// key for the test connections. `are_local` states for each host whether it is this machine.
    /// Fails if the kernel has no random numbers.
    pub(super) fn new(
        job: &JobSpec,
        are_local: Vec<bool>,
        timeout_ms: u64,
    ) -> diagnostic::Result<NetworkCheckOptions> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| {
            let message = format!("cannot create a key for the measurements: {error}");
            Diagnostic::error(command::ASYNC_RUNTIME_FAILED, message)
        })?;
        let request = NetworkRequest {
            key: JobSecretKey(key),
            interface: job.cluster.interface.clone(),
            prefers_reached_address: job.cluster.hosts != HostSelection::Join,
            ports: job.cluster.ports,
        };
        Ok(NetworkCheckOptions { request, are_local, timeout_ms })
    }
}

/// The agents of all hosts with their control connections, in the order of the hosts, with `None`
/// for a host that is busy with a measurement.
type AgentSessions = Vec<Option<ProbeSession>>;

/// Measures the connections between the hosts of a job, so that each host takes part in only one
/// measurement at a time. Hosts without an agent are left out. The caller must run in a
/// [`tokio::task::LocalSet`].
pub(super) async fn measure_network(
    sessions: Vec<ProbeSession>,
    targets: &NetworkCheckOptions,
) -> (Vec<ProbeSession>, NetworkReport) {
    let tasks: Vec<_> = sessions
        .into_iter()
        .enumerate()
        .map(|(index, session)| {
            let mut request = targets.request.clone();
            // sshd states on this machine at which address the user reached it.
            request.prefers_reached_address &= !targets.are_local.get(index).is_some_and(|local| *local);
            spawn_local(request_network_inspection(session, request))
        })
        .collect();
    let (mut sessions, mut inspections): (AgentSessions, Vec<_>) = (Vec::new(), Vec::new());
    for task in tasks {
        // A task that panicked counts as a host without an answer.
        let (session, inspection) = task.await.map_or((None, None), |(s, i)| (Some(s), i));
        sessions.push(session);
        inspections.push(inspection);
    }
    let mut report = NetworkReport { inspections, ..NetworkReport::default() };
    measure_rounds(&mut sessions, targets, &mut report).await;
    (sessions.into_iter().flatten().collect(), report)
}

/// Measures the planned pairs of hosts round by round, and then further pairs until it is clear
/// which hosts are at fault.
async fn measure_rounds(
    sessions: &mut AgentSessions,
    targets: &NetworkCheckOptions,
    report: &mut NetworkReport,
) {
    // Only hosts that listen can be measured; the others have a failed check.
    let listens = |inspection: &Option<NetworkInspection>| {
        inspection.as_ref().is_some_and(|inspection| !inspection.listeners.is_empty())
    };
    let hosts: Vec<usize> = (0..sessions.len()).filter(|host| listens(&report.inspections[*host])).collect();
    let deadline = Instant::now() + MAX_MEASURING_TIME;
    let mut planned = plan_rounds(hosts.len());
    planned.reverse();
    let mut searched = 0;
    loop {
        let round = match planned.pop() {
            Some(round) => round.into_iter().map(|(a, b)| (hosts[a], hosts[b])).collect(),
            None => choose_search_round(&report.pairs, sessions.len(), &hosts),
        };
        if round.is_empty() {
            return;
        }
        searched += usize::from(planned.is_empty());
        if Instant::now() >= deadline || searched > MAX_SEARCH_ROUNDS {
            report.is_incomplete = true;
            return;
        }
        report.rounds += 1;
        measure_round(sessions, &round, targets, report).await;
    }
}

/// Returns pairs of hosts to measure next, with each host in at most one pair, to find out which
/// hosts or paths cause the bad transfers. No host is in two of them. `count` is the number of all
/// hosts, and `hosts` are those that can be measured.
fn choose_search_round(pairs: &PairMeasurements, count: usize, hosts: &[usize]) -> Vec<(usize, usize)> {
    let is_usable = |a: usize, b: usize| hosts.contains(&a) && hosts.contains(&b);
    let wanted = ConnectionProperty::ALL
        .into_iter()
        .flat_map(|property| pairs.create_fault_search(property).choose_test_transfers(count, is_usable));
    select_disjoint_pairs(wanted.collect::<Vec<_>>())
}

/// Measures the connections of several pairs of hosts at the same time, and adds the results to the
/// report. A host is in at most one pair.
async fn measure_round(
    sessions: &mut AgentSessions,
    round: &[(usize, usize)],
    targets: &NetworkCheckOptions,
    report: &mut NetworkReport,
) {
    let mut tasks = Vec::new();
    for &(a, b) in round {
        let (Some(first), Some(second)) = (sessions[a].take(), sessions[b].take()) else { continue };
        let streams = [&first, &second].map(|session| session.count_cpus() / CPUS_PER_STREAM);
        let request = |peer: usize, transfer_ms: u64| MeasureRequest {
            addresses: report.inspections[peer].as_ref().map_or_else(Vec::new, |i| i.listeners.clone()),
            timeout_ms: targets.timeout_ms,
            transfer_ms,
            streams: streams[0].min(streams[1]).clamp(1, MAX_STREAMS),
        };
        let requests = [request(b, TRANSFER_MS), request(a, 0), request(a, TRANSFER_MS)];
        tasks.push(((a, b), spawn_local(measure_pair(first, second, requests))));
    }
    for ((a, b), task) in tasks {
        let Ok((first, second, [forward, back])) = task.await else { continue };
        (sessions[a], sessions[b]) = (Some(first), Some(second));
        for (host, peer, found) in [(a, b, forward), (b, a, back)] {
            if let Some(found) = found {
                report.pairs.add(host, peer, &found);
            }
        }
    }
}

/// Measures the connection between two hosts in both directions, first by the agent of the first
/// host and then by the agent of the second host. If the first agent reaches no port of the second,
/// the second agent measures the transfers. `requests` are the requests to the first agent, and
/// those to the second without and with transfers.
async fn measure_pair(
    mut first: ProbeSession,
    mut second: ProbeSession,
    [forward, back, full_back]: [MeasureRequest; 3],
) -> (ProbeSession, ProbeSession, [Option<Measurement>; 2]) {
    let forward = request_measurement(&mut first, forward).await;
    let is_measured = forward.as_ref().is_some_and(|found| found.sent.is_some());
    let back = request_measurement(&mut second, if is_measured { back } else { full_back }).await;
    (first, second, [forward, back])
}

/// Requests that an agent inspect the network of its host, and listen for connections of other
/// agents. Returns `None` if no agent answers.
async fn request_network_inspection(
    mut session: ProbeSession,
    request: NetworkRequest,
) -> (ProbeSession, Option<NetworkInspection>) {
    let answer = ask_agent(&mut session, ProbeRequest::Network(request), MEASUREMENT_TIMEOUT, |answer| {
        if let ProbeAnswer::Network(found) = answer { Some(*found) } else { None }
    });
    let inspection = answer.await;
    (session, inspection)
}

/// Requests that an agent measure the connections to another host, and waits for the result.
/// Returns `None` if the agent does not answer in time.
async fn request_measurement(session: &mut ProbeSession, request: MeasureRequest) -> Option<Measurement> {
    let connections = Duration::from_millis(request.timeout_ms) * SEQUENTIAL_CONNECTIONS_PER_MEASUREMENT;
    ask_agent(session, ProbeRequest::Measure(request), connections + MEASUREMENT_TIMEOUT, |answer| {
        if let ProbeAnswer::Measure(found) = answer { Some(*found) } else { None }
    })
    .await
}

/// Sends a request to a host's agent and waits for its answer. A failure is stored as the error of
/// the host, which is then no longer asked.
async fn ask_agent<T>(
    session: &mut ProbeSession,
    request: ProbeRequest,
    limit: Duration,
    select: impl Fn(ProbeAnswer) -> Option<T>,
) -> Option<T> {
    if session.probe.error.is_some() {
        return None;
    }
    let connection = session.connection.as_mut()?;
    connection.send(ToAgent::Probe(request));
    let select = |message| if let FromAgent::Probed(answer) = message { select(answer) } else { None };
    match connection.wait_for_message(Some(limit), select).await {
        Ok(value) => Some(value),
        Err(error) => {
            session.probe.error = Some(choose_error_of_silent_agent(&session.host, error, None).await);
            None
        }
    }
}
