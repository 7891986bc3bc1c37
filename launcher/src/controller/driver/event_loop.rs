//! The event loop of the controller: processes messages, signals, file changes and deadlines.
use super::{
    AgentId, ControllerDriver, ControllerReplacement, EventLoopEnd, SupervisedAgent, debug_log,
    loop_event::LoopEvent,
};
use crate::{
    cluster::{AgentOutput, AgentProcess, AgentStartStep},
    connection::{FrameError, Outbox, read_frames, write_frames},
    controller::{
        core::{ControllerInput, HostIndex},
        exec_socket::{ExecClientEvent, ExecSocket},
        hostfile::HostfileWatch,
        job_file::JobFileWatch,
        journal::StoredReportReceiver,
        report_id::ReportId,
        root_cause::AgentEnd,
        signals::{SignalEvent, SignalReceiver},
    },
};
use protocol::control::FromAgent;
use std::time::Duration;
use tokio::{
    io::AsyncReadExt,
    sync::mpsc,
    time::{Instant, sleep},
};
use tracing::info;

/// The size of one read of the text that an agent writes to stderr, in bytes.
const STDERR_CHUNK_BYTES: usize = 4 << 10;
/// The longest time for which the event loop of the controller waits without an event.
/// [`crate::clock::RunningClock`] counts at most two seconds between two readings, so the clock
/// would lag after a longer sleep.
const MAX_SLEEP: Duration = Duration::from_secs(1);
/// The interval at which the controller writes the journal (the run's file of events) to stable
/// storage, and checks whether the disk hangs.
const JOURNAL_SYNC_INTERVAL: Duration = Duration::from_millis(500);

impl ControllerDriver {
    /// Starts the agents, then processes messages, signals, file changes and deadlines until the
    /// run ends or another controller takes it over. In the first case, all agents have ended when
    /// this function returns.
    pub(super) async fn run_event_loop(&mut self, mut signals: SignalReceiver) -> EventLoopEnd {
        // The files are read before the first heartbeat is due, because their disk may stall.
        let (mut job_file, mut hostfile) = self.watch_files(false);
        self.start_all_agents();
        let mut journal_tick = Instant::now();
        loop {
            match self.end.take() {
                Some(EventLoopEnd::Ended(outcome)) => {
                    self.close_agents(outcome.exit_code).await;
                    return EventLoopEnd::Ended(outcome);
                }
                Some(end) => {
                    self.wait_for_released_agents().await;
                    return end;
                }
                None => {}
            }
            let event = self.receive_event(&mut signals, &mut job_file, &mut hostfile).await;
            if self.clock.has_paused() {
                self.process_event_after_pause(event, &mut job_file, &mut hostfile).await;
            } else {
                self.process_event(event, &mut job_file, &mut hostfile).await;
            }
            self.continue_waiting_exec_requests();
            self.flush_outboxes();
            if Instant::now() >= journal_tick {
                journal_tick = Instant::now() + JOURNAL_SYNC_INTERVAL;
                self.write_status();
                self.update_inner_hosts();
                self.emit_mlflow_notices();
                let notice = self.journal.as_mut().and_then(|journal| journal.perform_due_work());
                notice.into_iter().for_each(|notice| match self.is_adopting {
                    true => self.report.show_message(format!("launch: {notice}")),
                    false => self.emit_notice(notice),
                });
            }
        }
    }

    /// Waits for the next event for the controller, such as a message or a signal, or for the time
    /// at which its next deadline passes.
    async fn receive_event(
        &mut self,
        signals: &mut SignalReceiver,
        job_file: &mut JobFileWatch,
        hostfile: &mut HostfileWatch,
    ) -> LoopEvent {
        let now = self.clock.now();
        let pause =
            self.core.find_next_deadline().map_or(MAX_SLEEP, |at| at.saturating_sub(now).min(MAX_SLEEP));
        tokio::select! {
            Some((agent, message)) = self.messages.1.recv() => LoopEvent::Agent(agent, message),
            Some((agent, step)) = self.start_steps.1.recv() => LoopEvent::StartStep(agent, step),
            Some(line) = self.lines.1.recv() => LoopEvent::Line(line),
            event = signals.receive() => LoopEvent::Signal(event),
            Some(planned) = self.planned.1.recv() => LoopEvent::Planned(planned),
            Some(reports) = receive_stored_reports(&mut self.stored) => LoopEvent::Stored(reports),
            Some(summary) = self.journal_taken.1.recv() => LoopEvent::JournalTaken(Box::new(summary)),
            Some(answer) = self.evictions.1.recv() => LoopEvent::Eviction(answer),
            content = job_file.wait_for_change() => LoopEvent::JobFile(content),
            content = hostfile.wait_for_change() => LoopEvent::Hostfile(content),
            event = receive_exec_event(&mut self.exec_socket) => LoopEvent::ExecClient(event),
            () = sleep(pause) => LoopEvent::Tick,
        }
    }

    /// Processes one event, such as a message or a signal, mostly by passing it to the controller's
    /// state machine and executing the resulting actions.
    pub(super) async fn process_event(
        &mut self,
        event: LoopEvent,
        job_file: &mut JobFileWatch,
        hostfile: &mut HostfileWatch,
    ) {
        match event {
            LoopEvent::Agent(agent, message) => self.handle_agent_message(agent, message).await,
            LoopEvent::StartStep((host, number), step) => {
                if self.agents.get(&host).is_some_and(|agent| agent.number == number) {
                    self.handle_input(ControllerInput::StartStep(host, step));
                }
            }
            LoopEvent::Line(line) => self.report.show_message(line),
            LoopEvent::Signal(SignalEvent::Request(input)) => self.handle_input(*input),
            LoopEvent::Signal(SignalEvent::ChildrenEnded) => _ = self.reap_children(),
            LoopEvent::Signal(SignalEvent::Ignored) => {}
            LoopEvent::Planned(planned) => self.finish_planning(planned),
            LoopEvent::Stored(reports) => {
                self.events.forget_stored_events(&reports);
                self.handle_input(ControllerInput::Stored(reports));
            }
            LoopEvent::JournalTaken(summary) => {
                self.continue_journal(*summary);
                (*job_file, *hostfile) = self.watch_files(true);
            }
            LoopEvent::Eviction(answer) => self.handle_eviction_answer(answer),
            LoopEvent::JobFile(content) => self.apply_job_file_change(job_file, content),
            LoopEvent::Hostfile(content) => self.apply_hostfile_change(hostfile, content),
            LoopEvent::ExecClient(event) => self.handle_exec_client(event),
            LoopEvent::Tick => self.handle_input(ControllerInput::Tick),
        }
    }

    /// Starts to watch the job file and the hostfile for changes while the job runs. Watches
    /// neither during a takeover. After a takeover, their present content counts as a change.
    fn watch_files(&self, is_taken_over: bool) -> (JobFileWatch, HostfileWatch) {
        let is_watching = !self.is_adopting;
        let job_file = self.watched_job_file.clone().filter(|_| is_watching);
        let hostfile = self.hostfile.clone().filter(|_| is_watching);
        (
            JobFileWatch::start(job_file, is_taken_over),
            HostfileWatch::start(hostfile, &self.hosts, is_taken_over),
        )
    }

    /// Starts the agents of all hosts at the beginning of a run or of its takeover.
    fn start_all_agents(&mut self) {
        let names: Vec<String> = self.hosts.iter().map(|h| h.name.clone()).collect();
        let mut failed = Vec::new();
        for (host, started) in self.transport.start_agents(&names).into_iter().enumerate() {
            match started {
                Ok(process) => self.register_agent(host, process),
                Err(error) => failed.push((host, error)),
            }
        }
        let now = self.clock.now();
        let actions = match self.is_adopting {
            true => self.core.send_attach_requests(now),
            false => self.core.send_hellos(now),
        };
        actions.into_iter().for_each(|action| self.execute_action(action));
        for (host, error) in failed {
            self.handle_input(ControllerInput::AgentGone { host, end: AgentEnd::NotStarted(error) });
        }
    }

    /// Starts the tasks that exchange messages with a newly started agent, and stores the agent as
    /// the current agent of its host.
    pub(super) fn register_agent(&mut self, host: HostIndex, process: AgentProcess) {
        let (outbox, outgoing) = Outbox::channel();
        self.agents_started += 1;
        let number = self.agents_started;
        info!(target: "controller::transport", host, number, "started agent");
        tokio::spawn(read_frames((host, number), process.output, self.messages.0.clone()));
        tokio::spawn(write_frames(process.input, outgoing));
        tokio::spawn(forward_stderr(process.stderr, self.lines.0.clone()));
        if let Some(steps) = process.start_steps {
            tokio::spawn(forward_start_steps((host, number), steps, self.start_steps.0.clone()));
        }
        let agent = SupervisedAgent {
            number,
            is_relay: self.is_adopting,
            handle: process.handle,
            outbox: Some(outbox),
            ended: None,
        };
        self.agents.insert(host, agent);
        self.inner_hosts.retain(|_, inner_host| *inner_host != host);
    }

    /// Moves critical messages from the overflow buffers into the send queues of the agents'
    /// connections, until the queues are full.
    fn flush_outboxes(&mut self) {
        let agents = &mut self.agents;
        self.backlogged.retain(|host| {
            let outbox = agents.get_mut(host).and_then(|a| a.outbox.as_mut());
            outbox.is_some_and(|outbox| {
                outbox.flush_overflow();
                outbox.has_overflow()
            })
        });
    }

    /// Passes a message of an agent, or the end of its connection, to the controller's state
    /// machine. Ignores messages of an agent that was replaced by a later agent of its host.
    pub(super) async fn handle_agent_message(
        &mut self,
        (host, number): AgentId,
        message: Result<Option<FromAgent>, FrameError>,
    ) {
        if matches!(message, Ok(None) | Err(_)) {
            self.released.remove(&(host, number));
        }
        // The host may have a later agent by now.
        if self.agents.get(&host).is_none_or(|agent| agent.number != number) {
            return;
        }
        match message {
            Ok(Some(FromAgent::Released { token, silent_ms })) => {
                let is_controlled = token.is_some();
                self.end = Some(EventLoopEnd::Replaced(ControllerReplacement { is_controlled, silent_ms }));
            }
            Ok(Some(FromAgent::Exec { id, reply })) => self.send_exec_reply(id, reply),
            Ok(Some(message)) => {
                if is_worker_start(&message) {
                    self.count_started_worker();
                }
                self.handle_input(ControllerInput::Agent(host, message));
            }
            Ok(None) => {
                self.end_exec_commands_on_host(host);
                self.handle_agent_end(host, None).await;
            }
            Err(error) => {
                self.end_exec_commands_on_host(host);
                self.handle_agent_end(host, Some(error.into())).await;
            }
        }
    }

    /// Counts a started worker and, once all workers run, informs the process `launch run --detach`
    /// that waits for the start.
    fn count_started_worker(&mut self) {
        self.not_started = self.not_started.saturating_sub(1);
        if self.not_started == 0
            && let Some(starter) = self.starter.take()
        {
            starter.notify_started();
        }
    }

    /// Passes an input to the controller's state machine and executes the actions that it requests.
    /// Then processes each input that these actions have produced in the same way.
    pub(super) fn handle_input(&mut self, input: ControllerInput) {
        let mut next = Some(input);
        while let Some(input) = next {
            debug_log::log_input(&input);
            let now = self.clock.now();
            let actions = self.core.handle_input(now, input);
            actions.into_iter().for_each(|action| self.execute_action(action));
            next = self.pending_inputs.pop_front();
        }
    }
}

/// Returns whether a message reports the start of a worker.
fn is_worker_start(message: &FromAgent) -> bool {
    match message {
        FromAgent::Report { message, .. } => matches!(**message, FromAgent::Started { .. }),
        message => matches!(message, FromAgent::Started { .. }),
    }
}

/// Waits until more reports of agents are stored in the journal on disk, and returns the IDs of
/// these reports. Waits forever without a journal.
async fn receive_stored_reports(stored: &mut Option<StoredReportReceiver>) -> Option<Vec<ReportId>> {
    match stored {
        Some(stored) => stored.recv().await,
        None => std::future::pending().await,
    }
}

/// Waits for the next request, or the end, of a process `launch exec` that is connected to the
/// controller. Waits forever without a socket.
async fn receive_exec_event(socket: &mut Option<ExecSocket>) -> ExecClientEvent {
    match socket {
        Some(socket) => socket.receive_event().await,
        None => std::future::pending().await,
    }
}

/// Forwards each step of an agent's start, such as the copy of the executable, to the channel
/// `steps` of the event loop. Ends when the start ends or the channel is closed.
async fn forward_start_steps(
    agent: AgentId,
    mut started: mpsc::Receiver<AgentStartStep>,
    steps: mpsc::Sender<(AgentId, AgentStartStep)>,
) {
    while let Some(step) = started.recv().await {
        if steps.send((agent, step)).await.is_err() {
            return;
        }
    }
}

/// Forwards each line of an agent's stderr to the channel `lines`, from which the controller's
/// event loop shows it to the user. Ends when the stream ends or the channel is closed.
async fn forward_stderr(mut stream: AgentOutput, lines: mpsc::Sender<String>) {
    let mut buffer = [0; STDERR_CHUNK_BYTES];
    while let Ok(n @ 1..) = stream.read(&mut buffer).await {
        for line in String::from_utf8_lossy(&buffer[..n]).lines() {
            if lines.send(line.to_owned()).await.is_err() {
                return;
            }
        }
    }
}
