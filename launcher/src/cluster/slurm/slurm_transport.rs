//! [`SlurmTransport`]: starts agents on the nodes of a Slurm allocation, in one step (`srun`) with
//! one task on each node. Each agent connects back to the controller over TCP.
//!
//! srun cannot carry the control connections: it mixes the output of all tasks, and a SIGTERM to
//! srun kills the tasks immediately. So srun only starts the agents and passes them an invitation
//! on standard input, which keeps the key out of arguments and environment. srun ends after its
//! last agent.
//!
//! Each group of a heterogeneous job gets a separate step, because srun passes its standard input
//! to the first group only.
use super::{
    allocation::{SlurmAllocation, SlurmNode, SlurmNodeGroup},
    srun,
    srun_process::SrunProcess,
    step_connection::{SlurmAgentConnection, SlurmAgentReader},
    step_listener,
};
use crate::{
    cluster::{
        pending_agent::PendingAgent,
        transport::{AgentHandle, AgentOutput, AgentProcess, Transport},
    },
    connection::{
        handshake::{HandshakeKey, Invitation},
        listeners::open_listeners,
    },
    discover::{find_reachable_addresses, list_interface_addresses, sort_and_limit_addresses},
};
use diagnostic::{Diagnostic, codes::slurm};
use globset::Glob;
use jobspec::{EnvSource, InterfaceSelector, JobSpec, PortSelection, RunSpec, env};
use protocol::control::ExitStatus;
use std::{collections::HashSet, io, sync::Arc};
use tokio::io::AsyncReadExt as _;

/// Starts agents on the nodes of a Slurm allocation, in one step (`srun`) with one task on each
/// node.
pub(crate) struct SlurmTransport {
    allocation: SlurmAllocation,
    /// Whether srun copies the executable to the nodes (`--bcast`).
    bcast: bool,
    /// Additional options of srun (`slurm.step_options`).
    step_options: Vec<String>,
    /// The network interface of this machine, or a network, through which agents connect to this
    /// machine. It is ignored if this machine has no such address.
    interface: InterfaceSelector,
    ports: PortSelection,
    /// Variables of this process that srun does not get: secrets, because Slurm sends the
    /// environment of srun to the nodes without encryption, the GPUs of this node, and a list of
    /// nodes that is not complete.
    withheld_variables: Vec<String>,
    steps: Vec<Arc<SrunProcess>>,
}

impl SlurmTransport {
    /// Creates the transport that starts the agents of a job on the nodes of a Slurm allocation.
    pub(crate) fn new(allocation: SlurmAllocation, job: &JobSpec) -> SlurmTransport {
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
        SlurmTransport {
            allocation,
            bcast: job.slurm.bcast,
            step_options: job.slurm.step_options.clone(),
            interface: job.cluster.interface.clone(),
            ports: job.cluster.ports,
            withheld_variables: select_withheld_variables(&job.run, names),
            steps: Vec::new(),
        }
    }

    /// Divides the nodes `hosts` into groups, and returns for each group the Slurm step (`srun`)
    /// that starts the agents on its nodes. Ignores names of other hosts.
    ///
    /// A step holds the nodes of one heterogeneous group. If steps must request GPUs and the nodes
    /// have different numbers of GPUs, each node gets a separate step.
    fn group_nodes_into_steps(&self, hosts: &[String]) -> Vec<srun::StepNodesAndGpus> {
        let requested: HashSet<&str> = hosts.iter().map(String::as_str).collect();
        let mut steps: Vec<srun::StepNodesAndGpus> = Vec::new();
        for group in &self.allocation.groups {
            let requires_request = group.nodes.iter().any(|node| node.requires_gpu_request);
            let gpus_are_equal = group.nodes.windows(2).all(|pair| pair[0].gpus == pair[1].gpus);
            let one_step = !requires_request || gpus_are_equal;
            let mut current: Option<srun::StepNodesAndGpus> = None;
            for node in group.nodes.iter().filter(|node| requested.contains(node.name.as_str())) {
                let gpus = node.gpus.filter(|_| requires_request);
                let gpus = gpus.map(if gpus_are_equal {
                    srun::StepGpuRequest::PerNode
                } else {
                    srun::StepGpuRequest::Total
                });
                let single =
                    srun::StepNodesAndGpus { het_group: group.het, gpus, names: vec![node.name.clone()] };
                match &mut current {
                    Some(current) if one_step => current.names.push(node.name.clone()),
                    _ => steps.extend(current.replace(single)),
                }
            }
            steps.extend(current);
        }
        steps
    }

    /// Starts a Slurm step (`srun`) that runs an agent on each of `nodes`, and a listener to which
    /// these agents connect. Returns the agents, which have not connected yet, with the names of
    /// their nodes. The `stderr` of the first agent carries the output of the whole step; the
    /// others have none.
    fn start_step(
        &mut self,
        nodes: &srun::StepNodesAndGpus,
    ) -> diagnostic::Result<Vec<(String, AgentProcess)>> {
        let cannot_listen = |error: io::Error| {
            Diagnostic::error(slurm::SLURM_LISTEN_FAILED, "cannot open a TCP port for the agents")
                .with_cause(&error)
        };
        let ips = find_reachable_addresses(&self.interface, list_interface_addresses());
        let (ips, omitted) = sort_and_limit_addresses(ips);
        let (listeners, addresses) =
            open_listeners(&ips, self.ports, nodes.names.len()).map_err(cannot_listen)?;
        let invitation = Invitation { key: HandshakeKey::generate().map_err(cannot_listen)?, addresses };
        let executable = srun::StepExecutable::find_current(self.bcast, self.allocation.job)?;
        let arguments = srun::build_srun_arguments(nodes, &executable, &self.step_options);
        let (step, output) = SrunProcess::start(&arguments, &invitation, &self.withheld_variables)?;
        self.steps.push(step.clone());
        let pending = nodes.names.iter().map(|name| PendingAgent::new(name));
        let (mut agents, mut slots) = (Vec::new(), Vec::new());
        // Only the output of the first step begins with the warning.
        let warning = match omitted.is_empty() || self.steps.len() > 1 {
            true => String::new(),
            false => step_listener::format_omitted_addresses_warning(&omitted),
        };
        // The output of the whole step belongs to the first agent.
        let mut step_output = Some(io::Cursor::new(warning).chain(output));
        for PendingAgent { input, output, slot } in pending {
            let stderr: AgentOutput = match step_output.take() {
                Some(output) => Box::new(output),
                None => Box::new(tokio::io::empty()),
            };
            let connection = SlurmAgentConnection { slot: slot.clone(), step: step.clone() };
            let output = SlurmAgentReader { stream: output, step: step.clone(), end: None };
            agents.push((
                slot.name.clone(),
                AgentProcess {
                    input: Box::new(input),
                    output: Box::new(output),
                    stderr,
                    start_steps: None,
                    handle: AgentHandle::Connection(Box::new(connection)),
                },
            ));
            slots.push(slot);
        }
        tokio::spawn(step_listener::accept_agents(listeners, invitation.key, slots, step));
        Ok(agents)
    }
}

/// The names of the environment variables from which `srun` takes the list of nodes on which it can
/// start tasks. In a step of some nodes, they contain only these nodes.
const NODE_LIST_VARIABLES: [&str; 2] = ["SLURM_JOB_NODELIST", "SLURM_NODELIST"];

/// The variable in which Slurm states how many GPUs the job has on the node of the batch script.
const GPUS_ON_NODE_VARIABLE: &str = "SLURM_GPUS_ON_NODE";

/// The variables with which Slurm selects the GPUs of a job on the node of the batch script. On
/// each node on which a step has GPUs, Slurm sets them for the step. On a node without GPUs, the
/// step would keep the values of another node.
const DEVICE_VARIABLES: [&str; 4] =
    [env::CUDA_VISIBLE_DEVICES, env::ROCR_VISIBLE_DEVICES, "GPU_DEVICE_ORDINAL", env::ZE_AFFINITY_MASK];

/// Selects the environment variables of this process that `srun` must not inherit: possible
/// secrets, and Slurm's selection of this node's GPUs. Without GPUs of Slurm, a user has selected
/// the GPUs for all nodes.
fn select_withheld_variables(run: &RunSpec, names: Vec<String>) -> Vec<String> {
    let has_gpus_of_slurm = names.iter().any(|name| name == GPUS_ON_NODE_VARIABLE);
    let is_withheld = |name: &String| {
        has_gpus_of_slurm && DEVICE_VARIABLES.contains(&name.as_str()) || is_withheld_from_srun(run, name)
    };
    names.into_iter().filter(is_withheld).collect()
}

/// Returns whether an environment variable may be a secret, so that workers must get it over the
/// encrypted control connection instead of through srun. Such variables are those to which
/// `run.env` refers, and those with the name of a secret that `run.pass_env` selects. Variables
/// that Slurm and the agents need, such as `PATH`, are never among them.
fn is_withheld_from_srun(run: &RunSpec, name: &str) -> bool {
    /// The names of environment variables that srun always gets, because Slurm and the agents need
    /// them, even if the job treats them as secrets.
    const VARIABLES_NEEDED_BY_SRUN: [&str; 6] = ["HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER"];
    if VARIABLES_NEEDED_BY_SRUN.contains(&name) || name.starts_with("SLURM") {
        return false;
    }
    let refers_to = |(_, source): &(String, EnvSource)| matches!(source, EnvSource::FromEnv(n) if n == name);
    // The patterns were checked with the job.
    let selects = |glob: &String| Glob::new(glob).is_ok_and(|glob| glob.compile_matcher().is_match(name));
    run.env_from.iter().any(refers_to)
        || (env::is_probable_secret_name(name) && run.pass_env.iter().any(selects))
}

impl Transport for SlurmTransport {
    fn start_agents(&mut self, hosts: &[String]) -> Vec<diagnostic::Result<AgentProcess>> {
        let mut started: Vec<(String, diagnostic::Result<AgentProcess>)> = Vec::new();
        for nodes in self.group_nodes_into_steps(hosts) {
            match self.start_step(&nodes) {
                Ok(agents) => started.extend(agents.into_iter().map(|(name, agent)| (name, Ok(agent)))),
                Err(error) => {
                    let failed = |name: String| (name.clone(), Err(error.clone().with_subject(name)));
                    started.extend(nodes.names.into_iter().map(failed));
                }
            }
        }
        let take_result = |name: &String| match started.iter().position(|(node, _)| node == name) {
            Some(index) => started.swap_remove(index).1,
            None => {
                let job = self.allocation.job;
                let message = format!("host {name} is not a node of the Slurm allocation {job}");
                Err(Diagnostic::error(slurm::SLURM_NODE_NOT_ALLOCATED, message).with_subject(name))
            }
        };
        hosts.iter().map(take_result).collect()
    }

    /// Adds the hosts `names` of a run that this controller takes over to the known nodes of the
    /// Slurm allocation. In a step of some nodes, `SLURM_JOB_NODELIST` has only the nodes of the
    /// step. Slurm itself rejects nodes that the job does not have.
    fn add_adopted_hosts(&mut self, names: &[String]) {
        let groups = &mut self.allocation.groups;
        let has_node = |groups: &[SlurmNodeGroup], name: &String| {
            groups.iter().flat_map(|group| &group.nodes).any(|node| node.name == *name)
        };
        for name in names {
            if !has_node(groups, name)
                && let [group] = &mut groups[..]
            {
                group.nodes.push(SlurmNode {
                    name: name.clone(),
                    tasks: None,
                    cpus: 0,
                    gpus: None,
                    requires_gpu_request: false,
                });
                // Without these variables, srun asks Slurm for the nodes of the job.
                self.withheld_variables.extend(NODE_LIST_VARIABLES.map(str::to_owned));
            }
        }
    }

    fn child_processes(&self) -> Vec<u32> {
        self.steps.iter().filter_map(|step| step.running_pid()).collect()
    }

    fn record_child_exit(&mut self, pid: u32, status: ExitStatus) {
        if let Some(step) = self.steps.iter().find(|step| step.pid() == pid) {
            step.set_exit_status(status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a node of an allocation that has `gpus` GPUs. `requires_gpu_request` states whether
    /// the job requested GPUs per task.
    fn build_node(name: &str, gpus: Option<u32>, requires_gpu_request: bool) -> SlurmNode {
        SlurmNode { name: name.to_owned(), tasks: None, cpus: 0, gpus, requires_gpu_request }
    }

    #[test]
    fn srun_gets_no_variable_that_the_control_connection_carries() {
        let mut run = crate::testing::sample_job().run;
        run.env_from = ["MINE", "HOME"].map(|n| ("A".into(), EnvSource::FromEnv(n.into()))).into();
        run.pass_env = vec!["HF_*".into(), "P*".into()];
        let hidden = ["MINE", "HF_TOKEN", "HF_HOME", "WANDB_API_KEY", "HOME", "PATH", "SLURM_JOB_ID"]
            .into_iter()
            .filter(|name| is_withheld_from_srun(&run, name));
        assert_eq!(hidden.collect::<Vec<_>>(), ["MINE", "HF_TOKEN"]);
    }

    #[test]
    fn srun_does_not_get_the_gpus_that_slurm_has_selected_for_this_node() {
        let run = crate::testing::sample_job().run;
        let select = |names: &[&str]| {
            select_withheld_variables(&run, names.iter().map(|name| (*name).to_owned()).collect())
        };
        let names =
            ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"];
        assert_eq!(select(&names), ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]);
        assert!(select(&names[..3]).is_empty(), "the user has set them");
    }

    #[test]
    fn nodes_of_an_adopted_run_are_added_to_the_nodes_of_the_step() {
        let groups = vec![SlurmNodeGroup {
            het: None,
            nodes: vec![build_node("b", None, false)],
            gpus_on_batch_node: None,
        }];
        let allocation = SlurmAllocation { job: 7, array: None, groups };
        let mut slurm = SlurmTransport::new(allocation, &crate::testing::sample_job());
        let hosts = ["a", "b"].map(str::to_owned);
        assert_eq!(slurm.group_nodes_into_steps(&hosts)[0].names, ["b"]);
        slurm.add_adopted_hosts(&hosts);
        let steps = slurm.group_nodes_into_steps(&hosts);
        assert_eq!((steps.len(), steps[0].names.join(",")), (1, "b,a".to_owned()));
        assert!(NODE_LIST_VARIABLES.iter().all(|name| slurm.withheld_variables.iter().any(|v| v == name)));
    }

    #[test]
    fn a_step_holds_nodes_with_equal_requests() {
        let two_nodes =
            |gpus: [u32; 2]| vec![build_node("a", Some(gpus[0]), true), build_node("b", Some(gpus[1]), true)];
        let uneven = vec![
            SlurmNodeGroup { het: Some(0), nodes: two_nodes([2, 1]), gpus_on_batch_node: None },
            SlurmNodeGroup {
                het: Some(1),
                nodes: vec![build_node("c", None, false), build_node("d", None, false)],
                gpus_on_batch_node: None,
            },
        ];
        let even = vec![SlurmNodeGroup { het: None, nodes: two_nodes([2, 2]), gpus_on_batch_node: Some(2) }];
        let hosts = ["d", "a", "c", "b", "elsewhere"].map(str::to_owned);
        let steps = |groups: Vec<SlurmNodeGroup>| -> Vec<_> {
            let allocation = SlurmAllocation { job: 7, array: None, groups };
            let slurm = SlurmTransport::new(allocation, &crate::testing::sample_job());
            let steps = slurm.group_nodes_into_steps(&hosts);
            steps.into_iter().map(|step| (step.het_group, step.gpus, step.names.join(","))).collect()
        };
        let step = |het_group, gpus, names: &str| (het_group, gpus, names.to_owned());
        let total = |count| Some(srun::StepGpuRequest::Total(count));
        let expected =
            [step(Some(0), total(2), "a"), step(Some(0), total(1), "b"), step(Some(1), None, "c,d")];
        assert_eq!(steps(uneven), expected);
        assert_eq!(steps(even), [step(None, Some(srun::StepGpuRequest::PerNode(2)), "a,b")]);
    }
}
