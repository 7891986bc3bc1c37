//! [`SlurmAgentConnection`]: the connection to an agent in a Slurm step, and [`SlurmAgentReader`],
//! which delays the end of the agent's stream until srun has ended.
use super::{srun, srun_process::SrunProcess};
use crate::cluster::{
    pending_agent::{AgentConnectionSlot, PendingAgentReader},
    transport::RemoteAgentConnection,
};
use diagnostic::{Diagnostic, codes::slurm};
use protocol::control::ExitStatus;
use std::{
    fmt,
    future::Future,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, ReadBuf},
    time::{Sleep, sleep},
};

/// How long the controller, at the end of an agent's stream, waits for srun to end, so that srun's
/// exit status can explain the end. If srun ends within this time, its exit status is known when
/// the controller asks why the stream has ended.
const STEP_EXIT_TIMEOUT: Duration = Duration::from_millis(250);

/// The handle by which the controller closes the connection to one agent in a Slurm step, or learns
/// why the agent failed.
pub(super) struct SlurmAgentConnection {
    pub(super) slot: AgentConnectionSlot,
    pub(super) step: Arc<SrunProcess>,
}

impl fmt::Debug for SlurmAgentConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlurmConnection").field("name", &self.slot.name).finish_non_exhaustive()
    }
}

impl RemoteAgentConnection for SlurmAgentConnection {
    fn abort(&self) {
        self.slot.abort();
    }

    fn failure(&self) -> Option<Diagnostic> {
        let was_connected = self.slot.is_connected();
        let name = &self.slot.name;
        let (default_code, message) = match self.step.exit_status() {
            Some(ExitStatus::Code(0)) | None if was_connected => return None,
            Some(ExitStatus::Code(code)) => (
                slurm::SLURM_STEP_FAILED,
                format!("srun, which runs the agent of host {name}, ended with exit code {code}"),
            ),
            Some(ExitStatus::Signal(number, _)) => (
                slurm::SLURM_STEP_FAILED,
                format!("srun, which runs the agent of host {name}, was killed by signal {number}"),
            ),
            None => (
                slurm::SLURM_AGENT_FAILED,
                format!("the agent of host {name} ended before it connected to the controller"),
            ),
        };
        let output = self.step.join_output_tail();
        let known_code = srun::classify_failure_output(&output);
        let message = if output.is_empty() { message } else { format!("{message}: {output}") };
        let diagnostic = Diagnostic::error(known_code.unwrap_or(default_code), message)
            .with_subject(name)
            .with_field("output", output);
        Some(if known_code.is_some() { diagnostic.with_remedy() } else { diagnostic })
    }

    fn exit_status(&self) -> Option<ExitStatus> {
        // srun reports one status for all tasks, which may be the status of another agent.
        None
    }
}

/// The stream on which the controller reads from an agent in a Slurm step, whose end is delayed for
/// a short time until srun has ended.
///
/// The end of the stream is reported when srun has ended, or after [`STEP_EXIT_TIMEOUT`] if srun is
/// still running.
pub(super) struct SlurmAgentReader {
    pub(super) stream: PendingAgentReader,
    pub(super) step: Arc<SrunProcess>,
    pub(super) end: Option<PostponedStreamEnd>,
}

/// The result of the last read from an agent, which is returned to the controller only after srun
/// has ended or a deadline has passed.
pub(super) struct PostponedStreamEnd {
    result: io::Result<()>,
    deadline: Pin<Box<Sleep>>,
    step_exit: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl AsyncRead for SlurmAgentReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.end.is_none() {
            let filled_before = buffer.filled().len();
            let result = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
            if result.is_ok() && (buffer.filled().len() > filled_before || buffer.remaining() == 0) {
                return Poll::Ready(Ok(()));
            }
            let mut exit = self.step.exit_receiver();
            let step_exit = Box::pin(async move { _ = exit.wait_for(Option::is_some).await });
            let deadline = Box::pin(sleep(STEP_EXIT_TIMEOUT));
            self.end = Some(PostponedStreamEnd { result, deadline, step_exit });
        }
        if let Some(end) = &mut self.end
            && end.deadline.as_mut().poll(cx).is_pending()
            && end.step_exit.as_mut().poll(cx).is_pending()
        {
            return Poll::Pending;
        }
        Poll::Ready(self.end.take().map_or(Ok(()), |end| end.result))
    }
}
