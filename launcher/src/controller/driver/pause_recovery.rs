//! Checks after a pause of this process (such as Ctrl-Z) whether another controller has taken over
//! the run, before the controller continues.
use super::{ControllerDriver, ControllerReplacement, EventLoopEnd, loop_event::LoopEvent};
use crate::controller::{hostfile::HostfileWatch, job_file::JobFileWatch, journal::Journal};
use protocol::control::FromAgent;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// How long the controller waits, after this process was paused, for a message of an agent that
/// another controller has taken over the run. Agents sent this news when it happened, but not over
/// connections that had broken before. The journal shows the takeover in any case.
const TAKEOVER_NEWS_TIMEOUT: Duration = Duration::from_secs(1);

impl ControllerDriver {
    /// Checks whether another controller took over the run while this process was paused, for
    /// example by Ctrl-Z, and if not, processes the waiting events. If another controller has taken
    /// over the run in the meantime, ends the run for this controller without an order and without
    /// an event.
    ///
    /// Heartbeats are sent first. From their arrival on, an agent obeys no new controller.
    pub(super) async fn process_event_after_pause(
        &mut self,
        event: LoopEvent,
        job_file: &mut JobFileWatch,
        hostfile: &mut HostfileWatch,
    ) {
        let heartbeats = self.core.build_heartbeats();
        heartbeats.into_iter().for_each(|action| self.execute_action(action));
        let deadline = Instant::now() + TAKEOVER_NEWS_TIMEOUT;
        let replaced = self.journal.as_ref().map(Journal::begin_replacement_check);
        let mut events = vec![event];
        loop {
            if let Some(LoopEvent::Agent((host, number), Ok(Some(FromAgent::Released { .. })))) =
                events.last()
                && self.agents.get(host).is_some_and(|agent| agent.number == *number)
            {
                events.drain(..events.len() - 1);
                break;
            }
            match timeout_at(deadline, self.messages.1.recv()).await {
                Ok(Some((agent, message))) => events.push(LoopEvent::Agent(agent, message)),
                Ok(None) | Err(_) => break,
            }
        }
        // No lease may expire because messages have waited.
        self.clock.skip_pause();
        let is_released =
            matches!(events.last(), Some(LoopEvent::Agent(_, Ok(Some(FromAgent::Released { .. })))));
        if !is_released
            && let Some(replaced) = replaced
            && matches!(timeout_at(deadline, replaced).await, Ok(Ok(true)))
        {
            let replacement = ControllerReplacement { is_controlled: true, silent_ms: None };
            self.end = Some(EventLoopEnd::Replaced(replacement));
            return;
        }
        for event in events {
            self.process_event(event, job_file, hostfile).await;
        }
    }
}
