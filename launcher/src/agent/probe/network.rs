//! [`NetworkProber`]: measures connections between hosts for `launch check --network`, and accepts
//! the measurements of the agents of other hosts.
//!
//! Every connection begins with the handshake of control connections, so that only agents of the
//! job use the ports. The data that follow are zeros; they are neither encrypted nor stored.
mod measurement;
mod measurement_server;
mod measuring_connection;

use crate::connection::handshake::HandshakeKey;
use crate::discover::{inspect_interface, inspect_rdma, list_interface_addresses};
use diagnostic::{Diagnostic, codes::host};
use measurement_server::start_measurement_servers;
use measuring_connection::MeasurementEndpoint;
use protocol::{
    control::{HostInventory, InterfaceAddress, select_host_address},
    network_probe::{
        MAX_MEASURED_PORTS, MeasureRequest, Measurement, NetworkInspection, NetworkInterface, NetworkRequest,
    },
};
use std::{
    io,
    net::{IpAddr, SocketAddr, TcpListener},
    path::Path,
    sync::{Mutex, PoisonError},
};

/// The context string for deriving the key of the connections of `launch check --network` from the
/// secret key in the controller's request.
const MEASUREMENT_KEY_CONTEXT: &str = "launch check --network";

/// Measures the network connections between this host and other hosts for `launch check --network`,
/// and accepts the measurements of other hosts' agents.
#[derive(Debug, Default)]
pub(super) struct NetworkProber {
    end: Mutex<Option<MeasurementEndpoint>>,
}

impl NetworkProber {
    /// Returns the network interface to measure and the RDMA devices of this host, and starts
    /// threads that accept measurements of other agents.
    pub(super) fn inspect_and_listen(
        &self,
        request: &NetworkRequest,
        inventory: Option<HostInventory>,
    ) -> NetworkInspection {
        let rdma = inspect_rdma(Path::new("/"));
        let addresses = list_interface_addresses();
        let reached = inventory.and_then(|inventory| inventory.reached_address);
        let reached = reached.filter(|_| request.prefers_reached_address);
        let Some(selected) = select_host_address(&request.interface, reached, &addresses) else {
            let error = build_address_error(&addresses);
            return NetworkInspection { rdma, error: Some(error), ..NetworkInspection::default() };
        };
        let interface: NetworkInterface = inspect_interface(Path::new("/"), selected);
        let key = HandshakeKey::derive_from_secret(MEASUREMENT_KEY_CONTEXT, &request.key.0);
        let end = MeasurementEndpoint { key, address: selected.address };
        let opened = open_listeners(request, selected.address).and_then(|(listeners, addresses)| {
            start_measurement_servers(listeners, &end.key).map(|()| addresses)
        });
        *self.end.lock().unwrap_or_else(PoisonError::into_inner) = Some(end);
        let (listeners, error) = match opened {
            Ok(addresses) => (addresses, None),
            Err(error) => {
                let message = format!("cannot listen at {}", selected.address);
                let error = Diagnostic::error(host::PROBE_FAILED, message).with_cause(&error);
                (Vec::new(), Some(error.with_help("free a port of `cluster.ports`; each host needs two")))
            }
        };
        NetworkInspection { interface: Some(interface), listeners, error, rdma }
    }

    /// Measures latency and throughput of the connection to the agent of another host, and blocks
    /// until the measurement has ended. Each step has a time limit. The result is empty before a
    /// call of [`Self::inspect_and_listen`].
    pub(super) fn measure_connection_to_agent(&self, request: &MeasureRequest) -> Measurement {
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).clone();
        end.map_or_else(Measurement::default, |end| measurement::measure_connection(&end, request))
    }
}

/// Opens TCP listeners for the measurements of other agents, on up to [`MAX_MEASURED_PORTS`] ports
/// that are spread over the requested port range. Fails if no port is free.
fn open_listeners(
    request: &NetworkRequest,
    address: IpAddr,
) -> io::Result<(Vec<TcpListener>, Vec<SocketAddr>)> {
    let mut opened = Vec::new();
    let mut last_error = io::Error::from(io::ErrorKind::AddrInUse);
    for part in request.ports.split(MAX_MEASURED_PORTS) {
        let listener = part.bind_first_free_port(|port| TcpListener::bind(SocketAddr::new(address, port)));
        match listener.and_then(|listener| Ok((listener.local_addr()?, listener))) {
            Ok((local, listener)) => opened.push((listener, local)),
            Err(error) => last_error = error,
        }
    }
    if opened.is_empty() { Err(last_error) } else { Ok(opened.into_iter().unzip()) }
}

/// Builds the error that this host has no address that other hosts can reach, so that its
/// connections cannot be measured.
fn build_address_error(addresses: &[InterfaceAddress]) -> Diagnostic {
    let known: Vec<String> = addresses.iter().map(|a| format!("{} {}", a.interface, a.address)).collect();
    let message = "the host has no address on the selected interface that other hosts can reach";
    Diagnostic::error(host::PEER_ADDRESS_MISSING, message)
        .with_help(format!("change `cluster.interface`; the host has {}", known.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jobspec::{InterfaceSelector, PortSelection};
    use protocol::control::JobSecretKey;

    /// Returns a prober that listens at the loopback, and where it listens. `secret` is the byte of
    /// which the key consists.
    fn start_prober(secret: u8) -> (NetworkProber, Vec<SocketAddr>) {
        let prober = NetworkProber::default();
        let request = NetworkRequest {
            key: JobSecretKey([secret; 32]),
            interface: InterfaceSelector::Named("lo".to_owned()),
            prefers_reached_address: false,
            ports: PortSelection::Any,
        };
        let found = prober.inspect_and_listen(&request, None);
        assert_eq!(found.error, None);
        assert_eq!(found.interface.expect("an interface").name, "lo");
        (prober, found.listeners)
    }

    fn request(addresses: Vec<SocketAddr>, transfer_ms: u64) -> MeasureRequest {
        MeasureRequest { addresses, timeout_ms: 2000, transfer_ms, streams: 2 }
    }

    #[test]
    fn both_directions_are_measured() {
        let ((first, _), (_second, listeners)) = (start_prober(1), start_prober(1));
        let found = first.measure_connection_to_agent(&request(listeners.clone(), 50));
        assert!(matches!(found.connections[..], [Ok(ms)] if ms > 0.0), "{found:?}");
        assert!(found.round_trip_ms.is_some_and(|ms| ms > 0.0 && ms < 2000.0), "{found:?}");
        for transfer in [found.sent, found.received] {
            let transfer = transfer.expect("a transfer");
            assert!(transfer.bytes_per_second() > 1e6 && transfer.seconds >= 0.04, "{transfer:?}");
            assert!(transfer.retransmits.is_some() && transfer.segments > Some(0), "{transfer:?}");
        }
        let found = first.measure_connection_to_agent(&request(listeners, 0));
        assert!(found.connections[0].is_ok() && found.sent.is_none() && found.received.is_none());
    }

    #[test]
    fn an_agent_with_another_key_is_rejected() {
        let ((first, _), (_second, listeners)) = (start_prober(1), start_prober(2));
        let found = first.measure_connection_to_agent(&request(listeners, 50));
        assert!(found.connections[0].is_err() && found.sent.is_none(), "{found:?}");
    }

    #[test]
    fn an_unreachable_port_is_an_error_and_the_others_are_measured() {
        let ((first, _), (_second, mut listeners)) = (start_prober(1), start_prober(1));
        let closed = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port");
        listeners.insert(0, closed);
        let found = first.measure_connection_to_agent(&request(listeners, 20));
        let error = found.connections[0].as_ref().expect_err("closed");
        assert_eq!(error.code(), host::PEER_UNREACHABLE);
        assert!(found.connections[1].is_ok() && found.sent.is_some(), "{found:?}");
    }
}
