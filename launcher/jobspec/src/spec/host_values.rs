//! Creates the parsers and printers ([`ValueType`]) for `cluster.hosts`, for filters of hosts, and
//! for names of users and hosts.
use crate::{
    hosts::{MAX_HOSTS, parse_hosts},
    keys::{
        choice::keywords_type,
        collections::{described_list_type, list_type},
        text::{formatted_text_type, path_type, read_text, text_type},
        value_type::{ReadResult, ValueType, in_variant, out_of_range_error, wrong_type_error},
    },
    yaml::{
        format::{YamlText, format_map},
        tree::{YamlNode, YamlValue},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::{collections::HashSet, path::PathBuf};

/// `cluster.hosts`: the hosts that the job may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostSelection {
    /// The nodes of the Slurm allocation that launch runs in. Outside of an allocation, the nodes
    /// that join if the environment variables describe one node of several. Otherwise this machine.
    Auto,
    /// Only the machine on which launch was started.
    Local,
    /// The nodes of the Slurm allocation that launch runs in.
    Slurm,
    /// The hosts of the PBS job that launch runs in, which are reached over SSH.
    Pbs,
    /// The hosts of the LSF job that launch runs in, which are reached over SSH.
    Lsf,
    /// The hosts on which launch is started, once on each. They join the job.
    Join,
    /// The hosts that these texts name. [`crate::hosts::parse_hosts`] parses each text.
    List(Vec<String>),
    /// The hosts of the hostfile at this path.
    File(PathBuf),
}

/// The phrase by which messages describe the values of `cluster.hosts`.
const EXPECTED_HOSTS: &str =
    "`auto`, `local`, `slurm`, `pbs`, `lsf`, `join`, a list of hosts, or `{file: hostfile}`";

/// Returns the parser and printer ([`ValueType`]) for `cluster.hosts`: `auto`, `local`, `slurm`,
/// `pbs`, `lsf`, `join`, a list of hosts, or `{file: hostfile}`.
pub(crate) fn host_selection_type() -> ValueType<HostSelection> {
    let file = json!({"file": path_type().schema});
    let schema = json!({"anyOf": [
        host_keywords_type().schema,
        {"type": "array", "items": {"type": ["string", "integer"], "minLength": 1}, "minItems": 1},
        {"type": "object", "properties": file, "required": ["file"], "additionalProperties": false},
    ]});
    let accepts = "`auto`, `local`, `slurm`, `pbs`, `lsf`, `join`, list of hosts, or `{file: hostfile}`";
    ValueType::new(accepts, schema, read_hosts, |hosts| match hosts {
        HostSelection::List(texts) => list_type("list of hosts", text_type()).print(texts),
        HostSelection::File(file) => {
            Some(YamlText::Line(format_map([("file".to_owned(), path_type().print_line(file))])))
        }
        keyword => host_keywords_type().print(keyword),
    })
}

/// Returns the parser and printer ([`ValueType`]) for those values of `cluster.hosts` that are
/// keywords, such as `local` and `slurm`.
fn host_keywords_type() -> ValueType<HostSelection> {
    keywords_type(vec![
        ("auto", HostSelection::Auto),
        ("local", HostSelection::Local),
        ("slurm", HostSelection::Slurm),
        ("pbs", HostSelection::Pbs),
        ("lsf", HostSelection::Lsf),
        ("join", HostSelection::Join),
    ])
}

/// Reads a value of `cluster.hosts` from YAML.
fn read_hosts(node: &YamlNode) -> ReadResult<HostSelection> {
    match &node.value {
        YamlValue::List(items) if items.is_empty() => Err(out_of_range_error(EXPECTED_HOSTS, node)),
        YamlValue::List(_) => {
            let host = ValueType::new_single_line("host", json!({}), read_host_pattern, String::clone);
            let hosts = described_list_type("list of hosts", EXPECTED_HOSTS, host).read(node)?;
            reject_duplicate_hosts(node, &hosts)?;
            Ok(HostSelection::List(hosts))
        }
        YamlValue::Map(entries) => match entries.as_slice() {
            [only] if only.key == "file" => in_variant!(path_type(), HostSelection::File).read(&only.value),
            _ => Err(wrong_type_error(EXPECTED_HOSTS, node)),
        },
        YamlValue::Text if host_keywords_type().read(node).is_err() && read_host_pattern(node).is_ok() => {
            let help = format!("write a list of one item as [\"{}\"]", node.raw);
            Err(wrong_type_error(EXPECTED_HOSTS, node).with_help(help))
        }
        _ => host_keywords_type().read(node),
    }
}

/// Reads an item of the list `cluster.hosts`: a text that names one or several hosts, such as
/// `node-[01-16]`. Checks the text, but returns it unchanged.
fn read_host_pattern(node: &YamlNode) -> ReadResult<String> {
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

/// Fails if the list `cluster.hosts` names a host twice, or names more than [`MAX_HOSTS`] hosts
/// after ranges are expanded. `node` is the list.
fn reject_duplicate_hosts(node: &YamlNode, texts: &[String]) -> ReadResult<()> {
    let YamlValue::List(items) = &node.value else { return Ok(()) };
    let mut names = HashSet::new();
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

/// Returns the parser and printer ([`ValueType`]) for `cluster.include` and `cluster.exclude`:
/// lists of filters of hosts as in DeepSpeed. A single text is also accepted, as on DeepSpeed's
/// command line.
pub(crate) fn host_filters_type() -> ValueType<Vec<String>> {
    let filters = || {
        described_list_type("list of text", "a list of filters such as `worker-0@worker-1:0,2`", text_type())
    };
    let schema = json!({"anyOf": [text_type().schema, filters().schema]});
    let read = move |node: &YamlNode| match node.value {
        YamlValue::Text => text_type().read(node).map(|text| vec![text]),
        _ => filters().read(node),
    };
    ValueType::new("list of text", schema, read, move |list| filters().print(list))
}

/// Returns the parser and printer ([`ValueType`]) for login names for SSH, such as `user` in
/// `user@host`.
pub(crate) fn user_name_type() -> ValueType<String> {
    formatted_text_type("text", "a user name", "^[^@:\\s]+$", |name| {
        parse_hosts(&format!("{name}@host")).is_ok_and(|hosts| hosts.len() == 1)
    })
}

/// Returns the parser and printer ([`ValueType`]) for job.yaml keys that accept a text that names
/// exactly one host.
pub(crate) fn one_host_type() -> ValueType<String> {
    formatted_text_type("text: `[user@]host[:port]`", "one host: `[user@]host[:port]`", "^\\S+$", |text| {
        parse_hosts(text).is_ok_and(|hosts| hosts.len() == 1)
    })
}
