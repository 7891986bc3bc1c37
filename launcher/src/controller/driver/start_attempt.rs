//! Starts all workers: makes their plan, has the rendezvous port (`MASTER_PORT`) bound, sends the
//! plan to the agents, and distributes the workers' addresses.
use super::ControllerDriver;
use crate::{
    connection::encode_frame,
    controller::{
        attempt_preparation::{AttemptPlanningResult, AttemptPreparation, group_workers_by_host},
        controller_identity::draw_random_bytes,
        core::{ControllerInput, HostIndex},
        root_cause::AgentEnd,
    },
    format::format_notice,
    plan::{self, Attempt},
};
use diagnostic::{Diagnostic, codes::run};
use jobspec::env;
use protocol::{
    control::{FromAgent, JobSecretKey, ToAgent, WorkerAddresses, WorkerPeers},
    event::Event,
};
use std::{collections::HashSet, path::PathBuf, thread};

impl ControllerDriver {
    /// Starts a new agent process on a host, directly or through SSH, Slurm or a joined node. If
    /// that fails, the controller's state machine receives the failure as an input after the driver
    /// has executed the current actions.
    pub(super) fn start_agent(&mut self, host: HostIndex) {
        let Some(target) = self.hosts.get(host) else { return };
        match self.transport.start_agents(std::slice::from_ref(&target.name)).pop() {
            Some(Ok(process)) => self.register_agent(host, process),
            other => {
                let error = other.and_then(Result::err).unwrap_or_else(|| {
                    Diagnostic::error(run::INTERNAL, "the transport returned no agent process")
                });
                self.agents.remove(&host);
                self.pending_inputs
                    .push_back(ControllerInput::AgentGone { host, end: AgentEnd::NotStarted(error) });
            }
        }
    }

    /// Begins to plan an attempt (start of all workers) on `hosts`, which are listed in the order
    /// of their ranks. A separate thread prepares the checkpoint from which programs resume,
    /// because its disk may be slow.
    pub(super) fn prepare_attempt(
        &mut self,
        attempt: u32,
        restarts: u32,
        hosts: &[HostIndex],
        resume: Option<PathBuf>,
    ) {
        let rejected = |diagnostic| ControllerInput::Rejected { attempt, diagnostic };
        let number = Attempt { number: attempt, restarts, resume, batch_job: self.batch_job.clone() };
        let job_hosts = self.inventories.build_job_hosts(&self.hosts, hosts);
        let plan = plan::plan_attempt(&self.job, &job_hosts, &self.plan.run, &number);
        let mut plan = match plan {
            Ok(plan) => plan,
            Err(problems) => {
                return self.pending_inputs.push_back(rejected(combine_plan_errors(problems)));
            }
        };
        plan.warnings.clear();
        let (job, hosts, planned) = (self.job.clone(), hosts.to_vec(), self.planned.0.clone());
        let prepare_resume = self.prepare_resume;
        let prepare = move || {
            let plan = prepare_resume(&job, &mut plan).map(|()| plan);
            // An error means that the controller has ended.
            _ = planned.blocking_send(AttemptPlanningResult { attempt, hosts, plan });
        };
        if let Err(error) = thread::Builder::new().name("prepare-resume".into()).spawn(prepare) {
            let message = "cannot start a thread that prepares the attempt";
            let error = Diagnostic::error(run::CONTROLLER_SETUP_FAILED, message).with_cause(&error);
            self.pending_inputs.push_back(rejected(error));
        }
    }

    /// Passes the finished plan of the workers, or the planning error, to the controller's state
    /// machine, and shows new warnings to the user. The state machine then requests the rendezvous.
    pub(super) fn finish_planning(&mut self, planned: AttemptPlanningResult) {
        let AttemptPlanningResult { attempt, hosts, plan } = planned;
        let plan = match plan {
            Ok(plan) => plan,
            Err(diagnostic) => return self.handle_input(ControllerInput::Rejected { attempt, diagnostic }),
        };
        let new = plan.warnings.iter().filter(|w| !repeats_reported_notice(w, &self.plan.warnings)).cloned();
        for warning in new.collect::<Vec<_>>() {
            self.emit_event(Event::new_diagnostic_notice(None, format_notice(&warning), &warning));
        }
        let mut preparation =
            AttemptPreparation::new(&self.job, plan, &self.inventories.collect_host_addresses());
        preparation.hosts = hosts;
        let (workers, bind) = (group_workers_by_host(&preparation.plan), preparation.bind.clone());
        self.preparation = Some(preparation);
        self.handle_input(ControllerInput::Planned { attempt, workers, bind });
    }

    /// Sends all built-in workers, through their agents, the addresses of all workers and a new
    /// random key with which they authenticate each other. The key is never stored.
    pub(super) fn send_peers_and_key(&mut self, attempt: u32, members: Vec<WorkerAddresses>) {
        let key = match draw_random_bytes() {
            Ok(bytes) => JobSecretKey(bytes),
            Err(diagnostic) => {
                let host = members.first().map_or(0, |m| m.host_index as HostIndex);
                let failed = FromAgent::Failed { attempt, rank: None, diagnostic };
                return self.pending_inputs.push_back(ControllerInput::Agent(host, failed));
            }
        };
        let hosts: HashSet<HostIndex> = members.iter().map(|m| m.host_index as HostIndex).collect();
        let peers = WorkerPeers { attempt, key, members, nccl_id: None };
        hosts.into_iter().for_each(|host| self.send_to_agent(host, ToAgent::Peers(peers.clone())));
    }

    /// Starts all planned workers by sending each agent the plan of its workers, the secret values,
    /// and the rendezvous address. `port` is the port of the rendezvous.
    pub(super) fn start_workers(&mut self, port: u16) {
        let Some(preparation) = self.preparation.take() else { return };
        self.report_end_of_stragglers();
        self.plan = preparation.plan;
        self.plan.master_port = Some(port);
        self.not_started = self.plan.world;
        let attempt = self.plan.host_plans.first().map_or(0, |plan| plan.attempt);
        self.status.begin_attempt(attempt);
        let hosts = preparation.hosts.iter().zip(&self.plan.host_plans);
        let is_remote = hosts.flat_map(|(host, plan)| {
            let local = self.hosts.get(*host).is_none_or(|target| target.local);
            plan.workers.iter().map(move |_| !local)
        });
        self.streamed_logs.begin_attempt(is_remote.collect());
        for (position, host) in preparation.hosts.into_iter().enumerate() {
            let Some(mut plan) = self.plan.host_plans.get(position).cloned() else { continue };
            plan.workers.iter_mut().for_each(|w| self.plan.insert_rendezvous(&mut w.env));
            // Secrets are only in the message to the agent, not in the stored plan.
            plan.workers.iter_mut().for_each(|w| w.env.extend(self.secrets.names_and_values()));
            plan.debug_filter = debuglog::active_filter_directives();
            for worker in plan.workers.iter_mut().filter(|worker| worker.command.is_none()) {
                worker.env.push((env::LAUNCH_LOG.to_owned(), plan.debug_filter.clone()));
            }
            let start = ToAgent::Start(Box::new(plan));
            match encode_frame(&start) {
                Ok(_) => self.send_to_agent(host, start),
                Err(error) => {
                    self.kill_agent(host);
                    let error = Diagnostic::error(run::PLAN_TOO_LARGE, "the plan of the host was not sent")
                        .with_cause(&error);
                    self.pending_inputs
                        .push_back(ControllerInput::AgentGone { host, end: AgentEnd::StreamBroken(error) });
                }
            }
        }
    }
}

/// Returns whether the user has already seen the notice `notice`, or one with the same content,
/// among the notices `reported`. A note that a prepared checkpoint is reused repeats each note
/// about the same directory, which this run has reported before.
fn repeats_reported_notice(notice: &Diagnostic, reported: &[Diagnostic]) -> bool {
    let is_reuse = notice.field("reused") == Some(&true.into());
    let has_same_path =
        |other: &Diagnostic| other.code() == notice.code() && other.field("path") == notice.field("path");
    reported.contains(notice) || (is_reuse && reported.iter().any(has_same_path))
}

/// Combines all errors because of which no plan of the workers can be made into one error. A single
/// problem is returned unchanged.
fn combine_plan_errors(mut problems: Vec<Diagnostic>) -> Diagnostic {
    if problems.len() == 1 {
        return problems.remove(0);
    }
    let message = format!("the job does not fit the hosts: {} problems", problems.len());
    let summary = Diagnostic::error(run::PLAN_INVALID, message);
    problems.into_iter().fold(summary, Diagnostic::with_detail_diagnostic)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diagnostic::codes::job::JOB_RESUME_NOTICE;

    #[test]
    fn a_checkpoint_that_this_run_prepared_is_reported_once() {
        let build_note = |message: &str, path: &str, reused: bool| {
            Diagnostic::note(JOB_RESUME_NOTICE, message).with_field("path", path).with_field("reused", reused)
        };
        let resharded = [build_note("resharded", "/launch-w2/checkpoint-3", false)];
        assert!(repeats_reported_notice(&resharded[0], &resharded));
        assert!(repeats_reported_notice(&build_note("reused", "/launch-w2/checkpoint-3", true), &resharded));
        for new in [
            build_note("reused", "/launch-w2/checkpoint-6", true),
            build_note("resharded again", "/launch-w2/checkpoint-3", false),
            Diagnostic::note(JOB_RESUME_NOTICE, "skipped"),
        ] {
            assert!(!repeats_reported_notice(&new, &resharded), "{new}");
        }
        assert!(!repeats_reported_notice(&build_note("reused", "/launch-w2/checkpoint-3", true), &[]));
    }
}
