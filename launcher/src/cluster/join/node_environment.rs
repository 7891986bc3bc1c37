//! [`find_node_environment`]: detects, from environment variables, whether another launcher or
//! scheduler has started this process as one node of several.
//!
//! The functions are pure: the environment is an argument. A launcher that starts several processes
//! on a node is an error, because each of them would control all workers of the node.
use crate::cluster::batch_hosts::{BatchHosts, PBS_NODEFILE};
use diagnostic::{Diagnostic, codes::host};
use jobspec::{
    env,
    hosts::{InvalidNodeCount, NodeCount, RendezvousAddress},
};
use std::str::FromStr;

/// The number of nodes, the node rank of this node, and the address of node 0, as environment
/// variables state them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeEnvironment {
    /// The names of the variables, for messages.
    pub(crate) source: String,
    /// The number of nodes; `None` if it is not known.
    pub(crate) nodes: Option<NodeCount>,
    /// The number of this node, from 0; `None` if it is not known.
    pub(crate) node_rank: Option<u32>,
    /// The address of node 0; `None` if it is not known.
    pub(crate) rendezvous: Option<RendezvousAddress>,
}

/// What the environment variables of a supported scheduler, such as Slurm, state about this
/// process.
#[derive(Clone, Debug, Default)]
pub(crate) struct SchedulerVariables {
    /// Whether this process runs in an allocation of the scheduler.
    pub(crate) is_allocated: bool,
    /// The position of this process in a step with several tasks; `None` if this process is not
    /// part of such a step.
    pub(crate) step: Option<StepVariables>,
    /// The first host of the allocation or step.
    pub(crate) first_host: Option<String>,
}

/// What a scheduler's variables state about the step (such as a Slurm step) that contains this
/// process: numbers of nodes and tasks, and this node's rank.
#[derive(Clone, Debug)]
pub(crate) struct StepVariables {
    /// The names of the variables, for messages.
    pub(crate) source: String,
    pub(crate) nodes: u32,
    pub(crate) node_rank: u32,
    pub(crate) tasks: u32,
}

/// The environment variables, files and host name from which launch detects that another launcher
/// has started it as one of several nodes.
pub(crate) struct ProcessEnvironment<'a> {
    /// Returns the value of an environment variable.
    pub(crate) get: &'a dyn Fn(&str) -> Option<String>,
    /// Reads a file. Returns `None` if the file cannot be read.
    pub(crate) read_file: &'a dyn Fn(&str) -> Option<String>,
    /// The host name of this machine.
    pub(crate) host: &'a str,
    pub(crate) scheduler: SchedulerVariables,
}

/// The number of processes of an MPI program, which MPI launchers write to an environment variable
/// in different notations. It is the number of nodes, because one process is started on each.
struct MpiProcessCount(u32);

impl FromStr for MpiProcessCount {
    type Err = InvalidNodeCount;

    fn from_str(text: &str) -> Result<MpiProcessCount, InvalidNodeCount> {
        let count: NodeCount = text.parse()?;
        if count.min == count.max { Ok(MpiProcessCount(count.max)) } else { Err(InvalidNodeCount) }
    }
}

/// The names of the environment variables by which an MPI launcher describes each process that it
/// starts.
struct MpiVariableNames {
    size: &'static str,
    rank: &'static str,
    /// The names of variables for the number of processes on this node.
    local_size: &'static [&'static str],
}

/// The names of the environment variables by which MPI launchers, such as Open MPI's `mpirun`,
/// inform each process about its rank and the number of processes. They also state its local rank.
/// All of these launchers set the number of processes.
const MPI_LAUNCHER_VARIABLES: &[MpiVariableNames] = &[
    MpiVariableNames {
        size: "OMPI_COMM_WORLD_SIZE",
        rank: "OMPI_COMM_WORLD_RANK",
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
    },
    MpiVariableNames {
        size: "MV2_COMM_WORLD_SIZE",
        rank: "MV2_COMM_WORLD_RANK",
        local_size: &["MV2_COMM_WORLD_LOCAL_SIZE"],
    },
    MpiVariableNames {
        size: "JSM_NAMESPACE_SIZE",
        rank: "JSM_NAMESPACE_RANK",
        local_size: &["JSM_NAMESPACE_LOCAL_SIZE"],
    },
];
/// The names of the environment variables by which the PMI process managers of MPICH, Intel MPI and
/// PALS inform each process about its rank.
const PMI_LAUNCHER_VARIABLES: MpiVariableNames = MpiVariableNames {
    size: "PMI_SIZE",
    rank: "PMI_RANK",
    local_size: &["MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"],
};

/// Determines from environment variables whether another launcher or scheduler has started this
/// process as one node of several. Returns `None` if no variable describes a node, or if there is
/// one node. Fails if the variables contradict each other, or describe one worker of several.
pub(crate) fn find_node_environment(
    environment: &ProcessEnvironment<'_>,
) -> diagnostic::Result<Option<NodeEnvironment>> {
    if let Some(found) = environment.find_launch_variables()? {
        return Ok(found.only_if_multi_node());
    }
    environment.check_not_a_worker()?;
    let in_allocation = environment.scheduler.is_allocated;
    let find = || -> diagnostic::Result<Option<NodeEnvironment>> {
        if !in_allocation {
            if let Some(found) = environment.find_pet_variables()? {
                return Ok(Some(found));
            }
            if let Some(found) = environment.find_training_operator_variables()? {
                return Ok(Some(found));
            }
            if let Some(found) = environment.find_indexed_job_variables()? {
                return Ok(Some(found));
            }
        }
        for variables in MPI_LAUNCHER_VARIABLES {
            if let Some(found) = environment.find_mpi_variables(variables)? {
                return Ok(Some(found));
            }
        }
        if let Some(found) = environment.find_step_variables()? {
            return Ok(Some(found));
        }
        if in_allocation {
            return Ok(None);
        }
        match environment.find_mpi_variables(&PMI_LAUNCHER_VARIABLES)? {
            Some(found) => Ok(Some(found)),
            None => Ok(environment.find_pmix_variables()?.or_else(|| environment.find_batch_variables())),
        }
    };
    Ok(find()?.and_then(NodeEnvironment::only_if_multi_node))
}

impl NodeEnvironment {
    /// Returns this value if the run has several nodes or an unknown number of nodes, and `None` if
    /// it has a single node.
    fn only_if_multi_node(self) -> Option<NodeEnvironment> {
        (self.nodes.is_none_or(|nodes| nodes.max > 1)).then_some(self)
    }
}

impl ProcessEnvironment<'_> {
    /// Returns the value of the environment variable `name`; `None` if the variable is not set or
    /// empty.
    fn find_nonempty_variable(&self, name: &str) -> Option<String> {
        (self.get)(name).filter(|value| !value.is_empty())
    }

    /// Parses the value of the environment variable `name`, which must be a number or another value
    /// of the type `T`. Returns `None` if the variable is not set or empty. Fails if the value is
    /// malformed.
    fn parse_variable<T: FromStr>(&self, name: &str) -> diagnostic::Result<Option<T>> {
        let Some(value) = self.find_nonempty_variable(name) else { return Ok(None) };
        let parsed = value.trim().parse().map(Some);
        parsed.map_err(|_| {
            let shown: String = value.chars().take(60).flat_map(char::escape_default).collect();
            Diagnostic::error(host::JOIN_NODES_INVALID, format!("{name} has an unexpected value: `{shown}`"))
                .with_subject(name)
                .with_field("value", shown)
                .with_help("give `--nodes`, `--node-rank` and `--rendezvous`; `--nodes 1` runs on this machine alone")
        })
    }

    /// Reads the environment variables by which a user describes this node to launch itself, such
    /// as `LAUNCH_NODES`. Returns `None` without `LAUNCH_NODES`.
    fn find_launch_variables(&self) -> diagnostic::Result<Option<NodeEnvironment>> {
        let Some(nodes) = self.parse_variable::<NodeCount>(env::LAUNCH_NODES)? else { return Ok(None) };
        Ok(Some(NodeEnvironment {
            source: env::LAUNCH_NODES.to_owned(),
            nodes: Some(nodes),
            node_rank: self
                .parse_variable(env::LAUNCH_NODE_RANK)?
                .or(self.parse_variable("JOB_COMPLETION_INDEX")?),
            rendezvous: self.parse_variable(env::LAUNCH_RENDEZVOUS)?,
        }))
    }

    /// Fails if a launcher has started several processes of launch on this node, one for each
    /// worker, instead of one process per node.
    fn check_not_a_worker(&self) -> diagnostic::Result<()> {
        let [rank, local, world] =
            [env::RANK, env::LOCAL_RANK, env::WORLD_SIZE].map(|name| self.find_nonempty_variable(name));
        match (rank, local, world.and_then(|world| world.trim().parse::<u32>().ok())) {
            (Some(rank), Some(_), Some(world)) if world > 1 => {
                let message = format!(
                    "this process is worker {rank} of {world} of another launcher (RANK, LOCAL_RANK, WORLD_SIZE)"
                );
                Err(Diagnostic::error(host::JOIN_STARTED_PER_WORKER, message)
                    .with_field("workers", world)
                    .with_help("start launch once on each node; launch starts the workers")
                    .with_help("`--nodes 1` runs a separate job on this machine in each of them"))
            }
            _ => Ok(()),
        }
    }

    /// Reads the `PET_*` environment variables, with which the Kubeflow Trainer sets the options of
    /// torchrun.
    fn find_pet_variables(&self) -> diagnostic::Result<Option<NodeEnvironment>> {
        let Some(nodes) = self.parse_variable::<NodeCount>("PET_NNODES")? else { return Ok(None) };
        let endpoint = self.parse_variable::<RendezvousAddress>("PET_RDZV_ENDPOINT")?;
        Ok(Some(NodeEnvironment {
            source: "PET_NNODES".to_owned(),
            nodes: Some(nodes),
            node_rank: self.parse_variable("PET_NODE_RANK")?,
            rendezvous: match endpoint {
                Some(endpoint) => Some(endpoint),
                None => self.read_node_0_address("PET_MASTER_ADDR", "PET_MASTER_PORT")?,
            },
        }))
    }

    /// Reads the node rank, the number of nodes and the address of node 0 from the environment
    /// variables that Kubeflow's training operator sets for the pods of a PyTorchJob.
    fn find_training_operator_variables(&self) -> diagnostic::Result<Option<NodeEnvironment>> {
        let is_set = |name: &str| self.find_nonempty_variable(name).is_some();
        if !is_set(env::RANK)
            || !is_set(env::WORLD_SIZE)
            || !is_set(env::MASTER_ADDR)
            || is_set(env::LOCAL_RANK)
        {
            return Ok(None);
        }
        Ok(Some(NodeEnvironment {
            source: "WORLD_SIZE and RANK".to_owned(),
            nodes: self.parse_variable(env::WORLD_SIZE)?,
            node_rank: self.parse_variable(env::RANK)?,
            rendezvous: self.read_node_0_address(env::MASTER_ADDR, env::MASTER_PORT)?,
        }))
    }

    /// Reads the index of this pod in an Indexed Job of Kubernetes, which becomes the node rank,
    /// from an environment variable. The pods of a job with a headless service have names that end
    /// with the index, and node 0 is the one with index 0.
    fn find_indexed_job_variables(&self) -> diagnostic::Result<Option<NodeEnvironment>> {
        let Some(index) = self.parse_variable::<u32>("JOB_COMPLETION_INDEX")? else { return Ok(None) };
        let host = self.host.split('.').next().unwrap_or_default();
        let stem = host.strip_suffix(&index.to_string()).filter(|stem| stem.ends_with('-'));
        let rendezvous = stem.and_then(|stem| {
            let domain = self.find_host_domain(host)?;
            Some(RendezvousAddress::with_default_port(&format!("{stem}0.{domain}")))
        });
        let source = "JOB_COMPLETION_INDEX".to_owned();
        Ok(Some(NodeEnvironment { source, nodes: None, node_rank: Some(index), rendezvous }))
    }

    /// Finds the domain part of this machine's host name in `/etc/hosts`, where Kubernetes writes
    /// the full name of a pod. Kubernetes writes the name there that a headless service gives the
    /// pod.
    fn find_host_domain(&self, host: &str) -> Option<String> {
        let hosts = (self.read_file)("/etc/hosts")?;
        let words =
            hosts.lines().filter(|line| !line.trim_start().starts_with('#')).flat_map(str::split_whitespace);
        let qualified = words.into_iter().find_map(|word| word.strip_prefix(host)?.strip_prefix('.'));
        qualified.map(str::to_owned)
    }

    /// Reads the rank of this process and the number of processes from the environment variables of
    /// an MPI launcher. Fails if it has started several processes on this node.
    fn find_mpi_variables(
        &self,
        variables: &MpiVariableNames,
    ) -> diagnostic::Result<Option<NodeEnvironment>> {
        let Some(nodes) = self.parse_variable::<MpiProcessCount>(variables.size)? else { return Ok(None) };
        for name in variables.local_size {
            check_processes_per_node(name, self.parse_variable(name)?)?;
        }
        Ok(Some(NodeEnvironment {
            source: format!("{} and {}", variables.size, variables.rank),
            nodes: Some(NodeCount::from_exact_count(nodes.0)),
            node_rank: self.parse_variable(variables.rank)?,
            rendezvous: self.find_first_batch_host_address(),
        }))
    }

    /// Reads the rank of this node and the number of nodes from the variables of the scheduler's
    /// step (such as a Slurm step) that contains this process. Fails if a node has several tasks.
    fn find_step_variables(&self) -> diagnostic::Result<Option<NodeEnvironment>> {
        let Some(step) = &self.scheduler.step else { return Ok(None) };
        if step.tasks != step.nodes {
            let per_node = step.tasks.div_ceil(step.nodes.max(1));
            check_processes_per_node(&step.source, Some(per_node.max(2)))?;
        }
        Ok(Some(NodeEnvironment {
            source: step.source.clone(),
            nodes: Some(NodeCount::from_exact_count(step.nodes)),
            node_rank: Some(step.node_rank),
            rendezvous: self.find_first_batch_host_address(),
        }))
    }

    /// Reads the node rank of this process from `PMIX_RANK`, an environment variable that the
    /// process manager PMIx sets. PMIx has no variable for the number of processes.
    fn find_pmix_variables(&self) -> diagnostic::Result<Option<NodeEnvironment>> {
        let Some(rank) = self.parse_variable::<u32>("PMIX_RANK")? else { return Ok(None) };
        let hosts = self.list_batch_hosts().map(|found| found.hosts).unwrap_or_default();
        let nodes = u32::try_from(hosts.len()).ok().filter(|n| *n > 0).map(NodeCount::from_exact_count);
        let rendezvous = self.find_first_batch_host_address();
        Ok(Some(NodeEnvironment { source: "PMIX_RANK".to_owned(), nodes, node_rank: Some(rank), rendezvous }))
    }

    /// Determines the node rank of this host, which is its position in the host list of the LSF or
    /// PBS batch job.
    fn find_batch_variables(&self) -> Option<NodeEnvironment> {
        let BatchHosts { source, hosts } = self.list_batch_hosts()?;
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        let this_host = short(self.host);
        let nodes = hosts.len() as u32;
        Some(NodeEnvironment {
            source: source.to_owned(),
            nodes: Some(NodeCount::from_exact_count(nodes)),
            node_rank: hosts.iter().position(|name| short(name) == this_host).map(|rank| rank as u32),
            rendezvous: self.find_first_batch_host_address(),
        })
    }

    /// Returns the address at which node 0 listens in a batch job of LSF or PBS: the first host of
    /// the batch job, with launch's default port.
    fn find_first_batch_host_address(&self) -> Option<RendezvousAddress> {
        let batch = || self.list_batch_hosts().and_then(|found| found.hosts.into_iter().next());
        let first = self.scheduler.first_host.clone().or_else(batch)?;
        Some(RendezvousAddress::with_default_port(&first))
    }

    /// Returns the hosts of a batch job of LSF or PBS. Returns `None` outside of one.
    fn list_batch_hosts(&self) -> Option<BatchHosts> {
        BatchHosts::list_lsf_hosts(self.get).or_else(|| {
            let text = (self.read_file)(&self.find_nonempty_variable(PBS_NODEFILE)?)?;
            BatchHosts::parse_pbs_nodefile(&text)
        })
    }

    /// Builds the address at which node 0 listens from the environment variables called `host_name`
    /// (for the host) and `port_name` (for the port). A missing port is the default one.
    fn read_node_0_address(
        &self,
        host_name: &str,
        port_name: &str,
    ) -> diagnostic::Result<Option<RendezvousAddress>> {
        let Some(mut address) = self.parse_variable::<RendezvousAddress>(host_name)? else { return Ok(None) };
        if let Some(port) = self.parse_variable::<u16>(port_name)?.filter(|port| *port > 0) {
            address.port = port;
        }
        Ok(Some(address))
    }
}

/// Fails if `count`, the number of launch processes that another launcher has started on this node,
/// is greater than 1.
fn check_processes_per_node(source: &str, count: Option<u32>) -> diagnostic::Result<()> {
    match count {
        Some(count) if count > 1 => {
            let message = format!("launch was started {count} times on this node ({source})");
            Err(Diagnostic::error(host::JOIN_STARTED_PER_WORKER, message)
                .with_field("processes", count)
                .with_remedy()
                .with_help("`--nodes 1` runs a separate job on this machine in each of them"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "environment_tests.rs"]
mod tests;
