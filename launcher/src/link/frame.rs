//! Frames over an asynchronous stream.
use contract::frame::{HEADER, body_length, decode};
pub(crate) use contract::frame::{LinkError, encode};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Reads one frame; `None` where the stream ends between two frames. Not cancel-safe: belongs in a task of its own.
pub(crate) async fn read<R, T>(stream: &mut R) -> Result<Option<T>, LinkError>
where
    R: AsyncRead + Unpin,
    T: DeserializeOwned,
{
    let mut header = [0; HEADER];
    let mut have = 0;
    while have < HEADER {
        match stream.read(&mut header[have..]).await.map_err(LinkError::Io)? {
            0 if have == 0 => return Ok(None),
            0 => return Err(LinkError::Truncated),
            n => have += n,
        }
    }
    let length = body_length(header)?;
    // The buffer grows with what really arrives: a lying length costs the liar, not us.
    let mut body = Vec::new();
    stream.take(u64::from(length)).read_to_end(&mut body).await.map_err(LinkError::Io)?;
    if body.len() < length as usize {
        return Err(LinkError::Truncated);
    }
    decode(&body).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use contract::control::{FromAgent, FromWorker, MAX_FRAME, ToAgent, ToWorker};
    use proptest::prelude::*;

    fn block<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn frames_follow_one_another_and_the_end_is_clean() {
        let messages = vec![
            FromAgent::Heartbeat,
            FromAgent::Started { epoch: 0, rank: 3, pid: 77 },
            FromAgent::Line { rank: 0, stderr: true, text: "π — not ASCII".into() },
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
        block(async {
            let mut stream = &bytes[..];
            for message in &messages {
                assert_eq!(read::<_, FromAgent>(&mut stream).await.unwrap().as_ref(), Some(message));
            }
            assert!(read::<_, FromAgent>(&mut stream).await.unwrap().is_none());
        });
    }

    #[test]
    fn a_cut_stream_is_an_error_at_every_byte() {
        let bytes =
            encode(&ToAgent::Kill { epoch: 0, reason: "a peer failed".into(), grace_ms: 5, stacks: false })
                .unwrap();
        for cut in 1..bytes.len() {
            let got = block(read::<_, ToAgent>(&mut &bytes[..cut]));
            assert!(matches!(got, Err(LinkError::Truncated)), "cut at {cut}: {got:?}");
        }
    }

    #[test]
    fn a_long_frame_is_refused_before_it_is_read() {
        let mut bytes = (MAX_FRAME + 1).to_le_bytes().to_vec();
        bytes.extend_from_slice(&[0; 64]);
        let mut stream = &bytes[..];
        let got = block(read::<_, ToAgent>(&mut stream));
        assert!(matches!(got, Err(LinkError::TooLong(n)) if n == u64::from(MAX_FRAME) + 1), "{got:?}");
        assert_eq!(stream.len(), 64, "the body must be left unread");
    }

    #[test]
    fn what_can_not_be_sent_is_not_sent() {
        let text = "x".repeat(MAX_FRAME as usize);
        assert!(matches!(
            encode(&FromAgent::Line { rank: 0, stderr: false, text }),
            Err(LinkError::TooLong(_))
        ));
    }

    #[test]
    fn trailing_bytes_and_other_messages_are_refused() {
        let mut body = encode(&ToAgent::Heartbeat).unwrap()[HEADER..].to_vec();
        body.push(0);
        assert!(matches!(decode::<ToAgent>(&body), Err(LinkError::Malformed(_))));
        let body = encode(&FromAgent::WorkersEnded { epoch: 0 }).unwrap()[HEADER..].to_vec();
        assert!(matches!(decode::<ToAgent>(&body), Err(LinkError::Malformed(_))));
        // an array that claims four billion strings
        let body = [0x81, 0xa4, b'L', b'i', b'n', b'e', 0xdd, 0xff, 0xff, 0xff, 0xff];
        assert!(matches!(decode::<FromAgent>(&body), Err(LinkError::Malformed(_))));
        // depth without end
        assert!(matches!(decode::<FromAgent>(&[0x91; 100_000]), Err(LinkError::Malformed(_))));
    }

    proptest! {
        #[test]
        fn hostile_bodies_never_panic(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<ToAgent>(&body);
            let _ = decode::<FromAgent>(&body);
            let _ = decode::<ToWorker>(&body);
            let _ = decode::<FromWorker>(&body);
        }

        #[test]
        fn hostile_streams_end_in_a_message_an_error_or_the_end(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            block(async {
                let mut stream = &bytes[..];
                while let Ok(Some(_)) = read::<_, FromAgent>(&mut stream).await {}
            });
        }

        #[test]
        fn damaged_messages_never_panic(flip in 0usize..4000, value in any::<u8>()) {
            let tail = (0..20).map(|i| format!("line {i}")).collect();
            let status = contract::control::ExitStatus::Signal(11, true);
            let mut frame = encode(&FromAgent::Exited { epoch: 0, rank: 1, pid: 2, status, oom: false, tail, error: None }).unwrap();
            let at = flip % frame.len();
            frame[at] ^= value;
            block(async {
                let mut stream = &frame[..];
                while let Ok(Some(_)) = read::<_, FromAgent>(&mut stream).await {}
            });
        }
    }
}
