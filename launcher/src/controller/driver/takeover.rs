//! Takes over a run whose controller was lost: connects to the agents of the run, and continues the
//! journal (file of events) and the other files in the run directory.
use super::{ControllerDriver, ControllerReplacement, EventLoopEnd, EvictionAnswer};
use crate::{
    clock::read_unix_time,
    cluster::{AgentHandle, AgentProcess},
    connection::{encode_frame, read_frame},
    controller::{
        control_file::ControlFile,
        core::{AttachFailure, ControllerInput, HostIndex, StoredMemo, TakenOverJournal},
        journal::JournalSummary,
    },
    runs,
    secrets::SecretVariables,
};
use diagnostic::{
    Diagnostic,
    codes::run,
    quantity::{format_count, format_duration},
};
use jobspec::ControllerLossAction;
use protocol::{
    control::{AttachPurpose, AttachRejection, ControllerToken, FromAgent, HostPlan, ToAgent},
    event::Event,
    exit,
    host_name::read_host_name,
};
use std::time::Duration;
use tokio::{io::AsyncWriteExt, sync::mpsc, time::timeout};

/// How long the controller waits for the old agent of a lost host to end after the controller has
/// requested this end.
const EVICTION_TIMEOUT: Duration = Duration::from_secs(60);

impl ControllerDriver {
    /// Sends a request to the agent of a host to accept this process as the new controller of the
    /// run, because the previous controller was lost.
    pub(super) fn send_attach_request(&mut self, host: HostIndex) {
        let Some(target) = self.hosts.get(host) else { return };
        let request = self.identity.build_attach_request(&target.name, AttachPurpose::Adopt);
        self.send_to_agent(host, ToAgent::Attach(Box::new(request)));
    }

    /// Starts a process on a host that counts as lost, in order to ask the old agent there, if it
    /// still runs, to end. Does nothing if the host cannot be reached.
    pub(super) fn evict_agent(&mut self, host: HostIndex) {
        let Some(target) = self.hosts.get(host) else { return };
        let purpose = AttachPurpose::Evict { below: self.agents_started + 1 };
        let request = self.identity.build_attach_request(&target.name, purpose);
        let Ok(frame) = encode_frame(&ToAgent::Attach(Box::new(request))) else { return };
        if let Some(Ok(process)) = self.transport.start_agents(std::slice::from_ref(&target.name)).pop() {
            let token = self.identity.token();
            tokio::spawn(request_agent_eviction((host, token), process, frame, self.evictions.0.clone()));
        }
    }

    /// Informs the controller's state machine that the old agent of a lost host has ended, or ends
    /// this controller because another controller has replaced it.
    pub(super) fn handle_eviction_answer(&mut self, answer: EvictionAnswer) {
        match answer {
            EvictionAnswer::Ended(host) => self.handle_input(ControllerInput::Evicted(host)),
            EvictionAnswer::Replaced => {
                let replacement = ControllerReplacement { is_controlled: true, silent_ms: None };
                self.end = Some(EventLoopEnd::Replaced(replacement));
            }
        }
    }

    /// Copies the job and the workers' secret environment variables from the plan that an agent has
    /// kept, because the files of the run directory contain no secrets.
    pub(super) fn adopt_job_and_secrets_of_plan(&mut self, plan: HostPlan) {
        let stored = self.job.clone();
        if let Some(worker) = plan.workers.first() {
            self.secrets = SecretVariables::from_worker_env(&plan.job.run, &worker.env);
        }
        (self.job, self.plan.world) = (plan.job, plan.world);
        // An attempt resumes from its own checkpoint.
        self.job.resume = stored.resume;
        // The plan of a program lacks the list of hosts.
        self.job.cluster.hosts = stored.cluster.hosts;
        (self.job.cluster.include, self.job.cluster.exclude) =
            (stored.cluster.include, stored.cluster.exclude);
    }

    /// Starts to replace the journal (the file of the run's events) of the lost controller by a
    /// copy, to which this controller will append.
    pub(super) fn take_over_journal(&mut self, stored: StoredMemo) {
        self.watched_job_file.clone_from(&stored.job_file);
        // Paths in the job file may be relative to this directory. If it does not exist here,
        // changes of such paths are reported as not reloadable.
        _ = std::env::set_current_dir(&stored.directory);
        if let Some(journal) = &self.journal {
            journal.take_over(&self.plan.run.0, stored.memo.restarts, self.journal_taken.0.clone());
        }
        self.taken_memo = Some(stored);
    }

    /// Numbers new events after those that the lost controller wrote to the journal (the run's file
    /// of events), and then continues the run.
    pub(super) fn continue_journal(&mut self, summary: JournalSummary) {
        let Some(StoredMemo { unstored, newest_event, .. }) = self.taken_memo.take() else { return };
        let newest = summary.newest_controller_event_number().max(newest_event);
        let journal = TakenOverJournal::new(summary, unstored, read_unix_time());
        self.events.continue_numbering_after(newest, journal.missing_events().cloned());
        let summary = journal.summary();
        if let Some(began_at) = summary.began_at {
            self.earlier = Duration::try_from_secs_f64(read_unix_time() - began_at).unwrap_or_default();
        }
        // The progress bar needs the number of steps.
        summary.ready.iter().for_each(|ready| self.report.show_event_of_earlier_controller(ready.clone()));
        self.handle_input(ControllerInput::JournalTaken(Box::new(journal)));
    }

    /// Reports that this controller has taken over the run, and registers this process in
    /// `run.json` as the controller.
    pub(super) fn report_takeover(&mut self, unattended: Duration) {
        self.is_adopting = false;
        let (host, pid) = (read_host_name(), std::process::id());
        self.emit_event(Event::Takeover { host, pid, unattended_s: unattended.as_secs_f64() });
        if let Err(error) = self.start_metrics_server() {
            self.emit_notice(format!("{error}; the run continues without metrics"));
        }
        self.start_mlflow(true);
        self.write_control_file();
        let directory = self.plan.run_dir.clone();
        if let Some(journal) = &self.journal {
            journal.run_in_background(move || runs::register_takeover(&directory));
        }
        if let Some(starter) = self.starter.take() {
            starter.notify_started();
        }
    }

    /// Writes, in the background, the file `control.json`, from which a later controller learns how
    /// to reach the agents. Does nothing if the run does not outlive its controller.
    pub(super) fn write_control_file(&mut self) {
        let Some(journal) = &self.journal else { return };
        if self.identity.controller_loss_action() == ControllerLossAction::Continue {
            let (file, directory) = (self.build_control_file(), self.plan.run_dir.clone());
            journal.run_in_background(move || file.write(&directory));
        }
    }

    /// Builds the content of the file `control.json`, from which a later controller learns how to
    /// reach the agents.
    fn build_control_file(&self) -> ControlFile {
        let epoch = self.identity.token().epoch;
        let (hosts, addresses) = (self.hosts.clone(), self.addresses.clone());
        ControlFile::new(self.identity.key(), epoch, hosts, addresses, self.requeue.is_some())
    }

    /// Ends the event loop of this controller with `failure`, the reason why the controller cannot
    /// take over the run. Also ends the agents of a run whose workers were never started.
    pub(super) fn abandon_takeover(&mut self, failure: AttachFailure) {
        if failure == AttachFailure::NotStarted {
            (0..self.hosts.len()).for_each(|host| self.release_agent(host, None));
        }
        self.end = Some(EventLoopEnd::Abandoned(failure));
    }

    /// Builds the error message for the user that this controller cannot take over the run, for
    /// example because the hosts cannot be reached.
    pub(super) fn build_attach_error(&self, failure: &AttachFailure) -> Diagnostic {
        let name = &self.plan.run.0;
        let host = |id: &HostIndex| self.hosts.get(*id).map_or("", |host| host.name.as_str());
        let (code, message, help) = match failure {
            AttachFailure::Controlled { host: id, silent_ms } => {
                let (host, silence) = (host(id), format_duration(*silent_ms as f64 / 1000.0));
                let message = format!(
                    "host {host} obeys another controller of run {name}, from which it received a message {silence} ago"
                );
                (run::RUN_HAS_CONTROLLER, message, "`launch ps` shows the controllers of runs".to_owned())
            }
            AttachFailure::Stale { .. } => {
                let message = format!("another controller was about to take over run {name}");
                (run::RUN_HAS_CONTROLLER, message, format!("run `launch attach {name}` again"))
            }
            AttachFailure::NoAgents { unreachable: 0 } => {
                let message = format!("no agent of run {name} is alive: its workers have ended");
                (run::RUN_NOT_ATTACHABLE, message, "start the job again to resume it".to_owned())
            }
            AttachFailure::NoAgents { unreachable } => {
                let hosts = format_count(*unreachable, "host");
                let message = format!("no agent of run {name} answers, and {hosts} cannot be reached");
                (run::RUN_HOSTS_UNREACHABLE, message, "check the network and the hosts".to_owned())
            }
            AttachFailure::NotStarted => {
                let message = format!("run {name} has not started its workers");
                (run::RUN_NOT_ATTACHABLE, message, "start the job again".to_owned())
            }
            AttachFailure::TooFewAnswers { adopted, unreachable } => {
                let names: Vec<&str> = unreachable.iter().map(host).collect();
                let message = format!(
                    "only {} of run {name} can be reached; {} cannot",
                    format_count(*adopted, "host"),
                    crate::format::format_hosts(&names.iter().map(ToString::to_string).collect::<Vec<_>>())
                );
                let help =
                    "another controller might control them; if they are down, use `launch attach --force`";
                (run::RUN_HOSTS_UNREACHABLE, message, help.to_owned())
            }
            AttachFailure::Interrupted => {
                let message = format!("run {name} was not taken over, because the command was interrupted");
                (run::RUN_NOT_ATTACHABLE, message, format!("run `launch attach {name}` again"))
            }
        };
        Diagnostic::error(code, message).with_subject(name).with_help(help)
    }
}

/// Returns the exit code of `launch` after a failed takeover of a run: the code for an interruption
/// by the user, or the code for errors of the cluster.
pub(super) fn find_attach_exit_code(failure: &AttachFailure) -> u8 {
    if *failure == AttachFailure::Interrupted { exit::INTERRUPTED } else { exit::CLUSTER }
}

/// Asks the agent of a lost host to end, through a newly started process on that host, and passes
/// the answer to the controller's event loop. Passes the answer on once the agent has ended, or if
/// no agent is alive, or if the agent obeys a controller with a greater token than `token`.
async fn request_agent_eviction(
    (host, token): (HostIndex, ControllerToken),
    process: AgentProcess,
    frame: Vec<u8>,
    answers: mpsc::Sender<EvictionAnswer>,
) {
    let AgentProcess { handle, mut input, mut output, .. } = process;
    let request = async {
        input.write_all(&frame).await.ok()?;
        input.flush().await.ok()?;
        read_frame::<_, FromAgent>(&mut output).await.ok()?
    };
    let answer = match timeout(EVICTION_TIMEOUT, request).await.ok().flatten() {
        Some(FromAgent::WorkersEnded { .. } | FromAgent::NotAdopted(AttachRejection::NoAgent)) => {
            Some(EvictionAnswer::Ended(host))
        }
        Some(FromAgent::NotAdopted(AttachRejection::Controlled { token: other, .. })) if other > token => {
            Some(EvictionAnswer::Replaced)
        }
        _ => None,
    };
    if let AgentHandle::Connection(connection) = handle {
        connection.abort();
    }
    if let Some(answer) = answer {
        // An error means that the controller has ended.
        _ = answers.send(answer).await;
    }
}
