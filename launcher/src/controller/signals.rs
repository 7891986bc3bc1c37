//! [`SignalReceiver`]: catches the signals that are sent to the controller, and translates each
//! signal into a request to the controller's state machine.
use super::core::{ControllerInput, StopRequest};
use jobspec::{RunSignalActions as SignalActions, SignalAction};
use nix::sys::signal::Signal;
use std::io;
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};

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
    /// meaning.
    pub(super) fn install(actions: SignalActions, announcements: SignalAnnouncements) -> io::Result<Self> {
        Ok(SignalReceiver {
            actions,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: if is_signal_ignored(libc::SIGHUP) { None } else { Some(signal(SignalKind::hangup())?) },
            usr1: signal(SignalKind::user_defined1())?,
            usr2: signal(SignalKind::user_defined2())?,
            child: signal(SignalKind::child())?,
            announcements,
        })
    }

    /// Waits for the next signal and returns what it requests of the controller. Cancel-safe.
    pub(super) async fn receive(&mut self) -> SignalEvent {
        let hangup = async {
            match &mut self.hangup {
                Some(stream) => stream.recv().await,
                None => std::future::pending().await,
            }
        };
        let SignalActions { usr1, usr2, term } = self.actions;
        tokio::select! {
            _ = self.interrupt.recv() => SignalEvent::from_input(ControllerInput::Stop(StopRequest::Interrupt)),
            _ = self.terminate.recv() => match self.announcements.term {
                true => SignalEvent::from_input(ControllerInput::Stop(StopRequest::BatchSystem)),
                false => interpret_signal(term, Signal::SIGTERM),
            },
            _ = self.quit.recv() => SignalEvent::from_input(ControllerInput::Kill),
            _ = hangup => SignalEvent::from_input(ControllerInput::Stop(StopRequest::Terminate)),
            _ = self.usr1.recv() => match self.announcements.usr1 {
                true => SignalEvent::from_input(ControllerInput::Stop(StopRequest::TimeLimit)),
                false => interpret_signal(usr1, Signal::SIGUSR1),
            },
            _ = self.usr2.recv() => interpret_signal(usr2, Signal::SIGUSR2),
            _ = self.child.recv() => SignalEvent::ChildrenEnded,
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

/// Returns whether this process currently ignores the signal with this number.
fn is_signal_ignored(signal: i32) -> bool {
    // SAFETY: only queries the current action, and `action` is valid memory for the result.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
