//! Decoding where hosts are and how they are reached.
use super::{
    Hosts, KnownHosts, SshConfig, SshSpec,
    decode::{Decoder, Table},
    read::{Read, choice, duration, expected, int32, list, text},
    sections::path,
    tree::{Fault, Node, Value},
};
use crate::hosts::{MAX_HOSTS, parse_hosts};

/// Longest wait for a step of a connection, milliseconds.
const MOST_WAIT: u64 = 10 * 60 * 1000;

/// `auto`, `local`, `slurm`, a list, or `{file: hostfile}`.
pub(super) fn hosts(node: &Node) -> Read<Hosts> {
    const WHAT: &str = "`auto`, `local`, `slurm`, a list of hosts, or `{file: hostfile}`";
    match &node.value {
        Value::List(items) if items.is_empty() => Err(expected(WHAT, node)),
        Value::List(_) => {
            let hosts = list(WHAT, host)(node)?;
            no_more_than_once(node, &hosts)?;
            Ok(Hosts::List(hosts))
        }
        Value::Map(entries) => match entries.as_slice() {
            [only] if only.key == "file" => path(&only.value).map(Hosts::File),
            _ => Err(expected(WHAT, node)),
        },
        Value::Text if !["auto", "local", "slurm"].contains(&node.raw.as_str()) && host(node).is_ok() => {
            Err(expected(WHAT, node).hint(format!("a list of one is written [\"{}\"]", node.raw)))
        }
        _ => choice(&[("auto", Hosts::Auto), ("local", Hosts::Local), ("slurm", Hosts::Slurm)], &[])(node),
    }
}

/// A host, or several, as one text.
fn host(node: &Node) -> Read<String> {
    let text = match node.value {
        // a bare number may be a host's name
        Value::Int(_) => node.raw.clone(),
        _ => text(node)?,
    };
    match parse_hosts(&text) {
        Ok(_) => Ok(text),
        Err(fault) => {
            let column = text.get(..fault.at).map_or(0, |before| before.chars().count()) + 1;
            let fault = Fault::at(node.span, format!("{} (at its character {column})", fault.message));
            Err(fault.hint("a host is [user@]name[:port], where the name may have ranges: n[01-16]"))
        }
    }
}

fn no_more_than_once(node: &Node, texts: &[String]) -> Read<()> {
    let Value::List(items) = &node.value else { return Ok(()) };
    let mut seen = std::collections::HashSet::new();
    for (item, text) in items.iter().zip(texts) {
        for host in parse_hosts(text).unwrap_or_default() {
            let name = host.name();
            if seen.len() >= MAX_HOSTS {
                return Err(Fault::at(node.span, format!("names more than {MAX_HOSTS} hosts")));
            }
            if !seen.insert(name.clone()) {
                let fault = Fault::at(item.span, format!("names the host `{name}` again"));
                return Err(
                    fault.hint("each host has one agent; `workers_per_host` says how many ranks it gets")
                );
            }
        }
    }
    Ok(())
}

/// A list of DeepSpeed's filters; one text stands for a list of one, as on DeepSpeed's command line.
pub(super) fn filters(node: &Node) -> Read<Vec<String>> {
    match node.value {
        Value::Text => text(node).map(|text| vec![text]),
        _ => list("a list of filters such as `worker-0@worker-1:0,2`", text)(node),
    }
}

/// `cluster.ssh`.
pub(super) fn ssh(d: &mut Decoder, cluster: &Table<'_>) -> SshSpec {
    let t = d.section(cluster, "cluster.ssh");
    SshSpec {
        user: d.opt(&t, "cluster.ssh.user", user),
        port: d.opt(&t, "cluster.ssh.port", |n| int32(1..=u32::from(u16::MAX))(n).map(|p| p as u16)),
        key: d.opt(&t, "cluster.ssh.key", path),
        config: d.get(&t, "cluster.ssh.config", |node| {
            Ok(match text(node)?.as_str() {
                "usual" => SshConfig::Usual,
                "none" => SshConfig::None,
                _ => SshConfig::File(path(node)?),
            })
        }),
        known_hosts: d.get(
            &t,
            "cluster.ssh.known_hosts",
            choice(&[("strict", KnownHosts::Strict), ("accept_new", KnownHosts::AcceptNew)], &[]),
        ),
        jump: d.opt(&t, "cluster.ssh.jump", jump),
        connect_timeout_ms: d.get(&t, "cluster.ssh.connect_timeout", |node| match duration(node)? {
            ms @ 1..=MOST_WAIT => Ok(ms),
            _ => Err(expected("a duration above 0 of at most `10m`", node)),
        }),
        parallel: d.get(&t, "cluster.ssh.parallel", int32(1..=1024)),
    }
}

fn user(node: &Node) -> Read<String> {
    let name = text(node)?;
    match parse_hosts(&format!("{name}@host")) {
        Ok(hosts) if hosts.len() == 1 => Ok(name),
        _ => Err(expected("a user's name", node)),
    }
}

fn jump(node: &Node) -> Read<String> {
    let text = text(node)?;
    match parse_hosts(&text).map(|hosts| hosts.len()) {
        Ok(1) => Ok(text),
        _ => Err(expected("one host: `[user@]host[:port]`", node)),
    }
}
