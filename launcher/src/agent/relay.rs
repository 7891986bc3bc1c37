//! [`relay_to_agent`]: connects a new controller with the agent that is alive on this host.
use super::attach_socket::connect_to_agent;
use crate::connection::encode_frame;
use protocol::control::{AttachRequest, FromAgent};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};

/// Passes the request of a controller to the agent that is alive on this host, and then copies the
/// bytes of both directions until one side ends. Answers the request with a rejection if no agent
/// can be reached. `input` and `output` are the control connection to the controller.
pub(super) async fn relay_to_agent(
    request: AttachRequest,
    mut input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
) {
    let (mut from_agent, mut to_agent) = match connect_to_agent(&request).await {
        Ok(halves) => halves,
        Err(rejection) => {
            if let Ok(frame) = encode_frame(&FromAgent::NotAdopted(rejection)) {
                // An error means that the controller has ended.
                _ = output.write_all(&frame).await;
                _ = output.flush().await;
            }
            return;
        }
    };
    tokio::select! {
        _ = tokio::io::copy(&mut from_agent, &mut output) => {
            _ = output.flush().await;
        }
        _ = tokio::io::copy(&mut input, &mut to_agent) => {}
    }
}
