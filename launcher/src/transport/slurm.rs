//! Agents on the nodes of a Slurm allocation: one step (`srun`, one task on each node) starts them, and each connects back
//! over TCP.
//!
//! srun can't carry the control streams: it mixes the output of all tasks, and a SIGTERM to it kills them at once. So it
//! only starts the agents, hands them an invitation on stdin (never in arguments or environment), and is ended last. A
//! group of a heterogeneous job is a step of its own: srun gives its stdin to the first group alone.
mod door;
mod requeue;
mod srun;
mod step;
mod stream;
mod submit;

pub(crate) use requeue::requeue;
pub(crate) use submit::submit;

use super::{AgentProcess, Carrier, Transport};
use crate::{
    discover::slurm::Allocation,
    link::join::{Invitation, Key},
};
use contract::control::ExitStatus;
use std::{
    collections::HashSet,
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};
use step::Step;

/// The nodes of the allocation that this process runs in.
pub(crate) struct Slurm {
    allocation: Allocation,
    /// Copy the executable to the nodes, instead of finding it there.
    bcast: bool,
    /// Where agents connect to; empty: every address of this machine.
    addresses: Vec<IpAddr>,
    steps: Vec<Arc<Step>>,
}

impl Slurm {
    /// `bcast`: copy the executable to the nodes. `addresses`: this machine's, for agents to connect to; empty: all of
    /// them are tried.
    pub(crate) fn new(allocation: Allocation, bcast: bool, addresses: Vec<IpAddr>) -> Slurm {
        Slurm { allocation, bcast, addresses, steps: Vec::new() }
    }

    /// The nodes among `hosts`, in groups that one step can hold: those of one het group, or each for itself where they have unequal GPUs
    /// by task.
    fn groups(&self, hosts: &[String]) -> Vec<srun::Nodes> {
        let wanted: HashSet<&str> = hosts.iter().map(String::as_str).collect();
        let mut groups: Vec<srun::Nodes> = Vec::new();
        for group in &self.allocation.groups {
            let by_task = group.nodes.iter().any(|node| node.by_task);
            let even = group.nodes.windows(2).all(|pair| pair[0].gpus == pair[1].gpus);
            let whole = !by_task || even;
            let mut held: Option<srun::Nodes> = None;
            for node in group.nodes.iter().filter(|node| wanted.contains(node.name.as_str())) {
                let gpus = node.gpus.filter(|_| by_task);
                let gpus = gpus.map(if even { srun::Gpus::OnEach } else { srun::Gpus::OnOne });
                let one = srun::Nodes { het: group.het, gpus, names: vec![node.name.clone()] };
                match &mut held {
                    Some(held) if whole => held.names.push(node.name.clone()),
                    _ => groups.extend(held.replace(one)),
                }
            }
            groups.extend(held);
        }
        groups
    }

    fn start_group(&mut self, nodes: &srun::Nodes) -> io::Result<Vec<(String, AgentProcess)>> {
        let (listener, port) = door::listen(nodes.names.len())?;
        let mut ips = self.addresses.clone();
        if ips.is_empty() {
            ips = door::own_addresses();
            // A cluster of one machine may have no other address.
            ips.push(IpAddr::from([127, 0, 0, 1]));
        }
        let invitation = Invitation {
            key: Key::random()?,
            addresses: ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect(),
        };
        let executable = srun::Executable::own(self.bcast, self.allocation.job)?;
        let (step, words) = Step::start(&srun::arguments(nodes, &executable), &invitation)?;
        self.steps.push(step.clone());
        let seats: Vec<_> = nodes.names.iter().map(|name| stream::seat(name, &step)).collect();
        let (mut agents, mut takers) = (Vec::new(), Vec::new());
        let mut words = Some(words);
        for (seat, taker) in seats {
            let talk: super::Output = match words.take() {
                Some(words) => Box::new(words),
                None => Box::new(tokio::io::empty()),
            };
            agents.push((
                seat.name().to_owned(),
                AgentProcess {
                    input: Box::new(seat.input),
                    output: Box::new(seat.output),
                    talk,
                    carrier: Carrier::Connection(Box::new(seat.connection)),
                },
            ));
            takers.push(taker);
        }
        tokio::spawn(door::keep(listener, invitation.key, takers, step));
        Ok(agents)
    }
}

impl Transport for Slurm {
    fn start(&mut self, hosts: &[String]) -> Vec<io::Result<AgentProcess>> {
        let mut started: Vec<(String, io::Result<AgentProcess>)> = Vec::new();
        for nodes in self.groups(hosts) {
            match self.start_group(&nodes) {
                Ok(agents) => started.extend(agents.into_iter().map(|(name, agent)| (name, Ok(agent)))),
                Err(error) => {
                    let again = |name| (name, Err(io::Error::new(error.kind(), error.to_string())));
                    started.extend(nodes.names.into_iter().map(again));
                }
            }
        }
        let of = |host: &String| match started.iter().position(|(name, _)| name == host) {
            Some(at) => started.swap_remove(at).1,
            None => Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!("{host} isn't a node of the allocation {}", self.allocation.job),
            )),
        };
        hosts.iter().map(of).collect()
    }

    fn helpers(&self) -> Vec<u32> {
        self.steps.iter().filter_map(|step| step.living()).collect()
    }

    fn child_ended(&mut self, pid: u32, status: ExitStatus) {
        if let Some(step) = self.steps.iter().find(|step| step.pid() == pid) {
            step.ended(status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::discover::slurm::{Group, Node};

    fn node(name: &str, gpus: Option<u32>, by_task: bool) -> Node {
        Node { name: name.to_owned(), tasks: None, cpus: 0, gpus, by_task }
    }

    #[test]
    fn a_step_holds_nodes_that_ask_for_the_same() {
        let two = |gpus: [u32; 2]| vec![node("a", Some(gpus[0]), true), node("b", Some(gpus[1]), true)];
        let groups = vec![
            Group { het: Some(0), nodes: two([2, 1]) },
            Group { het: Some(1), nodes: vec![node("c", None, false), node("d", None, false)] },
        ];
        let even = vec![Group { het: None, nodes: two([2, 2]) }];
        let hosts = ["d", "a", "c", "b", "elsewhere"].map(str::to_owned);
        let found = |groups: Vec<Group>| -> Vec<_> {
            let allocation = Allocation { job: 7, array: None, restarts: 0, groups };
            let slurm = Slurm::new(allocation, false, Vec::new());
            slurm.groups(&hosts).into_iter().map(|g| (g.het, g.gpus, g.names.join(","))).collect()
        };
        let step = |het, gpus, names: &str| (het, gpus, names.to_owned());
        let one = |count| Some(srun::Gpus::OnOne(count));
        let want = [step(Some(0), one(2), "a"), step(Some(0), one(1), "b"), step(Some(1), None, "c,d")];
        assert_eq!(found(groups), want);
        assert_eq!(found(even), [step(None, Some(srun::Gpus::OnEach(2)), "a,b")]);
    }
}
