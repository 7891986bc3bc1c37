//! Starts: a plan for the hosts that are there, a bound rendezvous, the workers' introduction.
use super::Driver;
use crate::{
    controller::{
        core::{Input, HostIndex},
        port,
        prepare::{Preparation, workers_of},
    },
    link::encode,
    plan::{self, Epoch},
};
use contract::{
    control::{FromAgent, JobKey, PeerAddress, Peers, ToAgent},
    event::Event,
    preflight::Finding,
};
use std::{collections::HashSet, io::Read as _, path::PathBuf};

impl Driver {
    /// Starts a host's agent again. Its core is told of a failure after what it is about to say.
    pub(super) fn start_agent(&mut self, node: HostIndex) {
        let Some(host) = self.hosts.get(node) else { return };
        match self.transport.start(std::slice::from_ref(&host.name)).pop() {
            Some(Ok(process)) => self.adopt(node, process),
            other => {
                let error = other.and_then(Result::err);
                let why = error.map_or_else(|| "its transport gave none".to_owned(), |e| e.to_string());
                self.agents.remove(&node);
                self.later
                    .push_back(Input::AgentGone { node, how: format!("could not be started again: {why}") });
            }
        }
    }

    pub(super) fn prepare_epoch(
        &mut self,
        epoch: u32,
        restarts: u32,
        nodes: &[HostIndex],
        resume: Option<PathBuf>,
    ) {
        // The store of the last start isn't this one's.
        self.store = None;
        let hosts = self.found.hosts(&self.hosts, nodes);
        let start = Epoch { number: epoch, restarts, resume };
        let refused = |findings: Vec<Finding>| {
            findings.iter().map(|f| format!("{}: {}", f.path, f.message)).collect::<Vec<_>>().join("; ")
        };
        let mut plan = match plan::plan(&self.job, &hosts, &self.plan.run, &start) {
            Ok(plan) => plan,
            Err(findings) => {
                return self.later.push_back(Input::Refused { epoch, message: refused(findings) });
            }
        };
        plan.warnings.clear();
        if let Err(failure) = (self.fit)(&self.job, &mut plan) {
            return self.later.push_back(Input::Refused { epoch, message: failure.line() });
        }
        let new = plan.warnings.iter().filter(|w| !self.plan.warnings.contains(w)).cloned();
        for Finding { path, message, .. } in new.collect::<Vec<_>>() {
            let message = format!("{path}: {message}");
            self.event(Event::Notice { rank: None, message });
        }
        let mut preparation = Preparation::new(&self.job, plan, &self.found.all());
        preparation.nodes = nodes.to_vec();
        let first = nodes.first().copied().unwrap_or(0);
        let here = self.hosts.get(first).is_some_and(|host| host.local);
        if here {
            match preparation.bind_here(&self.talk.0) {
                Ok(rendezvous) => preparation.rendezvous = Some(rendezvous),
                Err(message) => return self.later.push_back(Input::Refused { epoch, message }),
            }
            self.later.push_back(Input::Ready { epoch, workers: workers_of(&preparation.plan) });
        } else {
            self.tell(first, ToAgent::Bind(preparation.bind.clone()));
        }
        self.preparation = Some(preparation);
    }

    /// The agent of rank 0's node has bound the rendezvous, or can't.
    pub(super) fn bound(&mut self, node: HostIndex, epoch: u32, port: Result<u16, String>) {
        let Some(preparation) = &mut self.preparation else { return };
        if preparation.bind.epoch != epoch || preparation.nodes.first() != Some(&node) {
            return;
        }
        let input = match port {
            Ok(port) => {
                preparation.port = Some(port);
                Input::Ready { epoch, workers: workers_of(&preparation.plan) }
            }
            Err(message) => Input::Refused { epoch, message },
        };
        self.handle(input);
    }

    /// The workers get to know each other, and a key that nobody else has: it exists in their memory and this message only.
    pub(super) fn introduce(&mut self, epoch: u32, members: Vec<PeerAddress>) {
        let mut key = JobKey([0; 32]);
        if let Err(error) = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut key.0)) {
            let message = format!("no random numbers for the job's key from /dev/urandom: {error}");
            let node = members.first().map_or(0, |m| m.node as HostIndex);
            let failed = FromAgent::Failed { epoch, rank: None, message };
            return self.later.push_back(Input::Agent(node, failed));
        }
        let nodes: HashSet<HostIndex> = members.iter().map(|m| m.node as HostIndex).collect();
        let peers = Peers { epoch, key, members, nccl_id: None };
        nodes.into_iter().for_each(|node| self.tell(node, ToAgent::Peers(peers.clone())));
    }

    pub(super) fn start_workers(&mut self) {
        let Some(mut preparation) = self.preparation.take() else { return };
        let (mut port, mut store) = (preparation.port, None);
        if let Some(rendezvous) = preparation.rendezvous.take() {
            let (number, kept) = rendezvous.ready();
            (port, store) = (Some(number), kept);
        }
        self.store = store;
        self.plan = preparation.plan;
        self.not_started = self.plan.world;
        let elsewhere = preparation.nodes.iter().zip(&self.plan.nodes).flat_map(|(at, node)| {
            let local = self.hosts.get(*at).is_none_or(|host| host.local);
            node.workers.iter().map(move |_| !local)
        });
        self.copies.begin(elsewhere.collect());
        for (at, node) in preparation.nodes.into_iter().enumerate() {
            let Some(mut plan) = self.plan.nodes.get(at).cloned() else { continue };
            if let Some(port) = port {
                plan.workers.iter_mut().for_each(|w| port::set(&mut w.env, port));
            }
            // From here on they are in the message to the agent only.
            plan.workers.iter_mut().for_each(|w| w.env.extend(self.secrets.pairs()));
            let start = ToAgent::Start(Box::new(plan));
            match encode(&start) {
                Ok(_) => self.tell(node, start),
                Err(error) => {
                    self.kill_agent(node);
                    self.later.push_back(Input::AgentGone {
                        node,
                        how: format!("can't be told its plan: {error}"),
                    });
                }
            }
        }
    }
}
