//! Connects ranks on several hosts by TCP: selects the address on which a rank listens, exchanges
//! the addresses, and joins the group.
use super::session::AgentSession;
use crate::error::{Error, Result};
use comm::{
    Comm,
    tcp::{AbortHandle, GroupMember, GroupSpec, RankListener, TcpLimits},
};
use diagnostic::{Diagnostic, codes};
use jobspec::{InterfaceSelector, env};
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags, sys::resource};
use protocol::control::{
    InterfaceAddress, MAX_ADDRESSES, WorkerAddresses, WorkerInit, WorkerPeers, select_host_address,
};
use std::{
    net::{IpAddr, SocketAddr},
    os::fd::OwnedFd,
    sync::Arc,
};

/// Connects this rank to all other ranks of the job, some of which run on other hosts. Collective:
/// every rank must call it.
///
/// `memory` is the file descriptor of the memory segment that the ranks of this host share. An
/// abort of the session also interrupts joining the group.
pub(super) fn connect_ranks_of_hosts(
    session: &AgentSession,
    init: &WorkerInit,
    memory: Option<OwnedFd>,
    shm: comm::shm::ShmLimits,
) -> Result<Arc<dyn Comm>> {
    raise_open_file_limit(init.world as usize)?;
    let (address, reason) = find_listen_address(&init.job.cluster.interface)?;
    let bind = |port| RankListener::bind_to(SocketAddr::new(address, port));
    let bound = init
        .job
        .cluster
        .ports
        .bind_first_free_port(bind)
        .and_then(|endpoint| Ok((endpoint.address()?, endpoint)));
    let (address, endpoint) = bound.map_err(|e| {
        let message = format!("cannot listen on {address} ({reason})");
        Diagnostic::error(codes::training::WORKER_LISTEN_FAILED, message)
            .with_subject(address.to_string())
            .with_cause(&e)
    })?;
    println!(
        "rank {} of {}: accepts connections of its peers on {address} ({reason})",
        init.rank, init.world
    );
    let peers = session.exchange_addresses(vec![address], init.attempt)?;
    let group = build_peer_group(init, peers)?;
    let stopper = AbortHandle::new(group.rank, group.members.len())?;
    let stop = stopper.clone();
    session.add_abort_handler(move |reason| stop.abort(reason));
    Ok(Arc::new(endpoint.join(&group, memory, TcpLimits { shm, ..TcpLimits::default() }, &stopper)?))
}

/// Converts the addresses of all ranks, which the controller of the run has sent, to the
/// description of the TCP group by which this rank connects to the others. Fails if the list does
/// not fit this rank.
fn build_peer_group(init: &WorkerInit, peers: WorkerPeers) -> Result<GroupSpec> {
    let rank = init.rank as usize;
    let is_on_this_host =
        |p: &WorkerAddresses| peers.members.get(rank).is_some_and(|me| me.host_index == p.host_index);
    let fits = peers.members.len() == init.world as usize
        && peers.members.iter().all(|p| (1..=MAX_ADDRESSES).contains(&p.addresses.len()))
        && peers.members.iter().filter(|p| is_on_this_host(p)).count() == init.local_world as usize;
    if !fits {
        let message = format!(
            "the controller's list of {} peers does not fit rank {rank} of {} ({} on this host)",
            peers.members.len(),
            init.world,
            init.local_world
        );
        return Err(Error::new(codes::training::PEER_LIST_INVALID, message));
    }
    let members = peers.members.into_iter();
    let members =
        members.map(|p| GroupMember { host: p.host_index as usize, addresses: p.addresses }).collect();
    Ok(GroupSpec { rank, members, run: init.run.clone(), attempt: init.attempt, key: peers.key.0 })
}

/// Raises this process's limit of open files so that two connections per peer and the worker's
/// other files fit.
fn raise_open_file_limit(world: usize) -> Result<()> {
    let needed = 2 * world as u64 + 256;
    let error = |message: String| {
        Diagnostic::error(codes::training::OPEN_FILE_LIMIT, message).with_field("needed", needed)
    };
    let failed = |e: nix::errno::Errno| error("cannot change the limit of open files".into()).with_cause(&e);
    let (soft, hard) = resource::getrlimit(resource::Resource::RLIMIT_NOFILE).map_err(failed)?;
    if soft >= needed {
        return Ok(());
    }
    if hard < needed {
        let message = format!("{world} ranks need {needed} open files each, but this host allows {hard}");
        return Err(error(message)
            .with_field("hard_limit", hard)
            .with_help(format!("raise the hard limit (`ulimit -Hn`) to at least {needed}"))
            .into());
    }
    Ok(resource::setrlimit(resource::Resource::RLIMIT_NOFILE, needed, hard).map_err(failed)?)
}

/// Finds the network address of this host on which this rank accepts connections of other ranks, as
/// `cluster.interface` of job.yaml selects. Also returns the reason for the selection.
fn find_listen_address(wanted: &InterfaceSelector) -> Result<(IpAddr, String)> {
    let interfaces = getifaddrs().map_err(|e| {
        let message = "cannot list the network addresses of this host";
        Diagnostic::error(codes::training::HOST_ADDRESSES_UNAVAILABLE, message).with_cause(&e)
    })?;
    let addresses: Vec<InterfaceAddress> = interfaces
        .filter(|i| i.flags.contains(InterfaceFlags::IFF_UP))
        .filter_map(|i| {
            let address = i.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            let address = v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))?;
            Some(InterfaceAddress { interface: i.interface_name, address })
        })
        .collect();
    let ssh = std::env::var_os(env::SSH_CONNECTION).and_then(|v| v.into_string().ok());
    Ok(select_listen_address(wanted, ssh.as_deref(), &addresses)?)
}

/// Selects the network address on which this rank accepts connections of other ranks, by the job's
/// interface setting `wanted`. Also returns the reason for the selection. `ssh` is the value of
/// `SSH_CONNECTION`.
fn select_listen_address(
    wanted: &InterfaceSelector,
    ssh: Option<&str>,
    addresses: &[InterfaceAddress],
) -> diagnostic::Result<(IpAddr, String)> {
    let reached = ssh.and_then(|s| s.split(' ').nth(2)).and_then(|a| a.parse::<IpAddr>().ok());
    let selected = select_host_address(wanted, reached, addresses);
    let describe = |a: &InterfaceAddress| format!("interface {}", a.interface);
    match wanted {
        InterfaceSelector::Auto => {
            if let Some(a) = selected.filter(|a| Some(a.address) == reached) {
                return Ok((a.address, format!("{}, used by the ssh connection", describe(a))));
            }
            // Without a network, a job whose agents are all on this machine can use the loopback.
            let loopbacks = || addresses.iter().filter(|a| a.address.is_loopback());
            selected
                .or_else(|| loopbacks().min_by_key(|a| a.address.is_ipv6()))
                .map(|a| (a.address, format!("{}, cluster.interface: auto", describe(a))))
                .ok_or_else(|| {
                    let message = "this host has no address on which a worker could listen";
                    Diagnostic::error(codes::training::HOST_ADDRESSES_UNAVAILABLE, message)
                })
        }
        InterfaceSelector::Named(name) => selected
            .map(|a| (a.address, format!("{}, cluster.interface: {name}", describe(a))))
            .ok_or_else(|| build_interface_not_found_error(name, addresses)),
    }
}

/// Builds the error which reports that the `cluster.interface` of the job matches no address of
/// this host. The error lists the host's addresses.
fn build_interface_not_found_error(name: &str, addresses: &[InterfaceAddress]) -> Diagnostic {
    let list: Vec<String> = addresses.iter().map(|a| format!("{} on {}", a.address, a.interface)).collect();
    let message = format!("no address of this host matches `cluster.interface: {name}`");
    Diagnostic::error(codes::training::INTERFACE_NOT_FOUND, message)
        .with_subject("cluster.interface")
        .with_field("interface", name)
        .with_field("addresses", list.clone())
        .with_help(format!("this host has {}", list.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the addresses of a simulated host with a loopback and two network interfaces.
    fn list_test_addresses() -> Vec<InterfaceAddress> {
        [
            ("lo", "127.0.0.1"),
            ("lo", "::1"),
            ("eth0", "fe80::1"),
            ("eth0", "2001:db8::5"),
            ("eth0", "192.0.2.5"),
            ("ib0", "10.1.2.3"),
        ]
        .map(|(i, a)| InterfaceAddress { interface: i.into(), address: a.parse().unwrap() })
        .to_vec()
    }

    /// Selects a listen address with `wanted` as the value of `cluster.interface`. Returns the
    /// address and the reason as text.
    fn select_for_test(
        wanted: &str,
        ssh: Option<&str>,
        addresses: &[InterfaceAddress],
    ) -> diagnostic::Result<(String, String)> {
        let wanted = match wanted {
            "auto" => InterfaceSelector::Auto,
            name => InterfaceSelector::Named(name.into()),
        };
        select_listen_address(&wanted, ssh, addresses).map(|(address, reason)| (address.to_string(), reason))
    }

    /// Returns the listen address that `wanted`, a value of `cluster.interface`, selects. Panics if
    /// the selection fails.
    fn expect_selected(wanted: &str, addresses: &[InterfaceAddress]) -> String {
        select_for_test(wanted, None, addresses).unwrap().0
    }

    #[test]
    fn auto_is_the_address_of_the_ssh_connection_or_the_first_that_is_no_loopback() {
        let ssh = Some("192.0.2.1 4711 10.1.2.3 22");
        assert_eq!(select_for_test("auto", ssh, &list_test_addresses()).unwrap().0, "10.1.2.3");
        for ssh in [None, Some(""), Some("a b"), Some("192.0.2.1 4711 198.51.100.7 22")] {
            assert_eq!(
                select_for_test("auto", ssh, &list_test_addresses()).unwrap().0,
                "192.0.2.5",
                "{ssh:?}"
            );
        }
        assert_eq!(expect_selected("auto", &list_test_addresses()[..2]), "127.0.0.1");
        assert_eq!(
            expect_selected("auto", &list_test_addresses()[..4]),
            "2001:db8::5",
            "link-local addresses are skipped"
        );
        let error = select_for_test("auto", None, &[]).unwrap_err();
        assert_eq!(error.code(), codes::training::HOST_ADDRESSES_UNAVAILABLE);
    }

    #[test]
    fn the_reason_names_the_interface_and_the_rule() {
        let reasons = [("auto", Some("192.0.2.1 4711 10.1.2.3 22")), ("auto", None), ("10.1.0.0/16", None)]
            .map(|(wanted, ssh)| select_for_test(wanted, ssh, &list_test_addresses()).unwrap().1);
        insta::assert_snapshot!(reasons.join("\n"));
    }

    #[test]
    fn an_interface_is_selected_by_name_or_network() {
        assert_eq!(expect_selected("ib0", &list_test_addresses()), "10.1.2.3");
        assert_eq!(expect_selected("10.1.0.0/16", &list_test_addresses()), "10.1.2.3");
        assert_eq!(expect_selected("2001:db8::/32", &list_test_addresses()), "2001:db8::5");
        assert_eq!(expect_selected("0.0.0.0/0", &list_test_addresses()[4..]), "192.0.2.5");
        assert_eq!(expect_selected("127.0.0.0/8", &list_test_addresses()), "127.0.0.1");
    }

    #[test]
    fn an_interface_that_does_not_exist_is_an_error_that_lists_the_addresses() {
        assert_eq!(
            select_for_test("ib1", None, &list_test_addresses()).unwrap_err().code(),
            codes::training::INTERFACE_NOT_FOUND
        );
        let error = select_for_test("10.2.0.0/16", None, &list_test_addresses()).unwrap_err();
        assert_eq!(error.code(), codes::training::INTERFACE_NOT_FOUND);
        insta::assert_snapshot!(diagnostic::render(&error, false));
    }
}
