//! Decodes `cluster.hosts`, the filters of hosts, and `cluster.ssh`.
use super::{
    HostSelection, KnownHosts, SshConfig, SshSpec,
    decode::{JobDecoder, JobSection},
    readers::{
        ReadResult, choice_reader, int32_reader, list_reader, out_of_range_error, read_duration, read_text,
        wrong_format_error, wrong_type_error,
    },
    sections::read_path,
    value_error::ValueError,
    yaml::{YamlNode, YamlValue},
};
use crate::hosts::{MAX_HOSTS, parse_hosts};
use diagnostic::codes::job as codes;

/// The longest `cluster.ssh.connect_timeout`, in milliseconds.
const MAX_CONNECT_TIMEOUT_MS: u64 = 10 * 60 * 1000;

/// Reads `cluster.hosts`: `auto`, `local`, `slurm`, a list of hosts, or `{file: hostfile}`.
pub(super) fn read_hosts(node: &YamlNode) -> ReadResult<HostSelection> {
    const WHAT: &str = "`auto`, `local`, `slurm`, a list of hosts, or `{file: hostfile}`";
    match &node.value {
        YamlValue::List(items) if items.is_empty() => Err(out_of_range_error(WHAT, node)),
        YamlValue::List(_) => {
            let hosts = list_reader(WHAT, read_host)(node)?;
            reject_duplicate_hosts(node, &hosts)?;
            Ok(HostSelection::List(hosts))
        }
        YamlValue::Map(entries) => match entries.as_slice() {
            [only] if only.key == "file" => read_path(&only.value).map(HostSelection::File),
            _ => Err(wrong_type_error(WHAT, node)),
        },
        YamlValue::Text
            if !["auto", "local", "slurm"].contains(&node.raw.as_str()) && read_host(node).is_ok() =>
        {
            Err(wrong_type_error(WHAT, node)
                .with_help(format!("write a list of one item as [\"{}\"]", node.raw)))
        }
        _ => choice_reader(&[
            ("auto", HostSelection::Auto),
            ("local", HostSelection::Local),
            ("slurm", HostSelection::Slurm),
        ])(node),
    }
}

/// Reads a text that names one or several hosts. Checks the text, but returns it unchanged.
fn read_host(node: &YamlNode) -> ReadResult<String> {
    let text = match node.value {
        // A number may be the name of a host.
        YamlValue::Int(_) => node.raw.clone(),
        _ => read_text(node)?,
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

/// Fails if the texts of a list name a host twice, or more than [`MAX_HOSTS`] hosts. `node` is the
/// list.
fn reject_duplicate_hosts(node: &YamlNode, texts: &[String]) -> ReadResult<()> {
    let YamlValue::List(items) = &node.value else { return Ok(()) };
    let mut names = std::collections::HashSet::new();
    for (item, text) in items.iter().zip(texts) {
        for host in parse_hosts(text).unwrap_or_default() {
            let name = host.name_with_port();
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

/// Reads `cluster.include` or `cluster.exclude`: a list of DeepSpeed's filters. A single text is
/// also accepted, as on DeepSpeed's command line.
pub(super) fn read_filters(node: &YamlNode) -> ReadResult<Vec<String>> {
    match node.value {
        YamlValue::Text => read_text(node).map(|text| vec![text]),
        _ => list_reader("a list of filters such as `worker-0@worker-1:0,2`", read_text)(node),
    }
}

/// Decodes the section `cluster.ssh`. Reports errors to `d`.
pub(super) fn decode_ssh(d: &mut JobDecoder, cluster: &JobSection<'_>) -> SshSpec {
    let t = d.open_section(cluster, "cluster.ssh");
    SshSpec {
        user: d.decode_optional(&t, "cluster.ssh.user", read_user),
        port: d.decode_optional(&t, "cluster.ssh.port", |n| {
            int32_reader(1..=u32::from(u16::MAX))(n).map(|p| p as u16)
        }),
        key: d.decode_optional(&t, "cluster.ssh.key", read_path),
        config: d.decode_value(&t, "cluster.ssh.config", |node| {
            Ok(match read_text(node)?.as_str() {
                "default" => SshConfig::Default,
                "none" => SshConfig::None,
                _ => SshConfig::File(read_path(node)?),
            })
        }),
        known_hosts: d.decode_value(
            &t,
            "cluster.ssh.known_hosts",
            choice_reader(&[("strict", KnownHosts::Strict), ("accept_new", KnownHosts::AcceptNew)]),
        ),
        jump: d.decode_optional(&t, "cluster.ssh.jump", read_jump_host),
        connect_timeout_ms: d.decode_value(&t, "cluster.ssh.connect_timeout", |node| {
            match read_duration(node)? {
                ms @ 1..=MAX_CONNECT_TIMEOUT_MS => Ok(ms),
                _ => Err(out_of_range_error("a duration above 0 of at most `10m`", node)),
            }
        }),
        fanout: d.decode_value(&t, "cluster.ssh.fanout", int32_reader(1..=1024)),
    }
}

/// Reads a login name. Rejects names that [`parse_hosts`] does not accept before an `@`.
fn read_user(node: &YamlNode) -> ReadResult<String> {
    let name = read_text(node)?;
    match parse_hosts(&format!("{name}@host")) {
        Ok(hosts) if hosts.len() == 1 => Ok(name),
        _ => Err(wrong_format_error("a user name", node)),
    }
}

/// Reads a text that names exactly one host, as `[user@]host[:port]`.
fn read_jump_host(node: &YamlNode) -> ReadResult<String> {
    let text = read_text(node)?;
    match parse_hosts(&text).map(|hosts| hosts.len()) {
        Ok(1) => Ok(text),
        _ => Err(wrong_format_error("one host: `[user@]host[:port]`", node)),
    }
}
