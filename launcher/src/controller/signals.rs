//! The signals that the controller catches, and what each of them requests.
use super::core::{Input, StopRequest};
use contract::job::{SignalAction, Signals as SignalActions};
use nix::sys::signal::Signal;
use std::io;
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};

/// The streams of the signals that the controller catches, and how it interprets them.
pub(super) struct SignalReceiver {
    actions: SignalActions,
    interrupt: SignalStream,
    terminate: SignalStream,
    quit: SignalStream,
    /// `None` if the controller inherited an ignored SIGHUP (`nohup`), which stays ignored.
    hangup: Option<SignalStream>,
    usr1: SignalStream,
    usr2: SignalStream,
    child: SignalStream,
    /// SIGUSR1 announces the time limit of the batch job.
    has_time_limit: bool,
}

/// What a received signal means.
pub(super) enum SignalEvent {
    /// A request to the core.
    Request(Input),
    /// Child processes have ended.
    ChildrenEnded,
    /// A signal that `run.signals` ignores.
    Ignored,
}

impl SignalReceiver {
    /// Installs the signal handlers. With `has_time_limit`, the batch system sends SIGUSR1 before
    /// the time limit.
    pub(super) fn catch(actions: SignalActions, has_time_limit: bool) -> io::Result<Self> {
        Ok(SignalReceiver {
            actions,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            quit: signal(SignalKind::quit())?,
            hangup: if is_ignored(libc::SIGHUP) { None } else { Some(signal(SignalKind::hangup())?) },
            usr1: signal(SignalKind::user_defined1())?,
            usr2: signal(SignalKind::user_defined2())?,
            child: signal(SignalKind::child())?,
            has_time_limit,
        })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) -> SignalEvent {
        let hangup = async {
            match &mut self.hangup {
                Some(stream) => stream.recv().await,
                None => std::future::pending().await,
            }
        };
        let SignalActions { usr1, usr2, term } = self.actions;
        tokio::select! {
            _ = self.interrupt.recv() => SignalEvent::Request(Input::Stop(StopRequest::Interrupt)),
            _ = self.terminate.recv() => signal_event(term, Signal::SIGTERM),
            _ = self.quit.recv() => SignalEvent::Request(Input::Kill),
            _ = hangup => SignalEvent::Request(Input::Stop(StopRequest::Terminate)),
            _ = self.usr1.recv() => match self.has_time_limit {
                true => SignalEvent::Request(Input::Stop(StopRequest::TimeLimit)),
                false => signal_event(usr1, Signal::SIGUSR1),
            },
            _ = self.usr2.recv() => signal_event(usr2, Signal::SIGUSR2),
            _ = self.child.recv() => SignalEvent::ChildrenEnded,
        }
    }
}

fn signal_event(action: SignalAction, signal: Signal) -> SignalEvent {
    match action {
        SignalAction::Save => SignalEvent::Request(Input::Save(signal as i32)),
        SignalAction::SaveAndStop => SignalEvent::Request(Input::Stop(StopRequest::Terminate)),
        SignalAction::Ignore => SignalEvent::Ignored,
    }
}

fn is_ignored(signal: i32) -> bool {
    // SAFETY: only queries the current action, and `action` is valid memory for the result.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
