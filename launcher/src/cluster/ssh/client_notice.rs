//! [`OpenSshNotice`]: informs the user once that launch uses OpenSSH's client (the program `ssh`),
//! and why.
use super::target::SshTarget;
use crate::cluster::transport::AgentOutput;
use std::{
    future::Future,
    io,
    pin::{Pin, pin},
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll, ready},
};
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::oneshot,
};

/// Describes which external SSH client (OpenSSH) connects to the host `target` and why it was
/// chosen; returns `None` for launch's built-in client.
pub(super) fn describe_external_client(target: &SshTarget) -> Option<String> {
    Some(match &target.client.as_ref()?.requirement {
        Some(requirement) => format!("ssh, because of `{}`", requirement.option),
        None => "ssh".to_owned(),
    })
}

/// The record of whether the user was already informed that launch uses OpenSSH's client for hosts
/// of the job. Only the first host that needs this client shows the notice.
#[derive(Debug, Default)]
pub(super) struct OpenSshNotice {
    is_shown: AtomicBool,
}

impl OpenSshNotice {
    /// Returns the text that informs the user why OpenSSH's client connects to the host `target`;
    /// `None` if the user was informed already.
    pub(super) fn take_notice_text(&self, target: &SshTarget) -> Option<String> {
        let requirement = target.client.as_ref()?.requirement.as_ref()?;
        if self.is_shown.swap(true, Ordering::SeqCst) {
            return None;
        }
        let name = &target.name;
        Some(format!(
            "launch: using `ssh` to connect to {name} and similar hosts, because of `{}` \
             (cluster.ssh.client: auto)\n",
            requirement.option
        ))
    }
}

/// A stream that first returns a notice that launch uses OpenSSH's client, and then the stderr of
/// the agent on the host.
pub(super) struct StderrAfterNotice {
    /// Delivers the notice. Without a notice, the sender is dropped.
    notice: Option<oneshot::Receiver<String>>,
    /// The part of the notice that was not read.
    text: Vec<u8>,
    stderr: AgentOutput,
}

impl StderrAfterNotice {
    /// Creates a stream that returns a notice about OpenSSH's client and then the agent's `stderr`,
    /// with the channel through which the notice is passed.
    pub(super) fn new(stderr: AgentOutput) -> (oneshot::Sender<String>, StderrAfterNotice) {
        let (sender, receiver) = oneshot::channel();
        (sender, StderrAfterNotice { notice: Some(receiver), text: Vec::new(), stderr })
    }
}

impl AsyncRead for StderrAfterNotice {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(notice) = &mut self.notice {
            let text = ready!(pin!(notice).poll(cx));
            self.notice = None;
            self.text = text.unwrap_or_default().into_bytes();
        }
        if self.text.is_empty() {
            return Pin::new(&mut self.stderr).poll_read(cx, buffer);
        }
        let length = self.text.len().min(buffer.remaining());
        buffer.put_slice(&self.text.drain(..length).collect::<Vec<u8>>());
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    #[tokio::test]
    async fn a_notice_precedes_the_standard_error() {
        for (notice, expected) in [(Some("notice\n"), "notice\nerror"), (None, "error")] {
            let (sender, mut stream) = StderrAfterNotice::new(Box::new(&b"error"[..]));
            match notice {
                Some(text) => sender.send(text.to_owned()).expect("a receiver"),
                None => drop(sender),
            }
            let mut text = String::new();
            stream.read_to_string(&mut text).await.expect("text");
            assert_eq!(text, expected);
        }
    }
}
