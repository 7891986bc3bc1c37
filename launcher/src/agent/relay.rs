//! [`relay_to_agent`]: connects a new controller with the agent that is alive on this host.
use super::attach_socket::{SocketReader, SocketWriter, connect_to_agent};
use crate::{
    connection::{encode_frame, read_frame},
    leases::ATTACH_TIMEOUT,
};
use diagnostic::{Diagnostic, codes::host};
use protocol::control::{AttachPurpose, AttachRejection, AttachRequest, FromAgent};
use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    time::{Instant, sleep, timeout_at},
};

/// The interval at which an agent that obeys a silent controller is asked again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Passes the request of a controller to the agent that is alive on this host, and then copies the
/// bytes of both directions until one side ends. Answers the request with a rejection if no agent
/// can be reached. `input` and `output` are the control connection to the controller.
///
/// In a tree, agents learn only from silence that their controller has ended. With `in_tree`, the
/// agent is asked again until it obeys the new controller, or until the old one has sent a message.
pub(super) async fn relay_to_agent(
    request: AttachRequest,
    in_tree: bool,
    mut input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
) {
    let connected = match in_tree && request.purpose == AttachPurpose::Adopt {
        true => request_adoption(&request).await.map(|(answer, connection)| (Some(answer), connection)),
        false => connect_to_agent(&request).await.map(|connection| (None, connection)),
    };
    let (answer, connection) = match connected {
        Ok((answer, connection)) => (answer, Some(connection)),
        Err(rejection) => (Some(FromAgent::NotAdopted(rejection)), None),
    };
    if let Some(Ok(frame)) = answer.map(|answer| encode_frame(&answer)) {
        // An error means that the controller has ended.
        _ = output.write_all(&frame).await;
        _ = output.flush().await;
    }
    let Some((mut from_agent, mut to_agent)) = connection else { return };
    tokio::select! {
        _ = tokio::io::copy(&mut from_agent, &mut output) => {
            _ = output.flush().await;
        }
        _ = tokio::io::copy(&mut input, &mut to_agent) => {}
    }
}

/// Sends the request to the agent again and again, as long as the agent obeys a controller that is
/// silent, for [`ATTACH_TIMEOUT`] at most. Returns the last answer, and the connection on which it
/// arrived. Fails if there is no answer.
async fn request_adoption(
    request: &AttachRequest,
) -> Result<(FromAgent, (SocketReader, SocketWriter)), AttachRejection> {
    let deadline = Instant::now() + ATTACH_TIMEOUT;
    let mut silence_ms = None;
    loop {
        let (mut from_agent, to_agent) = connect_to_agent(request).await?;
        let answer = timeout_at(deadline, read_frame(&mut from_agent)).await.ok().and_then(Result::ok);
        let answer = answer.flatten().ok_or_else(|| {
            let message = "the agent that is alive on the host does not answer";
            let error = Diagnostic::error(host::AGENT_UNREACHABLE, message).with_subject(&request.host);
            AttachRejection::Failed(error)
        })?;
        match &answer {
            FromAgent::NotAdopted(AttachRejection::Controlled { silent_ms, .. })
                if silence_ms.is_none_or(|earlier| *silent_ms > earlier) && Instant::now() < deadline =>
            {
                silence_ms = Some(*silent_ms);
                sleep(RETRY_INTERVAL).await;
            }
            _ => return Ok((answer, (from_agent, to_agent))),
        }
    }
}
