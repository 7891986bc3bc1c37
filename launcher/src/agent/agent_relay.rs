//! [`relay_to_agent`]: connects a new controller of a run with the agent that still works for the
//! run on this host.
use super::attach_socket::{SocketReader, SocketWriter, send_request_to_agent};
use crate::{
    connection::{encode_frame, read_frame},
    leases::ADOPTION_TIMEOUT,
};
use diagnostic::{Diagnostic, codes::host};
use protocol::control::{AttachPurpose, AttachRejection, AttachRequest, FromAgent};
use std::time::Duration;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    time::{Instant, sleep, timeout_at},
};

/// The pause between two requests of a new controller to control an agent that still waits for
/// messages of its previous, now silent controller.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// The longest delay with which messages of a controller that has ended may still reach an agent. A
/// controller that is alive sends heartbeats more often.
const MAX_MESSAGE_DELAY: Duration = Duration::from_secs(4);

/// Passes a new controller's request for control to the agent that is alive on this host, and then
/// copies bytes between controller and agent. Answers the request with a rejection if no agent can
/// be reached. `input` and `output` are the control connection to the controller.
///
/// In a tree, agents learn only from silence that their controller has ended. With `in_tree`, the
/// agent is asked again until it obeys the new controller, or until the old one has sent a message
/// that is no late one.
pub(super) async fn relay_to_agent(
    request: AttachRequest,
    in_tree: bool,
    mut input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
) {
    let connected = match in_tree && request.purpose == AttachPurpose::Adopt {
        true => request_adoption(&request).await.map(|(answer, connection)| (Some(answer), connection)),
        false => send_request_to_agent(&request).await.map(|connection| (None, connection)),
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

/// Asks the agent on this host to obey a new controller, and repeats the request while the agent
/// still obeys another controller that is silent. The time limit is `run.host_lease` and
/// [`ADOPTION_TIMEOUT`]. Returns the last answer, and the connection on which it arrived. Fails if
/// there is no answer.
async fn request_adoption(
    request: &AttachRequest,
) -> Result<(FromAgent, (SocketReader, SocketWriter)), AttachRejection> {
    let start = Instant::now();
    let deadline = start + Duration::from_millis(request.host_lease_ms) + ADOPTION_TIMEOUT;
    loop {
        let elapsed = start.elapsed();
        let (mut from_agent, to_agent) = send_request_to_agent(request).await?;
        let answer = timeout_at(deadline, read_frame(&mut from_agent)).await.ok().and_then(Result::ok);
        let answer = answer.flatten().ok_or_else(|| {
            let message = "the agent that is alive on the host does not answer";
            let error = Diagnostic::error(host::AGENT_UNREACHABLE, message).with_subject(&request.host);
            AttachRejection::Failed(error)
        })?;
        match &answer {
            FromAgent::NotAdopted(AttachRejection::Controlled { silent_ms, .. })
                if !proves_live_controller(elapsed, Duration::from_millis(*silent_ms))
                    && Instant::now() + RETRY_INTERVAL < deadline =>
            {
                sleep(RETRY_INTERVAL).await;
            }
            _ => return Ok((answer, (from_agent, to_agent))),
        }
    }
}

/// Returns whether an agent received a message from its present controller so long after a new
/// controller's first request that the present controller must still be alive. `elapsed` is the
/// time from the first request to the present one, and `silence` is the time since the last
/// message. A silence of zero proves nothing: an agent that has just been adopted, and got no
/// message since, reports it, too.
fn proves_live_controller(elapsed: Duration, silence: Duration) -> bool {
    !silence.is_zero() && elapsed.saturating_sub(silence) > MAX_MESSAGE_DELAY
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leases::HEARTBEAT_INTERVAL;

    #[test]
    fn late_messages_of_a_controller_that_has_ended_do_not_prove_that_it_is_alive() {
        let check = |elapsed_ms, silent_ms| {
            proves_live_controller(Duration::from_millis(elapsed_ms), Duration::from_millis(silent_ms))
        };
        // The last message arrives after two seconds, and the silence grows from then on.
        for (elapsed_ms, silent_ms) in [(0, 900), (500, 1400), (2000, 1), (2500, 500), (9000, 7000)] {
            assert!(!check(elapsed_ms, silent_ms), "{elapsed_ms} {silent_ms}");
        }
        assert!(!check(20_000, 0), "an agent without heartbeats");
        let limit_ms = (MAX_MESSAGE_DELAY + HEARTBEAT_INTERVAL).as_millis() as u64;
        assert!((1..1000).all(|silent_ms| check(limit_ms, silent_ms)));
    }
}
