//! Resumes the control of the running workers after this controller has taken over a run from a
//! lost controller. Restores its hosts and workers, processes repeated reports, and repeats the
//! last order.
use super::{
    ABORT_GRACE, AgentEnd, AttemptState, ControllerAction, ControllerCore, HostIndex, WorkerState,
    adoption_state::{AdoptedRun, ReplayedReport},
    host_state::AgentConnectionState,
    run_memo::MemoPhase,
    taken_over_journal::TakenOverJournal,
};
use crate::controller::peer_exchange::PeerExchange;
use jobspec::ids::Rank;
use protocol::control::{FromAgent, HostPlan, ToAgent, WorkerPeers};
use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
    time::Duration,
};

/// The hosts, ranks and log paths of the workers that were running or starting when this controller
/// took over the run.
struct AdoptedMembers {
    /// The members in the order of ranks, each with its ranks and whether its workers were started.
    members: Vec<(HostIndex, Range<Rank>, bool)>,
    /// The logs of the workers whose plans are known.
    logs: BTreeMap<Rank, PathBuf>,
    /// The number of workers of the attempt.
    world: u32,
    run_dir: PathBuf,
}

impl ControllerCore {
    /// Resumes the control of a run after its takeover: processes reports that the lost controller
    /// may have missed, and repeats its last order to the agents.
    pub(super) fn continue_adopted_run(&mut self, now: Duration, run: AdoptedRun, journal: TakenOverJournal) {
        let AdoptedRun { phase, plans, peers, placement, reports, lost, unattended } = run;
        self.end_obsolete_agents(&plans, &reports);
        self.state = AttemptState::Joining;
        let mut is_incomplete = false;
        if phase != MemoPhase::BeforeStart {
            let members = self.find_adopted_members(&plans, placement.as_ref());
            is_incomplete = members.members.iter().any(|(id, _, was_started)| {
                !was_started && self.hosts[*id].agent == AgentConnectionState::Joined
            });
            self.restore_attempt(members);
            self.state = match phase {
                MemoPhase::Stopping(request) => AttemptState::Stopping(request),
                MemoPhase::Draining { host_lost } => AttemptState::Draining { host_lost },
                MemoPhase::Ending => AttemptState::Ending,
                MemoPhase::Running | MemoPhase::BeforeStart => AttemptState::Running,
            };
        }
        // The first order of this controller, from which on the agents obey no earlier one.
        self.send_memo(now);
        self.resend_peer_addresses(peers);
        let reports = self.replay_events(now, reports, journal);
        self.actions.push(ControllerAction::ReportTakeover { unattended });
        if is_incomplete {
            self.restart_incomplete_attempt(now);
        }
        self.handle_unadopted_hosts(now, lost);
        for report in reports {
            self.replay_report(now, report);
        }
        self.repeat_last_order(now);
    }

    /// Ends the agents that still run workers of an earlier start of the job than the current one.
    fn end_obsolete_agents(&mut self, plans: &[(HostIndex, HostPlan)], reports: &[ReplayedReport]) {
        for (id, plan) in plans.iter().filter(|(_, plan)| plan.attempt < self.attempt) {
            let has_ended = reports.iter().any(|report| {
                let ended = FromAgent::WorkersEnded { attempt: plan.attempt };
                report.host == *id && *report.message == ended
            });
            if !has_ended {
                self.actions.push(ControllerAction::ReleaseAgent(*id));
                self.hosts[*id].agent = AgentConnectionState::Lost;
            }
        }
    }

    /// Determines which hosts and ranks the current start of the workers uses, from the agents'
    /// plans and the host list in the journal.
    fn find_adopted_members(
        &self,
        plans: &[(HostIndex, HostPlan)],
        placement: Option<&(u32, Vec<String>)>,
    ) -> AdoptedMembers {
        let current: Vec<&(HostIndex, HostPlan)> =
            plans.iter().filter(|(_, plan)| plan.attempt == self.attempt).collect();
        let workers = || current.iter().flat_map(|(_, plan)| &plan.workers);
        let first_rank = |plan: &HostPlan| plan.workers.iter().map(|worker| worker.rank).min();
        let mut planned: Vec<(HostIndex, Range<Rank>)> = current
            .iter()
            .filter_map(|(id, plan)| {
                let first = first_rank(plan)?;
                Some((*id, first..first + plan.workers.len() as Rank))
            })
            .collect();
        planned.sort_by_key(|(_, ranks)| ranks.start);
        let placed: Vec<HostIndex> = match placement.filter(|(attempt, _)| *attempt == self.attempt) {
            Some((_, names)) => {
                let find = |name: &String| self.setup.hosts.iter().position(|host| host.name == *name);
                names.iter().filter_map(find).collect()
            }
            // Without a record, every host that an agent does not exclude may be a member.
            None => (0..self.hosts.len()).filter(|id| !self.hosts[*id].excluded).collect(),
        };
        let world = current.first().map_or(0, |(_, plan)| plan.world);
        let is_covered = planned.iter().map(|(_, ranks)| ranks.len()).sum::<usize>() == world as usize;
        let has_record = placement.is_some_and(|(attempt, _)| *attempt == self.attempt);
        let mut members = Vec::new();
        let mut next_rank = 0;
        for id in placed {
            if let Some((_, ranks)) = planned.iter().find(|(host, _)| *host == id) {
                next_rank = ranks.end;
                members.push((id, ranks.clone(), true));
            } else if has_record || !is_covered {
                // The ranks up to those of the next known host belong to this host.
                let following =
                    planned.iter().map(|(_, ranks)| ranks.start).filter(|start| *start >= next_rank);
                let end = following.min().unwrap_or(world);
                members.push((id, next_rank..end, false));
                next_rank = end;
            }
        }
        AdoptedMembers {
            members,
            logs: workers().map(|worker| (worker.rank, worker.log.clone())).collect(),
            world,
            run_dir: current.first().map(|(_, plan)| plan.run_dir.clone()).unwrap_or_default(),
        }
    }

    /// Initializes this controller's records of the hosts and workers after a takeover, as if the
    /// workers had just been started.
    fn restore_attempt(&mut self, adopted: AdoptedMembers) {
        let AdoptedMembers { members, logs, world, run_dir } = adopted;
        let default_log = |rank: Rank, directory: &Path| directory.join(format!("logs/rank-{rank}.log"));
        let mut hosts_of_ranks = vec![members.first().map_or(0, |(id, ..)| *id); world as usize];
        for (id, ranks, _) in &members {
            for rank in ranks.clone() {
                if let Some(host) = hosts_of_ranks.get_mut(rank as usize) {
                    *host = *id;
                }
            }
        }
        let worker = |(rank, host): (Rank, HostIndex)| {
            let log = logs.get(&rank).cloned().unwrap_or_else(|| default_log(rank, &run_dir));
            WorkerState::new(host, log)
        };
        self.workers = (0..world).zip(hosts_of_ranks).map(worker).collect();
        for (id, ranks, was_started) in &members {
            let host = &mut self.hosts[*id];
            (host.active, host.running, host.ranks) = (*was_started, 0, ranks.clone());
            host.keeps_copies = *was_started && self.setup.has_memory_copies;
        }
        self.members = members.iter().map(|(id, ..)| *id).collect();
        self.active_hosts = members.iter().filter(|(.., was_started)| *was_started).count();
        (self.running, self.stalled) = (0, 0);
    }

    /// Sends the network addresses of all workers to the agents that may not have received them
    /// from the lost controller. All workers need the same key.
    fn resend_peer_addresses(&mut self, known: Option<(HostIndex, WorkerPeers)>) {
        let known = known.filter(|(_, peers)| peers.attempt == self.attempt);
        let awaited = if known.is_some() { 0 } else { self.workers.len() };
        self.peer_exchange = PeerExchange::new(self.attempt, awaited);
        if let Some((id, peers)) = known {
            let others = self.members.iter().copied().filter(|other| *other != id);
            let sends = others.map(|other| ControllerAction::Send(other, ToAgent::Peers(peers.clone())));
            self.actions.extend(sends);
        }
    }

    /// Ends the workers of a start that the lost controller had not completed on all hosts, so that
    /// the workers are restarted. The next attempt does not count as a restart.
    fn restart_incomplete_attempt(&mut self, now: Duration) {
        match self.state {
            AttemptState::Running | AttemptState::Draining { .. } => {
                self.restart_pause = Some(Duration::ZERO);
            }
            AttemptState::Stopping(_) => self.killed = true,
            _ => return,
        }
        self.state = AttemptState::Ending;
        let grace = if self.setup.builtin { ABORT_GRACE } else { self.setup.grace };
        self.kill_workers(now, "the controller was lost while the attempt started", grace, false);
    }

    /// Handles the hosts whose agents could not be reached in a takeover, and treats those that run
    /// current workers as lost. Their losses precede all other failures, because the loss of a host
    /// makes other workers fail.
    fn handle_unadopted_hosts(&mut self, now: Duration, lost: Vec<(HostIndex, AgentEnd)>) {
        for (id, end) in lost {
            let host = &mut self.hosts[id];
            if self.members.contains(&id) {
                host.agent = AgentConnectionState::Joined;
                // The workers of the host may have been started.
                self.active_hosts += usize::from(!std::mem::replace(&mut host.active, true));
                self.handle_agent_gone(now, id, end);
            } else {
                (host.agent, host.inherited_quarantine_end) = (AgentConnectionState::NotStarted, None);
            }
        }
    }

    /// Repeats the last order of the lost controller to all agents, such as to stop or kill the
    /// workers, because some agents may have missed it.
    fn repeat_last_order(&mut self, now: Duration) {
        match self.state {
            AttemptState::Stopping(_) | AttemptState::Draining { host_lost: false } => {
                self.send_stop_to_workers(now)
            }
            AttemptState::Draining { host_lost: true } | AttemptState::Ending => {
                let grace = if self.setup.builtin { ABORT_GRACE } else { self.setup.grace };
                let reason = self.cause.as_ref().map(|cause| cause.message.clone());
                self.kill_workers(now, reason.as_deref().unwrap_or("the attempt is ending"), grace, false);
            }
            AttemptState::Joining => self.begin_next_attempt(now),
            _ => {}
        }
    }
}
