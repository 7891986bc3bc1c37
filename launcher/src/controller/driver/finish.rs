//! Ends a run, or ends a controller that another controller has replaced.
use super::{ControllerDriver, ControllerReplacement, takeover::find_attach_exit_code};
use crate::{
    cluster::{self, BatchJobEnd, BatchJobEndReason},
    controller::{
        core::{AttachFailure, RunOutcome},
        requeue::decide_requeue,
    },
    report, runs,
};
use diagnostic::{Diagnostic, codes, quantity::format_duration};
use nix::sys::signal::{SigHandler, Signal};
use protocol::{event::Event, exit};
use std::time::Duration;

/// How long the controller of a preempted batch job waits to be ended by the batch system, counted
/// from the end of the job's grace time.
const PREEMPTION_MARGIN: Duration = Duration::from_secs(60);
/// How long the controller waits at the end of a run until the console output of other hosts is
/// written to files.
const STREAMED_LOGS_TIMEOUT: Duration = Duration::from_secs(20);

impl ControllerDriver {
    /// Ends a run: reports the result, completes the journal (the run's file of events), requeues a
    /// batch job if required, and returns launch's exit code.
    pub(super) fn finish_run(mut self, outcome: RunOutcome) -> u8 {
        let seconds = (self.earlier + self.clock.now()).as_secs_f64();
        let exit_code = outcome.exit_code;
        let ends = outcome.ended_by_batch_system || outcome.end_announced;
        let job_end = if ends { self.report_batch_job_end() } else { None };
        let is_preemption = |end: &BatchJobEnd| matches!(end.reason, BatchJobEndReason::Preemption { .. });
        let preemption = job_end.filter(|end| outcome.ended_by_batch_system && is_preemption(end));
        let is_undecided = preemption.is_some() && self.requeue.is_none();
        let requeued =
            self.requeue.take().filter(|job| match decide_requeue(job, &outcome, preemption.is_some()) {
                Some(decision) => {
                    self.emit_notice(decision.message);
                    decision.requeue
                }
                None => false,
            });
        self.report_end_of_stragglers();
        self.emit_event(Event::Done { exit_code, step: outcome.step, seconds });
        // No process of the job is left, so the default actions are safe: Ctrl-C ends a wait for a
        // pager or a disk.
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGQUIT] {
            // SAFETY: the default action runs no code of this program.
            _ = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        }
        self.wait_for_complete_files(exit_code, seconds);
        drop(self.metrics.take());
        self.finish_mlflow();
        self.report.finish(report::RunSummary {
            exit_code,
            stopped: outcome.stopped,
            killed: outcome.killed,
            peers: outcome.peers,
            run_dir: self.plan.run_dir,
            command: self.command,
            resume_from: self.job.resume.from,
            has_checkpoint: outcome.has_checkpoint,
            seconds,
        });
        // Requeuing is the last step, because the scheduler then ends this process, too.
        if let Some(Err(error)) = requeued.map(|job| (job.requeue)(&job.id)) {
            report_error(&error);
        }
        if let Some(preemption) = preemption.filter(|_| is_undecided) {
            wait_for_preemption(&preemption);
        }
        exit_code
    }

    /// Asks the batch system (Slurm) why it ends the batch job of this run, and reports the reason
    /// to the user. Returns `None` if the run does not belong to a batch job, or if the batch
    /// system does not answer.
    fn report_batch_job_end(&mut self) -> Option<BatchJobEnd> {
        let answer = cluster::find_batch_job_end();
        if let Some(note) = build_batch_job_end_note(&answer) {
            self.emit_event(Event::new_diagnostic_notice(None, note.to_string(), &note));
        }
        answer.unwrap_or(None)
    }

    /// Waits until the journal (the run's file of events) and the files with other hosts' console
    /// output are completely written to disk. If the journal cannot be completed, records the end
    /// of the run in the user's state directory.
    fn wait_for_complete_files(&mut self, exit_code: u8, seconds: f64) {
        if !self.streamed_logs.flush(STREAMED_LOGS_TIMEOUT) {
            let message =
                "launch: the last output of other hosts is not stored, because the disk does not accept it";
            self.report.show_message(message.to_owned());
        }
        let Some(journal) = self.journal.take() else { return };
        let report = &mut self.report;
        if !journal.close(|message| report.show_message(format!("launch: {message}"))) {
            let recorded = match runs::record_run_end_outside_journal(&self.plan.run.0, exit_code, seconds) {
                Ok(()) => "`launch ps` shows its end".to_owned(),
                Err(error) => format!("its end is not recorded: {error}"),
            };
            let directory = self.plan.run_dir.display();
            report.show_message(format!(
                "launch: the journal of the run in {directory} is not complete; {recorded}"
            ));
        }
    }

    /// Ends this controller after it could not take over a run from a lost controller, and reports
    /// the reason to the user. Returns the exit code of `launch`.
    pub(super) fn abandon_run(self, failure: &AttachFailure) -> u8 {
        report_error(&self.build_attach_error(failure));
        find_attach_exit_code(failure)
    }

    /// Ends this controller because another controller has taken over the run or because the agents
    /// continue without a controller. Neither agents nor the journal are changed. Returns the exit
    /// code of `launch`.
    pub(super) fn leave_run(self, replacement: &ControllerReplacement) -> u8 {
        let timeout = Duration::from_millis(self.job.run.controller_timeout_ms);
        report_error(&build_replacement_error(&self.plan.run.0, replacement, timeout));
        exit::CLUSTER
    }
}

/// Builds the error that this controller no longer controls its run, because another controller has
/// replaced it or the agents continue without a controller. `timeout` is the time for which workers
/// continue without a controller.
fn build_replacement_error(run: &str, replacement: &ControllerReplacement, timeout: Duration) -> Diagnostic {
    let silence = replacement.silent_ms.map(|ms| format_duration(ms as f64 / 1000.0));
    let reason = silence.map_or_else(String::new, |silence| format!(", which was silent for {silence}"));
    let (message, help) = match replacement.is_controlled {
        true => (
            format!("another controller of run {run} has replaced this one{reason}"),
            format!("`launch ps` shows the run; `launch logs {run}` shows its output"),
        ),
        false => (
            format!("the hosts of run {run} continue without this controller{reason}"),
            format!(
                "run `launch attach {run}` to control the run again; without a controller, its workers \
                 save and stop after {}",
                format_duration(timeout.as_secs_f64())
            ),
        ),
    };
    let error = Diagnostic::error(codes::run::CONTROLLER_REPLACED, message).with_subject(run);
    match replacement.silent_ms {
        Some(silent_ms) => error.with_field("silent_ms", silent_ms).with_help(help),
        None => error.with_help(help),
    }
}

/// Builds a note to the user with the reason, such as preemption, for which the batch system ends
/// the batch job. Returns `None` if the run does not belong to a batch job.
fn build_batch_job_end_note(answer: &diagnostic::Result<Option<BatchJobEnd>>) -> Option<Diagnostic> {
    let (label, reason) = match answer {
        Ok(Some(end)) => (end.label.as_str(), end.reason),
        Ok(None) => return None,
        Err(_) => ("the batch job", BatchJobEndReason::Unknown),
    };
    let message = match reason {
        BatchJobEndReason::Preemption { .. } => format!("{label} is preempted"),
        BatchJobEndReason::TimeLimit => format!("{label} is at its time limit"),
        BatchJobEndReason::Cancelled => format!("{label} was cancelled"),
        BatchJobEndReason::Signal => format!("{label} continues, but a user sent SIGTERM to its processes"),
        BatchJobEndReason::Unknown => format!("cannot find out why {label} ends"),
    };
    let note = Diagnostic::note(codes::run::BATCH_JOB_END, message).with_field("reason", reason.name());
    Some(match answer {
        Err(error) => note.with_cause(error),
        _ if reason == BatchJobEndReason::TimeLimit => {
            note.with_help("to be requeued at the time limit, submit the job with `launch sbatch`")
        }
        _ => note,
    })
}

/// Blocks until the batch system ends this process, after the batch system has announced the
/// preemption of the batch job. A job that ends before it is preempted would not be requeued, even
/// if its partition requeues preempted jobs.
fn wait_for_preemption(preemption: &BatchJobEnd) {
    let BatchJobEndReason::Preemption { time_left } = preemption.reason else { return };
    report::command_output::write_message(&format!(
        "launch: {} is preempted; waiting until the batch system ends or requeues it\n",
        preemption.label
    ));
    std::thread::sleep(time_left + PREEMPTION_MARGIN);
}

/// Prints an error to stderr.
fn report_error(error: &Diagnostic) {
    let is_colored = report::command_output::is_color_enabled();
    report::command_output::write_message(&diagnostic::render(error, is_colored));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_batch_job_is_reported_with_its_reason() {
        let end = |reason| Ok(Some(BatchJobEnd { label: "job 7".to_owned(), reason }));
        let reason = |answer| {
            build_batch_job_end_note(&answer)
                .and_then(|note| Some(note.field("reason")?.as_str()?.to_owned()))
        };
        assert_eq!(reason(end(BatchJobEndReason::TimeLimit)).as_deref(), Some("time-limit"));
        assert_eq!(reason(end(BatchJobEndReason::Cancelled)).as_deref(), Some("cancelled"));
        assert_eq!(reason(Ok(None)), None, "no batch job");
        let error = Diagnostic::error(codes::slurm::SLURM_CONTROLLER_UNREACHABLE, "no answer");
        let note = build_batch_job_end_note(&Err(error)).expect("a note");
        assert_eq!((note.code(), note.causes().len()), (codes::run::BATCH_JOB_END, 1));
        assert_eq!(note.field("reason"), Some(&"unknown".into()));
    }
}
