//! [`SignalReceiver`]: catches the signals that are sent to the controller, and translates each
//! signal into a request to the controller's state machine.
use super::core::{ControllerInput, StopRequest};
use crate::{processes::is_signal_ignored, supervised_controller::ForwardedSignals};
use jobspec::{RunSignalActions as SignalActions, SignalAction};
use nix::sys::signal::Signal;
use std::{
    io,
    time::{Duration, Instant},
};
use tokio::{
    net::unix::pipe,
    signal::unix::{Signal as SignalStream, SignalKind, signal},
};

/// Two arrivals of a signal, one from the supervisor of this controller and one from another
/// process, count as one signal if less than this time passes between them.
const MAX_PAIR_INTERVAL: Duration = Duration::from_secs(3);

/// Receives the POSIX signals that control a run, and translates each to a request, such as to save
/// a checkpoint or to stop.
pub(super) struct SignalReceiver {
    /// The actions that SIGUSR1, SIGUSR2 and SIGTERM request (`run.signals`).
    actions: SignalActions,
    interrupt: SignalStream,
    terminate: SignalStream,
    quit: SignalStream,
    /// The SIGHUP signals that this process receives; `None` if the controller was started with
    /// SIGHUP ignored (`nohup`). The signal then stays ignored.
    hangup: Option<SignalStream>,
    usr1: SignalStream,
    usr2: SignalStream,
    child: SignalStream,
    announcements: SignalAnnouncements,
    /// The signals that the supervisor of this controller passes on; `None` without a supervisor.
    forwarded: Option<pipe::Receiver>,
    pairs: SignalPairs,
}

/// Where a signal comes from, for a controller with a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SignalSource {
    /// This process received the signal.
    Direct,
    /// The supervisor received the signal and passed it on.
    Supervisor,
}

/// Recognizes signals that were sent both to this process and to its supervisor, for example by a
/// scheduler to all processes of a batch job. Such a signal counts once.
#[derive(Debug, Default)]
struct SignalPairs {
    /// The signals whose second arrival, from the other source, is still expected.
    unpaired: Vec<(Signal, SignalSource, Instant)>,
}

impl SignalPairs {
    /// Returns whether the arrival of `signal` counts, because it is not the second of a pair.
    fn counts(&mut self, signal: Signal, source: SignalSource, now: Instant) -> bool {
        self.unpaired.retain(|(_, _, at)| now.duration_since(*at) < MAX_PAIR_INTERVAL);
        let first = self.unpaired.iter().position(|(other, from, _)| *other == signal && *from != source);
        match first {
            Some(index) => drop(self.unpaired.swap_remove(index)),
            None => self.unpaired.push((signal, source, now)),
        }
        first.is_none()
    }
}

/// Whether SIGUSR1 and SIGTERM, sent to this process, mean that the batch system is about to end
/// the job.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SignalAnnouncements {
    /// Whether SIGUSR1 announces the time limit of the batch job.
    pub(super) usr1: bool,
    /// Whether SIGTERM announces the end of the batch job, whatever its reason.
    pub(super) term: bool,
}

/// What a signal requests of the controller, such as to stop the run.
pub(super) enum SignalEvent {
    /// The signal requests an action of the controller's state machine, such as to save or to stop.
    Request(Box<ControllerInput>),
    /// SIGCHLD: child processes have ended and must be reaped.
    ChildrenEnded,
    /// A signal that `run.signals` ignores.
    Ignored,
}

impl SignalEvent {
    /// Creates a signal event, which makes the controller's state machine handle `input`, such as a
    /// request to stop the run.
    fn from_input(input: ControllerInput) -> SignalEvent {
        SignalEvent::Request(Box::new(input))
    }
}

impl SignalReceiver {
    /// Begins to catch the signals that control a run, such as SIGINT, SIGTERM and those of
    /// `run.signals`. `actions` states what each signal means to which `announcements` gives no
    /// meaning. `forwarded` are the signals that a supervisor of this controller passes on.
    pub(super) fn install(
        actions: SignalActions,
        announcements: SignalAnnouncements,
        forwarded: Option<&ForwardedSignals>,
    ) -> io::Result<Self> {
        Ok(SignalReceiver {
            actions,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: if is_signal_ignored(Signal::SIGHUP) {
                None
            } else {
                Some(signal(SignalKind::hangup())?)
            },
            usr1: signal(SignalKind::user_defined1())?,
            usr2: signal(SignalKind::user_defined2())?,
            child: signal(SignalKind::child())?,
            announcements,
            forwarded: forwarded.map(ForwardedSignals::open_receiver).transpose()?,
            pairs: SignalPairs::default(),
        })
    }

    /// Waits for the next signal and returns what it requests of the controller. Cancel-safe.
    pub(super) async fn receive(&mut self) -> SignalEvent {
        loop {
            let hangup = async {
                match &mut self.hangup {
                    Some(stream) => stream.recv().await,
                    None => std::future::pending().await,
                }
            };
            let direct = |signal| (signal, SignalSource::Direct);
            let (signal, source) = tokio::select! {
                _ = self.interrupt.recv() => direct(Signal::SIGINT),
                _ = self.terminate.recv() => direct(Signal::SIGTERM),
                _ = self.quit.recv() => direct(Signal::SIGQUIT),
                _ = hangup => direct(Signal::SIGHUP),
                _ = self.usr1.recv() => direct(Signal::SIGUSR1),
                _ = self.usr2.recv() => direct(Signal::SIGUSR2),
                _ = self.child.recv() => return SignalEvent::ChildrenEnded,
                forwarded = read_forwarded_signal(&self.forwarded) => match forwarded {
                    Some(signal) => (signal, SignalSource::Supervisor),
                    // The supervisor has ended.
                    None => {
                        self.forwarded = None;
                        continue;
                    }
                },
            };
            if self.forwarded.is_none() || self.pairs.counts(signal, source, Instant::now()) {
                return self.interpret(signal);
            }
        }
    }

    /// Returns what `signal` requests of the controller.
    fn interpret(&self, signal: Signal) -> SignalEvent {
        let SignalActions { usr1, usr2, term } = self.actions;
        let stop = |request| SignalEvent::from_input(ControllerInput::Stop(request));
        match signal {
            Signal::SIGINT => stop(StopRequest::Interrupt),
            Signal::SIGTERM if self.announcements.term => stop(StopRequest::BatchSystem),
            Signal::SIGTERM => interpret_signal(term, signal),
            Signal::SIGQUIT => SignalEvent::from_input(ControllerInput::Kill),
            Signal::SIGHUP => stop(StopRequest::Terminate),
            Signal::SIGUSR1 if self.announcements.usr1 => stop(StopRequest::TimeLimit),
            Signal::SIGUSR1 => interpret_signal(usr1, signal),
            Signal::SIGUSR2 => interpret_signal(usr2, signal),
            _ => SignalEvent::Ignored,
        }
    }
}

/// Reads the next signal that the supervisor of this controller has passed on. Returns `None` when
/// the supervisor has ended. Never returns without a supervisor. Cancel-safe.
async fn read_forwarded_signal(forwarded: &Option<pipe::Receiver>) -> Option<Signal> {
    let Some(receiver) = forwarded else { return std::future::pending().await };
    let mut number = [0];
    loop {
        receiver.readable().await.ok()?;
        match receiver.try_read(&mut number) {
            Ok(0) => return None,
            // An unknown number has no effect.
            Ok(_) => return Some(Signal::try_from(i32::from(number[0])).unwrap_or(Signal::SIGWINCH)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
    }
}

/// Converts the action that `run.signals` assigns to the received signal (save, save and stop, or
/// ignore) to a request to the controller.
fn interpret_signal(action: SignalAction, signal: Signal) -> SignalEvent {
    match action {
        SignalAction::Save => SignalEvent::from_input(ControllerInput::Save(signal as i32)),
        SignalAction::SaveAndStop => SignalEvent::from_input(ControllerInput::Stop(StopRequest::Terminate)),
        SignalAction::Ignore => SignalEvent::Ignored,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_to_the_controller_and_its_supervisor_counts_once() {
        let (mut pairs, start) = (SignalPairs::default(), Instant::now());
        let mut counts =
            |signal, source, seconds| pairs.counts(signal, source, start + Duration::from_secs(seconds));
        use SignalSource::{Direct, Supervisor};
        assert!(counts(Signal::SIGTERM, Direct, 0));
        assert!(!counts(Signal::SIGTERM, Supervisor, 1));
        // the second signal to both
        assert!(counts(Signal::SIGTERM, Supervisor, 1));
        assert!(counts(Signal::SIGINT, Direct, 1), "another signal");
        assert!(!counts(Signal::SIGTERM, Direct, 2));
        // two signals to the supervisor only
        assert!(counts(Signal::SIGTERM, Supervisor, 2));
        assert!(counts(Signal::SIGTERM, Supervisor, 2));
        // much later, another signal to this process
        assert!(counts(Signal::SIGTERM, Direct, 60));
    }
}
