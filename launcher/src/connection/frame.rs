//! Reads frames (messages with their length) of a control connection from an asynchronous stream.
use protocol::control::MAX_FRAME_BYTES;
pub(crate) use protocol::frame::{FrameError, encode_frame};
use protocol::frame::{HEADER_BYTES, decode_body, decode_body_length};
use serde::de::DeserializeOwned;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Reads one frame (a message with its length) from a stream and decodes the message. Returns
/// `None` if the stream ends between two frames. Fails if the stream ends within a frame, or if the
/// frame is too long or not valid.
///
/// Not cancel-safe: if the future is dropped, a frame that was read in part is lost.
pub(crate) async fn read_frame<R, T>(stream: &mut R) -> Result<Option<T>, FrameError>
where
    R: AsyncRead + Unpin,
    T: DeserializeOwned,
{
    read_short_frame(stream, MAX_FRAME_BYTES).await
}

/// Reads one frame (a message with its length) of at most `max_bytes` bytes from a stream and
/// decodes the message. Fails if its body is longer than `max_bytes`.
pub(crate) async fn read_short_frame<R, T>(stream: &mut R, max_bytes: u32) -> Result<Option<T>, FrameError>
where
    R: AsyncRead + Unpin,
    T: DeserializeOwned,
{
    let mut header = [0; HEADER_BYTES];
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match stream.read(&mut header[filled..]).await.map_err(FrameError::Io)? {
            0 if filled == 0 => return Ok(None),
            0 => return Err(FrameError::Truncated),
            n => filled += n,
        }
    }
    let length = decode_body_length(header)?;
    if length > max_bytes {
        return Err(FrameError::Io(io::Error::other(format!("a frame has more than {max_bytes} bytes"))));
    }
    // The buffer grows with the bytes that arrive, whatever length the header announces.
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body).await.map_err(FrameError::Io)?;
    if body.len() < length as usize {
        return Err(FrameError::Truncated);
    }
    decode_body(&body).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use protocol::control::{FromAgent, FromWorker, ToAgent, ToWorker};

    /// Runs a future to its end on this thread and returns its result.
    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn consecutive_frames_are_read_until_the_stream_ends() {
        let messages = vec![
            FromAgent::Heartbeat,
            FromAgent::Started { attempt: 0, rank: 3, pid: 77 },
            FromAgent::Line { rank: 0, stderr: true, text: "π — not ASCII".into() },
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(|m| encode_frame(m).unwrap()).collect();
        block_on(async {
            let mut stream = &bytes[..];
            for message in &messages {
                assert_eq!(read_frame::<_, FromAgent>(&mut stream).await.unwrap().as_ref(), Some(message));
            }
            assert!(read_frame::<_, FromAgent>(&mut stream).await.unwrap().is_none());
        });
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_is_an_error() {
        let bytes = encode_frame(&ToAgent::Kill {
            attempt: 0,
            reason: "a peer failed".into(),
            grace_ms: 5,
            stacks: false,
            leave_ms: None,
        })
        .unwrap();
        for end in 1..bytes.len() {
            let result = block_on(read_frame::<_, ToAgent>(&mut &bytes[..end]));
            assert!(matches!(result, Err(FrameError::Truncated)), "ends at {end}: {result:?}");
        }
    }

    #[test]
    fn a_frame_that_is_too_long_is_rejected_before_its_body_is_read() {
        let mut bytes = (MAX_FRAME_BYTES + 1).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 64]);
        let mut stream = &bytes[..];
        let result = block_on(read_frame::<_, ToAgent>(&mut stream));
        assert!(
            matches!(result, Err(FrameError::TooLong { bytes }) if bytes == u64::from(MAX_FRAME_BYTES) + 1),
            "{result:?}"
        );
        assert_eq!(stream.len(), 64, "the body must be left unread");
    }

    #[test]
    fn a_message_that_is_too_long_is_not_encoded() {
        let text = "x".repeat(MAX_FRAME_BYTES as usize);
        assert!(matches!(
            encode_frame(&FromAgent::Line { rank: 0, stderr: false, text }),
            Err(FrameError::TooLong { .. })
        ));
    }

    #[test]
    fn trailing_bytes_and_messages_of_other_connections_are_rejected() {
        let mut body = encode_frame(&ToAgent::Heartbeat).unwrap()[HEADER_BYTES..].to_vec();
        body.push(0);
        assert!(matches!(decode_body::<ToAgent>(&body), Err(FrameError::TrailingBytes { bytes: 1 })));
        let body = encode_frame(&FromAgent::WorkersEnded { attempt: 0 }).unwrap()[HEADER_BYTES..].to_vec();
        assert!(matches!(decode_body::<ToAgent>(&body), Err(FrameError::Decode(_))));
        // The body is an array that claims four billion strings.
        let body = [0x81, 0xa4, b'L', b'i', b'n', b'e', 0xdd, 0xff, 0xff, 0xff, 0xff];
        assert!(matches!(decode_body::<FromAgent>(&body), Err(FrameError::Decode(_))));
        // The body is an endless nesting of arrays.
        assert!(matches!(decode_body::<FromAgent>(&[0x91; 100_000]), Err(FrameError::Decode(_))));
    }

    proptest! {
        #[test]
        fn untrusted_bodies_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode_body::<ToAgent>(&body);
            let _ = decode_body::<FromAgent>(&body);
            let _ = decode_body::<ToWorker>(&body);
            let _ = decode_body::<FromWorker>(&body);
        }

        #[test]
        fn reading_untrusted_streams_terminates(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            block_on(async {
                let mut stream = &bytes[..];
                while let Ok(Some(_)) = read_frame::<_, FromAgent>(&mut stream).await {}
            });
        }

        #[test]
        fn damaged_messages_never_panic(offset in 0usize..4000, flipped_bits in any::<u8>()) {
            let tail = (0..20).map(|i| format!("line {i}")).collect();
            let status = protocol::control::ExitStatus::Signal(11, true);
            let exited = FromAgent::Exited {
                attempt: 0, rank: 1, pid: 2, status, oom: false, tail, error: None, gpu: None, timeout: None,
                lost_connection: None,
            };
            let mut frame = encode_frame(&exited).unwrap();
            let offset = offset % frame.len();
            frame[offset] ^= flipped_bits;
            block_on(async {
                let mut stream = &frame[..];
                while let Ok(Some(_)) = read_frame::<_, FromAgent>(&mut stream).await {}
            });
        }
    }
}
