//! The signals the controller answers to, and what each of them asks for.
use super::core::{Input, Stop};
use contract::job::{SignalAction, Signals as Meanings};
use nix::sys::signal::Signal;
use std::io;
use tokio::signal::unix::{Signal as SignalStream, SignalKind, signal};

/// The caught signals.
pub(super) struct Signals {
    meanings: Meanings,
    interrupt: SignalStream,
    terminate: SignalStream,
    kill: SignalStream,
    /// `None`: ignored by whoever started us (nohup), and so by us.
    hangup: Option<SignalStream>,
    usr1: SignalStream,
    usr2: SignalStream,
    child: SignalStream,
    /// SIGUSR1 says that the time limit is near.
    limited: bool,
}

/// What a signal says.
pub(super) enum Said {
    Asked(Input),
    /// Children have ended.
    Children,
    /// Nothing, by `run.signals`.
    Nothing,
}

impl Signals {
    /// `limited`: SIGUSR1 is the batch system's, before the time limit.
    pub(super) fn catch(meanings: Meanings, limited: bool) -> io::Result<Self> {
        Ok(Signals {
            meanings,
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            kill: signal(SignalKind::quit())?,
            hangup: if ignored(libc::SIGHUP) { None } else { Some(signal(SignalKind::hangup())?) },
            usr1: signal(SignalKind::user_defined1())?,
            usr2: signal(SignalKind::user_defined2())?,
            child: signal(SignalKind::child())?,
            limited,
        })
    }

    /// The next one.
    pub(super) async fn next(&mut self) -> Said {
        let hangup = async {
            match &mut self.hangup {
                Some(stream) => stream.recv().await,
                None => std::future::pending().await,
            }
        };
        let Meanings { usr1, usr2, term } = self.meanings;
        tokio::select! {
            _ = self.interrupt.recv() => Said::Asked(Input::Stop(Stop::Interrupt)),
            _ = self.terminate.recv() => said(term, Signal::SIGTERM),
            _ = self.kill.recv() => Said::Asked(Input::Kill),
            _ = hangup => Said::Asked(Input::Stop(Stop::Terminate)),
            _ = self.usr1.recv() => match self.limited {
                true => Said::Asked(Input::Stop(Stop::Limit)),
                false => said(usr1, Signal::SIGUSR1),
            },
            _ = self.usr2.recv() => said(usr2, Signal::SIGUSR2),
            _ = self.child.recv() => Said::Children,
        }
    }
}

fn said(action: SignalAction, signal: Signal) -> Said {
    match action {
        SignalAction::Save => Said::Asked(Input::Save(signal as i32)),
        SignalAction::SaveAndStop => Said::Asked(Input::Stop(Stop::Terminate)),
        SignalAction::Ignore => Said::Nothing,
    }
}

fn ignored(signal: i32) -> bool {
    // SAFETY: asks for the present action only; `action` is a valid place for it.
    unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(signal, std::ptr::null(), &mut action) == 0 && action.sa_sigaction == libc::SIG_IGN
    }
}
