//! [`NodeRole`]: whether this process runs a job alone, controls the job as node 0, or joins node 0
//! as another node. The options and the environment variables of the process decide.
use super::job_preparation::{JobLoadRequest, LoadedJob};
use crate::cluster::{NodeEnvironment, detect_node_environment, find_host_provider, is_own_address};
use clap::Args;
use diagnostic::{Diagnostic, codes::host};
use jobspec::{
    HostSelection, JobSource, JobSpec, env,
    hosts::{NodeCount, RendezvousAddress},
    quote_yaml,
};
use std::path::PathBuf;

/// The options of a command that the user starts once on each node, such as `--nodes` and
/// `--node-rank`.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct NodeArgs {
    /// Number of nodes, including node 0: N or MIN:MAX; start launch once on each node
    /// [default: from the environment, else `cluster.join.nodes`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(NodeCount))]
    pub(crate) nodes: Option<NodeCount>,
    /// Number of this node, from 0; node 0 controls the job [default: from the environment; else
    /// the machine that has the rendezvous address is node 0]
    #[arg(long, alias = "node_rank", value_name = "K")]
    pub(crate) node_rank: Option<u32>,
    /// Address of node 0, to which the other nodes connect; without `:PORT` the port is 29400
    /// [default: from the environment, else `cluster.join.rendezvous`]
    #[arg(long, value_name = "HOST:PORT", value_parser = clap::value_parser!(RendezvousAddress))]
    pub(crate) rendezvous: Option<RendezvousAddress>,
    /// File with the secret key of all nodes, of 32 bytes or more [default: LAUNCH_KEY_FILE, else
    /// `cluster.join.key_file`]
    #[arg(long, value_name = "FILE", conflicts_with = "insecure")]
    pub(crate) key_file: Option<PathBuf>,
    /// Use no key: every process that reaches node 0 can join, and can run programs as this user
    #[arg(long)]
    pub(crate) insecure: bool,
}

impl NodeArgs {
    /// Returns the first node option on the command line, such as `--nodes` or `--node-rank`, or
    /// `None` if there is no node option.
    fn find_given_node_option(&self) -> Option<&'static str> {
        let given = [
            (self.nodes.is_some(), "--nodes"),
            (self.node_rank.is_some(), "--node-rank"),
            (self.rendezvous.is_some(), "--rendezvous"),
            (self.key_file.is_some(), "--key-file"),
            (self.insecure, "--insecure"),
        ];
        given.into_iter().find_map(|(is_given, name)| is_given.then_some(name))
    }
}

/// Whether this process runs a job alone, controls the job as node 0 for nodes that join, or joins
/// the run of node 0.
#[derive(Debug)]
pub(super) enum NodeRole {
    /// This process controls the job, on the hosts that the job names.
    Alone(JobLoadRequest),
    /// This process is node 0, which controls the job and the other nodes.
    Controller {
        /// The request for the job, to which the settings of the nodes were added.
        request: JobLoadRequest,
        /// The address at which to join as another node if another process of this machine already
        /// is node 0; `None` if this process must be node 0.
        fallback: Option<RendezvousAddress>,
    },
    /// This process is another node than node 0, and joins the run that node 0 controls.
    Member {
        /// The request for the job, to which the settings of the nodes were added.
        request: JobLoadRequest,
        /// The address of node 0.
        address: RendezvousAddress,
        /// The number of this node; `None` to let node 0 choose the number.
        node_rank: Option<u32>,
    },
}

/// Decides from the node options, the environment and the job whether this process runs the job
/// alone, is node 0, or joins node 0. Fails if this process is one node of several, but cannot join
/// the others.
pub(super) fn choose_role(args: &NodeArgs, request: JobLoadRequest) -> diagnostic::Result<NodeRole> {
    let option = args.find_given_node_option();
    let loaded = LoadedJob::load(&request)?;
    let job = &loaded.job;
    if args.nodes.is_some_and(|nodes| nodes.max == 1) && args.node_rank.unwrap_or(0) == 0 {
        return Ok(build_standalone_role(request, job));
    }
    // Without a job file, `local` is only the default.
    let is_default =
        matches!(request.source, JobSource::CommandLine { .. }) && job.cluster.hosts == HostSelection::Local;
    let can_join = is_default || matches!(job.cluster.hosts, HostSelection::Auto | HostSelection::Join);
    match option {
        Some(option) if !can_join => {
            let message =
                format!("`{option}` is for hosts that join, but `cluster.hosts` selects other hosts");
            return Err(Diagnostic::error(host::JOIN_OPTION_UNSUPPORTED, message)
                .with_subject(option)
                .with_help("remove the option, or set `cluster.hosts: join`"));
        }
        None if !can_join => return Ok(NodeRole::Alone(request)),
        _ => {}
    }
    let has_options = option.is_some();
    let explain = |error: Diagnostic| match find_host_provider(job) {
        // The provider of the job's hosts knows better how launch is started.
        Err(specific) if !has_options && !is_default => loaded.convert_cluster_error(specific),
        _ => error,
    };
    let is_complete = args.nodes.is_some() && args.node_rank.is_some();
    let found = if is_complete { None } else { detect_node_environment().map_err(explain)? };
    if !has_options && found.is_none() && job.cluster.hosts != HostSelection::Join {
        return Ok(NodeRole::Alone(request));
    }
    let settings = NodeSettings::collect(args, found, job).map_err(explain)?;
    if settings.nodes.max == 1 {
        return Ok(build_standalone_role(request, job));
    }
    settings.into_role(request)
}

/// Returns the role of a process that runs a job without other nodes. Replaces `cluster.hosts:
/// join` in the job by `local`.
fn build_standalone_role(mut request: JobLoadRequest, job: &JobSpec) -> NodeRole {
    if job.cluster.hosts == HostSelection::Join {
        request.set.push("cluster.hosts=local".to_owned());
    }
    NodeRole::Alone(request)
}

/// The settings of this node from options, environment variables and the job: number of nodes, node
/// rank, address of node 0 and key file.
#[derive(Debug)]
struct NodeSettings {
    nodes: NodeCount,
    node_rank: Option<u32>,
    rendezvous: RendezvousAddress,
    /// The absolute path of the file with the key that the nodes share; `None` if the user has
    /// requested nodes without a key.
    key_file: Option<PathBuf>,
}

impl NodeSettings {
    /// Collects the settings of this node (address of node 0, node rank, number of nodes, key) from
    /// options, environment variables and the job. Options take precedence over environment
    /// variables, and these over the job.
    fn collect(
        args: &NodeArgs,
        found: Option<NodeEnvironment>,
        job: &JobSpec,
    ) -> diagnostic::Result<NodeSettings> {
        let join = &job.cluster.join;
        let nodes = args.nodes.or(found.as_ref().and_then(|found| found.nodes));
        let nodes = nodes.or(join.nodes.map(NodeCount::from_exact_count));
        let node_rank = args.node_rank.or(found.as_ref().and_then(|found| found.node_rank));
        let source = found.as_ref().map(|found| found.source.clone());
        let label = describe_node(nodes, node_rank, source.as_deref());
        let Some(nodes) = nodes else {
            let message = format!("{label}, but the number of nodes is not known");
            return Err(Diagnostic::error(host::JOIN_NODES_INVALID, message)
                .with_help("add `--nodes N`; `--nodes 1` runs a separate job on this machine"));
        };
        if let Some(rank) = node_rank.filter(|rank| *rank >= nodes.max) {
            let message = format!(
                "the node rank is {rank}, but the ranks of {} nodes are below {}",
                nodes.max, nodes.max
            );
            return Err(Diagnostic::error(host::JOIN_NODES_INVALID, message)
                .with_subject("--node-rank")
                .with_field("node_rank", rank)
                .with_field("nodes", nodes.max)
                .with_remedy());
        }
        let in_job = join.rendezvous.as_ref().and_then(|text| text.parse().ok());
        let rendezvous = args.rendezvous.clone().or(found.and_then(|found| found.rendezvous)).or(in_job);
        let rendezvous = match rendezvous {
            _ if nodes.max == 1 => RendezvousAddress::with_default_port("localhost"),
            Some(rendezvous) => rendezvous,
            None => {
                let message = format!("{label}, but the address of node 0 is not known");
                return Err(Diagnostic::error(host::JOIN_RENDEZVOUS_INVALID, message)
                    .with_remedy()
                    .with_help("`--nodes 1` runs a separate job on this machine"));
            }
        };
        let key_file = choose_key_file(args, job, &label, nodes)?;
        Ok(NodeSettings { nodes, node_rank, rendezvous, key_file })
    }

    /// Decides whether this process is node 0 or joins node 0, and sets the `cluster.join` keys of
    /// the job request to the node settings.
    fn into_role(self, mut request: JobLoadRequest) -> diagnostic::Result<NodeRole> {
        let NodeSettings { nodes, node_rank, rendezvous, key_file } = self;
        let mut set = |key: &str, value: String| request.set.push(format!("{key}={value}"));
        set("cluster.hosts", "join".to_owned());
        set("cluster.join.nodes", nodes.max.to_string());
        set("cluster.join.rendezvous", quote_yaml(&rendezvous.to_string()));
        match key_file {
            Some(file) => {
                let file = std::path::absolute(&file).unwrap_or(file);
                let text = file.to_str().ok_or_else(|| {
                    let message = format!("the path of the key file {} is not UTF-8 text", file.display());
                    Diagnostic::error(host::JOIN_KEY_INVALID, message).with_help("use another path")
                })?;
                set("cluster.join.key_file", quote_yaml(text));
                set("cluster.join.insecure", "false".to_owned());
            }
            None => set("cluster.join.insecure", "true".to_owned()),
        }
        if nodes.min < nodes.max {
            set("run.min_hosts", nodes.min.to_string());
        }
        Ok(match node_rank {
            Some(0) => NodeRole::Controller { request, fallback: None },
            None if is_own_address(&rendezvous) => {
                NodeRole::Controller { request, fallback: Some(rendezvous) }
            }
            node_rank => NodeRole::Member { request, address: rendezvous, node_rank },
        })
    }
}

/// Describes this node for messages to the user, such as `this is node 1 of 4 (PET_NNODES)`.
fn describe_node(nodes: Option<NodeCount>, rank: Option<u32>, source: Option<&str>) -> String {
    let source = source.map(|source| format!(" ({source})")).unwrap_or_default();
    match (rank, nodes) {
        (Some(rank), Some(nodes)) => format!("this is node {rank} of {}{source}", nodes.max),
        (None, Some(nodes)) => format!("this is one node of {}{source}", nodes.max),
        (Some(rank), None) => format!("this is node {rank} of several{source}"),
        (None, None) => format!("the job is for nodes that join{source}"),
    }
}

/// Returns the file with the key that the nodes share, or `None` if the user has requested nodes
/// without a key. Fails if there is neither.
fn choose_key_file(
    args: &NodeArgs,
    job: &JobSpec,
    label: &str,
    nodes: NodeCount,
) -> diagnostic::Result<Option<PathBuf>> {
    let join = &job.cluster.join;
    if args.insecure || nodes.max == 1 {
        return Ok(None);
    }
    let in_environment = std::env::var_os(env::LAUNCH_KEY_FILE).filter(|file| !file.is_empty());
    let in_job = join.key_file.as_ref().map(|file| job.run.workdir.join(file));
    let file = args.key_file.clone().or(in_environment.map(PathBuf::from)).or(in_job);
    if file.is_some() {
        return Ok(file);
    }
    match std::env::var(env::LAUNCH_INSECURE).as_deref() {
        Ok("1") => return Ok(None),
        Ok("" | "0") | Err(_) => {}
        Ok(other) => {
            let message = format!("{} is `{}`; expected 0 or 1", env::LAUNCH_INSECURE, other.escape_debug());
            return Err(Diagnostic::error(host::JOIN_KEY_MISSING, message).with_subject(env::LAUNCH_INSECURE));
        }
    }
    if join.insecure {
        return Ok(None);
    }
    Err(Diagnostic::error(host::JOIN_KEY_MISSING, format!("{label}, but the nodes have no key"))
        .with_help("give all nodes the same key: `--key-file FILE`, or LAUNCH_KEY_FILE=FILE")
        .with_help("`--insecure`, or LAUNCH_INSECURE=1, lets every process that reaches node 0 join")
        .with_help("`--nodes 1` runs a separate job on this machine"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(args: &NodeArgs, found: Option<NodeEnvironment>) -> diagnostic::Result<NodeSettings> {
        NodeSettings::collect(args, found, &crate::testing::sample_job())
    }

    /// Returns the environment of a process that is started as node 2 of 4.
    fn environment() -> NodeEnvironment {
        NodeEnvironment {
            source: "PET_NNODES".to_owned(),
            nodes: Some(NodeCount::from_exact_count(4)),
            node_rank: Some(2),
            rendezvous: Some(RendezvousAddress::with_default_port("h0")),
        }
    }

    #[test]
    fn options_come_before_the_environment() {
        let args = NodeArgs { node_rank: Some(1), key_file: Some("/k".into()), ..NodeArgs::default() };
        let found = settings(&args, Some(environment())).expect("settings");
        assert_eq!(
            (found.nodes.max, found.node_rank, found.rendezvous.to_string()),
            (4, Some(1), "h0:29400".into())
        );
        assert_eq!(found.key_file, Some(PathBuf::from("/k")));
    }

    #[test]
    fn the_key_file_of_the_job_is_relative_to_the_workdir() {
        let mut job = crate::testing::sample_job();
        job.run.workdir = "/w".into();
        job.cluster.join.key_file = Some("key".into());
        let found = NodeSettings::collect(&NodeArgs::default(), Some(environment()), &job).expect("settings");
        assert_eq!(found.key_file, Some(PathBuf::from("/w/key")));
    }

    #[test]
    fn a_node_that_cannot_join_is_an_error() {
        let key = NodeArgs { insecure: true, ..NodeArgs::default() };
        let partial = |change: &dyn Fn(&mut NodeEnvironment)| {
            let mut found = environment();
            change(&mut found);
            Some(found)
        };
        for (args, found, code) in [
            (&key, partial(&|found| found.nodes = None), host::JOIN_NODES_INVALID),
            (&key, partial(&|found| found.node_rank = Some(4)), host::JOIN_NODES_INVALID),
            (&key, partial(&|found| found.rendezvous = None), host::JOIN_RENDEZVOUS_INVALID),
            (&NodeArgs::default(), partial(&|_| {}), host::JOIN_KEY_MISSING),
            (&key, None, host::JOIN_NODES_INVALID),
        ] {
            let error = settings(args, found).expect_err("rejected");
            assert_eq!(error.code(), code, "{error}");
        }
    }

    #[test]
    fn the_settings_of_a_node_become_keys_of_its_job() {
        let source = JobSource::Text { name: "a.yaml".to_owned(), text: "run: {command: [a]}".to_owned() };
        let request = JobLoadRequest { source, set: Vec::new() };
        let args = NodeArgs {
            nodes: Some(NodeCount { min: 2, max: 4 }),
            node_rank: Some(3),
            rendezvous: Some("h0:7".parse().expect("an address")),
            key_file: Some("/a key".into()),
            insecure: false,
        };
        let role = choose_role(&args, request).expect("a role");
        let NodeRole::Member { request, address, node_rank } = role else { panic!("{role:?}") };
        assert_eq!((address.to_string().as_str(), node_rank), ("h0:7", Some(3)));
        let job = LoadedJob::load(&request).expect("a job").job;
        assert_eq!(job.cluster.hosts, HostSelection::Join);
        assert_eq!((job.cluster.join.nodes, job.cluster.join.key_file), (Some(4), Some("/a key".into())));
        assert_eq!(job.run.min_hosts, jobspec::MinHosts::AtLeast(2));
    }
}
