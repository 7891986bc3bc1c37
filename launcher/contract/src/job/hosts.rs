//! Decodes `cluster.hosts`, the filters of hosts, and `cluster.ssh`.
use super::{
    Hosts, KnownHosts, SshConfig, SshSpec,
    decode::{Decoder, Section},
    read::{ReadResult, choice, duration, int32, list, out_of_range, text, wrong_format, wrong_type},
    sections::path,
    value_error::ValueError,
    yaml::{YamlNode, YamlValue},
};
use crate::hosts::{MAX_HOSTS, parse_hosts};
use diagnostic::codes::job as codes;

/// Longest `cluster.ssh.connect_timeout`, milliseconds.
const MAX_CONNECT_TIMEOUT_MS: u64 = 10 * 60 * 1000;

/// Reads `auto`, `local`, `slurm`, a list of hosts, or `{file: hostfile}`.
pub(super) fn read_hosts(node: &YamlNode) -> ReadResult<Hosts> {
    const WHAT: &str = "`auto`, `local`, `slurm`, a list of hosts, or `{file: hostfile}`";
    match &node.value {
        YamlValue::List(items) if items.is_empty() => Err(out_of_range(WHAT, node)),
        YamlValue::List(_) => {
            let hosts = list(WHAT, read_host)(node)?;
            check_duplicates(node, &hosts)?;
            Ok(Hosts::List(hosts))
        }
        YamlValue::Map(entries) => match entries.as_slice() {
            [only] if only.key == "file" => path(&only.value).map(Hosts::File),
            _ => Err(wrong_type(WHAT, node)),
        },
        YamlValue::Text
            if !["auto", "local", "slurm"].contains(&node.raw.as_str()) && read_host(node).is_ok() =>
        {
            Err(wrong_type(WHAT, node).with_help(format!("write a list of one item as [\"{}\"]", node.raw)))
        }
        _ => choice(&[("auto", Hosts::Auto), ("local", Hosts::Local), ("slurm", Hosts::Slurm)])(node),
    }
}

/// Reads a text that names one or several hosts.
fn read_host(node: &YamlNode) -> ReadResult<String> {
    let text = match node.value {
        // A number may be the name of a host.
        YamlValue::Int(_) => node.raw.clone(),
        _ => text(node)?,
    };
    match parse_hosts(&text) {
        Ok(_) => Ok(text),
        Err(error) => {
            let column = text.get(..error.at).map_or(0, |before| before.chars().count()) + 1;
            Err(ValueError::new(error.code(), node.span, format!("{error} (at character {column})"))
                .with_help(
                    "write a host as [user@]name[:port]; the name may contain ranges such as n[01-16]",
                ))
        }
    }
}

fn check_duplicates(node: &YamlNode, texts: &[String]) -> ReadResult<()> {
    let YamlValue::List(items) = &node.value else { return Ok(()) };
    let mut names = std::collections::HashSet::new();
    for (item, text) in items.iter().zip(texts) {
        for host in parse_hosts(text).unwrap_or_default() {
            let name = host.name();
            if names.len() >= MAX_HOSTS {
                let message = format!("names more than {MAX_HOSTS} hosts");
                return Err(ValueError::new(codes::JOB_VALUE_OUT_OF_RANGE, node.span, message));
            }
            if !names.insert(name.clone()) {
                let message = format!("names the host `{name}` twice");
                return Err(ValueError::new(codes::JOB_ITEM_DUPLICATE, item.span, message).with_help(
                    "name each host once; `cluster.workers_per_host` is the number of workers on it",
                ));
            }
        }
    }
    Ok(())
}

/// Reads a list of DeepSpeed's filters. A single text is accepted, too, as on DeepSpeed's command
/// line.
pub(super) fn read_filters(node: &YamlNode) -> ReadResult<Vec<String>> {
    match node.value {
        YamlValue::Text => text(node).map(|text| vec![text]),
        _ => list("a list of filters such as `worker-0@worker-1:0,2`", text)(node),
    }
}

/// Decodes `cluster.ssh`.
pub(super) fn decode_ssh(d: &mut Decoder, cluster: &Section<'_>) -> SshSpec {
    let t = d.section(cluster, "cluster.ssh");
    SshSpec {
        user: d.get_optional(&t, "cluster.ssh.user", read_user),
        port: d.get_optional(&t, "cluster.ssh.port", |n| int32(1..=u32::from(u16::MAX))(n).map(|p| p as u16)),
        key: d.get_optional(&t, "cluster.ssh.key", path),
        config: d.get(&t, "cluster.ssh.config", |node| {
            Ok(match text(node)?.as_str() {
                "default" => SshConfig::Default,
                "none" => SshConfig::None,
                _ => SshConfig::File(path(node)?),
            })
        }),
        known_hosts: d.get(
            &t,
            "cluster.ssh.known_hosts",
            choice(&[("strict", KnownHosts::Strict), ("accept_new", KnownHosts::AcceptNew)]),
        ),
        jump: d.get_optional(&t, "cluster.ssh.jump", read_jump_host),
        connect_timeout_ms: d.get(&t, "cluster.ssh.connect_timeout", |node| match duration(node)? {
            ms @ 1..=MAX_CONNECT_TIMEOUT_MS => Ok(ms),
            _ => Err(out_of_range("a duration above 0 of at most `10m`", node)),
        }),
        fanout: d.get(&t, "cluster.ssh.fanout", int32(1..=1024)),
    }
}

fn read_user(node: &YamlNode) -> ReadResult<String> {
    let name = text(node)?;
    match parse_hosts(&format!("{name}@host")) {
        Ok(hosts) if hosts.len() == 1 => Ok(name),
        _ => Err(wrong_format("a user name", node)),
    }
}

fn read_jump_host(node: &YamlNode) -> ReadResult<String> {
    let text = text(node)?;
    match parse_hosts(&text).map(|hosts| hosts.len()) {
        Ok(1) => Ok(text),
        _ => Err(wrong_format("one host: `[user@]host[:port]`", node)),
    }
}
