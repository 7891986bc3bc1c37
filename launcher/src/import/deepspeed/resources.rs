//! [`DeepSpeedResources`]: the hosts and workers that a command line of `deepspeed` selects.
use super::arguments::PROGRAM_NAME;
use crate::import::{
    command_line::CommandLine,
    drop_in::{DropInContext, check_worker_count, create_unsupported_option_error},
    job_draft::ImportedNodes,
};
use diagnostic::Diagnostic;
use jobspec::{
    env,
    hosts::{HostSlots, NodeCount, RendezvousAddress, SelectedHost, filter_hosts, parse_hostfile},
};

/// The host name that stands for this machine in DeepSpeed's options `--include` and `--exclude`.
pub(super) const LOCALHOST_NAME: &str = "localhost";
/// The environment variable by which the user selects the kind of device that DeepSpeed uses.
const ACCELERATOR_VARIABLE: &str = "DS_ACCELERATOR";
/// DeepSpeed's default of `--master_port`.
const DEFAULT_MASTER_PORT: &str = "29500";

/// The hosts and slots (places for workers) on which a `deepspeed` command line runs its workers.
#[derive(Debug)]
pub(super) enum DeepSpeedResources {
    /// This machine, with this number of workers, the numbers of the GPUs if the command line
    /// selects GPUs, and the only host of the hostfile that the filters select, unless its name is
    /// [`LOCALHOST_NAME`].
    Local { workers: i64, devices: Option<Vec<u32>>, host: Option<String> },
    /// This machine as one of several nodes, on each of which the user runs `deepspeed --no_ssh`,
    /// with the number of workers of each node, and the numbers of their GPUs if the command line
    /// or the hostfile selects GPUs.
    Node { workers: i64, devices: Option<Vec<u32>>, nodes: ImportedNodes },
    /// The hosts of the hostfile that the filters select.
    Hosts,
}

/// Returns the value of the integer option `name` of `deepspeed`, or -1 if the option was not
/// given.
pub(super) fn read_integer_option(given: &CommandLine, name: &str) -> i64 {
    given.last_value(name).and_then(|text| text.trim().parse().ok()).unwrap_or(-1)
}

/// Determines the hosts of a `deepspeed` command line and the workers on each host, from the
/// text of the hostfile, the host filters and the requested counts. `hostfile` is `None` if the
/// file does not exist.
pub(super) fn select_resources(
    given: &CommandLine,
    hostfile: Option<&str>,
    context: &DropInContext<'_>,
) -> Result<DeepSpeedResources, Diagnostic> {
    let filter = |name: &str| given.last_value(name).filter(|text| !text.is_empty()).map(str::to_owned);
    let (mut include, exclude) = (filter("include"), filter("exclude"));
    let (nodes, gpus) = (read_integer_option(given, "num_nodes"), read_integer_option(given, "num_gpus"));
    if (nodes >= 0 || gpus >= 0) && (include.is_some() || exclude.is_some()) {
        let reason = "it contradicts `--include` and `--exclude`, as in DeepSpeed";
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--num_gpus", reason, "use one of them"));
    }
    let uses_gpus =
        context.installed_gpus > 0 && context.user_env_variable(ACCELERATOR_VARIABLE) != Some("cpu");
    let selects_gpus = hostfile.is_some() || gpus > 0 || include.is_some() || exclude.is_some();
    let pool = list_hosts(hostfile, nodes, uses_gpus, context)?;
    // The workers inherit the list of GPUs.
    let listed = context.user_env_variable(env::CUDA_VISIBLE_DEVICES).filter(|list| !list.is_empty());
    if let Some(list) = listed.filter(|_| !selects_gpus) {
        include = Some(format!("{LOCALHOST_NAME}:{list}"));
    }
    let option = if exclude.is_some() { "--exclude" } else { "--include" };
    let include: Vec<String> = include.into_iter().collect();
    let exclude: Vec<String> = exclude.into_iter().collect();
    let mut left = filter_hosts(&pool, &include, &exclude).map_err(|error| {
        create_unsupported_option_error(PROGRAM_NAME, option, error.to_string(), "slots count from 0")
    })?;
    if nodes > 0 {
        left.truncate(nodes as usize);
    }
    let is_node = hostfile.is_some() && given.last_value("no_ssh").is_some();
    let force = given.last_value("force_multi").is_some();
    if hostfile.is_some() && (left.len() > 1 || force) && !is_node {
        return Ok(DeepSpeedResources::Hosts);
    }
    let count_slots = |slots: HostSlots| match slots {
        _ if gpus > 0 => HostSlots::Count(gpus.min(i64::from(u32::MAX)) as u32),
        slots => slots,
    };
    let nodes = match is_node {
        true => select_node(given, &pool, &left, |slots| count_slots(slots.clone()))?,
        false => None,
    };
    let selected = left.into_iter().next();
    let host = selected.as_ref().map(|(index, _)| pool[*index].0.clone());
    let host = host.filter(|host| host != LOCALHOST_NAME);
    let slots = count_slots(selected.map_or(HostSlots::Count(0), |(_, slots)| slots));
    let workers = i64::from(slots.count().unwrap_or(1));
    check_worker_count(PROGRAM_NAME, "--num_gpus", workers)?;
    let devices = match slots {
        HostSlots::Selected(numbers) => Some(numbers),
        HostSlots::Count(count) => Some((0..count).collect()),
        HostSlots::Auto => None,
    };
    let devices = devices.filter(|_| uses_gpus && selects_gpus);
    Ok(match nodes {
        Some(nodes) => DeepSpeedResources::Node { workers, devices, nodes },
        None => DeepSpeedResources::Local { workers, devices, host },
    })
}

/// Lists the hosts of the hostfile or, without one, this machine, each with its slots. Fails if the
/// hostfile is not valid, or if several nodes are requested without a hostfile.
fn list_hosts(
    hostfile: Option<&str>,
    nodes: i64,
    uses_gpus: bool,
    context: &DropInContext<'_>,
) -> Result<Vec<(String, HostSlots)>, Diagnostic> {
    if let Some(text) = hostfile {
        return parse_hostfile_slots(text);
    }
    if nodes > 1 {
        let reason = "the job has several nodes, but there is no hostfile";
        let help = "name the hosts with `--hostfile`";
        return Err(create_unsupported_option_error(PROGRAM_NAME, "--num_nodes", reason, help));
    }
    Ok(vec![(LOCALHOST_NAME.to_owned(), HostSlots::Count(count_local_slots(uses_gpus, context)))])
}

/// Determines the nodes of `deepspeed --no_ssh`, and which of them this machine is, from the
/// selected hosts `left` of the hostfile, `--node_rank`, `--master_addr` and `--master_port`.
/// Returns `None` if only one host is selected. Fails if the number of this node is not that of a
/// selected host, as in DeepSpeed, or if the hosts have different slots.
fn select_node(
    given: &CommandLine,
    pool: &[(String, HostSlots)],
    left: &[SelectedHost],
    count_slots: impl Fn(&HostSlots) -> HostSlots,
) -> Result<Option<ImportedNodes>, Diagnostic> {
    let unsupported = |option: &str, reason: String, help: &str| {
        Err(create_unsupported_option_error(PROGRAM_NAME, option, reason, help))
    };
    let rank = read_integer_option(given, "node_rank");
    let Some(node_rank) = u32::try_from(rank).ok().filter(|rank| (*rank as usize) < left.len()) else {
        let reason = "`--no_ssh` needs the number of this node in the hostfile".to_owned();
        let help = format!("use a number from 0 to {}", left.len().saturating_sub(1));
        return unsupported("--node_rank", reason, &help);
    };
    let [(first, first_slots), others @ ..] = left else { return Ok(None) };
    if others.is_empty() {
        return Ok(None);
    }
    if others.iter().any(|(_, slots)| count_slots(slots) != count_slots(first_slots)) {
        let reason = "with `--no_ssh`, all hosts must have the same slots".to_owned();
        let help = "add `--num_gpus N`, or remove `--no_ssh` to connect over SSH";
        return unsupported("--hostfile", reason, help);
    }
    let name = pool[*first].0.as_str();
    let address = given.last_value("master_addr").filter(|address| !address.is_empty());
    let address = address.unwrap_or_else(|| name.rsplit_once('@').map_or(name, |(_, host)| host));
    let port = given.last_value("master_port").unwrap_or(DEFAULT_MASTER_PORT);
    let parsed: Result<RendezvousAddress, _> = address.parse();
    let (Ok(rendezvous), Ok(port)) = (parsed, port.trim().parse()) else {
        let reason = format!("`{}:{}` is not `HOST:PORT`", address.escape_debug(), port.escape_debug());
        return unsupported("--master_addr", reason, "");
    };
    Ok(Some(ImportedNodes {
        count: NodeCount::from_exact_count(left.len() as u32),
        node_rank: Some(node_rank),
        rendezvous: Some(RendezvousAddress { port, ..rendezvous }),
    }))
}

/// Parses a hostfile into host names, each with its number of slots (places for workers). Fails if
/// the text is not valid.
fn parse_hostfile_slots(text: &str) -> Result<Vec<(String, HostSlots)>, Diagnostic> {
    match parse_hostfile(text) {
        Ok(entries) => {
            let slots = |slots: Option<u32>| slots.map_or(HostSlots::Auto, HostSlots::Count);
            Ok(entries.into_iter().map(|entry| (entry.host.to_string(), slots(entry.slots))).collect())
        }
        Err(errors) => {
            let reason =
                errors.first().map(|error| format!("line {}: {error}", error.line)).unwrap_or_default();
            Err(create_unsupported_option_error(
                PROGRAM_NAME,
                "--hostfile",
                reason,
                "a line is `host slots=N`",
            ))
        }
    }
}

/// Returns how many workers DeepSpeed starts on this machine by default: one per GPU or, without
/// GPUs, `LOCAL_SIZE` or one per NUMA node.
fn count_local_slots(uses_gpus: bool, context: &DropInContext<'_>) -> u32 {
    let given = context
        .user_env_variable(env::LOCAL_SIZE)
        .and_then(|text| text.trim().parse().ok())
        .filter(|n| *n > 0);
    match uses_gpus {
        true => context.installed_gpus as u32,
        false => given.unwrap_or(context.numa_nodes.max(1) as u32),
    }
}
