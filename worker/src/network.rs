//! Collectives with ranks on other hosts: which address to listen at, telling it, and joining.
use crate::{
    error::{Error, Result},
    life::no_threads,
    session::Session,
};
use comm::{
    Comm,
    tcp::{Endpoint, Group, Limits, Member, Stopper},
};
use contract::{
    control::{MAX_ADDRESSES, PeerAddress, Peers, WorkerInit},
    env,
    job::Interface,
};
use nix::{ifaddrs::getifaddrs, net::if_::InterfaceFlags, sys::resource};
use std::{
    net::IpAddr,
    os::{fd::OwnedFd, unix::net::UnixStream},
    sync::Arc,
};

/// Listens, tells the others, and joins them. `memory` is what the ranks of this host share.
pub(crate) fn join(
    session: &Arc<Session>,
    mut read: UnixStream,
    welcome: &WorkerInit,
    memory: Option<OwnedFd>,
    shm: comm::shm::Limits,
) -> Result<Arc<dyn Comm>> {
    allow_connections(welcome.world as usize)?;
    let (address, why) = own_address(&welcome.job.cluster.interface)?;
    let bound = Endpoint::bind(address).and_then(|e| Ok((e.address()?, e)));
    let (address, endpoint) =
        bound.map_err(|e| Error::cluster(format!("can't listen at {address} ({why}): {e}")))?;
    println!("rank {} of {}: listens to its peers at {address} ({why})", welcome.rank, welcome.world);
    let peers = session.meet(&mut read, vec![address], welcome.epoch)?;
    let group = group(welcome, peers)?;
    let stopper = Stopper::new(group.rank, group.members.len())?;
    let stop = stopper.clone();
    // From here on an abort ends the joining, too.
    session.watch(read, move |reason| stop.abort(reason)).map_err(no_threads)?;
    Ok(Arc::new(endpoint.join(&group, memory, Limits { shm, ..Limits::default() }, &stopper)?))
}

/// The peers as told, if they make sense for this rank.
fn group(welcome: &WorkerInit, peers: Peers) -> Result<Group> {
    let rank = welcome.rank as usize;
    let here = |p: &PeerAddress| peers.members.get(rank).is_some_and(|me| me.node == p.node);
    let sound = peers.members.len() == welcome.world as usize
        && peers.members.iter().all(|p| (1..=MAX_ADDRESSES).contains(&p.addresses.len()))
        && peers.members.iter().filter(|p| here(p)).count() == welcome.local_world as usize;
    if !sound {
        return Err(Error::failed(format!(
            "the controller's list of peers does not fit rank {rank} of {} ({} on this host)",
            welcome.world, welcome.local_world
        )));
    }
    let members = peers.members.into_iter();
    let members = members.map(|p| Member { host: p.node as usize, addresses: p.addresses }).collect();
    Ok(Group { rank, members, run: welcome.run.clone(), epoch: welcome.epoch, key: peers.key.0 })
}

/// Two connections to each peer must be allowed beside what else a worker opens.
fn allow_connections(world: usize) -> Result<()> {
    let need = 2 * world as u64 + 256;
    let failed = |e: nix::errno::Errno| Error::cluster(format!("the limit of open files: {e}"));
    let (soft, hard) = resource::getrlimit(resource::Resource::RLIMIT_NOFILE).map_err(failed)?;
    if soft >= need {
        return Ok(());
    }
    if hard < need {
        return Err(Error::cluster(format!(
            "{world} ranks need {need} open files each, but at most {hard} are allowed here: raise `ulimit -Hn`"
        )));
    }
    resource::setrlimit(resource::Resource::RLIMIT_NOFILE, need, hard).map_err(failed)
}

/// An address of an interface of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Own {
    interface: String,
    address: IpAddr,
    loopback: bool,
}

fn own_address(wanted: &Interface) -> Result<(IpAddr, String)> {
    let all = getifaddrs().map_err(|e| Error::cluster(format!("this host's addresses: {e}")))?;
    let own: Vec<Own> = all
        .filter(|i| i.flags.contains(InterfaceFlags::IFF_UP))
        .filter_map(|i| {
            let address = i.address?;
            let v4 = address.as_sockaddr_in().map(|a| IpAddr::V4(a.ip()));
            let address = v4.or_else(|| address.as_sockaddr_in6().map(|a| IpAddr::V6(a.ip())))?;
            Some(Own {
                loopback: i.flags.contains(InterfaceFlags::IFF_LOOPBACK),
                interface: i.interface_name,
                address,
            })
        })
        .collect();
    let ssh = std::env::var_os(env::SSH_CONNECTION).and_then(|v| v.into_string().ok());
    choose(wanted, ssh.as_deref(), &own).map_err(Error::cluster)
}

/// The address to listen at, and why it.
fn choose(
    wanted: &Interface,
    ssh: Option<&str>,
    own: &[Own],
) -> std::result::Result<(IpAddr, String), String> {
    // IPv4 first: a link may have an address of each; link-local ones of IPv6 don't work without their interface.
    let usable = |o: &&Own| match o.address {
        IpAddr::V4(a) => !a.is_link_local(),
        IpAddr::V6(a) => !a.is_unicast_link_local(),
    };
    let mut candidates: Vec<&Own> = own.iter().filter(usable).collect();
    candidates.sort_by_key(|o| o.address.is_ipv6());
    let told = |o: &Own| format!("interface {}", o.interface);
    match wanted {
        Interface::Auto => {
            let reached = ssh.and_then(|s| s.split(' ').nth(2)).and_then(|a| a.parse::<IpAddr>().ok());
            if let Some(o) = reached.and_then(|r| candidates.iter().find(|o| o.address == r)) {
                return Ok((o.address, format!("{}, which ssh came by", told(o))));
            }
            let global = candidates.iter().find(|o| !o.loopback);
            // A machine without a network still runs a job whose agents are all its own.
            let any = global.or_else(|| candidates.first());
            any.map(|o| (o.address, format!("{}, cluster.interface: auto", told(o))))
                .ok_or_else(|| "this host has no address to listen at".into())
        }
        Interface::Named(name) => {
            let found = candidates.iter().find(|o| wanted.admits(&o.interface, o.address));
            found.map(|o| (o.address, format!("{}, cluster.interface: {name}", told(o)))).ok_or_else(|| {
                let has: Vec<String> =
                    own.iter().map(|o| format!("{} on {}", o.address, o.interface)).collect();
                format!("cluster.interface: {name} is not on this host, which has {}", has.join(", "))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Vec<Own> {
        [
            ("lo", "127.0.0.1", true),
            ("lo", "::1", true),
            ("eth0", "fe80::1", false),
            ("eth0", "2001:db8::5", false),
            ("eth0", "192.0.2.5", false),
            ("ib0", "10.1.2.3", false),
        ]
        .map(|(i, a, loopback)| Own { interface: i.into(), address: a.parse().unwrap(), loopback })
        .to_vec()
    }

    fn chosen(wanted: &str, ssh: Option<&str>, own: &[Own]) -> std::result::Result<String, String> {
        let wanted = match wanted {
            "auto" => Interface::Auto,
            name => Interface::Named(name.into()),
        };
        choose(&wanted, ssh, own).map(|(a, why)| format!("{a} {why}"))
    }

    #[test]
    fn auto_is_where_ssh_came_by_else_the_first_that_is_no_loopback() {
        let ssh = Some("192.0.2.1 4711 10.1.2.3 22");
        assert_eq!(chosen("auto", ssh, &own()).unwrap(), "10.1.2.3 interface ib0, which ssh came by");
        for ssh in [None, Some(""), Some("a b"), Some("192.0.2.1 4711 198.51.100.7 22")] {
            let got = chosen("auto", ssh, &own()).unwrap();
            assert_eq!(got, "192.0.2.5 interface eth0, cluster.interface: auto", "{ssh:?}");
        }
        assert!(chosen("auto", None, &own()[..2]).unwrap().starts_with("127.0.0.1"));
        assert!(chosen("auto", None, &own()[..4]).unwrap().starts_with("2001:db8::5"), "no link-local one");
        assert!(chosen("auto", None, &[]).is_err());
    }

    #[test]
    fn a_name_or_a_network_is_had_or_refused() {
        assert!(chosen("ib0", None, &own()).unwrap().starts_with("10.1.2.3 interface ib0"));
        assert!(chosen("10.1.0.0/16", None, &own()).unwrap().starts_with("10.1.2.3"));
        assert!(chosen("2001:db8::/32", None, &own()).unwrap().starts_with("2001:db8::5"));
        assert!(chosen("0.0.0.0/0", None, &own()[4..]).unwrap().starts_with("192.0.2.5"));
        assert!(chosen("127.0.0.0/8", None, &own()).unwrap().starts_with("127.0.0.1"));
        let e = chosen("10.2.0.0/16", None, &own()).unwrap_err();
        assert!(e.contains("10.2.0.0/16 is not on this host, which has 127.0.0.1 on lo"), "{e}");
        assert!(chosen("ib1", None, &own()).is_err());
    }
}
